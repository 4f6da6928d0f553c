"""Address space for blocks, committed as they are first written and given back when they hold nothing."""

import math
import mmap
import sys
from collections.abc import Iterable

import torch
from torch import Tensor

from kvine.errors import ConfigError


class BlockMemory:
    """Two tensors `[layers, blocks, ...]`, `k` and `v`, that a subclass reserves.

    On a CPU only address space is reserved; the system commits memory as blocks are first written, low ids first, and
    `give_back` returns it.
    """

    k: Tensor
    v: Tensor

    def __init__(self) -> None:
        self._maps: list[mmap.mmap | None] = []

    def give_back(self, blocks: Iterable[int]) -> None:
        """Returns the memory of free blocks to the system, where the system can take it back."""
        if sys.platform != "linux":
            return
        for mapped, stored in zip(self._maps, (self.k, self.v), strict=True):
            if mapped is None:
                continue
            num_layers, num_blocks = stored.shape[:2]
            size = stored.stride(1) * stored.element_size()  # one block of one layer
            for block in blocks:
                for layer in range(num_layers):
                    start = (layer * num_blocks + block) * size
                    first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
                    last = (start + size) // mmap.PAGESIZE * mmap.PAGESIZE
                    if last > first:
                        mapped.madvise(mmap.MADV_DONTNEED, first, last - first)

    def _reserve(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        count = math.prod(shape)
        try:
            if device.type == "cpu" and count:
                return self._map(shape, count, dtype)
            self._maps.append(None)
            return torch.zeros(shape, dtype=dtype, device=device)
        except (OSError, OverflowError, RuntimeError) as error:
            raise ConfigError(
                f"The system refuses {count * dtype.itemsize:,} bytes for the cache ({error}): lower kv_memory."
            ) from None

    def _map(self, shape: tuple[int, ...], count: int, dtype: torch.dtype) -> Tensor:
        # Private, for the system keeps the pages of a shared mapping even when no process looks at them any more.
        private = {} if sys.platform == "win32" else {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS}
        mapped = mmap.mmap(-1, count * dtype.itemsize, **private)
        self._maps.append(mapped)
        return torch.frombuffer(mapped, dtype=dtype, count=count).view(shape)
