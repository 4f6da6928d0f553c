"""One request: what was asked, what has been generated, and what it holds of the cache."""

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from kvine.cache.manager import CachedSequence
from kvine.engine.held import HeldText
from kvine.errors import KvineError, RequestError
from kvine.sampling.beam_search import BeamSearch, Hypothesis
from kvine.sampling.params import SamplingParams
from kvine.sampling.sampler import Sample
from kvine.spans import Spans

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
        finish_reason: set in the last event of each of a request's texts: `stop` (EOS, stop id or stop string),
            `length` (max_tokens), `context` (no room left in the model's context or in the cache), `abort` or `error`.
        detail: with `context`, a sentence that says what was full and what to do.
        error: with `error`, why.
        cached_tokens: prompt tokens that came from the cache when the request was first admitted.
        index: which of the request's texts: of n samples by their number, of beams the best first.
        hypothesis: a beam search brings nothing but the bare word that a step was made until it ends, and then each
            of its texts in whole, in one event.
        more: with `finish_reason`, whether other texts of the request have not ended yet.
    """

    request_id: int
    sample: Sample | None = None
    finish_reason: FinishReason | None = None
    detail: str | None = None
    error: KvineError | None = None
    cached_tokens: int = 0
    index: int = 0
    hypothesis: Hypothesis | None = None
    more: bool = False


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


class Line:
    """One text on its way through the engine. It is phase-free: it only has tokens computed and tokens to compute.

    Args:
        prompt_ids: the prompt, which the lines of a request share.
        index: which of its request's samples or beams it is.
        stop: watches for stop strings.
    """

    owner: "Request"

    def __init__(self, prompt_ids: list[int], index: int = 0, stop: StopChecker | None = None) -> None:
        self.prompt_ids = prompt_ids
        self.index = index
        self.stop = stop
        self.output_ids: list[int] = []
        self.sequence: CachedSequence | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and output."""
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def num_computed(self) -> int:
        """Tokens whose K and V the cache holds."""
        return 0 if self.sequence is None else self.sequence.num_tokens

    @property
    def num_left(self) -> int:
        """Tokens that are to be computed before the next one can be chosen."""
        return self.num_tokens - self.num_computed

    def tokens(self, start: int, end: int) -> list[int]:
        """Tokens start … end - 1 of prompt and output."""
        prompt = len(self.prompt_ids)
        if start >= prompt:
            return self.output_ids[start - prompt : end - prompt]
        return self.prompt_ids[start:end] + self.output_ids[: max(0, end - prompt)]


class Request(Line):
    """What was asked, and the lines that answer it. It is its own first line, and most requests have no other.

    n samples or beams begin as one line, which computes the prompt; `engine.lines` makes it several, whose blocks are
    shared until one of them writes. Lines that go on are equally long: each step takes all of them or none.

    Args:
        id: of the request.
        prompt_ids: the prompt; at least one token.
        params: how to sample.
        seed: keys the noise.
        namespace: of the tree of blocks it shares.
        limit: tokens of prompt and output at which it ends.
        chunk: most tokens that one step computes of it, so that what a window has to hold meanwhile fits the cache.
        limit_detail: what to say when `limit`, and not max_tokens, ends it.
        stops: watch for stop strings, one in each sample; or none.
        search: chooses among beams.
        pinned: positions that stay visible whatever the windows.
        held: a text that goes on with this request: it lends its sequence, and has it back at the end.
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
        stops: Sequence[StopChecker] = (),
        search: BeamSearch | None = None,
        pinned: Spans = (),
        held: HeldText | None = None,
    ) -> None:
        super().__init__(list(prompt_ids), 0, stops[0] if stops else None)
        self.owner = self
        self.id = id
        self.params = params
        self.seed = seed
        self.namespace = namespace
        self.limit = limit
        self.chunk = chunk
        self.limit_detail = limit_detail
        self.stops = stops
        self.search = search
        self.pinned = pinned
        self.held = held
        self.lines: list[Line] = [self]  # those that go on
        self.spread = params.num_lines == 1  # whether there are as many as there will be
        self.cached_tokens: int | None = None  # prompt tokens that were not computed; known once first admitted

    @property
    def width(self) -> int:
        """Lines that it has or will have."""
        return len(self.lines) if self.spread else self.params.num_lines

    @property
    def trunk(self) -> int:
        """Tokens that all lines begin with and that are computed once; all but one token where there is one line."""
        first = self.lines[0]
        end = first.num_tokens - 1
        if len(self.lines) == 1:
            return end
        texts = [line.output_ids for line in self.lines]
        same = next((n for n, column in enumerate(zip(*texts, strict=True)) if len(set(column)) > 1), len(texts[0]))
        return min(len(self.prompt_ids) + same, end)
