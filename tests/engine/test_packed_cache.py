"""A cache with packed blocks gives what a cache-free oracle gives that loses the same at the same places.

Retention, codecs of keys and values, backend, chunk, block size, prefix hit and rollback are combined so that every
three of their values meet.
"""

import functools
import itertools
import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from checkpoints import tiny_model
from quantizing import block_loss
from tiny_engines import VOCAB, Tiny, stepped_over

from kvine.config import CacheConfig, EngineConfig
from kvine.engine.build import dense_attention
from kvine.engine.cache_free import DenseRunner
from kvine.engine.engine import Engine
from kvine.engine.runner import Runner
from kvine.engine.stepped import SteppedCache
from kvine.errors import ConfigError
from kvine.sampling.params import SamplingParams

TEXT = [random.Random(1).randrange(3, VOCAB) for _ in range(46)]
OTHER = [random.Random(2).randrange(3, VOCAB) for _ in range(14)]
RETENTION: dict[str, dict[str, Any]] = {
    "all": {},
    "window": {"window": 13},
    "sinks": {"window": 13, "sink_tokens": 3},
    "in_cache": {"window": 13, "sink_tokens": 3, "sink_rule": "in_cache"},
}
FACTORS: dict[str, tuple[Any, ...]] = {
    "arch": ("llama", "gemma3"),
    "retention": tuple(RETENTION),
    "keys": ("exact", "fp16", "int8", "int4", "int2", "int8-token", "int4-token", "int2-token"),
    "values": ("exact", "bf16", "int8", "int4", "int2"),
    "block_size": (4, 8),
    "chunk": (1, 5, 64),
    "hit": (False, True),
    "rollback": (False, True),
    "backend": ("native", "sdpa", "reference"),
}


@dataclass(frozen=True)
class Combination:
    arch: str
    retention: str
    keys: str
    values: str
    block_size: int
    chunk: int
    hit: bool
    rollback: bool
    backend: str


def combinations() -> list[Combination]:
    """Rows in which every three values of different factors meet at least once, drawn greedily with a fixed seed."""
    names = list(FACTORS)
    open_ = {
        frozenset(zip(three, values, strict=True))
        for three in itertools.combinations(names, 3)
        for values in itertools.product(*(FACTORS[name] for name in three))
    }
    draw, rows = random.Random(0), []
    while open_:
        first = dict(next(iter(sorted(open_, key=lambda t: sorted(map(str, t))))))
        best: tuple[int, dict[str, Any]] = (-1, {})
        for _ in range(12):
            row = {name: first.get(name, draw.choice(FACTORS[name])) for name in names}
            met = sum(frozenset(three) in open_ for three in itertools.combinations(row.items(), 3))
            best = max(best, (met, row), key=lambda candidate: candidate[0])
        open_ -= {frozenset(three) for three in itertools.combinations(best[1].items(), 3)}
        rows.append(Combination(**best[1]))
    return rows


COMBINATIONS = combinations()


@functools.cache
def tiny(arch: str) -> Tiny:
    return Tiny(*tiny_model(arch))


def cache_of(c: Combination) -> CacheConfig:
    return CacheConfig(c.block_size, kv_dtype=f"{c.keys}/{c.values}", **RETENTION[c.retention])


def oracle(tiny: Tiny, cache: CacheConfig) -> DenseRunner:
    loss = block_loss(*cache.codecs, cache.block_size)
    attention = dense_attention(tiny.model, cache, loss=loss)
    return DenseRunner(tiny.model.decoder, attention, tiny.model.device)


def stepped_on(engine: Engine, tokens: list[int]) -> SteppedCache:
    """A cache that begins with what is held of `tokens` already."""
    runner = engine.parts.runner
    assert isinstance(runner, Runner)
    namespace = engine.parts.namespace(None)
    return SteppedCache(runner, engine.config, None, engine.manager.open(tokens, namespace))


def same(model: Tiny, c: Combination, text: list[int], logits: torch.Tensor) -> None:
    """The last logits of a text are the oracle's, and far nearer to them than to those of an exact cache.

    Whether a number lies above or below the middle of two steps is up to rounding too, and one that falls the other way
    makes a small part of what is lost in all.
    """
    cache = cache_of(c)
    lossy = oracle(model, cache).logits(text)[-len(logits) :]
    exact = DenseRunner(model.model.decoder, dense_attention(model.model, cache), model.model.device).logits(text)
    loss = float((exact[-len(logits) :] - lossy).abs().max())
    off = float((logits - lossy).abs().max())
    assert off <= 2e-4 + 0.1 * loss, f"{c}: off by {off:.2g}, where {loss:.2g} is lost"


