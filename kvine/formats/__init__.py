"""Reading checkpoints: GGUF and safetensors headers, and single tensors out of memory-mapped files.

Everything a header claims is checked against the file before anything is read or allocated.
"""
