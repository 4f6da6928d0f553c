"""A plan of samples and beams: to the byte what the engine holds for them, and exactly the memory that serves them."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from planned import planned
from test_plan_audit import CACHES, KINDS, engine_of, loaded

from kvine.cache.manager import CacheManager
from kvine.config import CacheConfig, EngineConfig
from kvine.errors import ConfigError
from kvine.evidence.plan.variants import planner_of
from kvine.sampling.params import SamplingParams

Tiny = Callable[..., tuple[Any, Path]]
PROMPT = [3 + (5 * n) % 120 for n in range(21)]
SAMPLES = SamplingParams(max_tokens=20, n=3, temperature=1.0, seed=4, ignore_eos=True)
BEAMS = SamplingParams(max_tokens=20, num_beams=3, ignore_eos=True)


@pytest.mark.parametrize("cache", CACHES, ids=lambda cache: f"{cache.block_size}-{cache.kv_dtype}-{cache.window}")
@pytest.mark.parametrize("kind", KINDS)
def test_planned_is_what_samples_hold_and_the_most_that_beams_do(tiny: Tiny, kind: str, cache: CacheConfig) -> None:
    model = loaded(tiny, kind, "fp32")
    cache, config = replace(cache, kv_memory="4MiB"), EngineConfig(max_step_tokens=36)
    plan = planned(tiny(kind)[1], context=40, sequences=3, shared=len(PROMPT), dtype="fp32", cache=cache, engine=config)
    planner = planner_of(plan)
    for params in (SAMPLES, BEAMS):
        engine = engine_of(model, cache, config)
        engine.add(PROMPT, params)
        engine.step()  # computes the prompt; from the next one on there are three
        while engine.busy:
            engine.step()
            if not engine.scheduler.running:
                break
            [request] = engine.scheduler.running
            lengths = {line.num_computed for line in request.lines}
            held = planner.held(lengths.pop(), 1)
            assert not lengths and len(request.lines) == 3
            now = engine.manager.bytes_referenced
            assert now == held if params is SAMPLES else now <= held
            assert now <= plan.kv_peak_bytes


@pytest.mark.parametrize("params", [SAMPLES, BEAMS], ids=["samples", "beams"])
@pytest.mark.parametrize("cache", CACHES, ids=lambda cache: f"{cache.block_size}-{cache.kv_dtype}-{cache.window}")
@pytest.mark.parametrize("kind", KINDS)
def test_the_planned_memory_is_enough_and_a_byte_less_is_not(
    tiny: Tiny, kind: str, cache: CacheConfig, params: SamplingParams
) -> None:
    model, folder = loaded(tiny, kind, "fp32"), tiny(kind)[1]
    cache, config = replace(cache, prefix_caching=False), EngineConfig(max_step_tokens=16)
    plan = planned(folder, context=40, sequences=3, shared=21, dtype="fp32", cache=cache, engine=config)
    engine = engine_of(model, replace(cache, kv_memory=plan.kv_peak_bytes), config)
    engine.add(PROMPT, params)
    ends = []
    while engine.busy:
        ends += [event.finish_reason for event in engine.step() if event.finish_reason is not None]
        engine.manager.check()
    assert ends == ["length"] * 3 and engine.scheduler.num_preemptions == 0
    assert CacheManager(plan.specs, plan.kv_peak_bytes).fits_ever(40, 16, 3, 21)
    assert not CacheManager(plan.specs, plan.kv_peak_bytes - 1).fits_ever(40, 16, 3, 21)


def test_several_requests_of_several_sequences(tiny: Tiny) -> None:
    folder = tiny("TL")[1]
    cache, config = CacheConfig(block_size=4), EngineConfig(max_step_tokens=64)
    one = planned(folder, context=40, sequences=4, shared=30, cache=cache, engine=config)
    two = planned(folder, context=40, batch=2, sequences=4, shared=30, cache=cache, engine=config)
    block = one.groups[0].bytes_per_block
    assert one.kv_bytes == one.kv_peak_bytes == (7 + 4 * 3) * block and two.kv_peak_bytes == 2 * one.kv_peak_bytes
    apart = planned(folder, context=40, sequences=4, cache=cache, engine=config)
    assert apart.kv_bytes == planned(folder, context=40, batch=4, cache=cache, engine=config).kv_bytes == 40 * block
    assert one.walls.kv_bytes_per_step == apart.walls.kv_bytes_per_step  # sharing saves memory, not reading


@pytest.mark.parametrize("wrong", [{"sequences": 0}, {"shared": -1}, {"shared": 41}, {"sequences": True}])
def test_wrong_counts_are_refused(tiny: Tiny, wrong: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(wrong))} is .*: give a whole number from"):
        planned(tiny("TL")[1], context=40, **wrong)