@pytest.mark.parametrize("part", range(8))
def test_every_combination_loses_what_its_codecs_lose_and_nothing_else(part: int) -> None:
    for c in COMBINATIONS[part::8]:
        model = tiny(c.arch)
        cache = cache_of(c)
        if c.keys in ("exact", "fp16") and c.values in ("exact", "bf16"):
            continue  # element by element: the tests of windows and of codecs have these
        engine = model.engine(cache, EngineConfig(c.chunk, backend=c.backend))
        if c.hit:
            engine.add(TEXT[:29], SamplingParams(max_tokens=2, ignore_eos=True))
            while engine.busy:
                engine.step()
        stepped = stepped_on(engine, TEXT)
        held = len(stepped)
        assert held == (0 if not c.hit else held) and (not c.hit or held >= 24), (c, held)
        logits = stepped.extend(TEXT[held:])[0]
        same(model, c, TEXT, logits)
        engine.manager.check()
        if c.rollback:
            kept = stepped.crop(38)
            engine.manager.check()
            logits = stepped.extend([*TEXT[kept:38], *OTHER])[0]
            same(model, c, [*TEXT[:38], *OTHER], logits)
        stepped.close()
        engine.manager.check()


def test_the_combinations_are_many_and_every_three_meet() -> None:
    assert 150 < len(COMBINATIONS) < 600
    met = {frozenset((("keys", c.keys), ("values", c.values), ("backend", c.backend))) for c in COMBINATIONS}
    assert len(met) == len(FACTORS["keys"]) * len(FACTORS["values"]) * len(FACTORS["backend"])


def test_batch_mates_and_preemption_change_no_token() -> None:
    """Requests that share a cache too small for all of them write what each writes alone."""
    model = tiny("llama")
    prompts = [TEXT[:n] + OTHER[:k] for n, k in ((9, 3), (17, 0), (5, 9), (17, 5))]
    for name in ("int8", "int4-token/int8", "int2"):
        cache = CacheConfig(4, kv_dtype=name)
        texts = []
        runner = oracle(model, cache)
        for prompt in prompts:
            text = list(prompt)
            for _ in range(12):
                text.append(int(runner.logits(text, last=True)[-1].argmax()))
            texts.append(text[len(prompt) :])
        roomy = model.engine(cache)
        need = max(roomy.manager.pools[0].bytes_per_block * 8, 1) + 3 * roomy.manager.pools[-1].bytes_per_block
        engine = model.engine(CacheConfig(4, kv_dtype=name, kv_memory=need))
        ids = [engine.add(prompt, SamplingParams(max_tokens=12, ignore_eos=True)) for prompt in prompts]
        written: dict[int, list[int]] = {number: [] for number in ids}
        while engine.busy:
            for event in engine.step():
                assert event.error is None
                if event.sample is not None:
                    written[event.request_id].append(event.sample.token_id)
            engine.manager.check()
        assert engine.scheduler.num_preemptions > 0, "nobody was ever short of memory"
        assert [written[number] for number in ids] == texts, name


@pytest.mark.parametrize("name", ["int8", "int4", "int2", "k8v4", "fp16/int4", "int8-token/exact"])
def test_no_exact_copy_of_a_full_block_survives_and_bytes_are_those_planned(name: str) -> None:
    """Token by token: at most one open block is held, and what is full takes the packed bytes."""
    model = tiny("llama")
    engine = model.engine(CacheConfig(8, kv_dtype=name))
    stepped = stepped_over(engine)
    spec = engine.manager.specs[0]
    heads = spec.num_layers * spec.num_kv_heads
    sizes = {"exact": 8 * 32, "fp16": 8 * 16, "int8": 8 * 8, "int4": 8 * 4, "int2": 8 * 2}  # bits of 8 tokens a channel
    keys, values = (codec.removesuffix("-token") for codec in engine_codecs(name))
    groups = max(s for s in range(1, 33) if spec.head_dim % s == 0)
    by_channel = not engine_codecs(name)[0].endswith("-token")
    sealed = sum(spec.head_dim * sizes[codec] // 8 for codec in (keys, values))
    if keys.startswith("int"):
        sealed += 4 * (spec.head_dim if by_channel else 8 * (spec.head_dim // groups))
    if values.startswith("int"):
        sealed += 4 * 8 * (spec.head_dim // groups)
    opened = sum(spec.head_dim * sizes["exact" if codec.startswith("int") else codec] // 8 for codec in (keys, values))
    for length in range(1, 42):
        stepped.extend([TEXT[length - 1]])
        full, begun = divmod(length, 8)
        assert stepped.num_bytes == heads * (full * sealed + (begun > 0) * opened), length
        assert len(stepped) == length
        assert len(engine.manager.pools[1].references) == (begun > 0), "an exact copy of a full block is held"
    stored = stepped.layer(0)[0]
    assert stored.shape[2] == 41


def engine_codecs(name: str) -> tuple[str, str]:
    return CacheConfig(kv_dtype=name).codecs


def test_shapes_that_cannot_be_packed_are_refused_when_the_engine_is_made() -> None:
    with pytest.raises(ConfigError, match="a block_size that 4 divides"):
        tiny("llama").engine(CacheConfig(6, kv_dtype="int2"))
    for name in ("int3", "int8/", "int4/int4-token", "k3v4", ""):
        with pytest.raises(ConfigError, match="is unknown: choose one of exact"):
            CacheConfig(kv_dtype=name)
