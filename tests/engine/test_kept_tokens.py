"""What a window keeps in sight: global tokens of a cache, and spans that a request pins.

Compared with transformers, which is handed the mask itself, and with the cache-free oracle.
"""

import functools
import itertools
import random
from typing import Any

import pytest
import torch
from checkpoints import tiny_model
from tiny_engines import VOCAB, Tiny, same_logits

from kvine.cache.manager import MISSING
from kvine.config import CacheConfig, EngineConfig
from kvine.engine.build import dense_attention
from kvine.engine.cache_free import DenseRunner
from kvine.engine.engine import Engine
from kvine.engine.runner import Runner
from kvine.engine.stepped import SteppedCache
from kvine.errors import ConfigError, RequestError
from kvine.sampling.params import SamplingParams
from kvine.spans import Spans

TEXT = [random.Random(5).randrange(3, VOCAB) for _ in range(60)]
WINDOW = 9
GLOBAL = ((6, 8), (13, 20), (30, 31))


@functools.cache
def tiny(arch: str) -> Tiny:
    return Tiny(*tiny_model(arch))


def stepped(engine: Engine, pinned: Spans) -> SteppedCache:
    """A cache whose sequence pins these positions."""
    runner = engine.parts.runner
    assert isinstance(runner, Runner)
    sequence = engine.manager.open((), engine.parts.namespace(None, pinned), pinned)
    return SteppedCache(runner, engine.config, engine.parts.max_context, sequence)


@torch.inference_mode()
def with_mask(model: Tiny, tokens: list[int], window: int, kept: Spans) -> torch.Tensor:
    """[N, vocabulary] of transformers' own forward, which is told for each query what it sees."""
    sees = torch.full((len(tokens), len(tokens)), -torch.inf)
    for q, k in itertools.product(range(len(tokens)), repeat=2):
        if k <= q and (q - k < window or any(first <= k < end for first, end in kept)):
            sees[q, k] = 0
    logits: torch.Tensor = model.oracle(torch.tensor([tokens]), attention_mask=sees[None, None], use_cache=False).logits
    return logits[0].float()


