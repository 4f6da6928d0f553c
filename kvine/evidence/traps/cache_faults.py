"""Faults of the cache itself: how values are stored, and who is given which block."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kvine.cache.blocks import BlockPool
from kvine.cache.hashing import block_key
from kvine.cache.layout import PACKED_BITS
from kvine.cache.manager import CacheManager
from kvine.cache.packed_pool import PackedPool
from kvine.cache.pool import KVPool, LayerKV
from kvine.cache.prefix import Node, PrefixIndex
from kvine.cache.sequence import CachedSequence
from kvine.cache.spec import CacheSpec
from kvine.config import PER_TOKEN
from kvine.spans import Spans


def in_fp32(pool: KVPool) -> KVPool:
    """Memory made without naming a dtype: torch's default is fp32, whatever the model is."""
    spec = replace(pool.spec, key_codec="fp32", value_codec="fp32")
    return KVPool(spec, pool.num_blocks, torch.float32, pool.k.device)


class NarrowPool(KVPool):
    """Rounds to bf16 on the way into memory that is wider."""

    def write(self, layer: int, rows: Tensor, k: Tensor, v: Tensor) -> None:
        """See `KVPool`."""
        super().write(layer, rows, k.to(torch.bfloat16).to(k.dtype), v.to(torch.bfloat16).to(v.dtype))


class ReinterpretedPool(KVPool):
    """`view` where `to` is needed: the bits of the model's dtype are taken for those of the cache's."""

    def write(self, layer: int, rows: Tensor, k: Tensor, v: Tensor) -> None:
        """See `KVPool`."""
        stored = self.layers[layer].k.dtype
        if stored.itemsize == k.dtype.itemsize:
            k, v = k.view(stored), v.view(stored)
        super().write(layer, rows, k, v)


def rebuilt(pool: KVPool, kind: type[KVPool], device: str | None = None) -> KVPool:
    """Memory of another kind for the same blocks."""
    compute = pool.k.dtype  # the codec names the storage, except for `exact`, which is this
    return kind(pool.spec, pool.num_blocks, compute, torch.device(device) if device else pool.k.device)


class NeighboursScales(PackedPool):
    """Codes of a block, and scales and minima of the one before it."""

    def unsealed(self, layer: int, blocks: Tensor) -> LayerKV:
        """See `PackedPool`."""
        stored, part = self.layers[layer], self._parts
        own = LayerKV(*(x.index_select(0, blocks) for x in (stored.k, stored.v)))
        scales = LayerKV(*(x.index_select(0, (blocks - 1).clamp(min=0)) for x in (stored.k, stored.v)))
        keys, values = (self.spec.block_size * self.spec.head_dim * bits // 8 for bits in packed_bits(self.spec))
        return LayerKV(
            part["key"].decode(torch.cat((own.k[..., :keys], scales.k[..., keys:]), -1)),
            part["value"].decode(torch.cat((own.v[..., :values], scales.v[..., values:]), -1)),
        )


def packed_bits(spec: CacheSpec) -> tuple[int, int]:
    """Bits of a key's and of a value's code."""
    keys, values = (codec.removesuffix(PER_TOKEN) for codec in (spec.key_codec, spec.value_codec))
    return PACKED_BITS[keys], PACKED_BITS[values]


def with_neighbours_scales(pool: PackedPool) -> PackedPool:
    """Memory that decodes with them."""
    compute = torch.float32  # packed codecs take any
    return NeighboursScales(pool.spec, pool.num_blocks, compute, pool.k.device)


def elsewhere(pool: KVPool) -> KVPool:
    """Memory on torch's `meta` device, which every machine has: no kernel can read it beside the model's tensors."""
    return rebuilt(pool, KVPool, "meta")


class SharedWithoutCopy(CacheManager):
    """Writes where it is, whoever else reads there."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.pools = [_AlwaysWritable(pool.capacity, pool.bytes_per_block) for pool in self.pools]


class _AlwaysWritable(BlockPool):
    def writable(self, block: int) -> bool:
        return True


class PublishedEarly(CacheManager):
    """Takes all of a prompt's blocks when it is admitted, and lets others find them before they are written."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.pools = [_WritableIfAlone(pool.capacity, pool.bytes_per_block) for pool in self.pools]
        self._prompts: dict[CachedSequence, list[int]] = {}

    def open(self, tokens: Sequence[int], namespace: bytes = b"", pinned: Spans = ()) -> CachedSequence:
        """See `CacheManager`."""
        sequence = super().open(tokens, namespace, pinned)
        self._prompts[sequence] = list(tokens)
        return sequence

    def reserve(self, sequence: CachedSequence, num_new: int) -> bool:
        """See `CacheManager`."""
        prompt = self._prompts.pop(sequence, None)
        if prompt is None:
            return super().reserve(sequence, num_new)
        done = super().reserve(sequence, max(num_new, len(prompt) - sequence.num_tokens))
        if done and self.prefix_caching:
            self._publish_all(sequence, prompt)
        return done

    def _publish_all(self, sequence: CachedSequence, prompt: Sequence[int]) -> None:
        parent, size = sequence.path[-1], self.block_size
        for block in range(len(sequence.path) - 1, len(prompt) // size):
            parent = self.index.add(parent, tuple(prompt[block * size : (block + 1) * size]))
            self._publish(sequence, parent, block)


class _WritableIfAlone(BlockPool):
    def writable(self, block: int) -> bool:
        return self.references[block] == 1


class TrustingIndex(PrefixIndex):
    """Takes equal keys for equal tokens."""

    def child(self, parent: Node, tokens: tuple[int, ...]) -> Node | None:
        """See `PrefixIndex`."""
        return next(iter(self._by_key.get(block_key(parent.key, tokens, self._hash), ())), None)


class TrustingManager(CacheManager):
    """A manager whose index trusts its keys."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.index = TrustingIndex(len(self.specs))
