"""`experiment cache --grow`: how work and time grow with prompt and output, with a cache and without one.

Counted exponents say what has to be done, timed ones what a machine makes of it; where they part is worth a look.
"""

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Literal

from kvine.engine.build import DTYPE_NAMES
from kvine.errors import ContextLengthError, RequestError
from kvine.evidence.experiments.cache import PATHS, Row
from kvine.evidence.experiments.counts import Balance, Counter, Work
from kvine.evidence.experiments.fits import PowerFit, fit_power
from kvine.evidence.experiments.trial import LogitsMode, Path, Trial, generate, synchronize
from kvine.evidence.progress import Progress, silent
from kvine.evidence.prompts import DEFAULT_PROMPT
from kvine.llm import LLM
from kvine.models.packing import count_packings

Grow = Literal["prompt", "output"]
Per = Literal["step", "total"]
What = Literal["time", "pairs", "flops", "bytes"]
NEW_TOKENS = 5  # after a growing prompt: the first token, and four steps to take a median of
RECENT_STEPS = 8  # of a growing output, whose median is the time of a step at this length

# What grows in the limit of long texts: pairs of a step go with n² without a cache and with n with one, so those of
# all steps of a growing output with n³ and n². After a growing prompt there is a fixed number of steps, and with a
# cache its first reading rules.
THEORY: dict[tuple[Grow, Per, Path], float] = {
    ("prompt", "step", "cache-free"): 2,
    ("prompt", "step", "cached"): 1,
    ("prompt", "total", "cache-free"): 2,
    ("prompt", "total", "cached"): 2,
    ("output", "step", "cache-free"): 2,
    ("output", "step", "cached"): 1,
    ("output", "total", "cache-free"): 3,
    ("output", "total", "cached"): 2,
}
BYTES_THEORY: dict[tuple[Grow, Per], float] = {
    ("prompt", "step"): 1,
    ("prompt", "total"): 1,
    ("output", "step"): 1,
    ("output", "total"): 2,
}
# Generates, and returns the seconds from the prompt to each token; told of each token.
Stamps = Callable[[LLM, Trial, Callable[[int], None]], list[float]]


@dataclass(frozen=True)
class Point:
    """One size of what grows, by one path.

    Attributes:
        path: cached, or cache-free.
        size: tokens of the prompt, or of the output.
        length: tokens of the text that the last step reads; what the fits are over.
        step_ms: median time of the last steps.
        first_ms, decode_ms, total_ms: until the first token, for each further one on average, and in all.
        step, total: the work of the last step, and of all of them.
    """

    path: Path
    size: int
    length: int
    step_ms: float
    first_ms: float
    decode_ms: float
    total_ms: float
    step: Work
    total: Work


@dataclass(frozen=True)
class Fit:
    """The power law of one quantity over the text's length, and the exponent that theory gives it for long texts."""

    path: Path
    per: Per
    what: What
    law: PowerFit
    theory: float


@dataclass(frozen=True)
class Curve:
    """One thing that grows: `prompt` with `fixed` new tokens, or `output` after a prompt of `fixed` tokens."""

    grow: Grow
    fixed: int
    points: tuple[Point, ...]
    fits: tuple[Fit, ...]

    def of(self, path: Path) -> list[Point]:
        """One path's points, shortest first."""
        return [point for point in self.points if point.path == path]


@dataclass(frozen=True)
class Curves:
    """What came of it.

    `heads` are the query heads of all layers: pairs divided by it are those of one head. `packings` says how many
    weights were packed, by type.
    """

    model: str
    dtype: str
    device: str
    repeats: int
    logits: LogitsMode
    heads: int
    curves: tuple[Curve, ...]
    balance: Balance
    packings: Mapping[str, int] = field(default_factory=dict)

    @property
    def rows(self) -> tuple[Row, ...]:
        """The longest text of the last curve, as `experiment cache` reports it; memory is not measured here."""
        points = [self.curves[-1].of(path)[-1] for path in PATHS]
        return tuple(Row(p.path, self.logits, p.total_ms, p.first_ms, p.decode_ms, None, None) for p in points)

    @property
    def speedup(self) -> float:
        """How many times faster the cached path is on that text."""
        free, cached = self.rows
        return free.total_ms / cached.total_ms


def run_curves(
    llm: LLM,
    grows: Sequence[Grow],
    *,
    prompt_sizes: Sequence[int],
    output_sizes: Sequence[int],
    repeats: int = 3,
    logits: LogitsMode = "all",
    progress: Progress = silent,
    stamps: Stamps | None = None,
) -> Curves:
    """Measures and counts both paths over growing prompts, growing outputs, or both.

    Args:
        llm: the model.
        grows: what grows.
        prompt_sizes: tokens of the prompts; each is followed by a few new ones.
        output_sizes: tokens of the outputs after a prompt of one token.
        repeats: of each measurement; medians count.
        logits: which of a call's logits are computed.
        progress: told of every token.
        stamps: measures one generation.

    Raises:
        RequestError: for sizes below 1 (outputs: 2), fewer than two of them, or repeats below 1.
        ContextLengthError: for a size that the model's context does not hold.
    """
    lengths = {"prompt": sorted(set(prompt_sizes)), "output": sorted(set(output_sizes))}
    if repeats < 1:
        raise RequestError("An experiment needs at least 1 repeat.")
    for grow in grows:
        _check_sizes(grow, lengths[grow], llm.model.config.max_context)
    dtype = DTYPE_NAMES[llm.model.dtype]
    counter = Counter(llm.model.config, llm.parts.manager.specs, dtype, logits == "all", llm.model.packings)
    bench = _Bench(llm, counter, repeats, logits, progress, stamps or generation_stamps)
    bench.warm_up()
    return Curves(
        llm.source.name,
        dtype,
        str(llm.model.device),
        repeats,
        logits,
        llm.model.config.num_layers * llm.model.config.num_heads,
        tuple(_curve(bench, grow, lengths[grow]) for grow in grows),
        Balance.of(counter),
        count_packings(llm.model.packings),
    )


