"""Faults that other engines had with windows, sinks and quantized caches, over every codec and every retention."""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from beam_oracles import beams_of, brute_force, same_beams
from combinations import OTHER, TEXT, Oracle, block_bytes, bound, same
from tiny_engines import Tiny, stepped_over
from torch import Tensor

from kvine.cache.tier import StoreTier
from kvine.config import ELEMENT_CODECS, PACKED_CODECS, CacheConfig, EngineConfig
from kvine.engine.engine import Engine
from kvine.evidence.cells.quantizer import block_loss
from kvine.rope import RotaryEmbedding, rotate
from kvine.sampling.params import SamplingParams

Make = Callable[..., tuple[Any, Path]]
CODECS = (*ELEMENT_CODECS, *PACKED_CODECS, "int4-token", "k8v4")
RETENTION: dict[str, dict[str, Any]] = {
    "all": {},
    "window": {"window": 8},
    "sinks": {"window": 8, "sink_tokens": 3},
    "in_cache": {"window": 8, "sink_tokens": 3, "sink_rule": "in_cache"},
}
SCALED = {
    "default": {"rope_type": "default", "rope_theta": 10_000.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 10_000.0,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 10_000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 32,
    },
}

every_codec = pytest.mark.parametrize("codec", CODECS)


def caches(codec: str, block_size: int = 4) -> Iterator[tuple[str, CacheConfig]]:
    """One codec with every retention."""
    for name, options in RETENTION.items():
        yield name, CacheConfig(block_size, kv_dtype=codec, **options)


def oracles(model: Tiny, cache: CacheConfig) -> tuple[Oracle, Oracle]:
    return Oracle(model, cache), Oracle(model, cache, lossy=False)


@every_codec
def test_a06_a_crop_is_made_or_what_is_missing_is_said(tiny: Make, codec: str) -> None:
    """Layers with and without windows of their own: they agree on one length, and hold just as much."""
    model = Tiny(*tiny("TH"))
    for name, cache in caches(codec):
        oracle, exact = oracles(model, cache)
        for removed in (1, 5, 12, 19, 20):
            engine = model.engine(replace(cache, prefix_caching=removed % 2 == 0))
            stepped = stepped_over(engine)
            stepped.extend(TEXT[:20])
            left = stepped.crop(20 - removed)
            assert left == len(stepped) <= 20 - removed and stepped.tokens == TEXT[:left]
            for layer in range(model.model.config.num_layers):
                k, v = stepped.layer(layer)
                assert k.shape == v.shape and k.shape[2] == len(stepped.positions(layer)) <= left
            wanted = [*TEXT[: 20 - removed], *OTHER[:4]]
            same(oracle, exact, wanted, stepped.extend(wanted[left:])[0], (name, removed))
            engine.manager.check()


@every_codec
def test_a08_bursts_and_rejections_around_the_window(tiny: Make, codec: str) -> None:
    """Drafts are bursts of tokens of which some are taken back: lengths stay exact, and no memory moves."""
    model = Tiny(*tiny("TH"))
    for (name, cache), start in zip(caches(codec), (6, 7, 8, 10), strict=True):
        oracle, exact = oracles(model, cache)
        engine = model.engine(cache)
        stepped = stepped_over(engine)
        addresses = [pool.k.data_ptr() for pool in engine.parts.runner.attention.pools]  # type: ignore[attr-defined]
        text = TEXT[:start]
        same(oracle, exact, text, stepped.extend(text)[0], name)
        for burst, accepted in ((1, 0), (2, 1), (3, 3), (4, 0), (5, 2), (6, 5), (6, 0)):
            draft = [*TEXT[len(text) :][:accepted], *OTHER[: burst - accepted]]
            same(oracle, exact, [*text, *draft], stepped.extend(draft)[0], (name, burst))
            assert len(stepped) == len(text) + burst
            text += draft[:accepted]
            left = stepped.crop(len(text))
            assert left == len(stepped) <= len(text) and stepped.tokens == text[:left]
            if text[left:]:
                same(oracle, exact, text, stepped.extend(text[left:])[0], (name, burst))
            engine.manager.check()
        assert addresses == [pool.k.data_ptr() for pool in engine.parts.runner.attention.pools]  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", SCALED)
