"""Full blocks as bytes and back: what a store keeps is what the cache's memory holds, bit for bit."""

from collections.abc import Sequence

import torch
from torch import Tensor

from kvine.cache.memory import BlockMemory
from kvine.cache.store import Parts


class PoolBytes:
    """The memories of all shelves, see `tier.BlockMemories`. Parts are keys and values, layer by layer.

    Args:
        memories: one for each shelf, in order.
    """

    def __init__(self, memories: Sequence[BlockMemory]) -> None:
        self._memories = list(memories)

    def sizes(self, shelf: int) -> tuple[int, ...]:
        """Bytes of a block's keys and of its values."""
        memory = self._memories[shelf]
        return tuple(stored[:, 0].numel() * stored.element_size() for stored in (memory.k, memory.v))

    def save(self, shelf: int, block: int, num_tokens: int | None = None) -> Parts:
        """Keys and values of a block, copied; of its first num_tokens tokens, zeros instead of what lies behind."""
        memory = self._memories[shelf]
        return tuple(_bytes(stored[:, block], num_tokens) for stored in (memory.k, memory.v))

    def load(self, shelf: int, block: int, parts: Parts) -> None:
        """Writes keys and values over those of a block."""
        memory = self._memories[shelf]
        for stored, part in zip((memory.k, memory.v), parts, strict=True):
            target = stored[:, block]
            target.copy_(torch.frombuffer(bytearray(part), dtype=stored.dtype).view(target.shape))


def _bytes(values: Tensor, num_tokens: int | None) -> memoryview:
    copied = values.to("cpu", copy=True, memory_format=torch.contiguous_format)
    if num_tokens is not None:
        copied[:, :, num_tokens:] = 0  # [layers, kv_heads, block_size, head_dim]: no block is packed before it is full
    return memoryview(copied.view(torch.uint8).flatten().numpy().data)
