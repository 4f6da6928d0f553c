"""Engine parts with one fault each, for the tests that `verify` must see it."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kvine.attention.base import Batch
from kvine.attention.cached import CachedAttention
from kvine.attention.reference import ReferenceBackend
from kvine.cache.spec import CacheSpec
from kvine.engine.engine import EngineParts
from kvine.engine.runner import Runner

Fault = Callable[[CachedAttention], CachedAttention]


def with_fault(parts: EngineParts, fault: Fault) -> EngineParts:
    """The same parts with another attention in the runner."""
    runner = parts.runner
    assert isinstance(runner, Runner)
    return replace(parts, runner=Runner(runner.decoder, fault(runner.attention), runner.manager, runner.device))


class ChangedSteps(CachedAttention):
    """Attention that is handed another batch than the one that runs."""

    def __init__(self, whole: CachedAttention, change: Callable[[Batch], Batch]) -> None:
        super().__init__(whole.layers, whole.pools, whole.backends, scale=whole.scale, softcap=whole.softcap)
        self._change = change

    def step(self, batch: Batch):
        return super().step(self._change(batch))


def changed_backend(whole: CachedAttention, backend: ReferenceBackend) -> CachedAttention:
    """Attention over the same pools with one other backend."""
    backends = [backend] * len(whole.pools)
    return CachedAttention(whole.layers, whole.pools, backends, scale=whole.scale, softcap=whole.softcap)


def decoded(batch: Batch) -> Tensor:
    """[N], true for tokens that are alone in their request's step."""
    counts = torch.tensor(batch.query_start).diff()  # [R]
    return (counts == 1).repeat_interleave(counts)


def late_positions(whole: CachedAttention) -> CachedAttention:
    """Decoded tokens are rotated one position too far. All tokens alike would be no fault: RoPE sees distances."""
    return ChangedSteps(whole, lambda b: replace(b, positions=b.positions + decoded(b).long()))


def stale_block(whole: CachedAttention) -> CachedAttention:
    """Block 1 is read where block 0 should be. Only exchanged they would be no fault: attention has no order."""

    def change(batch: Batch) -> Batch:
        groups = [
            replace(g, block_tables=[[table[1], *table[1:]] if len(table) > 2 else table for table in g.block_tables])
            for g in batch.groups
        ]
        return replace(batch, groups=tuple(groups))

    return ChangedSteps(whole, change)


def lost_write(whole: CachedAttention) -> CachedAttention:
    """The second token of a block, if it is decoded, is written over the first."""

    def change(batch: Batch) -> Batch:
        size = whole.pools[0].spec.block_size
        alone = decoded(batch)
        groups = [
            replace(g, slot_mapping=g.slot_mapping - (alone & (g.slot_mapping % size == 1)).long())
            for g in batch.groups
        ]
        return replace(batch, groups=tuple(groups))

    return ChangedSteps(whole, change)


@dataclass(frozen=True)
class BlindSpec(CacheSpec):
    """Queries do not see their own token, the first excepted."""

    def visible(self, q_pos: Any, k_pos: Any) -> Any:
        return super().visible(q_pos, k_pos) & ((k_pos != q_pos) | (q_pos == 0))


class OtherSpec(ReferenceBackend):
    """Attends by another spec than the cache was made for."""

    def __init__(self, change: Callable[[CacheSpec], CacheSpec]) -> None:
        self._change = change

    def plan(self, batch: Batch, group: int, spec: CacheSpec):
        return super().plan(batch, group, self._change(spec))


def last_key_dropped(whole: CachedAttention) -> CachedAttention:
    return changed_backend(whole, OtherSpec(lambda spec: BlindSpec(**vars(spec))))


def narrow_window(whole: CachedAttention) -> CachedAttention:
    """Windows are one token short."""
    return changed_backend(
        whole, OtherSpec(lambda spec: spec if spec.window is None else replace(spec, window=spec.window - 1))
    )


class OtherScale(ReferenceBackend):
    """Scores are a thousandth too large: too little to change any token."""

    def attend(self, q, kv, plan, *, scale, q_sink=None, softcap=None):
        return super().attend(q, kv, plan, scale=scale * 1.001, q_sink=q_sink, softcap=softcap)


def slightly_off_scale(whole: CachedAttention) -> CachedAttention:
    return changed_backend(whole, OtherScale())


class Failing(ReferenceBackend):
    """Fails once decoding begins."""

    def attend(self, q, kv, plan, **options):
        if decoded(plan.batch).all():
            raise MemoryError("no room for scores")
        return super().attend(q, kv, plan, **options)


def failing_step(whole: CachedAttention) -> CachedAttention:
    return changed_backend(whole, Failing())
