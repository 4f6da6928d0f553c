"""One request: what was asked, what has been generated, and what it holds of the cache."""

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from kvine.cache.manager import CachedSequence
from kvine.errors import KvineError, RequestError
from kvine.sampling.params import SamplingParams
from kvine.sampling.sampler import Sample

FinishReason = Literal["stop", "length", "context", "abort", "error"]


class StopChecker(Protocol):
    """Watches a request's tokens for text that ends it."""

    def append(self, token_id: int) -> bool:
        """Takes the next generated token; true when it completes a stop."""
        ...


@dataclass(frozen=True)
class Event:
    """What a step has brought for one request.

    Attributes:
        request_id: whose it is.
        sample: the new token, if there is one. A token that ends the text (EOS or a stop id) is reported too.
        finish_reason: set in a request's last event: `stop` (EOS, stop id or stop string), `length` (max_tokens),
            `context` (no room left in the model's context or in the cache), `abort` or `error`.
        detail: with `context`, a sentence that says what was full and what to do.
        error: with `error`, why.
        cached_tokens: prompt tokens that came from the cache when the request was first admitted.
    """

    request_id: int
    sample: Sample | None = None
    finish_reason: FinishReason | None = None
    detail: str | None = None
    error: KvineError | None = None
    cached_tokens: int = 0


def checked_ids(token_ids: Sequence[int], vocab_size: int) -> list[int]:
    """The ids as plain integers, numpy's accepted; RequestError if there are none, or one is not below vocab_size."""
    try:
        ids = [operator.index(token) for token in token_ids]
    except TypeError:
        raise RequestError("A prompt is a list of token ids, and these are whole numbers.") from None
    if not ids:
        raise RequestError("The prompt has no tokens: give at least one, this tokenizer adds none of its own.")
    if not all(0 <= token < vocab_size for token in ids):
        raise RequestError(f"A prompt may hold token ids from 0 to {vocab_size - 1} only.")
    return ids


class Request:
    """A request on its way through the engine. It is phase-free: it only has tokens computed and tokens to compute.

    Args:
        id: its number.
        prompt_ids: the prompt, at least one token.
        params: how to sample.
        seed: of its noise.
        namespace: key of the tree of blocks that it may share.
        limit: most tokens, prompt and output together.
        chunk: most tokens that one step computes of it, so that what a window has to hold meanwhile fits the cache.
        limit_detail: what to say when `limit`, and not max_tokens, ends it.
        stop: watches for stop strings.
    """

    def __init__(
        self,
        id: int,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        seed: int,
        namespace: bytes,
        limit: int,
        chunk: int,
        limit_detail: str,
        stop: StopChecker | None = None,
    ) -> None:
        self.id = id
        self.params = params
        self.seed = seed
        self.namespace = namespace
        self.limit = limit
        self.chunk = chunk
        self.limit_detail = limit_detail
        self.stop = stop
        self.prompt_ids = list(prompt_ids)
        self.output_ids: list[int] = []
        self.sequence: CachedSequence | None = None
        self.cached_tokens: int | None = None  # prompt tokens that were not computed; known once first admitted

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and output."""
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def num_computed(self) -> int:
        """Tokens whose K and V the cache holds."""
        return 0 if self.sequence is None else self.sequence.num_tokens

    def tokens(self, start: int, end: int) -> list[int]:
        """Tokens start … end - 1 of prompt and output."""
        prompt = len(self.prompt_ids)
        if start >= prompt:
            return self.output_ids[start - prompt : end - prompt]
        return self.prompt_ids[start:end] + self.output_ids[: max(0, end - prompt)]
