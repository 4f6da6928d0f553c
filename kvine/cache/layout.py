"""What codecs keep of a block, byte for byte: the planner, the allocator and the kernels all read it here.

A codec works *element by element* (`exact`, `fp32`, `fp16`, `bf16`) or *packs* whole blocks into 8, 4 or 2 bits a
number, with a scale and a minimum for each group of numbers, in fp16. Keys are grouped by channel over the tokens of a
block, for their outliers sit in a few channels; values by token, over up to 32 channels (KIVI, arXiv:2402.02750).
`-token` groups keys as values are, to compare with.

One head of a packed part is its codes, then its scales, then its minima:

    keys     codes [D, T], tokens side by side · by channel [D], by token [D / G, T]
    values   codes [T, D], channels side by side · [T, D / G]

Of n numbers side by side in b bits, byte j holds those at j, j + n·b/8, j + 2·n·b/8 …, the first in the lowest bits.
"""

from dataclasses import dataclass
from typing import Literal

from kvine.config import PER_TOKEN, is_packed, split_codecs

__all__ = ["ITEM_BYTES", "PackedLayout", "is_packed", "packed_layout", "part_bytes", "split_codecs", "unpackable"]

ITEM_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
PACKED_BITS = {"int8": 8, "int4": 4, "int2": 2}

Part = Literal["key", "value"]
_GROUP = 32
_PARAMETER_BYTES = 2 * 2  # scale and minimum, fp16


def channel_group(head_dim: int) -> int:
    """Channels that share a scale where a token is grouped by itself: the largest divisor of head_dim up to 32."""
    return max(size for size in range(1, _GROUP + 1) if head_dim % size == 0)


@dataclass(frozen=True)
class PackedLayout:
    """One head's part of a packed block.

    Attributes:
        part: whether it holds keys or values.
        bits: of a number, 8, 4 or 2.
        by_channel: whether scales belong to channels over all tokens; otherwise to tokens over groups of channels.
        block_size: T.
        head_dim: D.
    """

    part: Part
    bits: int
    by_channel: bool
    block_size: int
    head_dim: int

    @property
    def group(self) -> int:
        """Channels that share a scale."""
        return 1 if self.by_channel else channel_group(self.head_dim)

    @property
    def code_bytes(self) -> int:
        """Bytes of the codes."""
        return self.block_size * self.head_dim * self.bits // 8

    @property
    def num_groups(self) -> int:
        """Scales, and as many minima."""
        return self.head_dim if self.by_channel else self.block_size * (self.head_dim // self.group)

    @property
    def num_bytes(self) -> int:
        """Bytes in all."""
        return self.code_bytes + self.num_groups * _PARAMETER_BYTES


def packed_layout(part: Part, codec: str, block_size: int, head_dim: int) -> PackedLayout:
    """The layout of a packed codec; see `unpackable` for the shapes that it can have."""
    by_channel = part == "key" and not codec.endswith(PER_TOKEN)
    return PackedLayout(part, PACKED_BITS[codec.removesuffix(PER_TOKEN)], by_channel, block_size, head_dim)


def unpackable(part: Part, codec: str, block_size: int, head_dim: int) -> str | None:
    """Why a codec cannot keep blocks of this shape, as a sentence; None if it can."""
    if not is_packed(codec):
        return None
    each = 8 // PACKED_BITS[codec.removesuffix(PER_TOKEN)]
    if part == "key" and block_size % each:
        return f"Keys in {codec} share bytes among {each} tokens: give a block_size that {each} divides."
    if part == "value" and head_dim % each:
        return f"Values in {codec} share bytes among {each} channels, and heads of this model have {head_dim}."
    return None


def part_bytes(part: Part, codec: str, block_size: int, head_dim: int, dtype: str) -> int:
    """Exact bytes that a sealed block takes for one head's keys or values, under compute dtype `dtype`."""
    if is_packed(codec):
        return packed_layout(part, codec, block_size, head_dim).num_bytes
    return block_size * head_dim * ITEM_BYTES[dtype if codec == "exact" else codec]
