"""A cache of its own for each policy, read into as a generation reads: in chunks, then a token at a time.

Each policy's engine parts are the ones that serve users; what is measured of them is what they really hold and take.
"""

import time
from collections.abc import Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from statistics import median
from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor

from kvine.cache.spec import CacheSpec
from kvine.config import CacheConfig
from kvine.engine.build import DTYPE_NAMES, standard_parts
from kvine.engine.runner import Runner
from kvine.engine.stepped import SteppedCache
from kvine.evidence.experiments.trial import synchronize
from kvine.models.cache_specs import cache_specs

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvine.llm import LLM
    from kvine.models.decoder import Observer
    from kvine.models.load import LoadedModel

CHUNK = 128  # tokens in one model call, whose logits are held at once


class Reader:
    """One policy's cache, which reads texts one after the other. Use it in a `with`, so that it gives its memory back.

    Args:
        llm: the model; how its own cache is kept does not matter here.
        cache: the policy.
        length: most tokens that are read from empty.
        endless: whether it may go beyond the model's context.

    Attributes:
        specs: of its layer groups.
        backends: that compute their attention.
        end_bytes: of K and V held when the longest text so far had been read.
        peak_bytes: the most held at any time, in the middle of a model call too.
        times_ms: of model calls of a single token.
    """

    def __init__(self, llm: "LLM", cache: CacheConfig, length: int, *, endless: bool = False) -> None:
        self._llm = llm
        self._engine = replace(llm.engine_config, max_step_tokens=CHUNK)
        budget = memory_needed(llm.model, cache, length)
        parts = standard_parts(
            llm.model,
            replace(cache, prefix_caching=False, kv_memory=budget),
            self._engine,
            vocab_size=llm.tokenizer.vocab_size,
            eos_ids=(),
        )
        assert isinstance(parts.runner, Runner)
        self._runner = parts.runner
        self.specs: tuple[CacheSpec, ...] = parts.manager.specs
        self.backends = tuple(backend.name for backend in self._runner.attention.backends)
        self.max_context = None if endless else parts.max_context
        self.end_bytes = self.peak_bytes = 0
        self.times_ms: list[float] = []
        self._longest = 0
        self.cache = self._empty()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.cache.close()

    @property
    def step_ms(self) -> float | None:
        """Median of the timed model calls, the first left out where there are more: it is the one that warms up."""
        timed = self.times_ms[1:] or self.times_ms
        return median(timed) if timed else None

    def begin(self) -> None:
        """Forgets what has been read."""
        self.cache.close()
        self.cache = self._empty()

    def read(self, ids: Sequence[int], *, last: bool = False, observer: "Observer | None" = None) -> Tensor:
        """Logits of some more tokens, [n, vocabulary] fp32, or of the last one; at most `CHUNK` of them at once."""
        with self._watched(_Peak(self, observer)) if len(ids) > 1 or observer else nullcontext():
            logits = self.cache.extend(ids, last=last)[0]
        self._count()
        return logits

    def step(self, token_id: int) -> Tensor:
        """Logits [1, vocabulary] after one more token, timed as a decode step."""
        synchronize(self._llm.model.device)
        began = time.perf_counter()
        logits = self.cache.extend([token_id], last=True)[0]
        synchronize(self._llm.model.device)
        self.times_ms.append((time.perf_counter() - began) * 1e3)
        self._count()
        return logits

    def _count(self) -> None:
        held = self.cache.num_bytes
        self.peak_bytes = max(self.peak_bytes, held)
        if len(self.cache) >= self._longest:
            self._longest, self.end_bytes = len(self.cache), held

    def _empty(self) -> SteppedCache:
        return SteppedCache(self._runner, self._engine, self.max_context)

    @contextmanager
    def _watched(self, observer: "Observer") -> "Iterator[None]":
        self._runner.observer = observer
        try:
            yield
        finally:
            self._runner.observer = None


class _Peak:
    """Looks at the cache while a model call runs, when it holds most, and hands on to another observer."""

    def __init__(self, reader: Reader, then: "Observer | None") -> None:
        self._reader = reader
        self._then = then

    def __call__(self, name: str, layer: int, tensor: Tensor) -> None:
        if name == "embedding":
            self._reader.peak_bytes = max(self._reader.peak_bytes, self._reader.cache.num_bytes)
        if self._then is not None:
            self._then(name, layer, tensor)


def memory_needed(model: "LoadedModel", cache: CacheConfig, length: int) -> int:
    """Bytes of K and V that are enough to read so many tokens in chunks: what a policy's cache is given."""
    dtype = DTYPE_NAMES[model.dtype]
    needed = 0
    for spec in cache_specs(model.config, cache):
        opened = replace(spec, key_codec="exact", value_codec="exact").bytes_per_block(dtype)  # until they are packed
        needed += spec.max_live_blocks(length, CHUNK) * spec.bytes_per_block(dtype)
        needed += (CHUNK // spec.block_size + 2) * opened
    return needed


@torch.inference_mode()
def read_all(reader: Reader, ids: Sequence[int]) -> Tensor:
    """Reads a text of any length in chunks; logits of its last token, [vocabulary]."""
    logits = None
    for start in range(0, len(ids), CHUNK):
        logits = reader.read(ids[start : start + CHUNK], last=True)
    assert logits is not None
    return logits[-1]