@every_codec
def test_a09_sinks_under_scaled_rotations_are_stored_where_they_stand(tiny: Make, codec: str, kind: str) -> None:
    """What is stored is the raw key, rotated to its own position and kept by its codec; never rotated anew."""
    model = Tiny(*tiny("llama", rope_parameters=SCALED[kind]))
    rope = RotaryEmbedding(model.model.config.layers[0].rope, model.model.device)
    for rule in ("absolute", "in_cache"):
        cache = CacheConfig(4, kv_dtype=codec, window=8, sink_tokens=3, sink_rule=rule)  # type: ignore[arg-type]
        oracle, exact = oracles(model, cache)
        engine = model.engine(cache, EngineConfig(backend="sdpa"))  # an observer sees each layer's raw keys
        raw: list[Tensor] = []
        engine.parts.runner.observer = lambda name, layer, x, raw=raw: (  # type: ignore[attr-defined, misc]
            raw.append(x.clone()) if (name, layer) == ("k", 0) else None
        )
        stepped = stepped_over(engine)
        text = [*TEXT, *OTHER[:1]]
        for tokens in (text[:11], *([t] for t in text[11:])):
            logits = stepped.extend(tokens)[0]
        same(oracle, exact, text, logits, rule)
        keys = rotate(torch.cat(raw), *rope.cos_sin(torch.arange(len(text))))  # [N, Hkv, D]
        loss, full = block_loss(cache), len(text) // 4 * 4
        blocks = keys[:full].unflatten(0, (-1, 4)).transpose(1, 2)  # [blocks, Hkv, 4, D]
        kept = torch.cat((loss.keys(blocks).transpose(1, 2).flatten(0, 1), loss.open_keys(keys[full:])))
        held = stepped.positions(0)
        assert held[:4] == [0, 1, 2, 3] and held[4] >= 20, "blocks between sinks and window were evicted"
        stored = stepped.layer(0)[0][0].transpose(0, 1).float()
        torch.testing.assert_close(stored, kept[held].float(), rtol=0, atol=1e-5)


@every_codec
def test_a11_a_stream_past_the_context_loses_no_more_with_each_token(tiny: Make, codec: str) -> None:
    """No key is ever rotated anew, so nothing can add up: 50 tokens through a model of 12, sinks 2 and window 8."""
    model = Tiny(*tiny("TL", max_position_embeddings=12))
    cache = CacheConfig(4, kv_dtype=codec, window=8, sink_tokens=2, sink_rule="in_cache")
    oracle, exact = oracles(model, cache)
    stepped = stepped_over(model.engine(cache))
    text, off = TEXT[:5], []
    logits = stepped.extend(text)[0]
    for step in range(50):
        text.append(int(logits[-1].argmax()))
        logits = stepped.extend(text[-1:])[0]
        if step % 5 == 4:
            off.append(float((logits - exact.logits(text)[-1:]).abs().max()))
    same(oracle, exact, text, logits)
    assert sum(off[5:]) <= 2 * sum(off[:5]) + 1e-2, off
    engine = model.engine(replace(cache, sink_rule="absolute"))
    number = engine.add(TEXT[:5], SamplingParams(max_tokens=50, ignore_eos=True))
    events = [event for _ in range(12) for event in engine.step()]
    assert [event.finish_reason for event in events if event.request_id == number][-1] == "context"


