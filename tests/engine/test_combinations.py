"""However the past is kept, a text comes out as a cache-free oracle has it that loses the same at the same places.

Retention, codecs of keys and values, block size, chunk, prefix hit, rollback, beams, store and backend are combined so
that every three of their values meet. A hit may come from the store, in an engine that has never seen the text.
"""

import itertools
import math
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
from beam_oracles import brute_force
from combinations import (
    FACTORS,
    OTHER,
    REFUSED,
    TEXT,
    Combination,
    Oracle,
    bound,
    bytes_needed,
    combinations,
    exact_oracle,
    same,
    stepped_on,
    tiny,
    triples,
)

from kvine.cache.tier import StoreTier
from kvine.config import EngineConfig
from kvine.engine.engine import Engine
from kvine.engine.stepped import SteppedCache
from kvine.errors import ConfigError, RequestError
from kvine.sampling.params import SamplingParams

COMBINATIONS = combinations()
PARTS = 12
SERVED = 21  # tokens of the text that an earlier request has read


def engine_of(c: Combination, folder: Path | None, chunk: int | None = None) -> Engine:
    cache = replace(c.cache, cache_dir=folder, cache_size=None if folder is None else "4MiB")
    return tiny(c.arch).engine(cache, EngineConfig(chunk or c.chunk, backend=c.backend))


def begin(c: Combination, folder: Path) -> Engine:
    """An engine that finds the beginning of the text if it is to: in its memory, or in a store that another filled."""
    engine = engine_of(c, folder, chunk=64) if c.store else engine_of(c, None)
    if c.hit or c.store:
        engine.add(TEXT[:SERVED] if c.hit else OTHER, SamplingParams(max_tokens=2, ignore_eos=True), pinned=c.pinned)
        while engine.busy:
            engine.step()
    if not c.store:
        return engine
    end(engine)
    return engine_of(c, folder)


def end(engine: Engine) -> None:
    tier = engine.manager.tier
    if isinstance(tier, StoreTier):
        stats = tier.store.stats()
        assert not stats.damaged and not stats.refused
        tier.close()


def check_memory(engine: Engine, c: Combination, stepped: SteppedCache) -> None:
    """Exactly the bytes that are needed, and of what is sealed nothing but the packed bytes."""
    engine.manager.check()
    length = len(stepped)
    assert stepped.num_bytes == bytes_needed(c, length), c
    for pool in engine.manager.pools[len(engine.manager.specs) :]:  # of open blocks
        assert len(pool.references) == (length % c.block_size > 0), c
        assert all(len(pool.node_of[block].tokens) < c.block_size for block in pool.cached), c


def check_beams(engine: Engine, c: Combination, oracle: Oracle, prompt: list[int]) -> None:
    """A beam search over what the cache holds equals one that recomputes each beam's whole text."""
    params = SamplingParams(max_tokens=5, num_beams=c.beams, ignore_eos=True)
    number = engine.add(prompt, params, salt=None if c.hit else "nobody's", pinned=c.pinned)
    found: list[tuple[list[int], float | None]] = [([], None)] if c.beams == 1 else []
    while engine.busy:
        for event in engine.step():
            assert event.error is None and event.request_id == number
            if event.hypothesis is not None:
                found.append((list(event.hypothesis.token_ids), event.hypothesis.score))
            elif event.sample is not None:
                found[0][0].append(event.sample.token_id)
        engine.manager.check()
    assert (event.cached_tokens >= SERVED) if c.hit else (event.cached_tokens == 0), (c, event.cached_tokens)
    expected = brute_force(oracle.next, prompt, params, ends=())
    off = 2 * bound(oracle, exact_oracle(c.arch, c.retention), prompt, 1)
    assert [text for text, _ in found] == [text for text, _ in expected], c
    for (_, score), (_, right) in zip(found, expected, strict=True):
        assert score is None or math.isclose(score, right, abs_tol=off), (c, score, right)


@pytest.mark.parametrize("part", range(PARTS))
def test_every_combination_computes_what_its_oracle_computes(tmp_path: Path, part: int) -> None:
    for number, c in enumerate(COMBINATIONS[part::PARTS]):
        oracle, exact = Oracle(tiny(c.arch), c.cache, c.pinned), exact_oracle(c.arch, c.retention)
        engine = begin(c, tmp_path / str(number))
        stepped = stepped_on(engine, TEXT, c.pinned)
        held = len(stepped)
        assert (16 <= held <= SERVED) if c.hit else not held, (c, held)
        text = list(TEXT)
        same(oracle, exact, text, stepped.extend(text[held:])[0], c)
        check_memory(engine, c, stepped)
        if c.rollback:
            kept = stepped.crop(23)
            engine.manager.check()
            text = [*TEXT[:23], *OTHER]
            same(oracle, exact, text, stepped.extend(text[kept:])[0], c)
            check_memory(engine, c, stepped)
        check_beams(engine, c, oracle, text)
        stepped.close()
        engine.manager.check()
        assert engine.manager.bytes_referenced == 0, c
        end(engine)


def test_every_three_values_meet_but_for_what_is_refused() -> None:
    met = {frozenset(three) for c in COMBINATIONS for three in itertools.combinations(vars(c).items(), 3)}
    assert met >= triples().keys() and len(triples()) == 6644
    assert 200 <= len(COMBINATIONS) < 280, "more rows than they need to be"


def test_what_is_refused_is_refused_before_anything_is_computed_and_nothing_else_is() -> None:
    """The list is reviewed: each pair of values on it is refused, with its reason, and all other pairs are taken."""
    factors = ("retention", "keys", "values", "block_size", "chunk", "beams")
    plain = {name: FACTORS[name][-1] for name in FACTORS} | {"arch": "llama", "store": False, "beams": 1}
    for one, other in itertools.combinations(factors, 2):
        for pair in itertools.product(FACTORS[one], FACTORS[other]):
            chosen = (
                plain | dict(zip((one, other), pair, strict=True)) | ({} if "beams" in (one, other) else {"beams": 1})
            )
            reasons = [why for forbidden, why in REFUSED.items() if set(forbidden) <= set(chosen.items())]
            with pytest.raises((ConfigError, RequestError), match=reasons[0]) if reasons else nullcontext():
                c = Combination(**chosen)
                engine_of(c, None).add(TEXT, SamplingParams(num_beams=c.beams))