def _check_sizes(grow: Grow, sizes: Sequence[int], context: int) -> None:
    least = 1 if grow == "prompt" else 2  # an output of one token has no step with a cache
    if len(sizes) < 2 or sizes[0] < least:
        raise RequestError(f"A curve needs at least 2 different {grow} sizes of {least} or more.")
    longest = sizes[-1] + (NEW_TOKENS if grow == "prompt" else 1)
    if longest > context:
        raise ContextLengthError(
            f"A {grow} of {sizes[-1]} tokens makes a text of {longest}, and the model's context is {context}: choose "
            "smaller sizes."
        )


def generation_stamps(llm: LLM, trial: Trial, on_token: Callable[[int], None]) -> list[float]:
    """Seconds from the prompt to each token of one generation in this process."""
    times: list[float] = []

    def stamp(done: int) -> None:
        synchronize(llm.model.device)
        times.append(time.perf_counter())
        on_token(done)

    synchronize(llm.model.device)
    began = time.perf_counter()
    generate(llm, trial, stamp)
    return [moment - began for moment in times]


@dataclass(frozen=True)
class _Bench:
    llm: LLM
    counter: Counter
    repeats: int
    logits: LogitsMode
    progress: Progress
    stamps: Stamps

    def warm_up(self) -> None:
        """The first calls of a process are slower than all others."""
        for path in PATHS:
            self.stamps(self.llm, self._trial(path, 8, 2), lambda done: None)

    def times(self, grow: Grow, path: Path, prompt: int, new: int) -> list[list[float]]:
        """Milliseconds from the prompt to each token, for each repeat."""
        several = []
        for repeat in range(1, self.repeats + 1):
            what = f"{path}, {grow} of {prompt if grow == 'prompt' else new}, {repeat} of {self.repeats}"
            self.progress(what, 0, new)
            told = partial(self.progress, what, total=new)
            stamps = self.stamps(self.llm, self._trial(path, prompt, new), told)
            several.append([stamp * 1e3 for stamp in stamps])
        return several

    def point(self, grow: Grow, path: Path, prompt: int, new: int, times: Sequence[Sequence[float]]) -> Point:
        """One size, from generations of at least `new` tokens."""
        recent = min(RECENT_STEPS, new - 1, max(1, new // 2) if grow == "output" else new)
        steps = [run[i] - run[i - 1] for run in times for i in range(new - recent, new)]
        length, free = prompt + new - 1, path == "cache-free"
        first = median(run[0] for run in times)
        return Point(
            path,
            prompt if grow == "prompt" else new,
            length,
            median(steps),
            first,
            median((run[new - 1] - run[0]) / (new - 1) for run in times),
            median(run[new - 1] for run in times),
            self.counter.call(0 if free else length - 1, length),
            (self.counter.cache_free if free else self.counter.cached)(prompt, new),
        )

    def _trial(self, path: Path, prompt: int, new: int) -> Trial:
        ids = self.llm.encode(DEFAULT_PROMPT)
        text = list(itertools.islice(itertools.cycle(ids), prompt))
        return Trial(str(self.llm.source.path), "auto", "auto", None, path, self.logits, text, new)


def _curve(bench: _Bench, grow: Grow, sizes: Sequence[int]) -> Curve:
    points = []
    for path in PATHS:
        if grow == "output":  # the shorter outputs are the beginning of the longest
            times = bench.times(grow, path, 1, sizes[-1])
            points += [bench.point(grow, path, 1, size, times) for size in sizes]
        else:
            points += [
                bench.point(grow, path, size, NEW_TOKENS, bench.times(grow, path, size, NEW_TOKENS)) for size in sizes
            ]
    fits = [fit for path in PATHS for fit in _fits(grow, path, [point for point in points if point.path == path])]
    return Curve(grow, NEW_TOKENS if grow == "prompt" else 1, tuple(points), tuple(fits))


def _fits(grow: Grow, path: Path, points: Sequence[Point]) -> list[Fit]:
    lengths = [point.length for point in points]
    fits = []
    for per in ("step", "total"):
        works = [point.step if per == "step" else point.total for point in points]
        values: dict[What, list[float]] = {
            "time": [point.step_ms if per == "step" else point.total_ms for point in points],
            "pairs": [work.pairs for work in works],
            "flops": [work.flops for work in works],
            "bytes": [work.bytes for work in works],
        }
        for what, series in values.items():
            theory = BYTES_THEORY[grow, per] if what == "bytes" else THEORY[grow, per, path]
            fits.append(Fit(path, per, what, fit_power(lengths, series), theory))
    return fits
