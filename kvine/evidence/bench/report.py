"""What a bench has come to: rows of figures, each with its floor and with how much it varied."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

from kvine.evidence.bench.floors import Bound
from kvine.evidence.bench.machine import Machine

What = Literal["ready", "prefill", "decode", "batch", "prefix_hit", "peak_memory"]
UNITS: dict[What, str] = {
    "ready": "s",
    "prefill": "s",
    "decode": "ms",
    "batch": "tokens/s",
    "prefix_hit": "ms",
    "peak_memory": "bytes",
}
NOISY = 0.2  # of the median: a figure that varies by more than this says little


@dataclass(frozen=True)
class Row:
    """A figure: the median of its repeats.

    Attributes:
        engine, weights: who, and in what its weights are kept.
        what: see docs/performance.md; `context` is in tokens, `batch` in requests at once.
        value, unit: the figure; times per call (`prefill`, `prefix_hit`), per token (`decode`) or once (`ready`).
        floor: what it could be on this machine, in the same unit: least of a time or a size, most of a rate. None where
            there is no floor.
        bound: whether reading or multiplying sets the floor of a time or a rate.
        low, high: least and most of the repeats.
        repeats: how many there were.
        kvine_ratio: Kvine's figure over this one; None without one of Kvine's, and for Kvine itself.
    """

    engine: str
    weights: str
    what: What
    context: int
    batch: int
    value: float
    unit: str
    floor: float | None
    bound: Bound | None
    low: float
    high: float
    repeats: int = 1
    kvine_ratio: float | None = None

    @property
    def is_rate(self) -> bool:
        """Whether more is better."""
        return self.what == "batch"

    def is_like(self, other: "Row") -> bool:
        """Whether both are of the same thing."""
        return (self.what, self.context, self.batch) == (other.what, other.context, other.batch)

    @property
    def share(self) -> float | None:
        """How near to the floor, 1 being there: floor over value of a time or a size, value over floor of a rate."""
        if self.floor is None:
            return None
        return self.value / self.floor if self.is_rate else self.floor / self.value

    @property
    def spread(self) -> float | None:
        """Most less least of the repeats, over the median; None of a single one."""
        return (self.high - self.low) / self.value if self.repeats > 1 else None

    @property
    def is_noisy(self) -> bool:
        """Whether it varied by more than 20 % of the median."""
        return self.spread is not None and self.spread > NOISY


@dataclass(frozen=True)
class Entrant:
    """An engine that was measured.

    Attributes:
        name, version, weights: what ran.
        model: the file or folder that it read.
        same_tokens: its first greedy tokens that are Kvine's too, of those after the short prompt; None for Kvine.
    """

    name: str
    version: str
    weights: str
    model: str
    same_tokens: int | None


@dataclass(frozen=True)
class Skipped:
    """What was not measured, and why; `what` is None where the whole engine was left out."""

    engine: str
    what: str | None
    reason: str


@dataclass(frozen=True)
class CacheFree:
    """A token of Kvine's with its cache and without: milliseconds, at `context` tokens."""

    context: int
    cached_ms: float
    cache_free_ms: float

    @property
    def speedup(self) -> float:
        """How many times faster the cached one is."""
        return self.cache_free_ms / self.cached_ms


@dataclass(frozen=True)
class Bench:
    """All of it.

    Attributes:
        model, dtype, device: what Kvine ran.
        repeats, tokens: how often, and how many new tokens.
        machine: the rates that floors follow from.
        entrants: the engines, Kvine first.
        rows: by what was measured, and there by engine.
        cache_free: None if it was not asked for.
        skipped: what was not measured.
        compared: whether other engines were asked for.
    """

    model: str
    dtype: str
    device: str
    repeats: int
    tokens: int
    machine: Machine
    entrants: tuple[Entrant, ...]
    rows: tuple[Row, ...]
    cache_free: CacheFree | None
    skipped: tuple[Skipped, ...]
    compared: bool


def row_of(
    engine: str,
    weights: str,
    what: What,
    context: int,
    batch: int,
    figures: Sequence[float],
    *,
    floor: float | None = None,
    bound: Bound | None = None,
) -> Row:
    """The row of several repeats, in the unit that `UNITS` gives."""
    value = median(figures)
    return Row(
        engine,
        weights,
        what,
        context,
        batch,
        value,
        UNITS[what],
        floor,
        bound,
        min(figures),
        max(figures),
        len(figures),
    )
