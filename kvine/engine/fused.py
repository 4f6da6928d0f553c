"""Decode steps in one native call, where every part of the model and of the cache is the kernels' own.

What it computes equals, bit for bit, what the decoder gives with the same attention when it runs on the kernels.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from kvine.attention.cached import CachedAttention
from kvine.attention.native import NativeBackend, single_queries
from kvine.attention.packed_native import packed_kind
from kvine.cache.packed_pool import PackedPool
from kvine.cache.pool import KVPool
from kvine.cache.spec import CacheSpec
from kvine.engine.scheduler import Scheduled
from kvine.kernels import Kernels, is_plain
from kvine.kernels.packed import NativeProduct, PackedLinear, PackedWeight
from kvine.kernels.stack import LayerKind, NativeStack, StackLayer, StackShape
from kvine.models.decoder import Decoder, DecoderLayer
from kvine.models.layers import Embedding, Linear, RMSNorm
from kvine.models.matmul import native_product


class FusedDecoder:
    """A decoder and its cache, bound to each other; see `bind`.

    Args:
        stack: both.
        attention: whose blocks `stack` reads.
        softcap: bound of the logits.
        max_rows: with more rows the kernels are no longer the fastest; None for any number.
    """

    def __init__(
        self, stack: NativeStack, attention: CachedAttention, softcap: float | None, max_rows: int | None
    ) -> None:
        self._stack = stack
        self._attention = attention
        self._specs = [attention.pools[group].spec for group in range(len(attention.backends))]
        self._softcap = softcap
        self._max_rows = max_rows

    @classmethod
    def bind(cls, decoder: Decoder, attention: CachedAttention, native: Kernels | None) -> "FusedDecoder | None":
        """None where something is not for the kernels, so that the decoder's own loop must do."""
        if native is None or not all(isinstance(backend, NativeBackend) for backend in attention.backends):
            return None
        linears = [linear for layer in decoder.layers for linear in _linears(layer)]
        products = [native_product(linear.product) for linear in (*linears, decoder.head)]
        embedding = _bind_table(native, decoder.embedding)
        tensors = [norm for layer in decoder.layers for norm in _norms(layer) if norm is not None]
        opened = [pool for pool in attention.pools if isinstance(pool, KVPool)]
        tensors += [stored for pool in opened for kv in pool.layers for stored in (kv.k, kv.v)]
        if any(attention.pools[group].spec.block_size < 2 for group in attention.open_shelf):
            return None  # a block that is full at once is never open
        if embedding is None or None in products or not all(is_plain(t) and t.dtype in native.dtypes for t in tensors):
            return None
        kinds, kind_of = _kinds(attention)
        known = [product for product in products if product is not None]
        layers = []
        for index, layer in enumerate(decoder.layers):
            where = attention.layers[index]
            stored = _open_pool(attention, where.group).layers[where.index]
            own = tuple(product for product, _ in known[7 * index : 7 * index + 7])
            pool = attention.pools[where.group]
            sealed = pool.layers[where.index] if isinstance(pool, PackedPool) else None
            packed = () if sealed is None else (sealed.k, sealed.v)
            layers.append(StackLayer(*_norms(layer), own, stored.k, stored.v, kind_of[index], *packed))
        config, scale = decoder.config, decoder.embedding.scale
        shape = StackShape(
            decoder.embedding.dtype,
            config.hidden_size,
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            config.norm_eps,
            attention.scale,
            attention.softcap,
            config.activation,
            embedding,
            1.0 if scale is None else scale.item(),
            decoder.final_norm.weight,
            known[-1][0],
            config.vocab_size,
        )
        limits = [max_rows for _, max_rows in known if max_rows is not None]
        stack = NativeStack(native, shape, kinds, layers)
        return cls(stack, attention, config.logit_softcap, min(limits, default=None))

    def takes(self, step: Sequence[Scheduled]) -> bool:
        """Whether each request has one query, and there are not too many."""
        few = self._max_rows is None or len(step) <= self._max_rows
        return few and all(item.count == 1 for item in step)

    def run(self, step: Sequence[Scheduled], *, all_logits: bool) -> Tensor:
        """Logits of a step that `takes` accepts; see `Runner.run`."""
        ids: list[int] = []
        wanted: list[int] = []
        places: list[tuple[int, int]] = []  # of each request, its row and the number of its keys
        for row, item in enumerate(step):
            ids += item.request.tokens(item.start, item.start + 1)
            places.append((row, item.start + 1))
            if all_logits or item.samples:
                wanted.append(row)
        groups = []
        for group in range(len(self._specs)):
            tables = [self._table(item, group) for item in step]
            groups.append(single_queries(places, tables, [_seen_by(item, group) for item in step]))
        logits = self._stack.run(ids, wanted, groups)
        for group in self._attention.open_shelf:
            self._seal(step, group)
        return logits if self._softcap is None else torch.tanh(logits / self._softcap) * self._softcap

    def _table(self, item: Scheduled, group: int) -> list[int]:
        """A request's blocks; where full ones are packed, these and then the open one, which its token goes to."""
        assert item.request.sequence is not None
        table = item.request.sequence.tables[group]
        shelf = self._attention.open_shelf.get(group)
        if shelf is None:
            return table
        last = item.start // self._specs[group].block_size
        return [*table[:last], item.request.sequence.tables[shelf][last]]

    def _seal(self, step: Sequence[Scheduled], group: int) -> None:
        """Packs the blocks that the step has filled."""
        size, shelf = self._specs[group].block_size, self._attention.open_shelf[group]
        sealed, opened = self._attention.pools[group], self._attention.pools[shelf]
        assert isinstance(sealed, PackedPool)
        blocks, sources = [], []
        for item in step:
            if (item.start + 1) % size == 0:
                assert item.request.sequence is not None
                tables = item.request.sequence.tables
                blocks.append(tables[group][item.start // size])
                sources.append(tables[shelf][item.start // size])
        if blocks:
            index = torch.tensor(sources)
            sealed.seal_all(torch.tensor(blocks), opened.k.index_select(1, index), opened.v.index_select(1, index))


def _seen_by(item: Scheduled, group: int) -> CacheSpec:
    assert item.request.sequence is not None
    return item.request.sequence.shelves[group].spec


def _open_pool(attention: CachedAttention, group: int) -> KVPool:
    """Where a group's tokens are written: its own pool, or that of its open blocks."""
    pool = attention.pools[attention.open_shelf.get(group, group)]
    assert isinstance(pool, KVPool)
    return pool


def _kinds(attention: CachedAttention) -> tuple[list[LayerKind], list[int]]:
    """The kinds of layers, and which is whose."""
    number: dict[tuple[int, int], int] = {}
    kinds: list[LayerKind] = []
    kind_of: list[int] = []
    for where in attention.layers:
        key = (id(where.rope), where.group)
        if key not in number:
            number[key] = len(kinds)
            pool = attention.pools[where.group]
            stored = _open_pool(attention, where.group).layers[where.index]
            kinds.append(
                LayerKind(
                    where.rope.frequencies,
                    where.rope.scaling,
                    stored.k,
                    stored.v,
                    where.group,
                    packed_kind(pool) if isinstance(pool, PackedPool) else None,
                )
            )
        kind_of.append(number[key])
    return kinds, kind_of


def _bind_table(native: Kernels, embedding: Embedding) -> NativeProduct | None:
    if isinstance(embedding.weight, PackedWeight):
        return PackedLinear(native, embedding.weight, None, embedding.dtype)
    return native.bind(embedding.weight)


def _linears(layer: DecoderLayer) -> tuple[Linear, ...]:
    mlp = layer.mlp
    return (layer.q_proj, layer.k_proj, layer.v_proj, layer.o_proj, mlp.gate, mlp.up, mlp.down)


def _norms(layer: DecoderLayer) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor, Tensor | None]:
    def weight(norm: RMSNorm | None) -> Tensor | None:
        return None if norm is None else norm.weight

    return (
        layer.attn_norm.weight,
        weight(layer.q_norm),
        weight(layer.k_norm),
        weight(layer.post_attn_norm),
        layer.mlp_norm.weight,
        weight(layer.post_mlp_norm),
    )
