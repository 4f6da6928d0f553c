"""Requests of several lines: n samples or beams of one prompt, in blocks that they share until one of them writes.

A beam switch changes block tables and nothing else: lines that go on twice are forked, those that don't are released.
K and V move only where `CacheManager.reserve` copies a last, partly filled block that is still shared.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from torch import Tensor

from kvine.cache.manager import CacheManager
from kvine.engine.outcome import sample_row
from kvine.engine.request import Event, FinishReason, Line, Request
from kvine.engine.scheduler import Scheduled
from kvine.errors import KvineError, StepError
from kvine.sampling.beam_search import BeamSearch, Continuation
from kvine.sampling.sampler import Sample, Sampler, SampleRow

Outcome = Sample | KvineError


@dataclass(frozen=True)
class Turn:
    """What a request's lines have come to in a step.

    Attributes:
        request: whose lines were all computed to their end.
        outcomes: a sample, or what went wrong, for each line, or for each sample of a request that is yet to spread.
        beams: the lines of a beam search from here on, or what went wrong.
    """

    request: Request
    outcomes: Sequence[Outcome] = ()
    beams: Sequence[Continuation] | KvineError = ()

    @property
    def broken(self) -> bool:
        """Whether unusable logits came of the step: nobody should find the K and V that they come from."""
        return any(isinstance(outcome, StepError) for outcome in (*self.outcomes, self.beams))


def turns(step: Sequence[Scheduled], logits: Tensor, sampler: Sampler, eos_ids: Collection[int]) -> list[Turn]:
    """Chooses the next tokens of all requests that have caught up.

    Args:
        step: what was computed.
        logits: [M, vocabulary], a row for each of its items that samples.
        sampler: draws for all but beams.
        eos_ids: tokens that end a text.
    """
    rows: dict[Request, list[int]] = {}
    for row, line in enumerate(item.request for item in step if item.samples):
        rows.setdefault(line.owner, []).append(row)
    draws = {request: _draws(request, own, eos_ids) for request, own in rows.items() if request.search is None}
    drawn_from = [row for own in draws.values() for row, _ in own]
    asked = [sample for own in draws.values() for _, sample in own]
    drawn = logits if drawn_from == list(range(len(logits))) else logits[drawn_from]
    outcomes = iter(sampler.sample(drawn, asked))
    return [
        Turn(request, [next(outcomes) for _ in draws[request]])
        if request.search is None
        else Turn(request, beams=_advance(request.search, logits[own, : sampler.vocab_size]))
        for request, own in rows.items()
    ]


def spread(request: Request, manager: CacheManager) -> None:
    """Makes a request that has computed its prompt as many lines as it asked for, all with the prompt's blocks."""
    first = request.sequence
    assert first is not None
    for index in range(1, request.params.num_lines):
        line = Line(request.prompt_ids, index, request.stops[index] if request.stops else None)
        line.owner, line.sequence = request, manager.fork(first)
        request.lines.append(line)
    request.spread = True


def switch(request: Request, beams: Sequence[Continuation], manager: CacheManager) -> None:
    """Makes a request's lines those that go on: block tables follow their beams."""
    before = [(line.output_ids, line.sequence) for line in request.lines]
    heirs = {beam.parent for beam in beams}
    for parent, (_, sequence) in enumerate(before):
        if parent not in heirs and sequence is not None:
            manager.release(sequence, keep_tail=False)
    lines: list[Line] = []
    taken: set[int] = set()
    for index, beam in enumerate(beams):
        output_ids, sequence = before[beam.parent]
        assert sequence is not None
        line = request if index == 0 else Line(request.prompt_ids, index)
        line.owner, line.output_ids = request, [*output_ids, beam.token_id]
        line.sequence = manager.fork(sequence) if beam.parent in taken else sequence
        taken.add(beam.parent)
        lines.append(line)
    request.lines, request.spread = lines, True


def beam_events(request: Request) -> list[Event]:
    """The end of a beam search: its texts, the best first."""
    assert request.search is not None
    events, texts = [], request.search.finished
    for index, found in enumerate(texts):
        short = request.params.max_tokens is None or len(found.token_ids) < request.params.max_tokens
        reason: FinishReason = "stop" if found.ended else "context" if short else "length"
        events.append(
            Event(
                request.id,
                finish_reason=reason,
                detail=request.limit_detail if reason == "context" else None,
                cached_tokens=request.cached_tokens or 0,
                index=index,
                hypothesis=found,
                more=index + 1 < len(texts),
            )
        )
    return events


def closing_events(request: Request, reason: FinishReason, error: KvineError | None = None) -> list[Event]:
    """The end of all texts of a request that have not ended, at once."""
    if request.spread and request.search is None:
        indices = [line.index for line in request.lines]
    else:
        indices = list(range(request.params.num_lines))
    return [
        Event(request.id, finish_reason=reason, error=error, index=index, more=index != indices[-1])
        for index in indices
    ]


def _draws(request: Request, rows: Sequence[int], eos_ids: Collection[int]) -> list[tuple[int, SampleRow]]:
    """A row of logits and how to draw from it, for each of a request's samples; one row for all before they fork."""
    if request.spread:
        return [(row, sample_row(line, eos_ids)) for row, line in zip(rows, request.lines, strict=True)]
    return [(rows[0], sample_row(request, eos_ids, index)) for index in range(request.params.num_lines)]


def _advance(search: BeamSearch, logits: Tensor) -> list[Continuation] | KvineError:
    try:
        return search.advance(logits)
    except KvineError as error:
        return error
