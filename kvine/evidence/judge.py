"""What a difference between two paths means: rounding, by a bound that is measured, or a fault."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from kvine.engine.build import DTYPE_NAMES
from kvine.evidence.paths import Record

if TYPE_CHECKING:
    from kvine.evidence.cells.outcome import CellsReport

Verdict = Literal["reference", "identical", "rounding", "fault", "not run"]

# Two right ways of computing the same thing differ by chance, and a few steps show only some of it.
MARGIN = 4.0
LAST_PLACES = 4.0  # units of the largest logit that may always differ
# No rounding of a right computation moves logits further, as a share of their range: a larger measure is a fault too.
LARGEST_SHARE = {"fp32": 1e-3, "fp16": 2e-2, "bf16": 1e-1}
PACKED_SHARE = LARGEST_SHARE["bf16"]  # of packed weights, in every dtype: they are multiplied with numbers of 8 bits


@dataclass(frozen=True)
class Candidate:
    """One of two tokens that a step had to choose from; its logits are NaN where a path computed NaN."""

    token_id: int
    text: str
    reference_logit: float
    path_logit: float


@dataclass(frozen=True)
class Divergence:
    """The first step at which a path chose another token than the reference.

    Attributes:
        step: tokens generated before it.
        position: of the chosen token in the text, from 0.
        candidates: the reference's token, then the path's.
        gap: by how much the reference preferred its own, in logits.
        bound: of the difference of two logits, twice that of one.
        verdict: `rounding` if the gap is within the bound and the whole path within its own, otherwise `fault`.
    """

    step: int
    position: int
    candidates: tuple[Candidate, Candidate]
    gap: float
    bound: float
    verdict: Verdict


@dataclass(frozen=True)
class Run:
    """What came of one path in one dtype.

    Attributes:
        path, dtype: which.
        verdict: `identical`: all tokens are the reference's, and all logits within the bound; `rounding`: all logits
            are, but a near-tie went the other way; `fault`: not; `not run`: see `reason`.
        tokens: generated.
        matching: of them equal to the reference's before the first that is not.
        difference: largest difference of a logit from the reference's, over all steps.
        difference_step: where it was.
        bound: what rounding explains, in logits.
        first_divergence: None if all tokens are the reference's.
        reason: why it was not run, or what failed.
    """

    path: str
    dtype: str
    verdict: Verdict
    tokens: int = 0
    matching: int = 0
    difference: float | None = None
    difference_step: int | None = None
    bound: float | None = None
    first_divergence: Divergence | None = None
    reason: str | None = None

    @property
    def identical(self) -> bool | None:
        """Whether all tokens are the reference's; None if it was not run."""
        return None if self.verdict == "not run" else self.tokens > 0 and self.matching == self.tokens


@dataclass(frozen=True)
class Rounding:
    """How far apart two right computations were, in logits.

    Attributes:
        dtype: in which.
        measured: largest difference between the reference and what else is right: the rows cut in another way, and for
            another library angles in fp32.
        logit_range: largest less smallest logit of the reference.
        bound: `MARGIN` times measured, but never more than the limit.
        limit: what no rounding exceeds; by default `LARGEST_SHARE` of the range.
    """

    dtype: str
    measured: float
    logit_range: float
    bound: float
    limit: float


@dataclass(frozen=True)
class Report:
    """All runs, what they were judged by, and all cells; what was not asked for is empty or None.

    `packings` says for each dtype how many weights were packed to what; no others are.
    """

    model: str
    prompt_tokens: int
    runs: tuple[Run, ...]
    rounding: tuple[Rounding, ...]
    cells: "CellsReport | None" = None
    packings: Mapping[str, Mapping[str, int]] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether neither a run nor a cell shows a fault."""
        return all(run.verdict != "fault" for run in self.runs) and not (self.cells and self.cells.faults)


def measure_rounding(
    dtype: torch.dtype, reference: Record, *controls: Tensor, largest_share: float | None = None
) -> Rounding:
    """The bound for one dtype.

    Args:
        dtype: that both were computed in.
        reference: the cache-free path.
        controls: [n, vocabulary] each, the same logits computed rightly in another way.
        largest_share: of the logits' range, beyond which no rounding goes; None: that of the dtype.
    """
    name = DTYPE_NAMES[dtype]
    measured = max(_largest((reference.logits - control).abs())[0] for control in controls)
    logit_range = float(reference.logits.max() - reference.logits.min())
    # Where both happen to agree to the last bit, the last bits of the largest logit are still open.
    last_place = LAST_PLACES * float(reference.logits.abs().max()) * torch.finfo(dtype).eps
    limit = (LARGEST_SHARE[name] if largest_share is None else largest_share) * logit_range
    return Rounding(name, measured, logit_range, min(max(MARGIN * measured, last_place), limit), limit)


def judge_reference(path: str, reference: Record, rounding: Rounding) -> Run:
    """The reference's own run: at fault if rounding cannot explain how far it is from its control."""
    count = len(reference.chosen)
    if rounding.measured <= rounding.limit:
        return Run(path, rounding.dtype, "reference", count, count)
    return Run(
        path,
        rounding.dtype,
        "fault",
        count,
        count,
        difference=rounding.measured,
        reason=f"Cut into rows in another way, it computes logits that differ by {rounding.measured:.3g} "
        f"of a range of {rounding.logit_range:.3g}: no rounding does that.",
    )


def judge(
    path: str,
    record: Record,
    reference: Record,
    rounding: Rounding,
    *,
    prompt_tokens: int,
    piece: Callable[[int], str],
) -> Run:
    """Compares a path with the reference, step by step.

    Args:
        path: its name.
        record: what it computed, held to the reference's text.
        reference: the cache-free path.
        rounding: of this dtype.
        prompt_tokens: length of the prompt.
        piece: shows a token.
    """
    difference, step = _largest((record.logits - reference.logits).abs())
    within = difference <= rounding.bound  # false for NaN
    first = next(
        (i for i, pair in enumerate(zip(reference.chosen, record.chosen, strict=True)) if len({*pair}) > 1), None
    )
    divergence = None
    if first is not None:
        ours, theirs = (
            Candidate(token, piece(token), float(reference.logits[first, token]), float(record.logits[first, token]))
            for token in (reference.chosen[first], record.chosen[first])
        )
        gap, bound = ours.reference_logit - theirs.reference_logit, 2 * rounding.bound
        verdict: Verdict = "rounding" if within and gap <= bound else "fault"
        divergence = Divergence(first, prompt_tokens + first, (ours, theirs), gap, bound, verdict)
    return Run(
        path,
        rounding.dtype,
        "fault" if not within else "identical" if divergence is None else divergence.verdict,
        len(record.chosen),
        len(record.chosen) if first is None else first,
        difference,
        step,
        rounding.bound,
        divergence,
    )


def _largest(differences: Tensor) -> tuple[float, int]:
    """The largest of [n, vocabulary] differences, NaN counting as infinite, and the step it is at."""
    of_steps = differences.nan_to_num(nan=math.inf, posinf=math.inf).amax(1)
    return float(of_steps.max()), int(of_steps.argmax())
