"""Decoding GGUF's block formats: the gguf package's own arithmetic, fed in pieces that stay in the CPU's cache.

`gguf.quants.dequantize` walks 16 rows at a time, which takes seconds where this takes a fraction of one.
"""

from typing import cast

import gguf.quants
import numpy as np
import numpy.typing as npt
import torch

BLOCK_TYPES = frozenset({"Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"})

# Elements that numpy decodes at a time: 512 KiB of fp32, the fastest of the sizes from 8 Ki to 512 Ki elements.
_PIECE = 131072
# Elements that torch converts at a time: the most it does without waking its thread pool, whose barriers cost a
# scheduler quantum each when the cores are busy.
_SERIAL = 32768


def decode(raw: torch.Tensor, type_name: str, out: torch.Tensor) -> None:
    """Decode the blocks of one tensor.

    `raw` is uint8 [blocks, bytes per block], `out` a contiguous [blocks, elements per block] of any floating dtype on
    the CPU. Values are those of `gguf.quants`, computed in fp32 and then rounded to `out`'s dtype.
    """
    dequantize = getattr(gguf.quants, type_name).dequantize_blocks
    step, serial = _PIECE // out.shape[1], _SERIAL // out.shape[1]
    blocks = raw.numpy()
    # A damaged scale may be infinite or NaN: the model's numbers, not a warning of numpy's.
    with np.errstate(all="ignore"):
        for start in range(0, len(blocks), step):
            values = torch.from_numpy(cast(npt.NDArray[np.float32], dequantize(blocks[start : start + step])))
            for first in range(0, len(values), serial):
                piece = values[first : first + serial]
                out[start + first : start + first + len(piece)].copy_(piece)
