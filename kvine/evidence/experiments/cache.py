"""`experiment cache`: what a KV cache saves in time, and what it costs and saves in memory."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Literal

from kvine.errors import RequestError
from kvine.evidence.experiments.trial import LogitsMode, Outcome, Path, Trial, run_trial
from kvine.evidence.progress import Progress, silent
from kvine.hub import ModelSource
from kvine.text.tokenizer import load_tokenizer

PATHS: tuple[Path, ...] = ("cache-free", "cached")
Measure = Callable[[Trial, Callable[[int], None]], Outcome]


@dataclass(frozen=True)
class Row:
    """Medians over the repeats of one path: times in ms as in `Outcome`, memory in bytes.

    `own_bytes` is the median of what the generation itself took: its peak less what was taken before the prompt.
    """

    path: Path
    logits: LogitsMode
    total_ms: float
    prefill_ms: float
    decode_ms: float
    peak_bytes: int | None
    own_bytes: int | None


@dataclass(frozen=True)
class CacheExperiment:
    """What came of it.

    Attributes:
        model, dtype, device: what was measured.
        prompt_tokens, new_tokens, repeats: how.
        rows: cache-free then cached, for each mode of logits.
        same_tokens: whether all trials generated the same tokens.
        packings: how many weights were packed, by type.
    """

    model: str
    dtype: str
    device: str
    prompt_tokens: int
    new_tokens: int
    repeats: int
    rows: tuple[Row, ...]
    same_tokens: bool
    packings: Mapping[str, int] = field(default_factory=dict)

    def row(self, path: Path, logits: LogitsMode) -> Row:
        """The row of one path and mode; KeyError if it was not measured."""
        return {(row.path, row.logits): row for row in self.rows}[path, logits]

    @property
    def modes(self) -> tuple[LogitsMode, ...]:
        """The modes of logits that were measured."""
        return tuple(dict.fromkeys(row.logits for row in self.rows))

    def speedup(self, logits: LogitsMode) -> float:
        """How many times faster the cached path is."""
        return self.row("cache-free", logits).total_ms / self.row("cached", logits).total_ms


def run_cache_experiment(
    source: ModelSource,
    *,
    prompt: str,
    new_tokens: int = 64,
    repeats: int = 3,
    logits: Literal["all", "last", "both"] = "all",
    dtype: str = "auto",
    device: str = "auto",
    weights: str = "auto",
    threads: int | None = None,
    progress: Progress = silent,
    measure: Measure = run_trial,
) -> CacheExperiment:
    """Generates greedily with and without a cache, each time in a process of its own, the paths taking turns.

    Args:
        source: the model.
        prompt: read first by both.
        new_tokens: to generate, end of text or not.
        repeats: of each path.
        logits: which of a call's logits are computed; `both` measures either.
        dtype, device, weights, threads: as `LLM` takes them.
        progress: told of every token.
        measure: carries out one trial.

    Raises:
        RequestError: for numbers below 1.
        KvineError: what a trial reports.
    """
    if new_tokens < 1 or repeats < 1:
        raise RequestError("An experiment needs at least 1 token and 1 repeat.")
    prompt_ids = load_tokenizer(source).encode(prompt)
    modes: tuple[LogitsMode, ...] = ("all", "last") if logits == "both" else (logits,)
    trials = [
        Trial(str(source.path), dtype, device, threads, path, mode, prompt_ids, new_tokens, weights)
        for mode in modes
        for path in PATHS
    ]
    outcomes: dict[tuple[Path, LogitsMode], list[Outcome]] = {(trial.path, trial.logits): [] for trial in trials}
    for repeat in range(1, repeats + 1):
        for trial in trials:
            what = f"{trial.path}, {trial.logits} logits, {repeat} of {repeats}"
            progress(what, 0, new_tokens)
            outcome = measure(trial, lambda done, what=what: progress(what, done, new_tokens))  # type: ignore[misc]
            outcomes[trial.path, trial.logits].append(outcome)
    every = [outcome for several in outcomes.values() for outcome in several]
    return CacheExperiment(
        source.name,
        every[0].dtype,
        every[0].device,
        len(prompt_ids),
        new_tokens,
        repeats,
        tuple(_row(path, mode, several) for (path, mode), several in outcomes.items()),
        all(outcome.token_ids == every[0].token_ids for outcome in every),
        every[0].packings,
    )


def memory_sentence(experiment: CacheExperiment) -> str | None:
    """What the measured peaks say, in a sentence; None where memory could not be measured."""
    parts = []
    for mode in experiment.modes:
        free, cached = experiment.row("cache-free", mode).own_bytes, experiment.row("cached", mode).own_bytes
        if free is None or cached is None:
            return None
        more, less, difference = ("the cache-free", "the cached", free - cached)
        if difference < 0:
            more, less, difference = less, more, -difference
        kept = (
            "the logits of all positions are kept" if mode == "all" else "only the last position's logits are computed"
        )
        parts.append(f"where {kept}, {more} path needs {difference / 1e6:,.1f} MB more than {less} one")
    sentence = "; ".join(parts)
    return f"Beside the weights, {sentence}."


def _row(path: Path, mode: LogitsMode, outcomes: list[Outcome]) -> Row:
    peaks = [outcome.peak_bytes for outcome in outcomes if outcome.peak_bytes is not None]
    own = [
        outcome.peak_bytes - outcome.start_bytes
        for outcome in outcomes
        if outcome.peak_bytes is not None and outcome.start_bytes is not None
    ]
    return Row(
        path,
        mode,
        median(outcome.total_ms for outcome in outcomes),
        median(outcome.prefill_ms for outcome in outcomes),
        median(outcome.decode_ms for outcome in outcomes),
        int(median(peaks)) if peaks else None,
        int(median(own)) if own else None,
    )
