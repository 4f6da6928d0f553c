"""Ways to keep the past, combined so that every three of their values meet, and what each of them should compute."""

import functools
import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from checkpoints import tiny_model
from tiny_engines import VOCAB, Tiny
from torch import Tensor

from kvine.config import CacheConfig
from kvine.engine.build import dense_attention
from kvine.engine.cache_free import DenseRunner
from kvine.engine.engine import Engine
from kvine.engine.runner import Runner
from kvine.engine.stepped import SteppedCache
from kvine.evidence.cells.quantizer import block_loss
from kvine.spans import Spans

TEXT = random.Random(1).choices(range(3, VOCAB), k=30)
OTHER = random.Random(2).choices(range(3, VOCAB), k=14)
WINDOW, SINKS = 13, 3
RETENTION: dict[str, dict[str, Any]] = {
    "all": {},
    "window": {"window": WINDOW},
    "sinks": {"window": WINDOW, "sink_tokens": SINKS},
    "in_cache": {"window": WINDOW, "sink_tokens": SINKS, "sink_rule": "in_cache"},
    "global": {"window": WINDOW, "sink_tokens": 1, "global_tokens": ((4, 6), (9, 10))},
    "pinned": {"window": WINDOW},
}
PINNED: dict[str, Spans] = {"pinned": ((3, 5), (8, 9))}
FACTORS: dict[str, tuple[Any, ...]] = {
    "arch": ("llama", "gemma3"),
    "retention": tuple(RETENTION),
    "keys": ("exact", "fp16", "int8", "int4", "int2", "int8-token", "int4-token", "int2-token"),
    "values": ("exact", "bf16", "int8", "int4", "int2"),
    "block_size": (2, 4, 8),
    "chunk": (1, 5, 64),
    "hit": (False, True),
    "rollback": (False, True),
    "beams": (1, 2, 3),
    "store": (False, True),
    "backend": ("native", "sdpa", "reference"),
}
# What is refused, most when the engine is made and beams when they are asked for, and a part of the reason. Nothing
# else may be.
REFUSED: dict[tuple[tuple[str, Any], ...], str] = {
    (("keys", "int2"), ("block_size", 2)): "share bytes among 4 tokens: give a block_size that 4 divides",
    (("keys", "int2-token"), ("block_size", 2)): "share bytes among 4 tokens: give a block_size that 4 divides",
    (("chunk", 1), ("beams", 2)): "2 beams take 2 tokens in each step, and max_step_tokens is 1",
    (("chunk", 1), ("beams", 3)): "3 beams take 3 tokens in each step, and max_step_tokens is 1",
}

Choice = tuple[str, Any]  # a factor and its value


@dataclass(frozen=True)
class Combination:
    """One value of each factor."""

    arch: str
    retention: str
    keys: str
    values: str
    block_size: int
    chunk: int
    hit: bool
    rollback: bool
    beams: int
    store: bool
    backend: str

    @property
    def pinned(self) -> Spans:
        return PINNED.get(self.retention, ())

    @property
    def cache(self) -> CacheConfig:
        return CacheConfig(self.block_size, kv_dtype=f"{self.keys}/{self.values}", **RETENTION[self.retention])


def triples() -> dict[frozenset[Choice], None]:
    """Every three values of different factors that no refusal forbids, in order."""
    return {
        three: None
        for names in itertools.combinations(FACTORS, 3)
        for values in itertools.product(*(FACTORS[name] for name in names))
        if not is_refused(three := frozenset(zip(names, values, strict=True)))
    }


def is_refused(choices: frozenset[Choice]) -> bool:
    return any(choices >= set(forbidden) for forbidden in REFUSED)


@functools.cache
def combinations() -> tuple[Combination, ...]:
    """Rows in which all triples are met, drawn greedily with a fixed seed."""
    missing, draw = triples(), random.Random(0)
    rows = []
    while missing:
        first = dict(sorted(next(iter(missing))))
        drawn = [row for _ in range(6) if (row := _row(dict(first), missing, draw)) is not None]
        best = max(drawn, key=lambda row: sum(three in missing for three in _threes(row)))
        for three in _threes(best):
            missing.pop(three, None)
        rows.append(Combination(**best))
    return tuple(rows)


def _row(row: dict[str, Any], missing: dict[frozenset[Choice], None], draw: random.Random) -> dict[str, Any] | None:
    """Values for the rest of a row, one factor after the other, each the one that meets most of what is missing."""
    for name in draw.sample(list(FACTORS), len(FACTORS)):
        if name not in row:
            pairs = list(itertools.combinations(row.items(), 2))
            fitting = [value for value in FACTORS[name] if not is_refused(frozenset({*row.items(), (name, value)}))]
            if not fitting:
                return None
            met = {value: sum(frozenset((*two, (name, value))) in missing for two in pairs) for value in fitting}
            row[name] = draw.choice([value for value in fitting if met[value] == max(met.values())])
    return row


