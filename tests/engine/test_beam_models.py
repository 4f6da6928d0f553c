"""Beams over real arithmetic: equal to transformers' beam search, and to one that recomputes each beam's whole text."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from beam_oracles import beams_of, brute_force, same_beams, transformers_beams
from tiny_engines import Tiny

from kvine.attention.base import Batch
from kvine.config import CacheConfig, EngineConfig
from kvine.engine.build import build_engine, dense_attention
from kvine.engine.cache_free import DenseRunner
from kvine.engine.engine import Engine
from kvine.engine.runner import Runner
from kvine.evidence.traps.catalogue import TRAPS
from kvine.sampling.params import SamplingParams

Make = Callable[..., tuple[Any, Path]]
SHORT = [5, 9, 77, 20, 31]
LONG = [8, 8, 100, 4, 64, 33, 12, 90, 18, 3, 55]
MANY_ENDS = (40, 41, 42, 43, 44, 45, 46, 47)  # so many that texts end at all lengths
RULES = list(itertools.product((0.0, 1.0, 2.0, -1.0), (True, False, "never")))


@pytest.fixture(scope="module")
def plain(tiny: Make) -> Tiny:
    # Flatter logits than the other tests have: the best line is not the same one for ever.
    return Tiny(*tiny("TL", initializer_range=0.12, seed=3))


def engine_of(model: Tiny, cache: CacheConfig, ends: Sequence[int], config: EngineConfig | None = None) -> Engine:
    config = config or EngineConfig()
    return build_engine(config, replace(model.parts(cache, config), eos_ids=frozenset(ends)))


@pytest.mark.parametrize("block_size", [1, 4, 32])
@pytest.mark.parametrize("ends", [MANY_ENDS, (71,), ()], ids=["many ends", "one end", "no end"])
def test_beams_equal_transformers(plain: Tiny, block_size: int, ends: Sequence[int]) -> None:
    """Two prompts of uneven length at once; transformers pads them, Kvine does not."""
    engine = engine_of(plain, CacheConfig(block_size=block_size, kv_memory="8MiB"), ends)
    lengths = set()
    for num_beams in (2, 3, 4, 5):
        for length_penalty, early_stopping in RULES:
            params = SamplingParams(
                max_tokens=9, num_beams=num_beams, length_penalty=length_penalty, early_stopping=early_stopping
            )
            found = beams_of(engine, [SHORT, LONG], params)
            same_beams(found, transformers_beams(plain.oracle, [SHORT, LONG], params, ends))
            lengths |= {len(text) for beams in found for text, _ in beams}
    assert len(lengths) > 4 if ends == MANY_ENDS else lengths <= set(range(1, 10))


def test_min_tokens_holds_ends_back_as_in_transformers(plain: Tiny) -> None:
    engine = engine_of(plain, CacheConfig(block_size=4), MANY_ENDS)
    params = SamplingParams(max_tokens=9, num_beams=3, min_tokens=4)
    found = beams_of(engine, [SHORT, LONG], params)
    same_beams(found, transformers_beams(plain.oracle, [SHORT, LONG], params, MANY_ENDS))
    without = beams_of(engine, [SHORT, LONG], replace(params, min_tokens=0))
    assert min(len(text) for text, _ in without[1]) < 4 < min(len(text) for text, _ in found[1])


def test_stop_ids_end_beams_as_eos_does_and_ignore_eos_does_not(plain: Tiny) -> None:
    params = SamplingParams(max_tokens=7, num_beams=3)
    by_eos = beams_of(engine_of(plain, CacheConfig(block_size=4), MANY_ENDS), [SHORT], params)
    stops = replace(params, stop_token_ids=MANY_ENDS)
    same_beams(beams_of(engine_of(plain, CacheConfig(block_size=4), ()), [SHORT], stops), by_eos)
    ignored = beams_of(
        engine_of(plain, CacheConfig(block_size=4), MANY_ENDS), [SHORT], replace(params, ignore_eos=True)
    )
    same_beams(ignored, beams_of(engine_of(plain, CacheConfig(block_size=4), ()), [SHORT], params))
    assert ignored != by_eos


WINDOWS = {
    "full": ("TL", CacheConfig()),
    "window": ("TL", CacheConfig(window=6)),
    "sinks": ("TL", CacheConfig(window=5, sink_tokens=2)),
    "moved sinks": ("TL", CacheConfig(window=5, sink_tokens=3, sink_rule="in_cache")),
    "sliding and full layers": ("TH", CacheConfig()),
    "sliding layers and sinks": ("TH", CacheConfig(window=6, sink_tokens=1, sink_rule="in_cache")),
}


@pytest.mark.parametrize("block_size", [1, 4, 32])
@pytest.mark.parametrize("name", WINDOWS)
def test_beams_equal_whole_texts_recomputed_for_each_beam(tiny: Make, name: str, block_size: int) -> None:
    kind, cache = WINDOWS[name]
    model = Tiny(*tiny(kind, initializer_range=0.12, seed=3))
    cache = replace(cache, block_size=block_size, kv_memory="8MiB")
    engine = engine_of(model, cache, MANY_ENDS, EngineConfig(max_step_tokens=7))
    dense = DenseRunner(model.model.decoder, dense_attention(model.model, cache), model.model.device)

    def logits_of(text: list[int]) -> list[float]:
        return dense.logits(text, last=True)[-1].tolist()  # type: ignore[no-any-return]

    for num_beams, (length_penalty, early_stopping) in zip((2, 3, 5, 4), (*RULES[::4], RULES[9]), strict=True):
        params = SamplingParams(
            max_tokens=9, num_beams=num_beams, length_penalty=length_penalty, early_stopping=early_stopping
        )
        expected = [brute_force(logits_of, prompt, params, ends=MANY_ENDS) for prompt in (SHORT, LONG)]
        same_beams(beams_of(engine, [SHORT, LONG], params), expected)


def test_the_cache_free_engine_finds_the_same_beams(plain: Tiny) -> None:
    cache = CacheConfig(block_size=4, window=6, sink_tokens=1)
    params = SamplingParams(max_tokens=8, num_beams=4)
    cached = beams_of(engine_of(plain, cache, ()), [SHORT, LONG], params)
    same_beams(beams_of(plain.cache_free(cache), [SHORT, LONG], params), cached)


def test_one_beam_is_greedy(plain: Tiny) -> None:
    engine = engine_of(plain, CacheConfig(block_size=4), ())
    engine.add(LONG, SamplingParams(max_tokens=9, num_beams=1))
    tokens = []
    while engine.busy:
        tokens += [event.sample.token_id for event in engine.step() if event.sample is not None]
    assert tokens == plain.greedy(LONG, 9)


class Watched(Runner):
    """A runner that keeps the block tables it was given, and the copies it made."""

    tables: list[list[list[int]]]
    copies: int

    def batch(self, step: Any, *, all_logits: bool = False) -> Batch:
        batch = super().batch(step, all_logits=all_logits)
        self.tables.append([list(table) for table in batch.groups[0].block_tables])
        return batch

    def make_copies(self) -> None:
        self.copies += len(self.manager.copies)
        super().make_copies()


def watched(engine: Engine) -> tuple[Engine, Watched]:
    inner = engine.parts.runner
    assert isinstance(inner, Runner)
    runner = Watched(inner.decoder, inner.attention, inner.manager, inner.device)
    runner.tables, runner.copies = [], 0
    return Engine(replace(engine.parts, runner=runner), engine.config), runner


def test_beams_share_their_past_and_copy_only_the_block_they_write_to(plain: Tiny) -> None:
    """A prompt of 10 blocks and a half: four beams read ten blocks in common, and copy at most their last ones."""
    prompt = [(7 * n) % 120 + 3 for n in range(42)]
    engine, runner = watched(engine_of(plain, CacheConfig(block_size=4, kv_memory="8MiB"), ()))
    params = SamplingParams(max_tokens=14, num_beams=4)
    found = beams_of(engine, [prompt], params)
    assert len(runner.tables) == 14 and len(runner.tables[0]) == 1  # one prefill, and its prompt only once
    shared, total = [], []
    for tables in runner.tables[1:]:
        assert len(tables) == 4 and all(table[:10] == tables[0][:10] for table in tables)
        assert len({table[-1] for table in tables}) == 4, "two beams write to one block"
        total.append(len({block for table in tables for block in table}))
        shared.append(sum(len(set(column)) < 4 for column in zip(*tables, strict=True)))
    assert all(count >= 10 for count in shared) and max(shared) > 10  # what they share grows past the prompt
    assert max(total) <= 10 + 4 * 4 < 4 * 14, total
    assert 3 <= runner.copies <= 3 * 13  # of four heirs of one block at least one keeps it
    dense = DenseRunner(plain.model.decoder, dense_attention(plain.model, CacheConfig()), plain.model.device)
    expected = brute_force(lambda text: dense.logits(text, last=True)[-1].tolist(), prompt, params, ends=())
    same_beams(found, [expected])


def test_beams_end_when_the_context_is_full_and_say_so(tiny: Make) -> None:
    model = Tiny(*tiny("TL", max_position_embeddings=16, initializer_range=0.12))
    engine = engine_of(model, CacheConfig(block_size=4), ())
    request = engine.add(LONG, SamplingParams(max_tokens=None, num_beams=3))
    events = []
    while engine.busy:
        events += engine.step()
    ends = [event for event in events if event.hypothesis is not None]
    assert [event.finish_reason for event in ends] == ["context"] * 3 and "context of 16 tokens" in (
        ends[0].detail or ""
    )
    assert [len(e.hypothesis.token_ids) for e in ends if e.hypothesis] == [5] * 3
    assert [(e.request_id, e.index, e.more) for e in ends] == [
        (request, 0, True),
        (request, 1, True),
        (request, 2, False),
    ]


def test_a_layer_whose_tables_stay_behind_gives_other_beams(plain: Tiny) -> None:
    """The proof's own alarm: with the trap lab's fault the same search finds other texts than transformers."""
    params = SamplingParams(max_tokens=9, num_beams=4)
    parts = replace(plain.parts(CacheConfig(block_size=4), EngineConfig()), eos_ids=frozenset())
    healthy = beams_of(build_engine(EngineConfig(), parts), [LONG], params)
    same_beams(healthy, transformers_beams(plain.oracle, [LONG], params, ()))
    stale = TRAPS["stale-beam-reorder"].fault(plain.parts(CacheConfig(block_size=4), EngineConfig()))
    broken = beams_of(build_engine(EngineConfig(), replace(stale, eos_ids=frozenset())), [LONG], params)
    assert broken != healthy
