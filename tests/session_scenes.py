"""Policies to hold sessions to, sessions of tiny models, and what a cold engine makes of the same texts."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvine import LLM, CacheConfig, SamplingParams
from kvine.hub import ModelSource
from kvine.session import Session

BLOCK = 4
BLOCKS = CacheConfig(block_size=BLOCK)
ELEMENTS = {
    "exact": BLOCKS,
    "fp16": replace(BLOCKS, kv_dtype="fp16"),
    "bf16/fp32": replace(BLOCKS, kv_dtype="bf16/fp32"),
}
PACKED = {
    name: replace(BLOCKS, kv_dtype=name) for name in ("int8", "int4", "int2", "k8v4", "int4-token/int8", "int8/exact")
}
WINDOWS = {
    "window": replace(BLOCKS, window=8),
    "sinks": replace(BLOCKS, window=8, sink_tokens=5),
    "global": replace(BLOCKS, window=8, sink_tokens=2, global_tokens=((6, 10), (17, 18))),
    "moved sinks": replace(BLOCKS, window=9, sink_tokens=4, sink_rule="in_cache"),
    "window, bf16": replace(BLOCKS, window=7, kv_dtype="bf16"),
    "window, int8": replace(BLOCKS, window=8, kv_dtype="int8"),
    "moved sinks, k8v4": replace(BLOCKS, window=9, sink_tokens=4, sink_rule="in_cache", kv_dtype="k8v4"),
}
POLICIES = ELEMENTS | PACKED | WINDOWS
TEXT = [5 + (7 * i * i + 3 * i) % 120 for i in range(200)]  # ids without a period


def greedy(count: int) -> SamplingParams:
    return SamplingParams(max_tokens=count, ignore_eos=True)


def open_llm(folder: Path, cache: CacheConfig = BLOCKS, **options: Any) -> LLM:
    source = ModelSource("tiny", folder, "safetensors", None)
    return LLM(source, device="cpu", threads=1, cache=cache, **{"dtype": "fp32", **options})


class Cold:
    """What engines answer that hold nothing of any earlier text."""

    def __init__(self, folder: Path, cache: CacheConfig, **options: Any) -> None:
        self._llm = open_llm(folder, replace(cache, prefix_caching=False), **options)

    def __call__(self, tokens: list[int], count: int = 6) -> list[int]:
        return self._llm.generate(tokens, greedy(count)).token_ids


@contextmanager
def computed(llm: LLM) -> Iterator[list[tuple[int, int]]]:
    """The stretches of tokens, first and one after the last, that are fed meanwhile, in order."""
    fed: list[tuple[int, int]] = []
    llm.trace(lambda call: fed.extend(call.positions))
    yield fed
    llm.trace(None)


def count(fed: list[tuple[int, int]]) -> int:
    return sum(end - start for start, end in fed)


def continues_like(session: Session, cold: Cold, num_tokens: int = 6) -> None:
    """Whether a session goes on as an engine does that has never seen its text; it stays as it was."""
    before = session.tokens
    with session.fork() as fork:
        assert fork.generate(greedy(num_tokens)).token_ids == cold(before, num_tokens)
    assert session.tokens == before
    session._llm.engine.manager.check()
