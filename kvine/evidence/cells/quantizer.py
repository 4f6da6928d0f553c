"""What packed codecs make of a block, written apart from `kvine.cache.codec`, from what `kvine.cache.layout` says."""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from kvine.attention.dense import BlockLoss
from kvine.config import CacheConfig, is_packed

_BITS = {"int8": 8, "int4": 4, "int2": 2}
_ELEMENTS = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_MOST_CHANNELS = 32


def block_loss(cache: CacheConfig) -> BlockLoss:
    """What a cache with a packed codec makes of keys and values."""
    keys, values = cache.codecs
    kept_keys = kept_by(keys, by_channel=not keys.endswith("-token"))
    kept_values = kept_by(values, by_channel=False)
    return BlockLoss(
        cache.block_size,
        kept_keys,
        kept_values,
        _exact if is_packed(keys) else kept_keys,
        _exact if is_packed(values) else kept_values,
    )


def _exact(values: Tensor) -> Tensor:
    return values


def kept_by(codec: str, *, by_channel: bool) -> Callable[[Tensor], Tensor]:
    """What a codec makes of blocks [..., T, D], its groups channels over a block, or channels of a token."""
    if codec == "exact":
        return _exact
    if not is_packed(codec):
        dtype = _ELEMENTS[codec]
        largest = torch.finfo(dtype).max
        return lambda values: values.float().clamp(-largest, largest).to(dtype).to(values.dtype)

    def lose(blocks: Tensor) -> Tensor:
        least, step, codes = grid(blocks, codec, by_channel=by_channel)
        return least + step * codes

    return lose


def grid(blocks: Tensor, codec: str, *, by_channel: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Of blocks [..., T, D] in a packed codec the least value of each number's group, its step, and how many of them.

    Groups are channels over a block, or up to 32 channels of a token. Steps are even, from an fp16 not above the
    group's minimum, an fp16 apart. All three are fp32, [..., T, D].
    """
    steps = 2 ** _BITS[codec.removesuffix("-token")] - 1
    wide = blocks.float().clamp(-65504, 65504)
    width = wide.shape[-1]
    size = next(n for n in range(min(_MOST_CHANNELS, width), 0, -1) if width % n == 0)
    groups = wide.transpose(-1, -2) if by_channel else wide.reshape(*wide.shape[:-1], width // size, size)
    least = _fp16(groups.amin(-1, keepdim=True), toward=-torch.inf)
    step = _fp16((groups.amax(-1, keepdim=True) - least) / steps, toward=torch.inf)
    codes = torch.where(step > 0, (groups - least) / step, 0).round().clamp(0, steps)
    three = (x.expand(groups.shape) for x in (least, step, codes))
    if by_channel:
        return tuple(x.transpose(-1, -2) for x in three)  # type: ignore[return-value]
    return tuple(x.flatten(-2) for x in three)  # type: ignore[return-value]


def _fp16(values: Tensor, toward: float) -> Tensor:
    """The nearest fp16 on the given side, in fp32: the rounded one, or the next of a table of all."""
    table = _every_fp16()
    above: Tensor = torch.searchsorted(table, values.contiguous()).clamp(max=len(table) - 1)
    if toward > 0:
        return table[above]
    return torch.where(table[above] == values, table[above], table[(above - 1).clamp(min=0)])


@functools.cache
def _every_fp16() -> Tensor:
    """All finite ones, ascending, in fp32."""
    table = torch.arange(-32768, 32768).to(torch.int16).view(torch.float16).float()
    return table[table.isfinite()].sort().values
