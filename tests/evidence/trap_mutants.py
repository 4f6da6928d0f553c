"""Changes that no trap has and the examination was not written for, each with the kinds that would describe it well.

Made after the examination was finished, by going through the parts of an engine and changing one thing in each. A name
counts as sensible if it sends its reader to the right part of the engine; `unknown` never does.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kvine.attention.base import Batch
from kvine.attention.cached import AttentionLayer, CachedAttention, StepAttention
from kvine.cache.manager import CachedSequence, CacheManager
from kvine.cache.pool import KVPool, LayerKV
from kvine.engine.engine import EngineParts
from kvine.engine.runner import Runner
from kvine.engine.scheduler import Scheduled
from kvine.evidence.traps.cache_faults import rebuilt
from kvine.evidence.traps.seams import (
    Fault,
    OpenBackend,
    decoded,
    runner_of,
    with_attention,
    with_backend,
    with_batch,
    with_manager,
    with_pool,
    with_step,
)
from kvine.rope import RotaryEmbedding


@dataclass(frozen=True)
class Mutant:
    """A change, and the names that would be sensible for it."""

    name: str
    fault: Fault
    sensible: frozenset[str]


MUTANTS: dict[str, Mutant] = {}


def mutant(*sensible: str) -> Callable[[Callable[[], Fault]], Callable[[], Fault]]:
    def register(make: Callable[[], Fault]) -> Callable[[], Fault]:
        MUTANTS[make.__name__] = Mutant(make.__name__, lambda parts: make()(parts), frozenset(sensible))
        return make

    return register


# -- the backend -------------------------------------------------------------------------------------------------------


def _options(change: Callable[[dict[str, Any]], dict[str, Any]]) -> Fault:
    class Changed(OpenBackend):
        def attend(self, q: Tensor, kv: LayerKV, plan: Any, **options: Any) -> Tensor:
            return super().attend(q, kv, plan, **change(options))

    return with_backend(Changed)


@mutant("scale-wrong")
def scale_one_percent_off() -> Fault:
    return _options(lambda options: {**options, "scale": options["scale"] * 1.01})


@mutant("scale-wrong")
def scale_of_the_whole_width() -> Fault:
    return _options(lambda options: {**options, "scale": options["scale"] / 2})


@mutant("softcap-missing", "scale-wrong")
def a_softcap_nobody_asked_for() -> Fault:
    return _options(lambda options: {**options, "softcap": 2.0})


@mutant("head-map-wrong")
def one_query_head_reads_another_kv_head() -> Fault:
    class Swapped(OpenBackend):
        def spread(self, x: Tensor, num_heads: int) -> Tensor:
            heads = super().spread(x, num_heads)
            return torch.cat((heads[-1:], heads[1:]))

    return with_backend(Swapped)


@mutant("values-misaligned", "head-map-wrong")
def values_of_the_other_kv_head() -> Fault:
    class Flipped(OpenBackend):
        def gather(self, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
            k, v, k_pos = super().gather(*args)
            return k, v.flip(0), k_pos

    return with_backend(Flipped)


@mutant("history-partly-missing")
def last_full_block_skipped() -> Fault:
    class Skipping(OpenBackend):
        def visible(self, spec: Any, q_pos: Tensor, k_pos: Tensor) -> Tensor:
            before = q_pos[:, None] // spec.block_size - 1
            return super().visible(spec, q_pos, k_pos) & (k_pos // spec.block_size != before)

    return with_backend(Skipping)


@mutant("history-partly-missing")
def first_token_never_seen() -> Fault:
    class Blind(OpenBackend):
        def visible(self, spec: Any, q_pos: Tensor, k_pos: Tensor) -> Tensor:
            return super().visible(spec, q_pos, k_pos) & ((k_pos > 0) | (q_pos[:, None] == 0))

    return with_backend(Blind)


@mutant("history-partly-missing", "mask-without-history")
def chunk_boundary_dropped() -> Fault:
    """The last token before each step is not read."""

    class Dropping(OpenBackend):
        def visible(self, spec: Any, q_pos: Tensor, k_pos: Tensor) -> Tensor:
            return super().visible(spec, q_pos, k_pos) & (k_pos != q_pos[0] - 1)

    return with_backend(Dropping)


@mutant("history-partly-missing", "window-wrong")
def only_even_positions() -> Fault:
    class Even(OpenBackend):
        def visible(self, spec: Any, q_pos: Tensor, k_pos: Tensor) -> Tensor:
            return super().visible(spec, q_pos, k_pos) & ((k_pos % 2 == 0) | (k_pos == q_pos[:, None]))

    return with_backend(Even)


@mutant("values-misaligned")
def values_one_key_late() -> Fault:
    class Late(OpenBackend):
        def gather(self, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
            k, v, k_pos = super().gather(*args)
            return k, v.roll(1, 1), k_pos

    return with_backend(Late)


@mutant()  # no kind describes it
def attention_a_tenth_too_small() -> Fault:
    class Small(OpenBackend):
        def attend(self, q: Tensor, kv: LayerKV, plan: Any, **options: Any) -> Tensor:
            return super().attend(q, kv, plan, **options) * 0.9

    return with_backend(Small)


@mutant("query-position-wrong")
def queries_one_late() -> Fault:
    class Late(StepAttention):
        def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            place = self._attention.layers[layer]
            turned = _turn(q, place.rope, torch.ones(len(q), dtype=torch.long))
            return super().__call__(layer, turned, k, v)

    return with_step(Late)


# -- rotation ----------------------------------------------------------------------------------------------------------


def _turn(x: Tensor, rope: RotaryEmbedding, positions: Tensor) -> Tensor:
    from kvine.rope import rotate

    return rotate(x, *rope.cos_sin(positions))


def _other_rope(change: Callable[[Any], Any]) -> Fault:
    def attention(whole: CachedAttention) -> CachedAttention:
        layers = [
            AttentionLayer(p.group, p.index, RotaryEmbedding(change(p.rope.config), torch.device("cpu")))
            for p in whole.layers
        ]
        return CachedAttention(layers, whole.pools, whole.backends, scale=whole.scale, softcap=whole.softcap)

    return with_attention(attention)


@mutant("rotation-wrong")
def rope_theta_off() -> Fault:
    return _other_rope(lambda config: replace(config, theta=config.theta * 2))


@mutant("rotation-wrong", "position-wrong")
def rope_stretched_by_two() -> Fault:
    return _other_rope(lambda config: replace(config, kind="linear", factor=2.0))


@mutant("position-wrong")
def positions_counted_in_blocks() -> Fault:
    class Blocks(StepAttention):
        def __init__(self, attention: CachedAttention, batch: Batch) -> None:
            super().__init__(attention, batch)
            self._positions = batch.positions % attention.pools[0].spec.block_size

    return with_step(Blocks)


@mutant("position-wrong", "position-off-by-one-in-decode")
def positions_one_early_in_decode() -> Fault:
    class Early(StepAttention):
        def __init__(self, attention: CachedAttention, batch: Batch) -> None:
            super().__init__(attention, batch)
            self._positions = torch.where(decoded(batch), batch.positions - 1, batch.positions).clamp(min=0)

    return with_step(Early)


# -- memory ------------------------------------------------------------------------------------------------------------


def _writes(change: Callable[[KVPool, int, Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]) -> Fault:
    class Changed(KVPool):
        def write(self, layer: int, rows: Tensor, k: Tensor, v: Tensor) -> None:
            super().write(layer, *change(self, layer, rows, k, v))

    return with_pool(lambda pool: rebuilt(pool, Changed))


@mutant("values-misaligned", "slot-off-by-one")
def values_written_one_slot_late() -> Fault:
    class Late(KVPool):
        def write(self, layer: int, rows: Tensor, k: Tensor, v: Tensor) -> None:
            keys, values = self.layers[layer].k.view(-1, k.shape[-1]), self.layers[layer].v.view(-1, k.shape[-1])
            keys.index_copy_(0, rows, k.reshape(-1, k.shape[-1]).to(keys.dtype))
            values.index_copy_(0, (rows + 1) % len(values), v.reshape(-1, k.shape[-1]).to(values.dtype))

    return with_pool(lambda pool: rebuilt(pool, Late))


@mutant("cache-narrower-than-intended")
def values_in_eight_bits() -> Fault:
    def change(pool: KVPool, layer: int, rows: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        step = v.float().abs().amax(-1, keepdim=True) / 127
        return rows, k, ((v.float() / step).round() * step).to(v.dtype)

    return _writes(change)


@mutant("keys-or-values-altered")
def keys_scaled_before_they_are_stored() -> Fault:
    return _writes(lambda pool, layer, rows, k, v: (rows, k * 0.5, v))


@mutant("keys-or-values-altered", "head-map-wrong")
def heads_written_in_reverse() -> Fault:
    return _writes(lambda pool, layer, rows, k, v: (rows, k.flip(1), v.flip(1)))


@mutant("keys-or-values-altered")
def keys_and_values_exchanged() -> Fault:
    return _writes(lambda pool, layer, rows, k, v: (rows, v, k))


@mutant("never-written")
def last_layer_never_written() -> Fault:
    class Forgetting(KVPool):
        def write(self, layer: int, rows: Tensor, k: Tensor, v: Tensor) -> None:
            if layer < self.spec.num_layers - 1 or self.spec.num_layers == 1:
                super().write(layer, rows, k, v)

    return with_pool(lambda pool: rebuilt(pool, Forgetting))


@mutant("slot-wrong", "slot-off-by-one", "block-reused-while-held")
def every_layer_in_the_first_ones_memory() -> Fault:
    """All layers of a group write where its first layer does: the last one wins."""

    class OneLayer(KVPool):
        def write(self, layer: int, rows: Tensor, k: Tensor, v: Tensor) -> None:
            super().write(0, rows, k, v)

    return with_pool(lambda pool: rebuilt(pool, OneLayer))


@mutant("never-written", "shared-block-overwritten", "block-reused-while-held")
def copies_never_made() -> Fault:
    class Lazy(KVPool):
        def copy(self, copies: Any) -> None:
            pass

    return with_pool(lambda pool: rebuilt(pool, Lazy))


@mutant("never-written", "shared-block-overwritten", "block-reused-while-held")
def copies_one_token_short() -> Fault:
    class Short(KVPool):
        def copy(self, copies: Any) -> None:
            super().copy([replace(copy, num_tokens=copy.num_tokens - 1) for copy in copies])

    return with_pool(lambda pool: rebuilt(pool, Short))


@mutant("values-misaligned", "never-written", "shared-block-overwritten")
def copies_of_keys_only() -> Fault:
    class KeysOnly(KVPool):
        def copy(self, copies: Any) -> None:
            for c in copies:
                self.k[:, c.target, :, : c.num_tokens] = self.k[:, c.source, :, : c.num_tokens]

    return with_pool(lambda pool: rebuilt(pool, KeysOnly))


# -- block tables ------------------------------------------------------------------------------------------------------


def _tables(change: Callable[[list[int]], list[int]]) -> Fault:
    def batch(attention: CachedAttention, batch: Batch) -> Batch:
        groups = [replace(g, block_tables=[change(table) for table in g.block_tables]) for g in batch.groups]
        return replace(batch, groups=tuple(groups))

    return with_batch(batch)


@mutant("block-table-wrong")
def first_block_read_twice() -> Fault:
    return _tables(lambda table: [table[0], table[0], *table[2:]] if len(table) > 2 else table)


@mutant("block-table-wrong", "history-partly-missing")
def second_block_from_nowhere() -> Fault:
    return _tables(lambda table: [table[0], max(table) + 1, *table[2:]] if len(table) > 2 else table)


# -- manager -----------------------------------------------------------------------------------------------------------


@mutant("hash-collision-trusted", "published-before-filled", "block-reused-while-held")
def evicted_blocks_can_still_be_found() -> Fault:
    class Careless(CacheManager):
        def _evict(self, group: int, block: int) -> None:
            pool = self.pools[group]
            del pool.cached[block]
            pool.node_of.pop(block)
            pool._free(block)
            self.num_evictions += 1

    return with_manager(Careless)


@mutant("blocks-never-released")
def blocks_that_leak() -> Fault:
    class Leaking(CacheManager):
        def release(self, sequence: CachedSequence, *, keep_tail: bool = True) -> None:
            for group in range(len(self.pools)):
                for block in sequence.held(group)[:1]:
                    self.pools[group].acquire(block)
            super().release(sequence, keep_tail=keep_tail)

    return with_manager(Leaking)


@mutant("rolled-back-token-returns")
def crop_keeps_one_too_many() -> Fault:
    class Reluctant(CacheManager):
        def crop(self, sequence: CachedSequence, num_tokens: int) -> int:
            return super().crop(sequence, num_tokens + 1)

    return with_manager(Reluctant)


@mutant("shared-block-overwritten", "block-reused-while-held")
def fork_without_counting() -> Fault:
    class Uncounted(CacheManager):
        def fork(self, sequence: CachedSequence) -> CachedSequence:
            twin = super().fork(sequence)
            for group, pool in enumerate(self.pools):
                last = twin.tables[group][-1]
                pool.references[last] = 1
            return twin

    return with_manager(Uncounted)


# -- runner ------------------------------------------------------------------------------------------------------------


def _runner(kind: type[Runner]) -> Fault:
    def apply(parts: EngineParts) -> EngineParts:
        runner = runner_of(parts)
        return replace(parts, runner=kind(runner.decoder, runner.attention, runner.manager, runner.device))

    return apply


@mutant("logits-of-another-row")
def logits_of_the_row_before() -> Fault:
    class Before(Runner):
        def batch(self, step: Sequence[Scheduled], *, all_logits: bool = False) -> Batch:
            batch = super().batch(step, all_logits=all_logits)
            return replace(batch, logits_index=(batch.logits_index - 1).clamp(min=0))

    return _runner(Before)


@mutant("other-tokens-fed")
def a_token_fed_twice() -> Fault:
    class Twice(Runner):
        def batch(self, step: Sequence[Scheduled], *, all_logits: bool = False) -> Batch:
            batch = super().batch(step, all_logits=all_logits)
            ids = batch.input_ids.clone()
            if len(ids) > 4:
                ids[3] = ids[2]
            return replace(batch, input_ids=ids)

    return _runner(Twice)
