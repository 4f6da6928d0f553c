"""Engine parts with one fault each that only one option of a cell brings out."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from broken_parts import ChangedSteps, OtherSpec, changed_backend, with_fault

from kvine.attention.base import Batch, GroupBatch
from kvine.attention.cached import CachedAttention
from kvine.attention.reference import ReferenceBackend
from kvine.cache.prefix import Node
from kvine.cache.sequence import MISSING
from kvine.cache.tier import StoreTier
from kvine.engine.engine import EngineParts
from kvine.engine.runner import Runner

PlantFault = Callable[[EngineParts], EngineParts]


def changed_groups(whole: CachedAttention, change: Callable[[Batch, GroupBatch], GroupBatch]) -> CachedAttention:
    return ChangedSteps(whole, lambda batch: replace(batch, groups=tuple(change(batch, g) for g in batch.groups)))


def slots_of_blocks_of_three(parts: EngineParts) -> EngineParts:
    """Block size 3: tokens at the end of a block are written over the one before."""

    def change(whole: CachedAttention) -> CachedAttention:
        if whole.pools[0].spec.block_size != 3:
            return whole
        return changed_groups(
            whole, lambda _, g: replace(g, slot_mapping=g.slot_mapping - (g.slot_mapping % 3 == 2).long())
        )

    return with_fault(parts, change)


def chunks_from_zero(parts: EngineParts) -> EngineParts:
    """Feeding: each chunk of several tokens counts its positions from 0."""

    def change(batch: Batch) -> Batch:
        positions = batch.positions.clone()
        for first, end in zip(batch.query_start, batch.query_start[1:], strict=False):
            if end - first > 1:
                positions[first:end] = torch.arange(end - first)
        return replace(batch, positions=positions)

    return with_fault(parts, lambda whole: ChangedSteps(whole, change))


def shared_table(parts: EngineParts) -> EngineParts:
    """Mates: every row of a batch reads the first request's blocks, as far as these go."""

    def change(batch: Batch, group: GroupBatch) -> GroupBatch:
        first = group.block_tables[0]

        def shared(table: list[int]) -> list[int]:
            pairs = zip(first, table, strict=False)
            whole = [theirs if theirs != MISSING else own for theirs, own in pairs]
            return [*whole, *table[len(whole) :]]

        return replace(group, block_tables=[shared(table) for table in group.block_tables])

    return with_fault(parts, lambda whole: changed_groups(whole, change))


def resumed_one_early(parts: EngineParts) -> EngineParts:
    """Preemption: generated tokens that are computed again stand one position too early."""

    class Early(Runner):
        def batch(self, step, *, all_logits=False):
            batch = super().batch(step, all_logits=all_logits)
            positions = batch.positions.clone()
            for row, item in zip(batch.query_start, step, strict=False):
                first = max(0, len(item.request.prompt_ids) - item.start)
                if item.request.owner.id >= 0 and item.request.output_ids and item.count > 1:
                    positions[row + first : row + item.count] -= 1
            return replace(batch, positions=positions)

    runner = parts.runner
    assert isinstance(runner, Runner)
    return replace(parts, runner=Early(runner.decoder, runner.attention, runner.manager, runner.device))


def careless_comparison(parts: EngineParts) -> EngineParts:
    """Prefix: where a block matches in part, one token more is taken for equal."""
    index = parts.manager.index
    whole = index.longest_overlap

    def longest_overlap(parent: Node, tokens: Sequence[int], shelves: Sequence[int]) -> tuple[Node | None, int]:
        node, shared = whole(parent, tokens, shelves)
        return node, shared if node is None else min(shared + 1, len(tokens), len(node.tokens))

    index.longest_overlap = longest_overlap  # type: ignore[method-assign]
    return parts


def fork_without_copies(parts: EngineParts) -> EngineParts:
    """Fork: who extends a shared block writes into it."""
    for pool in parts.manager.pools:
        pool.writable = lambda block: True  # type: ignore[method-assign]
    return parts


def exchanged_beams(parts: EngineParts) -> EngineParts:
    """Beams: the first two read each other's past, as after a switch that was not carried through."""

    class Exchanged(Runner):
        def batch(self, step, *, all_logits=False):
            batch = super().batch(step, all_logits=all_logits)
            owners = [item.request.owner for item in step]
            beams = [n for n, owner in enumerate(owners) if owner is not None and owners.count(owner) > 1][:2]
            if len(beams) < 2:
                return batch
            one, other = beams
            groups = []
            for group in batch.groups:
                tables = list(group.block_tables)
                tables[one], tables[other] = tables[other], tables[one]
                groups.append(replace(group, block_tables=tables))
            return replace(batch, groups=tuple(groups))

    runner = parts.runner
    assert isinstance(runner, Runner)
    return replace(parts, runner=Exchanged(runner.decoder, runner.attention, runner.manager, runner.device))


def exchanged_halves(parts: EngineParts) -> EngineParts:
    """Store: what comes back has keys where values belong."""
    tier = parts.manager.tier
    if isinstance(tier, StoreTier):
        memories = tier._memories
        whole = memories.load
        memories.load = lambda shelf, block, kept: whole(shelf, block, kept[::-1])  # type: ignore[method-assign]
    return parts


class Louder(ReferenceBackend):
    """Scores are half as large again."""

    def attend(self, q, kv, plan, *, scale, q_sink=None, softcap=None):
        return super().attend(q, kv, plan, scale=scale * 1.5, q_sink=q_sink, softcap=softcap)


def loud_reference(parts: EngineParts) -> EngineParts:
    """Backend: one of them scales otherwise."""

    def change(whole: CachedAttention) -> CachedAttention:
        is_reference = isinstance(whole.backends[0], ReferenceBackend)
        return changed_backend(whole, Louder()) if is_reference else whole

    return with_fault(parts, change)


def coarse_fp16(parts: EngineParts) -> EngineParts:
    """Codec: what is to be kept as fp16 loses more bits on the way."""
    for pool in parts.runner.attention.pools:  # type: ignore[attr-defined]
        if pool.spec.key_codec == "fp16":
            whole = pool.write
            pool.write = lambda layer, rows, k, v, whole=whole: whole(
                layer, rows, *((x * 8).round() / 8 for x in (k, v))
            )
    return parts


def short_window(parts: EngineParts) -> EngineParts:
    """Window: one token short, where the cache has one."""

    def change(whole: CachedAttention) -> CachedAttention:
        shorter = OtherSpec(lambda spec: spec if spec.window is None else replace(spec, window=spec.window - 1))
        return whole if whole.pools[0].spec.window is None else changed_backend(whole, shorter)

    return with_fault(parts, change)


def low_precision_in_bf16(parts: EngineParts) -> EngineParts:
    """Dtype: values of bf16 lose half of their bits."""
    for pool in parts.runner.attention.pools:  # type: ignore[attr-defined]
        if pool.k.dtype == torch.bfloat16 and pool.spec.key_codec == "exact":
            whole = pool.write
            pool.write = lambda layer, rows, k, v, whole=whole: whole(layer, rows, (k * 2).round() / 2, v)
    return parts


def short_table(parts: EngineParts) -> EngineParts:
    """Prompt: positions end at 19."""
    return with_fault(
        parts, lambda whole: ChangedSteps(whole, lambda batch: replace(batch, positions=batch.positions.clamp(max=19)))
    )


def overcommitted(parts: EngineParts) -> EngineParts:
    """Memory: blocks are promised that are not there."""
    parts.manager._room_for = lambda needs: True  # type: ignore[method-assign]
    return parts
