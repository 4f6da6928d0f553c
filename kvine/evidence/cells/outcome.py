"""What came of a cell, and of all cells together."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvine.evidence.cells.beams import Line, SearchStep
from kvine.evidence.cells.covering import Refusal
from kvine.evidence.cells.oracle import Reference
from kvine.evidence.judge import Rounding, Verdict, judge
from kvine.evidence.locate import Location
from kvine.evidence.paths import Record


@dataclass(frozen=True)
class Cell:
    """What came of one cell.

    Attributes:
        factors: name of its level, by factor.
        verdict: as of a `judge.Run`; of several copies of the text the worst.
        tokens: compared, over all copies.
        agreement: share of them that the reference chose too; None if none was computed.
        gap: largest difference of a logit from the reference's.
        bound: what rounding explains, in logits.
        kl_mean, kl_max: Kullback-Leibler divergence of the cell's distribution from the reference's, in nats, over
            steps.
        location: the first wrong tensor, where it was looked for.
        reason: what failed, or why nothing was computed.
    """

    factors: Mapping[str, str]
    verdict: Verdict
    tokens: int = 0
    agreement: float | None = None
    gap: float | None = None
    bound: float | None = None
    kl_mean: float | None = None
    kl_max: float | None = None
    location: Location | None = None
    reason: str | None = None


@dataclass(frozen=True)
class LevelCount:
    """How many cells had a level, and how many of these show a fault."""

    factor: str
    level: str
    cells: int
    faults: int


@dataclass(frozen=True)
class CellsReport:
    """All cells.

    Attributes:
        cells: in the order they ran.
        pairs: pairs of levels that met in them.
        refused: what was not combined, and why.
        seed: of the design.
        seconds: they took.
    """

    cells: tuple[Cell, ...]
    pairs: int
    refused: tuple[Refusal, ...]
    seed: int
    seconds: float

    @property
    def faults(self) -> tuple[Cell, ...]:
        """Cells that show a fault."""
        return tuple(cell for cell in self.cells if cell.verdict == "fault")

    def by_level(self) -> list[LevelCount]:
        """Cells and faults of each level, factor by factor."""
        cells = Counter(item for cell in self.cells for item in cell.factors.items())
        faults = Counter(item for cell in self.faults for item in cell.factors.items())
        order = list(dict.fromkeys(factor for cell in self.cells for factor in cell.factors))
        return [
            LevelCount(factor, level, count, faults[factor, level])
            for (factor, level), count in sorted(cells.items(), key=lambda item: order.index(item[0][0]))
        ]

    def suspects(self) -> list[LevelCount]:
        """Levels that every faulty cell has in common and that others lack; with all of theirs faulty first."""
        common = [level for level in self.by_level() if level.faults and level.faults == len(self.faults)]
        telling = [level for level in common if level.cells < len(self.cells)]
        return sorted(telling, key=lambda level: level.faults / level.cells, reverse=True)


def judge_cell(factors: Mapping[str, str], records: Sequence[Record], reference: Reference) -> Cell:
    """Compares a cell with its reference.

    Args:
        factors: names of its levels.
        records: what the cell computed, of each copy of the text.
        reference: by the oracle.
    """
    runs = [judge("", record, reference.record, reference.rounding, prompt_tokens=0, piece=str) for record in records]
    order: tuple[Verdict, ...] = ("identical", "rounding", "fault")
    chosen = [
        ours == theirs
        for record in records
        for ours, theirs in zip(record.chosen, reference.record.chosen, strict=True)
    ]
    divergences = torch.cat([divergence(reference.record.logits, record.logits) for record in records])
    return Cell(
        factors,
        max((run.verdict for run in runs), key=order.index),
        tokens=len(chosen),
        agreement=sum(chosen) / len(chosen),
        gap=max(math.inf if run.difference is None else run.difference for run in runs),
        bound=reference.rounding.bound,
        kl_mean=float(divergences.mean()),
        kl_max=float(divergences.max()),
    )


def judge_search(
    factors: Mapping[str, str], steps: Sequence[SearchStep], right: Mapping[Line, Tensor], rounding: Rounding
) -> Cell:
    """Compares a search with brute force, which recomputes the whole text of every beam without a cache.

    Each step is judged by the texts that the search has then, so that a near-tie that went the other way does not hide
    what comes after it.

    Args:
        factors: names of the cell's levels.
        steps: what the search did.
        right: logits [vocabulary] after each of its lines, by the oracle.
        rounding: what it may do to a logit.
    """
    totals: dict[Line, float] = {(): 0.0}  # by the oracle's logits
    gap = short = 0.0
    agreeing = 0
    divergences: list[Tensor] = []
    for number, step in enumerate(steps):
        rows = torch.stack([right[line] for line in step.lines])
        difference = float((step.logits - rows).abs().nan_to_num(nan=math.inf).max())
        gap = max(gap, difference)
        divergences.append(divergence(rows, step.logits))
        sums = rows.double().log_softmax(1) + torch.tensor([[totals[line]] for line in step.lines])  # [lines, vocab]
        best = sums.flatten().topk(len(step.chosen))
        width = rows.shape[1]
        wanted = {(*step.lines[int(i) // width], int(i) % width) for i in best.indices}
        chosen = {line: float(sums[step.lines.index(line[:-1]), line[-1]]) for line in step.chosen}
        agreeing += len(wanted & chosen.keys())
        # Each of two sums may be off by a logit's and a normalization's bound in every step.
        short = max(short, (float(best.values[-1]) - min(chosen.values())) / (4 * (number + 1)))
        totals = chosen
    asked = sum(len(step.chosen) for step in steps)
    within = gap <= rounding.bound and short <= rounding.bound
    reason = None
    if short > rounding.bound:
        reason = f"A beam was left out that is better by {short:.3g} a step than one that was kept."
    kl = torch.cat(divergences)
    return Cell(
        factors,
        "fault" if not within else "identical" if agreeing == asked else "rounding",
        tokens=asked,
        agreement=agreeing / asked,
        gap=gap,
        bound=rounding.bound,
        kl_mean=float(kl.mean()),
        kl_max=float(kl.max()),
        reason=reason,
    )


def divergence(reference: Tensor, other: Tensor) -> Tensor:
    """Kullback-Leibler divergence of `other` from `reference`, logits [n, vocabulary] each, in nats; [n] float64."""
    ours, theirs = reference.double().log_softmax(1), other.double().log_softmax(1)
    return (ours.exp() * (ours - theirs)).sum(1).clamp(min=0)  # rounding may leave it a little below
