"""Beam search in a cell: an engine that keeps what one search reads and chooses, for `outcome` to judge."""

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor

from kvine.config import EngineConfig
from kvine.engine.engine import Engine, EngineParts
from kvine.sampling.beam_search import BeamSearch, Continuation
from kvine.sampling.params import SamplingParams

Line = tuple[int, ...]  # tokens generated


@dataclass(frozen=True)
class SearchStep:
    """One step of a search.

    Attributes:
        lines: the texts that it has, all of one length.
        logits: of the token after each, [lines, vocabulary] fp32 on the CPU.
        chosen: the texts that it goes on with, or ends with, best first.
    """

    lines: tuple[Line, ...]
    logits: Tensor
    chosen: tuple[Line, ...]


class RecordedSearch(BeamSearch):
    """A beam search that keeps what it reads and chooses; no token ends a text."""

    def __init__(self, num_beams: int, max_length: int) -> None:
        super().__init__(num_beams, length_penalty=1.0, early_stopping=False, end_ids=(), max_length=max_length)
        self.steps: list[SearchStep] = []

    def advance(self, logits: Tensor) -> list[Continuation]:
        """See `BeamSearch`."""
        lines = tuple(self._lines)
        going = super().advance(logits)
        chosen = tuple(self._lines) if going else tuple(found.token_ids for found in self.finished)
        self.steps.append(SearchStep(lines, logits.float().cpu().clone(), chosen))
        return going


class RecordingEngine(Engine):
    """An engine that keeps the searches of one request.

    Args:
        parts, config: of the engine.
        params: of the request, told from others by being the same object.
    """

    def __init__(self, parts: EngineParts, config: EngineConfig, params: SamplingParams) -> None:
        super().__init__(parts, config)
        self.recorded: RecordedSearch | None = None
        self._params = params

    def _search(self, params: SamplingParams, max_length: int) -> BeamSearch | None:
        if params is not self._params or params.num_beams == 1:
            return super()._search(params, max_length)
        self.recorded = RecordedSearch(params.num_beams, max_length)
        return self.recorded


def longest(lines: Iterable[Line]) -> list[Line]:
    """Those that are not the beginning of another."""
    kept: list[Line] = []
    for line in sorted(set(lines), key=len, reverse=True):
        if not any(other[: len(line)] == line for other in kept):
            kept.append(line)
    return kept
