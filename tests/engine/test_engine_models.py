"""The cache changes nothing: tiny checkpoints in fp32 against plain forwards of transformers."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import collect, drain, nothing_held, serve
from tiny_engines import VOCAB, Tiny, cast_logits, same_logits, stepped_over

from kvine.config import CacheConfig, EngineConfig
from kvine.errors import ContextLengthError, RequestError
from kvine.sampling.params import SamplingParams

Make = Callable[..., tuple[Any, Path]]
PLAIN = CacheConfig(block_size=4)


def text(length: int, seed: int = 0) -> list[int]:
    return [random.Random(f"{seed}/{n}").randrange(3, VOCAB) for n in range(length)]


@pytest.mark.parametrize("arch", ["TL", "TH"])
def test_a01_uneven_texts_split_anywhere_and_continued(tiny: Make, arch: str) -> None:
    """Batches are ragged: there is no padding, hence no pad id that could be a real token, and no shared positions."""
    model = Tiny(*tiny(arch))
    engine = model.engine(PLAIN)
    texts = [text(length, seed=length) for length in (1, 3, 13, 14)]
    rng = random.Random(4)
    splits = [rng.randrange(1, len(t)) if len(t) > 1 else 1 for t in texts]
    caches = [stepped_over(engine) for _ in texts]
    for cache, tokens, split in zip(caches, texts, splits, strict=True):
        same_logits(cache.extend(tokens[:split])[0], model.ref(tokens[:split]))
    for cache, tokens, split in zip(caches, texts, splits, strict=True):
        if tokens[split:]:
            same_logits(cache.extend(tokens[split:])[0], model.ref(tokens)[split:])
    expected = [model.greedy(tokens, 20) for tokens in texts]
    for step in range(20):
        for cache, answer in zip(caches, expected, strict=True):
            logits = cache.extend([answer[step]])[0, -1]
            if step + 1 < 20:
                assert int(logits.argmax()) == answer[step + 1]
    for cache, tokens, answer in zip(caches, texts, expected, strict=True):
        assert cache.tokens == tokens + answer
    engine.manager.check()
    for cache in caches:
        cache.close()
    chunked = model.engine(PLAIN, EngineConfig(max_step_tokens=5))
    outcomes = serve(chunked, texts, SamplingParams(max_tokens=20, ignore_eos=True))
    assert [o.tokens for o in outcomes] == expected


@pytest.mark.parametrize("backend", ["reference", "sdpa", "native"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_a02_no_row_is_ever_without_a_key(tiny: Make, backend: str, dtype: str) -> None:
    """No padding, so no row is masked everywhere: each query sees itself; all stays finite."""
    model = Tiny(*tiny("TH"), dtype=dtype)
    engine = model.engine(PLAIN, EngineConfig(backend=backend))
    seen: list[bool] = []
    engine.parts.runner.observer = lambda name, layer, tensor: seen.append(bool(tensor.isfinite().all()))  # type: ignore[attr-defined]
    serve(engine, [text(1), text(2, 1), text(33, 2)], SamplingParams(max_tokens=3, ignore_eos=True))
    assert len(seen) > 50 and all(seen)


@pytest.mark.parametrize("backend", ["reference", "sdpa", "native"])
@pytest.mark.parametrize("length", [7, 8, 9, 15, 16, 17, 25])
def test_a04_prompts_around_the_window_then_appends_of_every_kind(tiny: Make, length: int, backend: str) -> None:
    model = Tiny(*tiny("TH"))
    cache = model.stepped(PLAIN, EngineConfig(backend=backend))
    whole = text(length + 15)
    reference = model.ref(whole)
    at = 0
    for count in (length, 1, 5, *[1] * 9):
        same_logits(cache.extend(whole[at : at + count])[0], reference[at : at + count])
        at += count
    cache.close()


@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("removed", [1, 5, 12, 19, 20, 25])
@pytest.mark.parametrize("arch", ["TL", "TH"])
def test_a06_cropping_never_has_a_third_outcome(tiny: Make, arch: str, removed: int, prefix_caching: bool) -> None:
    model = Tiny(*tiny(arch))
    engine = model.engine(CacheConfig(block_size=4, prefix_caching=prefix_caching))
    cache = stepped_over(engine)
    prompt, other = text(20), text(4, seed=9)
    cache.extend(prompt)
    asked = max(0, 20 - removed)
    if removed > 20:  # more than there is: refused, and nothing is lost
        with pytest.raises(RequestError):
            cache.crop(20 - removed)
        assert len(cache) == 20
    left = cache.crop(max(0, 20 - removed))
    assert left == len(cache) <= asked and cache.tokens == prompt[:left]
    if arch == "TL" or removed == 20:
        assert left == asked
    for layer in range(model.model.config.num_layers):
        k, v = cache.layer(layer)
        assert k.shape == v.shape == (1, 2, len(cache.positions(layer)), 16)
        assert set(cache.positions(layer)) >= set(range(max(0, left - 7), left))
    wanted = prompt[:asked] + other
    same_logits(cache.extend(wanted[left:])[0], model.ref(wanted)[left:])
    engine.manager.check()
    cache.close()
    nothing_held(engine)


def test_a14_kv_dtypes_cast_values_and_never_bits(tiny: Make) -> None:
    for dtype in ("fp32", "bf16", "fp16"):
        model = Tiny(*tiny("TL"), dtype=dtype)
        tokens = text(21)
        for kv_dtype in ("fp32", "bf16", "fp16"):
            engine = model.engine(CacheConfig(block_size=4, kv_dtype=kv_dtype))
            cache = stepped_over(engine)
            logits = torch.cat([cache.extend(tokens[:13])[0], *(cache.extend([t])[0] for t in tokens[13:])])
            expected = cast_logits(model.model, tokens, kv_dtype)
            scale = float(expected.std())
            tolerance = 1e-3 if dtype == "fp32" else 0.15
            assert float((logits - expected).abs().max()) < tolerance * scale, (dtype, kv_dtype)
            assert (
                cache.layer(0)[0].dtype
                == {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[kv_dtype]
            )
            assert model.model.decoder.embedding.weight.dtype == model.model.dtype


def test_a14_torch_default_dtype_alters_nothing(tiny: Make) -> None:
    model = Tiny(*tiny("TH"))
    expected = model.stepped(PLAIN).extend(text(12))
    torch.set_default_dtype(torch.float16)
    try:
        got = Tiny(*tiny("TH")).stepped(PLAIN).extend(text(12))
    finally:
        torch.set_default_dtype(torch.float32)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("chunk", [1, 2, 3, 4, 5, 8, 13, 14, 18])
def test_c13_chunks_on_and_off_block_edges(tiny: Make, chunk: int) -> None:
    model = Tiny(*tiny("TH"))
    prompt = text(17)
    engine = model.engine(PLAIN, EngineConfig(max_step_tokens=chunk))
    serve(engine, [prompt[:10]], SamplingParams(max_tokens=1))
    [outcome] = serve(engine, [prompt], SamplingParams(max_tokens=6, ignore_eos=True))
    assert outcome.cached == 10
    assert outcome.tokens == model.greedy(prompt, 6)


# -- invariance -----------------------------------------------------------------------------------------------------

ARCHITECTURES = ["llama", "mistral", "qwen2", "qwen3", "gemma3", "TH"]
EIGHT = SamplingParams(max_tokens=8, ignore_eos=True)
PROMPTS = [text(19, 5), text(7, 6), [*text(19, 5)[:11], 3, 4], text(1, 7)]


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_greedy_tokens_depend_on_the_text_alone(tiny: Make, arch: str) -> None:
    """Not on chunks, batch mates, block size, backend, hits, or being preempted."""
    model = Tiny(*tiny(arch))
    expected = [model.greedy(prompt, 8) for prompt in PROMPTS]
    for chunk, block_size, backend in [
        (2_048, 32, "auto"),
        (2_048, 1, "reference"),
        (1, 4, "auto"),
        (5, 3, "reference"),
    ]:
        engine = model.engine(CacheConfig(block_size=block_size), EngineConfig(chunk, backend=backend))
        together = [o.tokens for o in serve(engine, PROMPTS, EIGHT)]
        assert together == expected, f"side by side: chunk {chunk}, block size {block_size}, backend {backend}"
        again = [serve(engine, [prompt], EIGHT)[0] for prompt in PROMPTS]
        assert [o.tokens for o in again] == expected, "one by one, from the cache"
        assert [o.cached for o in again[:2]] == [18, 6]
        nothing_held(engine)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_greedy_tokens_survive_preemption(tiny: Make, arch: str) -> None:
    model = Tiny(*tiny(arch))
    for prefix_caching in (True, False) if arch == "TH" else (True,):
        cache = CacheConfig(block_size=4, prefix_caching=prefix_caching)
        engine = model.engine(model.memory_of(cache, 27, extra_blocks=1), EngineConfig(max_step_tokens=9))
        outcomes = serve(engine, [*PROMPTS, PROMPTS[1]], EIGHT)
        assert [o.tokens for o in outcomes] == [model.greedy(p, 8) for p in [*PROMPTS, PROMPTS[1]]]
        assert engine.scheduler.num_preemptions > 0
        nothing_held(engine)


@pytest.mark.parametrize("rule", ["absolute", "in_cache"])
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_window_and_sinks_equal_the_cache_free_engine_with_the_same_view(tiny: Make, arch: str, rule: Any) -> None:
    model = Tiny(*tiny(arch))
    prompts = PROMPTS[:3]
    for sinks, window, block_size, chunk, backend in [
        (3, 6, 4, 5, "sdpa"),
        (5, 7, 2, 2_048, "reference"),
        (4, 7, 3, 1, "native"),
    ]:
        cache = CacheConfig(block_size=block_size, window=window, sink_tokens=sinks, sink_rule=rule)
        engine = model.engine(cache, EngineConfig(chunk, backend=backend))
        expected = [o.tokens for o in serve(model.cache_free(cache), prompts, EIGHT)]
        assert [o.tokens for o in serve(engine, prompts, EIGHT)] == expected
        assert serve(engine, prompts[:1], EIGHT)[0].tokens == expected[0], "from the cache"
        nothing_held(engine)
    assert expected != [model.greedy(p, 8) for p in prompts], "the window changes nothing here, so nothing was tested"


# -- stepped by hand ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ["TL", "TH"])
def test_forks_go_their_own_ways(tiny: Make, arch: str) -> None:
    model = Tiny(*tiny(arch))
    engine = model.engine(PLAIN)
    trunk = stepped_over(engine)
    trunk.extend(text(10))
    left, right = trunk.fork(), trunk.fork()
    for cache, seed in ((left, 1), (trunk, 2), (right, 3)):
        whole = text(10) + text(7, seed)
        same_logits(cache.extend(text(7, seed))[0], model.ref(whole)[10:])
        engine.manager.check()
    assert left.tokens[10:] == text(7, 1)
    for cache in (left, right, trunk):
        cache.close()
    nothing_held(engine)


def test_an_append_that_does_not_fit_changes_nothing(tiny: Make) -> None:
    model = Tiny(*tiny("TH"))
    for prefix_caching in (True, False):
        cache = CacheConfig(block_size=4, prefix_caching=prefix_caching)
        engine = model.engine(model.memory_of(cache, 40), EngineConfig(max_step_tokens=6))
        stepped = stepped_over(engine)
        prompt = text(20)
        stepped.extend(prompt)
        with pytest.raises(ContextLengthError, match="kv_memory"):
            stepped.extend(text(80, 1))
        assert stepped.tokens == prompt
        with pytest.raises(ContextLengthError, match="context"):
            stepped.extend(text(600, 1))
        assert stepped.tokens == prompt
        same_logits(stepped.extend([5])[0], model.ref([*prompt, 5])[-1:])
        stepped.close()
        nothing_held(engine)


def test_a_closed_cache_says_so(tiny: Make) -> None:
    model = Tiny(*tiny("TH"))
    engine = model.engine(PLAIN)
    cache = stepped_over(engine)
    cache.extend(text(9))
    cache.close()
    cache.close()
    for use in (lambda: cache.extend([3]), lambda: cache.fork(), lambda: cache.crop(4), lambda: cache.layer(0)):
        with pytest.raises(RequestError, match="closed"):
            use()
    nothing_held(engine)


def test_a_forgotten_cache_frees_itself(tiny: Make) -> None:
    engine = Tiny(*tiny("TL")).engine(PLAIN)
    cache = stepped_over(engine)
    cache.extend(text(9))
    assert engine.manager.bytes_referenced > 0
    del cache
    nothing_held(engine)


def test_hand_and_engine_share_the_memory_and_the_past(tiny: Make) -> None:
    model = Tiny(*tiny("TH"))
    engine = model.engine(PLAIN)
    cache = stepped_over(engine)
    cache.extend(text(9))
    request_id = engine.add(text(15, 3), EIGHT)
    done: dict[int, Any] = {}
    for _ in range(5):
        collect(engine.step(), done)
        cache.extend(text(1, 4))
    drain(engine, done)
    assert done[request_id].tokens == model.greedy(text(15, 3), 8)
    whole = text(9) + text(1, 4) * 5
    same_logits(cache.extend([7])[0], model.ref([*whole, 7])[-1:])
    cache.close()
