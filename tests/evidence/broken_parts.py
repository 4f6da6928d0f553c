"""Engine parts with one fault each, for the tests that `verify` must see it."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

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


def is_decode(batch: Batch) -> bool:
    return len(batch.input_ids) == batch.num_requests


def late_positions(whole: CachedAttention) -> CachedAttention:
    """Decoded tokens are rotated one position too far. All tokens alike would be no fault: RoPE sees distances."""
    return ChangedSteps(whole, lambda b: replace(b, positions=b.positions + 1) if is_decode(b) else b)


def stale_block(whole: CachedAttention) -> CachedAttention:
    """Decoding reads block 1 where block 0 should be. Only exchanged they would be no fault: attention has no order."""

    def change(batch: Batch) -> Batch:
        if not is_decode(batch):
            return batch
        groups = [
            replace(g, block_tables=[[table[1], *table[1:]] if len(table) > 2 else table for table in g.block_tables])
            for g in batch.groups
        ]
        return replace(batch, groups=tuple(groups))

    return ChangedSteps(whole, change)


def lost_write(whole: CachedAttention) -> CachedAttention:
    """The first decoded token of each block is written over the one before it."""

    def change(batch: Batch) -> Batch:
        if not is_decode(batch):
            return batch
        size = whole.pools[0].spec.block_size
        groups = [
            replace(g, slot_mapping=g.slot_mapping.where(g.slot_mapping % size != 1, g.slot_mapping - 1))
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
        if is_decode(plan.batch):
            raise MemoryError("no room for scores")
        return super().attend(q, kv, plan, **options)


def failing_step(whole: CachedAttention) -> CachedAttention:
    return changed_backend(whole, Failing())
