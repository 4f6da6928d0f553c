"""What a step takes at least on this machine: the bytes that it must read, and the products that it must compute.

A floor is the longer of the two, for both may go on at once; docs/performance.md has the formulas.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from kvine.cache.spec import CacheSpec
from kvine.evidence.bench.machine import Machine
from kvine.evidence.experiments.counts import Counter, Work
from kvine.models.config import ModelConfig

Bound = Literal["read", "matrix"]


@dataclass(frozen=True)
class Floor:
    """A least time in seconds, and what sets it: reading memory, or multiplying."""

    seconds: float
    bound: Bound


@dataclass(frozen=True)
class Floors:
    """The floors of one engine.

    Attributes:
        machine: its rates.
        model: whose arithmetic is counted.
        specs: which K and V a query reads.
        kv_dtype: that K and V are kept in, `fp32`, `bf16` or `fp16`.
        step_bytes: of the weights that a call reads, as this engine keeps them.
        held_bytes: of all its weights.
    """

    machine: Machine
    model: ModelConfig
    specs: tuple[CacheSpec, ...]
    kv_dtype: str
    step_bytes: int
    held_bytes: int

    def prefill(self, context: int) -> Floor:
        """Reading `context` tokens of prompt, up to the first token."""
        return self._of([(1, self._counter.call(0, context))])

    def decode(self, context: int, tokens: int) -> Floor:
        """One of the tokens after the first, on average, of `tokens` generated after `context` ones."""
        steps = max(1, tokens - 1)
        whole = self._of((1, self._counter.call(n - 1, n)) for n in range(context + 1, context + steps + 1))
        return Floor(whole.seconds / steps, whole.bound)

    def batch(self, requests: int, context: int, tokens: int) -> Floor:
        """All of `requests` prompts of `context` tokens at once, and `tokens` for each."""
        steps = (self._counter.call(n - 1, n) for n in range(context + 1, context + tokens))
        return self._of((requests, work) for work in (self._counter.call(0, context), *steps))

    def prefix_hit(self, context: int) -> Floor:
        """The first token where all of the prompt but its last token is cached."""
        return self._of([(1, self._counter.call(context - 1, context))])

    def memory(self, context: int) -> int:
        """Bytes of the weights, and of K and V of one text."""
        return self.held_bytes + self._counter.call(context - 1, context).kv_bytes

    @property
    def _counter(self) -> Counter:
        return Counter(self.model, self.specs, self.kv_dtype)

    def _of(self, calls: Iterable[tuple[int, Work]]) -> Floor:
        """Of calls one after the other, of so many texts alike: weights are read once a call, K and V once a text."""
        reading = computing = total = 0.0
        for texts, work in calls:
            read = (self.step_bytes + texts * work.kv_bytes) / self.machine.read_bytes_per_s
            compute = texts * work.flops / self.machine.flops_per_s
            reading, computing, total = reading + read, computing + compute, total + max(read, compute)
        return Floor(total, "read" if reading >= computing else "matrix")