def _threes(row: dict[str, Any]) -> list[frozenset[Choice]]:
    return [frozenset(three) for three in itertools.combinations(row.items(), 3)]


@functools.cache
def tiny(arch: str) -> Tiny:
    return Tiny(*tiny_model(arch))


class Oracle:
    """What a model makes of whole texts without a cache, with what the cache of a combination would lose of them."""

    def __init__(self, model: Tiny, cache: CacheConfig, pinned: Spans = (), *, lossy: bool = True) -> None:
        attention = dense_attention(model.model, cache, loss=block_loss(cache) if lossy else None).pinning(pinned)
        self._runner = DenseRunner(model.model.decoder, attention, model.model.device)
        self._known: dict[tuple[int, ...], Tensor] = {}

    def logits(self, text: Sequence[int]) -> Tensor:
        """Of every position, [N, vocabulary]."""
        key = tuple(text)
        if key not in self._known:
            self._known[key] = self._runner.logits(text)
        return self._known[key]

    def next(self, text: Sequence[int]) -> list[float]:
        """Logits of the token after a text."""
        logits: list[float] = self.logits(text)[-1].tolist()
        return logits


def bound(oracle: Oracle, exact: Oracle, text: Sequence[int], rows: int) -> float:
    """How far the last logits of a text may be from the oracle's: far nearer than to those of an exact cache.

    Whether a number lies above or below the middle of two steps is up to rounding too, and one that falls the other way
    makes a small part of what is lost in all.
    """
    return 2e-4 + 0.1 * float((exact.logits(text)[-rows:] - oracle.logits(text)[-rows:]).abs().max())


def same(oracle: Oracle, exact: Oracle, text: Sequence[int], logits: Tensor, what: object = "") -> None:
    """The last logits of a text, [N, vocabulary], are the oracle's."""
    off = float((logits - oracle.logits(text)[-len(logits) :]).abs().max())
    assert off <= bound(oracle, exact, text, len(logits)), f"{what}: off by {off:.2g}"


def stepped_on(engine: Engine, tokens: Sequence[int], pinned: Spans = ()) -> SteppedCache:
    """A cache that begins with what is held of `tokens` already."""
    runner = engine.parts.runner
    assert isinstance(runner, Runner)
    sequence = engine.manager.open(tokens, engine.parts.namespace(None, pinned), pinned)
    return SteppedCache(runner, engine.config, engine.parts.max_context, sequence)


@functools.cache
def exact_oracle(arch: str, retention: str) -> Oracle:
    return Oracle(tiny(arch), CacheConfig(**RETENTION[retention]), PINNED.get(retention, ()), lossy=False)


def block_bytes(model: Tiny, keys: str, values: str, size: int) -> tuple[int, int]:
    """Bytes that one layer's full block takes, and one that is not full, worked out from what the codecs promise."""
    heads, width = model.model.config.num_kv_heads, model.model.config.head_dim
    bits = {"exact": 32, "fp16": 16, "bf16": 16, "int8": 8, "int4": 4, "int2": 2}
    packs = any(codec.startswith("int") for codec in (keys, values))
    groups = width // max(count for count in range(1, 33) if width % count == 0)
    full = opened = 0
    for codec, by_channel in ((keys, not keys.endswith("-token")), (values, False)):
        name = codec.removesuffix("-token")
        full += size * width * bits[name] // 8
        if name.startswith("int"):  # a scale and a minimum in fp16
            full += 4 * (width if by_channel else size * groups)
        opened += size * width * bits["exact" if name.startswith("int") else name] // 8
    return heads * full, heads * opened if packs else heads * full


def bytes_needed(c: Combination, length: int) -> int:
    """Bytes of all blocks that some later query of a text of `length` tokens sees, and of the one that it fills."""
    full, opened = block_bytes(tiny(c.arch), c.keys, c.values, c.block_size)
    total = 0
    for layer in tiny(c.arch).model.config.layers:
        given = RETENTION[c.retention].get("window")
        options = RETENTION[c.retention] if layer.window is None else {}
        runs = ((0, options.get("sink_tokens", 0)), *options.get("global_tokens", ()), *(c.pinned if options else ()))
        kept = {p for run in runs for p in range(*run)}
        window = min(w for w in (layer.window, given, length + 1) if w is not None)
        seen = {p // c.block_size for p in range(length) if p > length - window or p in kept}
        seen.discard(length // c.block_size)
        total += len(seen) * full + (length % c.block_size > 0) * opened
    return total
