"""What packed codecs keep, written anew with numpy from their definition alone."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from kvine.attention.dense import BlockLoss


def outward(values: np.ndarray, up: bool) -> np.ndarray:
    """The nearest fp16 on the far side."""
    near = values.astype(np.float16)
    wrong = near.astype(np.float32) < values if up else near.astype(np.float32) > values
    return np.where(wrong, np.nextafter(near, np.float16(np.inf if up else -np.inf)), near)


def lost(values: np.ndarray, bits: int) -> np.ndarray:
    """A group of numbers [..., n] as 2^bits even steps from its minimum to its maximum."""
    steps = np.float32(2**bits - 1)
    low = outward(values.min(-1, keepdims=True), up=False).astype(np.float32)
    scale = outward((values.max(-1, keepdims=True) - low) / steps, up=True).astype(np.float32)
    with np.errstate(invalid="ignore"):
        codes = np.where(scale > 0, np.rint((values - low) / scale), 0)
    return low + scale * np.clip(codes, 0, steps)


def loss_of(codec: str, by_channel: bool) -> Callable[[Tensor], Tensor]:
    """Of blocks [n, H, T, D]: groups are channels over the block, or up to 32 channels of a token."""

    def lose(blocks: Tensor) -> Tensor:
        if codec in ("exact", "fp32"):
            return blocks
        if codec in ("fp16", "bf16"):
            return blocks.to(getattr(torch, {"fp16": "float16", "bf16": "bfloat16"}[codec])).to(blocks.dtype)
        bits = int(codec.removesuffix("-token")[3:])
        numbers = blocks.float().numpy()
        if by_channel:
            kept = lost(numbers.swapaxes(-1, -2), bits).swapaxes(-1, -2)
        else:
            width = numbers.shape[-1]
            size = max(s for s in range(1, 33) if width % s == 0)
            kept = lost(numbers.reshape(*numbers.shape[:-1], width // size, size), bits).reshape(numbers.shape)
        return torch.from_numpy(np.ascontiguousarray(kept))

    return lose


def block_loss(keys: str, values: str, block_size: int) -> BlockLoss:
    """What a cache with these codecs makes of its full blocks."""
    kept_keys, kept_values = loss_of(keys, not keys.endswith("-token")), loss_of(values, by_channel=False)
    return BlockLoss(
        block_size,
        kept_keys,
        kept_values,
        kept_keys if keys in ("fp16", "bf16") else exact,
        kept_values if values in ("fp16", "bf16") else exact,
    )


def exact(values: Tensor) -> Tensor:
    return values
