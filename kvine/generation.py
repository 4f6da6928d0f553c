"""What a request comes to: plain data, which the command line, a server and a notebook show each in their way."""

import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from kvine.engine.engine import Engine
from kvine.engine.held import HeldText
from kvine.engine.request import Event, FinishReason
from kvine.sampling.params import SamplingParams
from kvine.sampling.sampler import Sample
from kvine.spans import Spans
from kvine.text.stream import TextStream
from kvine.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Usage:
    """Tokens of a request: its prompt, how many of those came from the cache, and what all its choices hold."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


@dataclass(frozen=True)
class Timings:
    """Wall time of a request: until its first token (seconds, waiting included), and per further token (ms, mean)."""

    prefill_s: float
    decode_ms: float


@dataclass(frozen=True)
class Choice:
    """One of the texts that a request has come to: a sample, or a beam.

    Attributes:
        text, token_ids, finish_reason, detail, logprobs: see `Generation`.
        score: of a beam, its sum of log-probabilities divided by its length to the power of the length penalty.
    """

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    detail: str | None
    logprobs: list[Sample] | None
    score: float | None = None


@dataclass(frozen=True)
class Generation:
    """What a request has come to. What it says of a text, it says of the first of its choices.

    Attributes:
        text: the answer, without EOS and stop strings.
        token_ids: the generated ids, the ending one included.
        finish_reason: `stop`, `length`, `context` or `abort`, see `Event`.
        detail: with `context`, what was full and what to do.
        logprobs: a sample for each token, if they were asked for.
        prompt_ids: the prompt as it was fed.
        usage, timings: see there.
        choices: all its texts: one; with `n` as many samples, in their order; with `num_beams` as many beams, the best
            first.
    """

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    detail: str | None
    logprobs: list[Sample] | None
    prompt_ids: list[int]
    usage: Usage
    timings: Timings
    choices: list[Choice]


class ChoiceInProgress:
    """One of a request's texts as its events come in.

    Args:
        text: detokenizes; samples are fed to it by the engine, whose stop checker it is.
    """

    def __init__(self, text: TextStream) -> None:
        self.text = text
        self.samples: list[Sample] = []
        self.last: Event | None = None
        self._beam: tuple[int, ...] = ()

    @property
    def token_ids(self) -> list[int]:
        """The tokens generated so far."""
        return [*self._beam, *(sample.token_id for sample in self.samples)]

    def receive(self, event: Event) -> None:
        """Takes an event of this text."""
        if event.sample is not None:
            self.samples.append(event.sample)
        if (found := event.hypothesis) is not None:
            self._beam = found.token_ids
            for token_id in found.token_ids[: -1 if found.ended else None]:
                self.text.append(token_id)
        if event.finish_reason is not None:
            self.last = event

    def choice(self, *, logprobs: bool) -> Choice:
        """What it has come to."""
        assert self.last is not None and self.last.finish_reason is not None
        self.text.finish()
        found = self.last.hypothesis
        return Choice(
            text=self.text.text,
            token_ids=self.token_ids,
            finish_reason=self.last.finish_reason,
            detail=self.last.detail,
            logprobs=self.samples if logprobs else None,
            score=None if found is None else found.score,
        )


class Host(Protocol):
    """Whoever steps the engine for several requests: what a running request asks of it.

    Attributes:
        tokenizer: of the model.
        forgotten: requests whose results nobody holds any more.
    """

    tokenizer: Tokenizer
    forgotten: list[tuple[Engine, int]]

    @property
    def lock(self) -> AbstractContextManager[Any]:
        """Held by whoever changes an engine."""
        ...

    def pump(self, engine: Engine) -> None:
        """Makes one step and hands each event to the request that it belongs to."""
        ...

    def drain(self, engine: Engine) -> None:
        """Hands over events that need no step."""
        ...

    def deliver(self, engine: Engine, events: Sequence[Event]) -> None:
        """Hands these events over."""
        ...


class TextGeneration(Iterator[str]):
    """A running request: iterate for its text as it comes; `result` is complete when the iteration ends."""

    def __init__(
        self,
        llm: Host,
        engine: Engine,
        prompt_ids: list[int],
        params: SamplingParams,
        held: HeldText | None = None,
        pinned: Spans = (),
    ) -> None:
        self._llm = llm
        self._engine = engine
        self._params = params
        self._prompt_ids = prompt_ids
        self._choices = [
            ChoiceInProgress(TextStream(llm.tokenizer, tuple(params.stop), min_tokens=params.min_tokens))
            for _ in range(params.num_lines)
        ]
        self._text = self._choices[0].text
        self._last: Event | None = None
        self._cancelled = False
        self._began = time.perf_counter()
        self._first: float | None = None
        self._latest = self._began
        self._steps = 0  # that brought tokens
        self._cached_tokens = 0
        stops = None if params.num_beams > 1 else [choice.text for choice in self._choices]
        self.request_id = engine.add(prompt_ids, params, stop=stops, held=held, pinned=pinned)
        # Who leaves a loop early drops the iterator and closes nothing; only noted here, for this may run in mid-step.
        weakref.finalize(self, llm.forgotten.append, (engine, self.request_id)).atexit = False

    def __next__(self) -> str:
        with self._llm.lock:
            if piece := self._next_piece():
                return piece
        assert self._last is not None
        if self._last.error is not None:
            raise self._last.error
        raise StopIteration

    def _next_piece(self) -> str:
        while self._last is None:
            if piece := self._text.take():  # of a step that another thread has made
                return piece
            if self._cancelled or not self._engine.busy:
                self.close()
                break
            self._llm.pump(self._engine)
            if piece := self._text.take():
                return piece
        return self._text.finish()

    @property
    def token_ids(self) -> list[int]:
        """The tokens generated so far, of the first text if there are several."""
        return self._choices[0].token_ids

    @property
    def result(self) -> Generation:
        """The outcome; generates the rest first if need be. Raises what ended the request, if something went wrong."""
        for _ in self:
            pass
        choices = [c.choice(logprobs=self._params.logprobs is not None) for c in self._choices if c.last is not None]
        main, first = choices[0], self._began if self._first is None else self._first
        return Generation(
            text=main.text,
            token_ids=main.token_ids,
            finish_reason=main.finish_reason,
            detail=main.detail,
            logprobs=main.logprobs,
            prompt_ids=self._prompt_ids,
            usage=Usage(len(self._prompt_ids), self._cached_tokens, sum(len(c.token_ids) for c in choices)),
            timings=Timings(
                first - self._began, (self._latest - first) / (self._steps - 1) * 1e3 if self._steps > 1 else 0.0
            ),
            choices=choices,
        )

    def close(self) -> None:
        """Ends the request now and frees what it holds."""
        with self._llm.lock:
            if self._last is None:
                self._engine.abort(self.request_id)
                self._llm.drain(self._engine)
            if self._last is None:  # Ctrl-C between a step and its delivery: no event is coming
                self._llm.deliver(self._engine, [Event(self.request_id, finish_reason="abort")])

    def cancel(self) -> None:
        """Has the request end before its next model call. For a signal handler, which must not `close` in mid-step."""
        self._cancelled = True

    def receive(self, events: Sequence[Event]) -> None:
        """Takes what a step has brought for this request."""
        if any(event.sample or event.hypothesis or event.finish_reason is None for event in events):
            self._steps += 1
            self._latest = time.perf_counter()
            if self._first is None:
                self._first = self._latest
                self._cached_tokens = events[0].cached_tokens
        for event in events:
            self._choices[event.index].receive(event)
            if event.finish_reason is not None and not event.more:
                self._end(event)

    def _end(self, event: Event) -> None:
        self._last = event
        if event.hypothesis is None:  # the end of all; a beam search may have found fewer texts than beams
            for choice in self._choices:
                choice.last = choice.last or event
