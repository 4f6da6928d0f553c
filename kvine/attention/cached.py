"""Attention that writes each step's K and V into blocks and then reads the whole past from them.

What is read is always the cache, on the first prefill too: chunk size, prefix hits, batch mates and preemption then
change nothing but the order of float sums.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from kvine.attention.base import Backend, Batch
from kvine.cache.pool import KVPool
from kvine.rope import RotaryEmbedding


@dataclass(frozen=True)
class AttentionLayer:
    """Where a model layer's past is kept and how it is rotated."""

    group: int
    index: int  # the layer's number within its group
    rope: RotaryEmbedding


class CachedAttention:
    """The engine's attention: rotate, write, attend.

    Args:
        layers: one for each layer of the model.
        pools: the memory of each layer group.
        backends: the backend of each layer group.
        scale: factor on the scores.
        softcap: soft cap of the scores, if the model has one.
    """

    def __init__(
        self,
        layers: Sequence[AttentionLayer],
        pools: Sequence[KVPool],
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

    def step(self, batch: Batch) -> "StepAttention":
        """The `attend` function of one model call."""
        return StepAttention(self, batch)


class StepAttention:
    """`attend` for one batch: everything that its layers share is worked out once, here."""

    def __init__(self, attention: CachedAttention, batch: Batch) -> None:
        self._attention = attention
        self._plans: list[Any] = []
        self._rows: list[Tensor] = []
        self._angles: dict[tuple[int, int | None], tuple[Tensor, Tensor]] = {}
        self._moved: list[Tensor | None] = []  # positions by which the sinks are read, where they differ
        self._positions = batch.positions
        for group, (pool, backend) in enumerate(zip(attention.pools, attention.backends, strict=True)):
            self._plans.append(backend.plan(batch, group, pool.spec))
            self._rows.append(pool.row_index(batch.groups[group].slot_mapping))
            limit = pool.spec.sinks_move_from
            moved = limit is not None and max(batch.context_len) > limit
            self._moved.append(batch.positions.clamp(max=limit - 1) if limit is not None and moved else None)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attends in one layer: q `[N, Hq, D]`, k and v `[N, Hkv, D]`, q and k not yet rotated → `[N, Hq, D]`."""
        attention = self._attention
        place = attention.layers[layer]
        pool = attention.pools[place.group]
        cos, sin = self._rotation(place, moved=False)
        rotate = place.rope.rotate
        pool.write(place.index, self._rows[place.group], rotate(k, cos, sin), v)
        q_sink = None
        if self._moved[place.group] is not None:
            q_sink = rotate(q, *self._rotation(place, moved=True))
        return attention.backends[place.group].attend(
            rotate(q, cos, sin),
            pool.layers[place.index],
            self._plans[place.group],
            scale=attention.scale,
            q_sink=q_sink,
            softcap=attention.softcap,
        )

    def _rotation(self, place: AttentionLayer, moved: bool) -> tuple[Tensor, Tensor]:
        sinks = self._moved[place.group] if moved else None
        key = (id(place.rope), None if sinks is None else place.group)  # how far sinks move depends on the window
        if key not in self._angles:
            self._angles[key] = place.rope.cos_sin(self._positions if sinks is None else sinks)
        return self._angles[key]
