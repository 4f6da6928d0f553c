"""An oracle for lossy codecs: it keeps every token exactly, and quantizes in plain loops what attention is to read."""

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache

BITS = {"int8": 8, "int4": 4, "int2": 2}


class LoopCache(DynamicCache):
    """Full layers whose blocks, once they were full before a call, are read as a codec would give them back."""

    def __init__(self, keys: str, values: str, block_size: int) -> None:
        super().__init__()
        self.codecs, self.block_size = (keys, values), block_size

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args, **kwargs
    ) -> tuple[Tensor, Tensor]:
        full = self.get_seq_length(layer_idx) // self.block_size * self.block_size
        keys, values = super().update(key_states, value_states, layer_idx)
        return (
            lossy(keys, self.codecs[0], full, self.block_size, by_channel=not self.codecs[0].endswith("-token")),
            lossy(values, self.codecs[1], full, self.block_size, by_channel=False),
        )


def lossy(tokens: Tensor, codec: str, full: int, block_size: int, *, by_channel: bool) -> Tensor:
    """[rows, heads, N, D] with what the codec loses: of all tokens, or, if it packs, of the first `full`."""
    if codec in ("exact", "fp32"):
        return tokens
    if codec in ("fp16", "bf16"):
        return tokens.to({"fp16": torch.float16, "bf16": torch.bfloat16}[codec]).to(tokens.dtype)
    bits, out = BITS[codec.removesuffix("-token")], tokens.float().numpy().copy()
    rows, heads, _, width = out.shape
    for row in range(rows):
        for head in range(heads):
            for start in range(0, full, block_size):
                block = out[row, head, start : start + block_size]  # a view [T, D]
                if by_channel:
                    for channel in range(width):
                        block[:, channel] = quantized(block[:, channel], bits)
                else:
                    for token in range(block_size):
                        for first in range(0, width, min(32, width)):
                            group = slice(first, first + min(32, width))
                            block[token, group] = quantized(block[token, group], bits)
    return torch.from_numpy(out).to(tokens.dtype)


def quantized(group: np.ndarray, bits: int) -> np.ndarray:
    """The nearest of 2^bits even steps between fp16 numbers that enclose the group."""
    steps = np.float32(2**bits - 1)
    low = np.float16(group.min())
    if np.float32(low) > group.min():
        low = np.nextafter(low, np.float16(-np.inf))
    exact_step = (group.max() - np.float32(low)) / steps
    step = np.float16(exact_step)
    if np.float32(step) < exact_step:
        step = np.nextafter(step, np.float16(np.inf))
    if step == 0:
        return np.full_like(group, np.float32(low))
    codes = np.clip(np.rint((group - np.float32(low)) / np.float32(step)), 0, steps)
    return codes * np.float32(step) + np.float32(low)
