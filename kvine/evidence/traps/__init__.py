"""The trap lab: the classic mistakes of a KV cache, built into test engines, and an examination that names them."""
