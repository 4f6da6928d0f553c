"""How K and V are stored. The codecs here work element by element: they convert as a value is written."""

import torch
from torch import Tensor

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def storage_dtype(codec: str, compute: torch.dtype) -> torch.dtype:
    """The dtype in which a codec keeps values that were computed in `compute`."""
    return compute if codec == "exact" else DTYPES[codec]


def encode(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Converts values to the stored dtype, by value and never by bits.

    fp16 ends at 65,504: what bf16 or fp32 hold beyond that is stored as the largest fp16, not as infinity, which
    would turn the whole row to NaN.
    """
    if values.dtype == dtype:
        return values
    stored = values.to(dtype)
    if dtype == torch.float16:  # clamped after the conversion: in bf16 the limit itself would round up to 65,536
        limit = torch.finfo(torch.float16).max
        stored.clamp_(-limit, limit)
    return stored
