"""The memory of a layer group's full blocks where a codec packs them: bytes, one run for each head's keys or values."""

import torch
from torch import Tensor

from kvine.cache.codec import encode, pack, storage_dtype, unpack
from kvine.cache.layout import Part, is_packed, packed_layout
from kvine.cache.memory import BlockMemory
from kvine.cache.pool import LayerKV
from kvine.cache.spec import CacheSpec


class PackedPool(BlockMemory):
    """Sealed blocks of one layer group; k and v are uint8 `[layers, blocks, kv_heads, bytes]`.

    Args:
        spec: what the group keeps.
        num_blocks: blocks that the address space holds.
        compute: dtype of the K and V that come in.
        device: where the memory is.

    Raises:
        ConfigError: if the system does not grant the memory.
    """

    def __init__(self, spec: CacheSpec, num_blocks: int, compute: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.spec = spec
        self.num_blocks = num_blocks
        self._parts = {
            "key": _PartCodec("key", spec, spec.key_codec, compute),
            "value": _PartCodec("value", spec, spec.value_codec, compute),
        }
        shape = (spec.num_layers, num_blocks, spec.num_kv_heads)
        self.k = self._reserve((*shape, self._parts["key"].num_bytes), torch.uint8, device)
        self.v = self._reserve((*shape, self._parts["value"].num_bytes), torch.uint8, device)
        self.layers = [LayerKV(k, v) for k, v in zip(self.k, self.v, strict=True)]

    def seal(self, layer: int, blocks: Tensor, k: Tensor, v: Tensor) -> None:
        """Stores whole blocks: k and v `[n, kv_heads, block_size, head_dim]` of the group's layer number `layer`."""
        self.layers[layer].k.index_copy_(0, blocks, self._parts["key"].encode(k))
        self.layers[layer].v.index_copy_(0, blocks, self._parts["value"].encode(v))

    def seal_all(self, blocks: Tensor, k: Tensor, v: Tensor) -> None:
        """The same in all layers: k and v `[layers, n, kv_heads, block_size, head_dim]`."""
        self.k.index_copy_(1, blocks, self._parts["key"].encode(k))
        self.v.index_copy_(1, blocks, self._parts["value"].encode(v))

    def unsealed(self, layer: int, blocks: Tensor) -> LayerKV:
        """What the codecs have kept of blocks, fp32, each `[n, kv_heads, block_size, head_dim]`."""
        stored = self.layers[layer]
        return LayerKV(
            self._parts["key"].decode(stored.k.index_select(0, blocks)),
            self._parts["value"].decode(stored.v.index_select(0, blocks)),
        )


class _PartCodec:
    """Keys or values of whole blocks to bytes and back: [..., T, D] to uint8 [..., num_bytes]."""

    def __init__(self, part: Part, spec: CacheSpec, codec: str, compute: torch.dtype) -> None:
        self._shape = (spec.block_size, spec.head_dim)
        self._layout = packed_layout(part, codec, *self._shape) if is_packed(codec) else None
        self._dtype = None if self._layout else storage_dtype(codec, compute)
        if self._layout is not None:
            self.num_bytes = self._layout.num_bytes
        else:
            assert self._dtype is not None
            self.num_bytes = spec.block_size * spec.head_dim * self._dtype.itemsize

    def encode(self, values: Tensor) -> Tensor:
        if self._layout is not None:
            return pack(values, self._layout)
        assert self._dtype is not None
        return encode(values, self._dtype).contiguous().flatten(-2).view(torch.uint8)

    def decode(self, stored: Tensor) -> Tensor:
        if self._layout is not None:
            return unpack(stored, self._layout)
        assert self._dtype is not None
        return stored.contiguous().view(self._dtype).float().reshape(*stored.shape[:-1], *self._shape)