@pytest.mark.parametrize("backend", ["native", "sdpa", "reference"])
@pytest.mark.parametrize(("chunk", "size"), [(1, 4), (7, 8), (64, 1)])
def test_what_is_kept_is_seen_as_transformers_sees_it(backend: str, chunk: int, size: int) -> None:
    model = tiny("llama")
    for given, pinned in ((GLOBAL, ()), ((), GLOBAL), (GLOBAL[:1], GLOBAL[1:]), (((0, 2), *GLOBAL), ((1, 4),))):
        cache = CacheConfig(size, window=WINDOW, global_tokens=given)
        past = stepped(model.engine(cache, EngineConfig(chunk, backend=backend)), pinned)
        expected = with_mask(model, TEXT, WINDOW, (*given, *pinned))
        same_logits(past.extend(TEXT[:50])[0], expected[:50])
        same_logits(torch.cat([past.extend([token])[0] for token in TEXT[50:]]), expected[50:])
        table = past._held.tables[0]
        assert MISSING in table, "nothing was let go"
        kept = {key // size for run in (*given, *pinned) for key in range(*run)}
        assert all(table[block] != MISSING for block in kept)
        past.close()


@pytest.mark.parametrize("backend", ["native", "sdpa", "reference"])
@pytest.mark.parametrize("arch", ["llama", "gemma3"])
def test_a_pinned_beginning_lies_among_the_sinks_in_the_cache(arch: str, backend: str) -> None:
    """And a model's own windows are left as they are."""
    model = tiny(arch)
    for sinks, pinned in ((0, ((0, 11),)), (3, ((0, 11),)), (3, ((2, 11),)), (12, ((0, 11),))):
        cache = CacheConfig(4, window=WINDOW - 3, sink_tokens=sinks, sink_rule="in_cache")
        past = stepped(model.engine(cache, EngineConfig(13, backend=backend)), pinned)
        dense = DenseRunner(model.model.decoder, dense_attention(model.model, cache), model.model.device)
        same_logits(past.extend(TEXT)[0], dense.logits(TEXT, pinned))
        past.close()
        longer = CacheConfig(4, window=WINDOW - 3, sink_tokens=max(sinks, 11), sink_rule="in_cache")
        dense = DenseRunner(model.model.decoder, dense_attention(model.model, longer), model.model.device)
        past = stepped(model.engine(cache, EngineConfig(13, backend=backend)), pinned)
        same_logits(past.extend(TEXT)[0], dense.logits(TEXT))


def run(engine: Engine, *asked: tuple[list[int], Spans], **more: Any) -> list[list[int]]:
    """The greedy answers of requests side by side, each with what it pins."""
    params = SamplingParams(max_tokens=24, ignore_eos=True, **more)
    ids = [engine.add(prompt, params, pinned=pinned) for prompt, pinned in asked]
    written: dict[int, list[int]] = {number: [] for number in ids}
    while engine.busy:
        for event in engine.step():
            assert event.error is None
            if event.sample is not None and event.index == 0:
                written[event.request_id].append(event.sample.token_id)
            if event.hypothesis is not None and event.index == 0:
                written[event.request_id] = list(event.hypothesis.token_ids)
        engine.manager.check()
    return [written[number] for number in ids]


@pytest.mark.parametrize("kv_dtype", ["exact", "bf16", "int8/exact"])
@pytest.mark.parametrize("arch", ["llama", "gemma3"])
def test_requests_with_other_pins_do_not_disturb_each_other(arch: str, kv_dtype: str) -> None:
    """Alone, side by side, in little memory and from a prefix, a request writes the same."""
    model = tiny(arch)
    cache = CacheConfig(4, window=6, sink_tokens=1, kv_dtype=kv_dtype)
    asked = [(TEXT[:30], ()), (TEXT[:30], ((5, 9),)), (TEXT[:30], ((20, 30),)), (TEXT[:21], ((5, 9), (12, 13)))]
    alone = [run(model.engine(cache), one)[0] for one in asked]
    assert arch != "llama" or len({tuple(text) for text in alone[:3]}) == 3, "pins change nothing"
    engine = model.engine(cache, EngineConfig(11))
    assert run(engine, *asked) == alone
    assert run(engine, *asked) == alone, "from the prefix cache"
    whole = sum(pool.bytes_per_block for pool in engine.manager.pools)
    short = model.engine(
        CacheConfig(4, window=6, sink_tokens=1, kv_dtype=kv_dtype, kv_memory=11 * whole), EngineConfig(4)
    )
    assert run(short, *asked) == alone
    for prompt, pinned in asked:
        assert run(engine, (prompt, pinned), num_beams=2) == run(model.engine(cache), (prompt, pinned), num_beams=2)


def test_b02_pins_are_part_of_what_a_hit_compares() -> None:
    model = tiny("llama")
    engine = model.engine(CacheConfig(4, window=6))
    params = SamplingParams(max_tokens=1)
    found: dict[tuple[Spans, Spans], int] = {}
    spans: tuple[Spans, ...] = ((), ((5, 9),), ((5, 8),), ((0, 2),), ((5, 8), (8, 9)))
    for before, after in itertools.product(spans, repeat=2):
        engine.manager.clear()
        for pinned in (before, after):
            engine.add(TEXT[:29], params, pinned=pinned)
            while engine.busy:
                for event in engine.step():
                    found[before, after] = event.cached_tokens
    one = spans[1], spans[4]  # the same positions, written in two ways
    for before, after in itertools.product(spans, repeat=2):
        alike = before == after or {before, after} == set(one)
        assert (found[before, after] > 20) is alike and (alike or found[before, after] == 0), (before, after)
    free = model.engine()
    for pinned in spans:  # without a window nothing is dropped, and pins change nothing
        free.add(TEXT[:29], params, pinned=pinned)
        while free.busy:
            cached = [event.cached_tokens for event in free.step()]
    assert cached == [28]


def test_an_endless_text_keeps_what_is_pinned_in_constant_memory() -> None:
    model = tiny("llama")
    engine = model.engine(CacheConfig(4, window=8, sink_rule="in_cache"))
    held: set[int] = set()
    engine.on_call = lambda call: held.add(call.kv_bytes)
    number = engine.add(TEXT[:20], SamplingParams(max_tokens=700, ignore_eos=True), pinned=((0, 13),))
    steps = 0
    while engine.busy:
        events = engine.step()
        steps += sum(event.sample is not None for event in events)
        assert all(event.request_id == number for event in events)
    assert steps == 700 and model.model.config.max_context is not None
    assert model.model.config.max_context < 720, "the model's own context would have ended it"
    most = engine.manager.specs[0].keeping(((0, 13),)).max_live_blocks(719, 20)
    assert max(held) <= most * engine.manager.pools[0].bytes_per_block


def test_what_cannot_be_kept_is_refused_with_a_reason() -> None:
    for options, said in (
        ({"global_tokens": ((0, 2),)}, "Global tokens need a window"),
        ({"window": 8, "global_tokens": "0:2"}, "give runs of positions such as"),
        ({"window": 8, "global_tokens": ((2, 2),)}, "give runs of positions such as"),
        ({"window": 8, "global_tokens": ((-1, 2),)}, "give runs of positions such as"),
        ({"window": 8, "global_tokens": ((0, 2**40),)}, "no text has more than"),
        (
            {"window": 8, "global_tokens": ((5, 6),), "sink_rule": "in_cache", "sink_tokens": 4},
            "global tokens 5:6 have no",
        ),
    ):
        with pytest.raises(ConfigError, match=said):
            CacheConfig(**options)  # type: ignore[arg-type]
    touching = CacheConfig(window=8, sink_tokens=4, sink_rule="in_cache", global_tokens=((4, 6), (2, 5)))
    assert touching.global_tokens == ((2, 6),)
    engine = tiny("llama").engine(CacheConfig(4, window=8, sink_rule="in_cache"))
    params = SamplingParams(max_tokens=1)
    for pinned, said in (
        (((3, 5),), "only the beginning of a prompt can be pinned"),
        (((0, 99),), "What is pinned ends at 99, and the prompt at 20"),
        (((5, 2),), "give runs of positions"),
        ("0:4", "give runs of positions"),
    ):
        with pytest.raises(RequestError, match=said):
            engine.add(TEXT[:20], params, pinned=pinned)  # type: ignore[arg-type]
    assert not engine.busy
