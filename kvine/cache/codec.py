"""How K and V are stored: element by element, or packed by whole blocks (see `layout`)."""

import torch
from torch import Tensor

from kvine.cache.layout import PackedLayout

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_LARGEST = torch.finfo(torch.float16).max


def storage_dtype(codec: str, compute: torch.dtype) -> torch.dtype:
    """The dtype in which an element-wise codec keeps values that were computed in `compute`."""
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
        stored.clamp_(-_LARGEST, _LARGEST)
    return stored


def pack(values: Tensor, layout: PackedLayout) -> Tensor:
    """Packs whole blocks: [..., T, D] → [..., num_bytes] uint8, laid out as `layout` says.

    A number becomes the nearest of 2^bits even steps from its group's minimum to its maximum. Both ends are rounded
    outwards to fp16, so that nothing is off by more than half a step; beyond ±65,504 the ends are those. A NaN makes
    all of its group NaN.
    """
    wide = values.float().clamp(-_LARGEST, _LARGEST)
    grouped, axis = _grouped(wide, layout)
    low, high = grouped.amin(axis, keepdim=True), grouped.amax(axis, keepdim=True)
    minimum = _rounded(low, up=False)
    steps = 2**layout.bits - 1
    scale = _rounded((high - minimum.float()) / steps, up=True)
    codes = ((grouped - minimum.float()) / scale.float()).nan_to_num(0).round_().clamp_(0, steps)
    codes = codes.to(torch.uint8).view(values.shape)  # [..., T, D]
    if layout.part == "key":
        codes = codes.transpose(-1, -2)
    return torch.cat(
        (_side_by_side(codes, layout.bits).flatten(-2), *(_bytes(p, layout) for p in (scale, minimum))), -1
    )


def unpack(stored: Tensor, layout: PackedLayout) -> Tensor:
    """What `pack` has kept: [..., num_bytes] → [..., T, D] fp32."""
    t, d, lead = layout.block_size, layout.head_dim, stored.shape[:-1]
    codes, scale, minimum = torch.split(stored, [layout.code_bytes, 2 * layout.num_groups, 2 * layout.num_groups], -1)
    rows = (d, t) if layout.part == "key" else (t, d)
    numbers = _apart(codes.reshape(*lead, rows[0], rows[1] * layout.bits // 8), layout.bits).float()
    if layout.part == "key":
        numbers = numbers.transpose(-1, -2)
    grouped, _ = _grouped(numbers.contiguous(), layout)
    return (grouped * _parameters(scale, layout) + _parameters(minimum, layout)).view(*lead, t, d)


def _grouped(values: Tensor, layout: PackedLayout) -> tuple[Tensor, int]:
    """[..., T, D] with groups along one axis, and which: [..., T, D] by channel, [..., T, D / G, G] by token."""
    if layout.by_channel:
        return values, -2
    return _split(values, size=layout.group), -1


def _split(values: Tensor, *, size: int) -> Tensor:
    """The last axis as two, the second of `size`."""
    return values.reshape(*values.shape[:-1], values.shape[-1] // size, size)


def _bytes(parameters: Tensor, layout: PackedLayout) -> Tensor:
    """fp16 [..., 1, D] or [..., T, D / G, 1] → uint8 [..., 2 · num_groups], in the layout's order."""
    if layout.by_channel:
        ordered = parameters.squeeze(-2)
    elif layout.part == "key":
        ordered = parameters.squeeze(-1).transpose(-1, -2).flatten(-2)  # tokens side by side
    else:
        ordered = parameters.squeeze(-1).flatten(-2)
    return ordered.contiguous().view(torch.uint8)


def _parameters(stored: Tensor, layout: PackedLayout) -> Tensor:
    """The inverse of `_bytes`, in fp32."""
    # A copy always: what is contiguous as it lies may begin at an odd byte, where no fp16 can.
    ordered = stored.clone(memory_format=torch.contiguous_format).view(torch.float16).float()
    if layout.by_channel:
        return ordered.unsqueeze(-2)
    if layout.part == "key":
        return _split(ordered, size=layout.block_size).transpose(-1, -2).unsqueeze(-1)
    return _split(ordered, size=layout.head_dim // layout.group).unsqueeze(-1)


def _side_by_side(codes: Tensor, bits: int) -> Tensor:
    """uint8 [..., n] → [..., n · bits / 8]."""
    if bits == 8:
        return codes.contiguous()
    parts = _split(codes, size=codes.shape[-1] * bits // 8).unbind(-2)
    packed = parts[0].clone()
    for i, part in enumerate(parts[1:], 1):
        packed |= part << (bits * i)
    return packed


def _apart(packed: Tensor, bits: int) -> Tensor:
    """The inverse of `_side_by_side`."""
    if bits == 8:
        return packed
    return torch.cat([(packed >> (bits * i)) & (2**bits - 1) for i in range(8 // bits)], -1)


def _rounded(values: Tensor, *, up: bool) -> Tensor:
    """The nearest fp16 that is not on the wrong side of `values`, which are fp32 within fp16's range."""
    near = values.half()
    wrong = near.float() < values if up else near.float() > values
    away = near > 0 if up else near < 0  # one place further from zero, or nearer to it
    bits = near.view(torch.int16)
    from_zero = torch.tensor(1 if up else -0x7FFF, dtype=torch.int16)  # the least number of that sign
    moved = torch.where(near == 0, from_zero, bits + torch.where(away, 1, -1).to(torch.int16))
    return torch.where(wrong, moved, bits).view(torch.float16)
