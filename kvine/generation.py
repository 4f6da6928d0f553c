"""What a request has come to: plain data, which the command line, a server and a notebook show each in their way."""

from dataclasses import dataclass

from kvine.engine.request import Event, FinishReason
from kvine.sampling.sampler import Sample
from kvine.text.stream import TextStream


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