@every_codec
def test_a13_what_is_full_is_packed_however_it_came(tiny: Make, codec: str) -> None:
    """At most one open block; length exact and bytes at the packed rate at each step; two questions on one snapshot."""
    model = Tiny(*tiny("TL"))
    cache = CacheConfig(8, kv_dtype=codec)
    oracle, exact = oracles(model, cache)
    keys, values = cache.codecs
    wide = {"fp32": "exact"}  # the model computes in fp32
    full, opened = block_bytes(model, wide.get(keys, keys), wide.get(values, values), 8)
    for prompt in (5, 8, 9, 20):
        engine = model.engine(cache)
        stepped = stepped_over(engine)
        stepped.extend(TEXT[:prompt])
        for length in range(prompt, prompt + 10):
            assert len(stepped) == length
            assert stepped.num_bytes == 3 * (length // 8 * full + (length % 8 > 0) * opened)
            for pool in engine.manager.pools[1:]:
                assert len(pool.references) == (length % 8 > 0)
            stepped.extend([TEXT[length % len(TEXT)]])
        text = stepped.tokens
        with_other = stepped.fork()
        for question, asked in ((TEXT[:9], stepped), (OTHER[:9], with_other)):
            same(oracle, exact, [*text, *question], asked.extend(question)[0], prompt)
        assert stepped.layer(0)[0].dtype == with_other.layer(0)[0].dtype


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@every_codec
def test_a14_every_dtype_of_model_and_cache_converts_values(tiny: Make, codec: str, dtype: str) -> None:
    model = Tiny(*tiny("TL"), dtype=dtype)
    for name, cache in caches(codec):
        expected = Oracle(model, cache).logits(TEXT)
        got = []
        for default in (torch.float32, torch.float64):
            torch.set_default_dtype(default)
            try:
                stepped = model.stepped(cache)
                got.append(torch.cat([stepped.extend(TEXT[:24])[0], *(stepped.extend([t])[0] for t in TEXT[24:])]))
            finally:
                torch.set_default_dtype(torch.float32)
        assert torch.equal(*got), "the default dtype must not matter"
        off = float((got[0] - expected).abs().max()) / float(expected.std())
        packs = CacheConfig(kv_dtype=codec).codecs[0] not in ELEMENT_CODECS
        assert off < (0.2 if packs else 1e-3) if dtype == "fp32" else off < (0.6 if packs else 0.2), (name, off)
        assert model.model.decoder.embedding.weight.dtype == model.model.dtype


@every_codec
def test_a15_beams_equal_beams_recomputed(tiny: Make, codec: str) -> None:
    """One to five beams over two prompts of uneven length. A beam is a block table: nothing has to be reordered."""
    model = Tiny(*tiny("TL", initializer_range=0.12, seed=3))
    counts = itertools.cycle((1, 5, 2, 3, 4))
    for _ in range(CODECS.index(codec)):
        next(counts)
    for (name, cache), count in zip(caches(codec), counts, strict=False):
        oracle, exact = oracles(model, cache)
        prompts, params = (TEXT[:9], OTHER[:14]), SamplingParams(max_tokens=5, num_beams=count, ignore_eos=True)
        expected = [brute_force(oracle.next, prompt, params, ends=()) for prompt in prompts]
        engine = model.engine(cache)
        if count == 1:
            assert greedy(engine, prompts, params) == [text for ((text, _),) in expected], name
        else:
            off = max(2 * bound(oracle, exact, prompt, 1) for prompt in prompts)
            same_beams(beams_of(engine, prompts, params), expected, rel=off)


def greedy(engine: Engine, prompts: tuple[list[int], ...], params: SamplingParams) -> list[list[int]]:
    ids = [engine.add(prompt, params) for prompt in prompts]
    found: dict[int, list[int]] = {number: [] for number in ids}
    while engine.busy:
        for event in engine.step():
            if event.sample is not None:
                found[event.request_id].append(event.sample.token_id)
    return [found[number] for number in ids]


def test_b02_only_the_same_salt_model_and_cache_hit(tiny: Make, tmp_path: Path) -> None:
    """All of them share one folder of blocks, in which each tuple finds what it has put there and nothing else."""
    models = [Tiny(*tiny("TL")), Tiny(*tiny("TL", seed=1)), Tiny(*tiny("TL"), dtype="bf16")]
    options = [cache for codec in CODECS for _, cache in caches(codec)] + [CacheConfig(8)]
    uses = [(models[0], cache) for cache in options] + [(model, options[0]) for model in models[1:]]
    salts = (None, "", "a", "ab")
    for again in (False, True):
        for model, cache in uses:
            engine = model.engine(replace(cache, cache_dir=tmp_path / "store", cache_size="64MiB"))
            for salt in salts if cache is options[0] else salts[:1] + salts[-1:]:
                engine.add(TEXT[:14], SamplingParams(max_tokens=1), salt=salt)
                (event,) = engine.step()
                least = 14 // cache.block_size * cache.block_size
                assert event.cached_tokens == (least if again else 0), (cache, salt, event.cached_tokens)
            assert isinstance(engine.manager.tier, StoreTier)
            engine.manager.tier.close()
