"""Which number format a checkpoint is computed in when the user does not say. Loads no torch: the planner asks too."""


def automatic_dtype(stored: str, device: str, *, has_bf16: bool = True) -> tuple[str, str]:
    """The compute dtype (`fp32`, `bf16` or `fp16`) that `auto` means, and why.

    `stored` is the type of most of the checkpoint ("BF16", "Q4_1", ...), `device` the kind of device, `has_bf16`
    whether it computes in bf16. fp32 and bf16 are kept as they are. fp16 stays fp16 on a GPU; on a CPU it becomes fp32,
    which holds all its values, because fp16 arithmetic overflows at 65,504 and few CPUs have it. Block-quantized
    weights become bf16.
    """
    if stored in ("F32", "F64"):
        return "fp32", f"fp32 for weights stored as {stored}"
    if stored == "F16" and device != "cpu":
        return "fp16", "fp16 as stored"
    if stored == "F16":
        return "fp32", "fp32: it holds the stored fp16 exactly, and fp16 arithmetic overflows on a CPU"
    if not has_bf16:
        return "fp32", f"fp32: this GPU has no bf16 for the stored {stored}"
    return "bf16", "bf16 as stored" if stored == "BF16" else f"bf16 for weights stored as {stored}"
