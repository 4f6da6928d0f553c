"""What a request has come to: plain data, which the command line, a server and a notebook show each in their way."""

from dataclasses import dataclass

from kvine.engine.request import FinishReason
from kvine.sampling.sampler import Sample


@dataclass(frozen=True)
class Usage:
    """Tokens of a request: its prompt, how many of those came from the cache, and what was generated."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


@dataclass(frozen=True)
class Timings:
    """Wall time of a request: until its first token (seconds, waiting included), and per further token (ms, mean)."""

    prefill_s: float
    decode_ms: float


@dataclass(frozen=True)
class Generation:
    """What a request has come to.

    Attributes:
        text: the answer, without EOS and stop strings.
        token_ids: the generated ids, the ending one included.
        finish_reason: `stop`, `length`, `context` or `abort`, see `Event`.
        detail: with `context`, what was full and what to do.
        logprobs: a sample for each token, if they were asked for.
        prompt_ids: the prompt as it was fed.
        usage, timings: see there.
    """

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    detail: str | None
    logprobs: list[Sample] | None
    prompt_ids: list[int]
    usage: Usage
    timings: Timings
