"""Beam search over log-probabilities: which lines go on, which have ended, and when nothing better can come.

The rules are those of transformers' `generate(num_beams=...)`, so that both give the same texts. Knows no cache.
"""

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kvine.errors import StepError
from kvine.sampling.processors import ban, most_likely

EarlyStopping = bool | Literal["never"]


@dataclass(frozen=True)
class Hypothesis:
    """A finished line.

    Attributes:
        token_ids: what it generated, the token that ended it included.
        score: the sum of its tokens' log-probabilities, divided by their number to the power of the length penalty.
        ended: whether a token that ends a text has ended it, rather than the limit.
    """

    token_ids: tuple[int, ...]
    score: float
    ended: bool


@dataclass(frozen=True)
class Continuation:
    """A line that goes on: the line it continues, by its place among the present ones, and its next token."""

    parent: int
    token_id: int


@dataclass(frozen=True)
class _Candidate:
    parent: int
    token_id: int
    total: float  # sum of log-probabilities


class BeamSearch:
    """One prompt's beams. Starts with a single line that has generated nothing.

    Args:
        num_beams: lines kept, and hypotheses returned; fewer only where the vocabulary has not as many continuations.
        length_penalty: power of a hypothesis's length by which its sum of log-probabilities is divided; above 0 it
            favours long texts, since the sums are negative.
        early_stopping: True ends when there are num_beams hypotheses. False ends when the best line, at its present
            length, could not beat the worst of them. `never` ends when no line could at any length up to the limit.
        end_ids: tokens that end a line.
        max_length: tokens at which a line ends in any case.
        min_length: tokens before which no line may end by a token.
    """

    def __init__(
        self,
        num_beams: int,
        *,
        length_penalty: float,
        early_stopping: EarlyStopping,
        end_ids: Collection[int],
        max_length: int,
        min_length: int = 0,
    ) -> None:
        self.num_beams = num_beams
        self.length_penalty = length_penalty
        self.early_stopping = early_stopping
        self.end_ids = frozenset(end_ids)
        self.max_length = max_length
        self.min_length = min_length
        self.finished: list[Hypothesis] = []  # best first
        self._lines: list[tuple[int, ...]] = [()]
        self._totals = [0.0]

    @property
    def num_lines(self) -> int:
        """Lines that go on; each has generated as many tokens as the others."""
        return len(self._lines)

    def advance(self, logits: Tensor) -> list[Continuation]:
        """Takes one step: the best continuations of all lines together become the next lines, or hypotheses.

        Args:
            logits: [num_lines, vocabulary], in the order of the lines.

        Returns:
            The lines from here on, best first; none where the search has ended, with the result in `finished`.

        Raises:
            StepError: if a row has no finite maximum; nothing has changed then.
        """
        if not torch.isfinite(logits.amax(dim=-1)).all():
            raise StepError("The model's logits of a beam have no finite maximum.")
        candidates = self._candidates(logits)
        length = len(self._lines[0]) + 1
        ends = [length >= self.max_length or c.token_id in self.end_ids for c in candidates]
        # Only the best num_beams may end; those behind them are there so that enough lines are left to go on.
        for candidate, end in list(zip(candidates, ends, strict=True))[: self.num_beams]:
            if end:
                self._finish(candidate, length)
        going = [c for c, end in zip(candidates, ends, strict=True) if not end][: self.num_beams]
        if not going or self._is_over(going[0].total, length):
            return []
        self._lines = [(*self._lines[c.parent], c.token_id) for c in going]
        self._totals = [c.total for c in going]
        return [Continuation(c.parent, c.token_id) for c in going]

    def _candidates(self, logits: Tensor) -> list[_Candidate]:
        """The best continuations, so many that num_beams go on though each line ended in every possible way."""
        logprobs = logits.double().log_softmax(dim=-1)
        if len(self._lines[0]) < self.min_length:
            for row in logprobs:
                ban(row, self.end_ids)
        totals = (logprobs + torch.tensor(self._totals, dtype=torch.float64, device=logits.device)[:, None]).flatten()
        ids = most_likely(totals, max(2, 1 + len(self.end_ids)) * self.num_beams)
        width = logits.shape[1]
        found = zip(ids.tolist(), totals[ids].tolist(), strict=True)
        ranked = sorted(found, key=lambda pair: (-pair[1], pair[0]))
        return [_Candidate(i // width, i % width, total) for i, total in ranked if total > -math.inf]

    def _finish(self, candidate: _Candidate, length: int) -> None:
        token_ids = (*self._lines[candidate.parent], candidate.token_id)
        score = candidate.total / float(length) ** self.length_penalty
        self.finished.append(Hypothesis(token_ids, score, candidate.token_id in self.end_ids))
        self.finished.sort(key=lambda h: -h.score)  # stable: of equals the earlier one stays first
        del self.finished[self.num_beams :]

    def _is_over(self, best_total: float, length: int) -> bool:
        if len(self.finished) < self.num_beams:
            return False
        if self.early_stopping is True:
            return True
        at_best = self.max_length if self.early_stopping == "never" and self.length_penalty > 0 else length
        best_score: float = best_total / float(at_best) ** self.length_penalty
        return best_score <= self.finished[-1].score
