"""Attention that writes each step's K and V into blocks and then reads the whole past from them.

What is read is always the cache, on the first prefill too: chunk size, prefix hits, batch mates and preemption then
change nothing but the order of float sums.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvine.attention.base import Backend, Batch
from kvine.attention.native import NativeBackend
from kvine.attention.packed import PackedStep
from kvine.attention.packed_native import NativePackedStep
from kvine.cache.packed_pool import PackedPool
from kvine.cache.pool import KVPool
from kvine.cache.sequence import MISSING
from kvine.cache.spec import CacheSpec
from kvine.kernels import NEVER
from kvine.rope import RotaryEmbedding


@dataclass(frozen=True)
class AttentionLayer:
    """Where a model layer's past is kept and how it is rotated."""

    group: int
    index: int  # the layer's number within its group
    rope: RotaryEmbedding


Pool = KVPool | PackedPool


class CachedAttention:
    """The engine's attention: rotate, write, attend.

    Args:
        layers: one for each layer of the model.
        pools: the memory of each shelf of the cache, the groups' own first.
        backends: the backend of each layer group.
        scale: factor on the scores.
        softcap: soft cap of the scores, if the model has one.
    """

    def __init__(
        self,
        layers: Sequence[AttentionLayer],
        pools: Sequence[Pool],
        backends: Sequence[Backend],
        *,
        scale: float,
        softcap: float | None = None,
    ) -> None:
        self.layers = tuple(layers)
        self.pools = tuple(pools)
        self.backends = tuple(backends)
        self.scale = scale
        self.softcap = softcap
        packed = [group for group, pool in enumerate(pools) if isinstance(pool, PackedPool)]
        self.open_shelf = {group: len(backends) + n for n, group in enumerate(packed)}

    def step(self, batch: Batch) -> "StepAttention":
        """The `attend` function of one model call."""
        return StepAttention(self, batch)

    def read(self, group: int, layer: int, tables: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
        """K and V of a sequence in a group's layer number `layer`, each `[1, kv_heads, blocks × block_size, head_dim]`.

        Copies, for people and tests: of blocks that were let go nothing, of packed ones what the codecs have kept.

        Args:
            group: of the layers.
            layer: its number in the group.
            tables: the sequence's block tables, one for each shelf.
        """
        pool, shelf = self.pools[group], self.open_shelf.get(group)
        live = [block for block in tables[group] if block != MISSING]
        if isinstance(pool, KVPool):
            return pool.read(layer, live, len(live) * pool.spec.block_size)
        assert shelf is not None
        opened = self.pools[shelf]
        assert isinstance(opened, KVPool)
        kept = pool.unsealed(layer, torch.tensor(live, dtype=torch.long, device=pool.k.device))
        begun = [block for block in tables[shelf] if block != MISSING]
        tail = opened.read(layer, begun, len(begun) * pool.spec.block_size)
        return tuple(  # type: ignore[return-value]
            torch.cat((sealed.transpose(0, 1).flatten(1, 2)[None], last.float()), 2)
            for sealed, last in zip((kept.k, kept.v), tail, strict=True)
        )


class StepAttention:
    """`attend` for one batch: everything that its layers share is worked out once, here."""

    def __init__(self, attention: CachedAttention, batch: Batch) -> None:
        self._attention = attention
        self._plans: list[Any] = []
        self._rows: list[Tensor] = []
        self._packed: dict[int, PackedStep | NativePackedStep] = {}
        self._angles: dict[tuple[int, int | None], tuple[Tensor, Tensor]] = {}
        self._moved: list[Tensor | None] = []  # positions by which the sinks are read, where they differ
        self._positions = batch.positions
        for group, backend in enumerate(attention.backends):
            pool = attention.pools[group]
            if isinstance(pool, PackedPool):
                opened = attention.pools[attention.open_shelf[group]]
                assert isinstance(opened, KVPool)
                if isinstance(backend, NativeBackend):
                    self._packed[group] = NativePackedStep(batch, group, pool, opened, backend)
                else:
                    self._packed[group] = PackedStep(batch, group, pool, opened, backend)
                self._plans.append(None)
                self._rows.append(batch.positions)
            else:
                self._plans.append(backend.plan(batch, group, pool.spec))
                self._rows.append(pool.row_index(batch.groups[group].slot_mapping))
            self._moved.append(_moved(batch, pool.spec))

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attends in one layer: q `[N, Hq, D]`, k and v `[N, Hkv, D]`, q and k not yet rotated → `[N, Hq, D]`."""
        attention = self._attention
        place = attention.layers[layer]
        pool = attention.pools[place.group]
        cos, sin = self._rotation(place, moved=False)
        rotate = place.rope.rotate
        k = rotate(k, cos, sin)
        if isinstance(pool, KVPool):
            pool.write(place.index, self._rows[place.group], k, v)
        q_sink = None
        if self._moved[place.group] is not None:
            q_sink = rotate(q, *self._rotation(place, moved=True))
        q, scale, softcap = rotate(q, cos, sin), attention.scale, attention.softcap
        if isinstance(pool, PackedPool):
            return self._packed[place.group].attend(place.index, q, k, v, scale=scale, q_sink=q_sink, softcap=softcap)
        return attention.backends[place.group].attend(
            q, pool.layers[place.index], self._plans[place.group], scale=scale, q_sink=q_sink, softcap=softcap
        )

    def _rotation(self, place: AttentionLayer, moved: bool) -> tuple[Tensor, Tensor]:
        sinks = self._moved[place.group] if moved else None
        key = (id(place.rope), None if sinks is None else place.group)  # how far sinks move depends on the window
        if key not in self._angles:
            self._angles[key] = place.rope.cos_sin(self._positions if sinks is None else sinks)
        return self._angles[key]


def _moved(batch: Batch, spec: CacheSpec) -> Tensor | None:
    """[N] positions by which a group's sinks are read; None where all are the queries' own."""
    limits = [batch.spec_of(r, spec).sinks_move_from for r in range(batch.num_requests if batch.pinned else 1)]
    limits *= batch.num_requests // len(limits)
    if all(limit is None or length <= limit for limit, length in zip(limits, batch.context_len, strict=True)):
        return None
    last = [NEVER if limit is None else limit - 1 for limit in limits]
    counts = [end - start for start, end in itertools.pairwise(batch.query_start)]
    device = batch.positions.device
    bounds = torch.tensor(last, device=device).repeat_interleave(torch.tensor(counts, device=device))
    return batch.positions.minimum(bounds)
