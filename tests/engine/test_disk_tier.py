"""Blocks that come back from disk: a new engine over the same folder computes only what it must, and answers alike."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fakes import serve
from tiny_engines import Tiny

from kvine.cache.tier import StoreTier
from kvine.config import CacheConfig, EngineConfig
from kvine.engine.engine import Engine
from kvine.errors import ConfigError
from kvine.sampling.params import SamplingParams

GREEDY = SamplingParams(max_tokens=6, ignore_eos=True)
PROMPT = [(i * 37 + 11) % 120 + 3 for i in range(30)]
CACHES = {
    "plain": ("TL", CacheConfig(block_size=4)),
    "windowed": ("TL", CacheConfig(block_size=4, window=9)),
    "sinks": ("TL", CacheConfig(block_size=4, window=9, sink_tokens=3, sink_rule="in_cache")),
    "two groups": ("gemma3", CacheConfig(block_size=4)),
    "sliding and full": ("TH", CacheConfig(block_size=4)),
    "fp16": ("TL", CacheConfig(block_size=4, kv_dtype="fp16")),
    "bf16": ("gemma3", CacheConfig(block_size=4, kv_dtype="bf16")),
    "int8": ("TL", CacheConfig(block_size=4, kv_dtype="int8")),
    "k8v4 in a window": ("TH", CacheConfig(block_size=4, kv_dtype="k8v4", window=9, sink_tokens=2)),
}


def tier_of(engine: Engine) -> StoreTier:
    assert isinstance(engine.manager.tier, StoreTier)
    return engine.manager.tier


def answer(engine: Engine, prompt: list[int] = PROMPT) -> tuple[list[int], int, list[tuple[int, int]]]:
    """Tokens, cached tokens, and the positions that each call computed."""
    calls: list[Any] = []
    engine.on_call = calls.append
    (outcome,) = serve(engine, [prompt], GREEDY)
    engine.manager.check()
    return outcome.tokens, outcome.cached, [call.positions[0] for call in calls]


@pytest.mark.parametrize(("arch", "cache"), CACHES.values(), ids=CACHES)
@pytest.mark.parametrize("chunk", [5, 64])
def test_a_restart_finds_the_prompt_and_changes_nothing(
    tiny: Callable[..., Any], tmp_path: Path, arch: str, cache: CacheConfig, chunk: int
) -> None:
    model = Tiny(*tiny(arch))
    config = EngineConfig(max_step_tokens=chunk)
    cold, cached, _ = answer(model.engine(cache, config))
    assert cached == 0
    stored = replace(cache, cache_dir=tmp_path / "store")
    first = model.engine(stored, config)
    assert answer(first)[:2] == (cold, 0)
    tier_of(first).close()
    second = model.engine(stored, config)
    tokens, cached, calls = answer(second)
    assert (tokens, cached) == (cold, 28) and calls[0] == (28, 30)
    assert sum(end - start for start, end in calls) == 2 + 5, "the rest of the prompt, and every token but the last"
    longer = [*PROMPT, *cold, 5, 6, 7]
    assert answer(second, longer)[0] == answer(model.engine(cache, config), longer)[0]
    tier_of(second).close()


def test_a_prompt_of_whole_blocks_is_restored_but_for_its_last_token(tiny: Callable[..., Any], tmp_path: Path) -> None:
    model = Tiny(*tiny("TL"))
    cache = CacheConfig(block_size=4, cache_dir=tmp_path / "store")
    first = model.engine(cache)
    cold = answer(first, PROMPT[:28])[0]
    tier_of(first).close()
    second = model.engine(cache)
    assert answer(second, PROMPT[:28])[:2] == (cold, 27)
    tier_of(second).close()


def test_evicted_blocks_come_back_while_others_are_served(tiny: Callable[..., Any], tmp_path: Path) -> None:
    """Memory for one text and a little more: what the others push out comes back from the store."""
    model = Tiny(*tiny("gemma3"))
    cache = model.memory_of(CacheConfig(block_size=4, cache_dir=tmp_path / "store"), 40, 2)
    engine = model.engine(cache)
    prompts = [[(token + n) % 128 for token in PROMPT] for n in range(3)]
    cold = [answer(model.engine(replace(cache, cache_dir=None)), prompt)[0] for prompt in prompts]
    assert [answer(engine, prompt)[0] for prompt in prompts] == cold
    assert engine.manager.num_evictions
    tier_of(engine).wait()
    again = [answer(engine, prompt) for prompt in prompts]
    assert [tokens for tokens, _, _ in again] == cold and [cached for _, cached, _ in again] == [28, 28, 28]
    tier_of(engine).close()


def test_another_model_dtype_or_cache_finds_nothing(tiny: Callable[..., Any], tmp_path: Path) -> None:
    cache = CacheConfig(block_size=4, window=64, cache_dir=tmp_path / "store")
    engine = Tiny(*tiny("TL")).engine(cache)
    answer(engine)
    tier_of(engine).close()
    others = [
        (Tiny(*tiny("TL", seed=1)), cache),
        (Tiny(*tiny("TL"), dtype="bf16"), cache),
        (Tiny(*tiny("TL")), replace(cache, kv_dtype="bf16")),
        (Tiny(*tiny("TL")), replace(cache, window=63)),
        (Tiny(*tiny("TL")), replace(cache, sink_tokens=1)),
        (Tiny(*tiny("TL")), replace(cache, block_size=2)),
    ]
    for model, other in others:
        engine = model.engine(other)
        assert answer(engine)[1] == 0
        tier_of(engine).close()
    engine = Tiny(*tiny("TL")).engine(cache)
    assert answer(engine)[1] == 28, "the others have put theirs beside it"
    salted = engine.add(PROMPT, GREEDY, salt="mine")
    events = [event for _ in range(8) for event in engine.step() if event.request_id == salted]
    assert events and events[0].cached_tokens == 0
    tier_of(engine).close()


def test_a_full_or_broken_store_changes_no_answer(
    tiny: Callable[..., Any], tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    model = Tiny(*tiny("TL"))
    cache = CacheConfig(block_size=4, cache_dir=tmp_path / "store")
    cold = answer(model.engine(replace(cache, cache_dir=None)))[0]
    engine = model.engine(cache)
    tier_of(engine).store.close()  # as when nothing can be read or written any more
    assert answer(engine)[:2] == (cold, 0)
    tier_of(engine).close()
    file = tmp_path / "store" / "blocks.mdb"
    file.write_bytes(file.read_bytes()[:5000])
    engine = model.engine(cache)
    assert answer(engine)[:2] == (cold, 0)
    tier_of(engine).close()
    engine = model.engine(cache)
    assert answer(engine)[:2] == (cold, 28)
    tier_of(engine).close()


def test_what_cannot_work_is_refused_where_it_is_said() -> None:
    for options, said in [
        ({"cache_dir": ""}, "give the path of a folder"),
        ({"cache_dir": 3}, "give the path of a folder"),
        ({"cache_dir": "x", "prefix_caching": False}, "leave prefix_caching on"),
        ({"cache_size": "1KiB"}, "at least 1MiB"),
        ({"cache_size": "much"}, "not a size in bytes"),
    ]:
        with pytest.raises(ConfigError, match=said):
            CacheConfig(**options)  # type: ignore[arg-type]


def test_who_gives_no_size_keeps_the_folders(tiny: Callable[..., Any], tmp_path: Path) -> None:
    model = Tiny(*tiny("TL"))
    for size, limit in [(None, 2 << 30), ("3MiB", 3 << 20), (None, 3 << 20)]:
        engine = model.engine(CacheConfig(cache_dir=tmp_path / "store", cache_size=size))
        assert tier_of(engine).store.stats().bytes_limit == limit
        tier_of(engine).close()
