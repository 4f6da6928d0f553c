"""The memory of one layer group: K and V as `[layers, blocks, kv_heads, block_size, head_dim]`."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from kvine.cache.codec import DTYPES, encode, storage_dtype
from kvine.cache.manager import BlockCopy
from kvine.cache.memory import BlockMemory
from kvine.cache.spec import CacheSpec
from kvine.kernels import is_plain, write_rows


@dataclass(frozen=True)
class LayerKV:
    """One layer's blocks, as attention reads them: k and v `[blocks, kv_heads, block_size, head_dim]`, as stored."""

    k: Tensor
    v: Tensor


class KVPool(BlockMemory):
    """K and V of one layer group, element by element.

    Args:
        spec: what the group keeps.
        num_blocks: blocks that the address space holds.
        compute: dtype of the K and V that come in.
        device: where the memory is.
        native: whether compiled kernels write rows, where they can; otherwise torch does.

    Raises:
        ConfigError: if the system does not grant the memory.
    """

    def __init__(
        self,
        spec: CacheSpec,
        num_blocks: int,
        compute: torch.dtype,
        device: torch.device,
        *,
        native: bool = False,
    ) -> None:
        super().__init__()
        self.spec = spec
        self._native = native
        self.num_blocks = num_blocks
        shape = (spec.num_layers, num_blocks, spec.num_kv_heads, spec.block_size, spec.head_dim)
        self.k = self._reserve(shape, storage_dtype(spec.key_codec, compute), device)
        self.v = self._reserve(shape, storage_dtype(spec.value_codec, compute), device)
        self.layers = [LayerKV(k, v) for k, v in zip(self.k, self.v, strict=True)]
        self._rows = [
            (layer.k.view(-1, spec.head_dim), layer.v.view(-1, spec.head_dim)) for layer in self.layers
        ]  # [blocks × kv_heads × block_size, D]
        self._heads = torch.arange(spec.num_kv_heads, device=device) * spec.block_size

    def row_index(self, slots: Tensor) -> Tensor:
        """Rows of K (and of V) that belong to slots; [N] → [N × kv_heads]. A slot is block × block_size + offset."""
        size = self.spec.block_size
        first = (slots // size) * (size * self.spec.num_kv_heads) + slots % size
        return (first[:, None] + self._heads).view(-1)

    def write(self, layer: int, rows: Tensor, k: Tensor, v: Tensor) -> None:
        """Stores k and v `[N, kv_heads, head_dim]` of the group's layer number `layer` at `rows` (see `row_index`)."""
        keys, values = self._rows[layer]
        if self._native and k.dtype is v.dtype and k.dtype in DTYPES.values() and is_plain(k) and is_plain(v):
            write_rows(k.view(-1, self.spec.head_dim), v.view(-1, self.spec.head_dim), rows, keys, values)
            return
        keys.index_copy_(0, rows, encode(k.reshape(-1, self.spec.head_dim), keys.dtype))
        values.index_copy_(0, rows, encode(v.reshape(-1, self.spec.head_dim), values.dtype))

    def copy(self, copies: Iterable[BlockCopy]) -> None:
        """Makes the copies that copy-on-write asks for, in order."""
        for c in copies:
            self.k[:, c.target, :, : c.num_tokens] = self.k[:, c.source, :, : c.num_tokens]
            self.v[:, c.target, :, : c.num_tokens] = self.v[:, c.source, :, : c.num_tokens]

    def read(self, layer: int, blocks: list[int], num_tokens: int) -> tuple[Tensor, Tensor]:
        """K and V of a sequence's first num_tokens tokens in one layer, each `[1, kv_heads, num_tokens, head_dim]`.

        Copies in stored dtype. For people and tests: attention reads the blocks themselves.
        """
        index = torch.tensor(blocks, device=self.k.device, dtype=torch.long)

        def gather(stored: Tensor) -> Tensor:  # [n, H, block_size, D] → [1, H, n × block_size, D]
            return stored.index_select(0, index).transpose(0, 1).flatten(1, 2)[None, :, :num_tokens]

        return gather(self.layers[layer].k), gather(self.layers[layer].v)
