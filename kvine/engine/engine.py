"""The engine: requests in, events out, one step at a time. Synchronous and deterministic; token ids only."""

import itertools
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from kvine.cache.manager import CacheManager
from kvine.cache.shelf import shelves_of
from kvine.config import EngineConfig
from kvine.engine.held import HeldText
from kvine.engine.interrupt import uninterrupted
from kvine.engine.lines import Turn, beam_events, closing_events, spread, switch, turns
from kvine.engine.outcome import end_ids, finish_reason
from kvine.engine.request import Event, FinishReason, Line, Request, StopChecker, checked_ids
from kvine.engine.scheduler import Scheduled, Scheduler
from kvine.errors import ContextLengthError, KvineError, RequestError, StepError
from kvine.sampling.beam_search import BeamSearch
from kvine.sampling.noise import fresh_seed
from kvine.sampling.params import SamplingParams
from kvine.sampling.sampler import Sample, Sampler
from kvine.spans import Spans, checked_spans, merged


@dataclass(frozen=True)
class ModelCall:
    """One model call, as `--trace` shows it.

    Attributes:
        step: its number, from 1.
        positions: for each request the first position fed and the one after the last.
        cache_length: for each request the tokens that the cache holds after the call.
        kv_bytes: bytes of K and V that live requests hold after the call, in whole blocks.
        ms: how long the call and the sampling took.
    """

    step: int
    positions: tuple[tuple[int, int], ...]
    cache_length: tuple[int, ...]
    kv_bytes: int
    ms: float

    @property
    def input_shape(self) -> tuple[int, int]:
        """Requests side by side, and tokens fed to the model over all of them."""
        return len(self.positions), sum(end - start for start, end in self.positions)


class StepRunner(Protocol):
    """What an engine asks of a runner."""

    def run(self, step: Sequence[Scheduled]) -> Tensor:
        """Computes a step; [M, vocabulary] fp32 logits of the requests that sample, in the order of `step`."""
        ...

    def give_back(self) -> None:
        """Returns the memory of blocks that hold nothing to the system."""
        ...


class NamespaceOf(Protocol):
    """Names trees of blocks."""

    def __call__(self, salt: str | None, pinned: Spans = ()) -> bytes:
        """The key of the tree that requests with this salt and these pinned positions share."""
        ...


@dataclass(frozen=True)
class EngineParts:
    """What an engine is made of. A test engine replaces one part; the engine itself has no switches for it.

    Attributes:
        manager, runner, sampler: see there.
        eos_ids: ids that end a text, of the generation config and the tokenizer joined.
        vocab_size: ids that a prompt may hold: the model's, padding included.
        max_context: most tokens of prompt and output; None where a window with moved sinks has no end.
        namespace: see there.
    """

    manager: CacheManager
    runner: StepRunner
    sampler: Sampler
    eos_ids: Collection[int]
    vocab_size: int
    max_context: int | None
    namespace: NamespaceOf


class Engine:
    """Serves requests over one model and one cache.

    Args:
        parts: see `EngineParts`; `build.standard_parts` makes the usual ones.
        config: token budget and number of running requests.
    """

    def __init__(self, parts: EngineParts, config: EngineConfig | None = None) -> None:
        self.parts = parts
        self.config = config or EngineConfig()
        self.manager = parts.manager
        self.scheduler = Scheduler(parts.manager, self.config)
        self.on_call: Callable[[ModelCall], None] | None = None
        self._requests: dict[int, Request] = {}
        self._ids = itertools.count()
        self._calls = itertools.count(1)
        self._pending: list[Event] = []

    def add(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        stop: StopChecker | Sequence[StopChecker] | None = None,
        salt: str | None = None,
        pinned: Spans = (),
        held: HeldText | None = None,
    ) -> int:
        """Queues a request and returns its id.

        Args:
            prompt_ids: the prompt, at least one token.
            params: how to sample.
            stop: watches for stop strings; a list of as many as there are samples.
            salt: only requests with the same salt share cached blocks.
            pinned: runs of the prompt's positions, `(first, end)` with the end outside, that stay visible whatever the
                cache's window; windows that the model itself has are left as they are.
            held: a text of one line that has begun this request, and goes on with what it brings.

        Raises:
            RequestError: for an empty prompt, an id that the model does not know, more samples or beams than a step may
                compute tokens, or a run that is not in the prompt or that sinks inside the cache leave no place for.
            ContextLengthError: for a prompt that the model's context or the cache can never hold.
        """
        prompt_ids = checked_ids(prompt_ids, self.parts.vocab_size)
        width, length = params.num_lines, len(prompt_ids)
        if width > self.config.max_step_tokens:
            raise RequestError(
                f"{_lines(params)} take {width} tokens in each step, and max_step_tokens is "
                f"{self.config.max_step_tokens}: raise it, or ask for fewer."
            )
        pinned = self.checked_pins(pinned, length) if held is None else held.pinned
        limit, detail = self._limit(prompt_ids, params, pinned)
        stops = () if stop is None else stop if isinstance(stop, Sequence) else (stop,)
        request = Request(
            next(self._ids),
            prompt_ids,
            params,
            seed=fresh_seed() if params.seed is None else params.seed,
            namespace=self.parts.namespace(salt, pinned),
            limit=limit,
            chunk=self.manager.max_chunk(limit - 1, self.config.max_step_tokens, width, length, pinned),
            limit_detail=detail,
            stops=stops,
            search=self._search(params, limit - length),
            pinned=pinned,
            held=held,
        )
        if params.max_tokens == 0:
            self._pending += closing_events(request, "length")
            if held is not None:
                held.end(())
        else:
            self._requests[request.id] = request
            self.scheduler.add(request)
        return request.id

    def abort(self, request_id: int) -> None:
        """Ends a request and frees what it holds at once; unknown and finished ids are ignored."""
        request = self._requests.pop(request_id, None)
        if request is not None:
            _end_held(request)
            self.scheduler.remove(request)
            self.parts.runner.give_back()
            self._pending += closing_events(request, "abort")

    @property
    def busy(self) -> bool:
        """Whether a step would bring something."""
        return bool(self._requests or self._pending)

    def take_pending(self) -> list[Event]:
        """Events that need no step, such as the end of an aborted request."""
        events, self._pending = self._pending, []
        return events

    def step(self) -> list[Event]:
        """Makes one model call and returns what it brought. A call that fails ends its requests with an error event."""
        with uninterrupted():
            step = self.scheduler.schedule()
        events = self.take_pending()
        if not step:
            return events + self._refuse_waiting()
        began = time.perf_counter()
        try:
            logits = self.parts.runner.run(step)
            chosen = turns(step, logits, self.parts.sampler, self.parts.eos_ids)
        except Exception as error:
            return events + self._fail(step, error)
        except BaseException:  # Ctrl-C: what the step wrote is not to be trusted, and its requests must hear of it
            self._pending = events + self._drop(step, "abort")
            raise
        with uninterrupted():
            call = self._accept(step, chosen, began)
            self._pending = events + self._pending  # what follows may raise, and must lose nothing
        if self.on_call is not None:
            self.on_call(call)
        return self.take_pending()

    # -- inside -------------------------------------------------------------------------------------------------------

    def _accept(self, step: Sequence[Scheduled], chosen: Sequence[Turn], began: float) -> ModelCall:
        """Makes a step's tokens part of its sequences, and what was chosen part of its requests."""
        broken = {turn.request for turn in chosen if turn.broken}
        for item in step:
            line = item.request
            assert line.sequence is not None
            if line.owner not in broken:  # logits of NaN come from K and V that nobody else should find
                self.manager.commit(line.sequence, line.tokens(item.start, item.start + item.count))
        call = self._call(step, began)
        if self.manager.tier is not None:
            self.manager.tier.computed(sum(item.count for item in step), call.ms / 1e3)
        for turn in chosen:
            self._pending += self._take(turn)
        self.parts.runner.give_back()
        return call

    def _search(self, params: SamplingParams, max_length: int) -> BeamSearch | None:
        if params.num_beams == 1:
            return None
        return BeamSearch(
            params.num_beams,
            length_penalty=params.length_penalty,
            early_stopping=params.early_stopping,
            end_ids=end_ids(params, self.parts.eos_ids),
            max_length=max_length,
            min_length=params.min_tokens,
        )

    def checked_pins(self, pinned: Spans, length: int | None = None) -> Spans:
        """The runs, merged.

        Raises:
            RequestError: if they are none, end behind `length` tokens, or have no place among sinks inside the cache.
        """
        try:
            spans = merged(checked_spans(pinned))
        except ValueError:
            raise RequestError(f"pinned is {pinned!r}: give runs of positions such as ((0, 20),).") from None
        if length is not None and spans and spans[-1][1] > length:
            raise RequestError(f"What is pinned ends at {spans[-1][1]}, and the prompt at {length}: pin what is in it.")
        try:
            shelves_of(self.manager.specs, spans)
        except ValueError:
            raise RequestError(
                "With in_cache sinks only the beginning of a prompt can be pinned, for distances are counted inside "
                "the cache: pin positions from 0 on, or take sink_rule absolute."
            ) from None
        return spans

    def _limit(self, prompt_ids: Sequence[int], params: SamplingParams, pinned: Spans = ()) -> tuple[int, str]:
        length, width = len(prompt_ids), params.num_lines
        context = self.parts.max_context
        needs_room = params.max_tokens != 0
        if context is not None and length + needs_room > context:
            raise ContextLengthError(
                f"The prompt has {length} tokens and the model's context {context}, which leaves no room for an "
                "answer: shorten the prompt, or keep a window with in_cache sinks."
            )

        def fits(num_tokens: int) -> bool:
            return self.manager.fits_ever(num_tokens, 1, width, length, pinned)

        if not fits(length):
            several = f" for {_lines(params)}" if width > 1 else ""
            raise ContextLengthError(
                f"The prompt has {length} tokens, more than the cache of {self.manager.budget:,} bytes can "
                f"hold{several}: raise kv_memory or shorten the prompt{', or ask for fewer' if several else ''}."
            )
        limit = context if context is not None else (1 << 62)
        detail = f"The model's context of {context} tokens is full: shorten the prompt, or keep a window with sinks."
        if params.max_tokens is not None:
            limit = min(limit, length + params.max_tokens)
        if not fits(limit - 1):  # the last token is never fed, so never cached
            low, high = length, limit - 1
            while high - low > 1:
                middle = (low + high) // 2
                low, high = (middle, high) if fits(middle) else (low, middle)
            limit = low + 1
            detail = f"The cache of {self.manager.budget:,} bytes is full at {low} tokens: raise kv_memory."
        return limit, detail

    def _take(self, turn: Turn) -> list[Event]:
        """Appends what was chosen to a request's lines, or ends the request with what went wrong."""
        request = turn.request
        error = next((x for x in (*turn.outcomes, turn.beams) if isinstance(x, KvineError)), None)
        if error is not None:
            self._end(request, keep=not isinstance(error, StepError), failed=True)
            return closing_events(request, "error", error)
        if request.search is not None:
            assert not isinstance(turn.beams, KvineError)
            if not turn.beams:
                self._end(request)
                return beam_events(request)
            switch(request, turn.beams, self.manager)
            return [Event(request.id, cached_tokens=request.cached_tokens or 0)]
        if not request.spread:
            spread(request, self.manager)
        lines = list(request.lines)
        return [self._append(line, sample) for line, sample in zip(lines, turn.outcomes, strict=True)]

    def _append(self, line: Line, sample: Sample | KvineError) -> Event:
        """Gives a line its next token, and ends it where that is the last."""
        assert isinstance(sample, Sample)
        request, token = line.owner, sample.token_id
        line.output_ids.append(token)
        reason = finish_reason(line, token, self.parts.eos_ids)
        more = reason is not None and len(request.lines) > 1
        if more:
            request.lines.remove(line)
            assert line.sequence is not None
            self.manager.release(line.sequence)
            line.sequence = None
        elif reason is not None:
            self._end(request)
        return Event(
            request.id,
            sample,
            reason,
            request.limit_detail if reason == "context" else None,
            cached_tokens=request.cached_tokens or 0,
            index=line.index,
            more=more,
        )

    def _end(self, request: Request, *, keep: bool = True, failed: bool = False) -> None:
        del self._requests[request.id]
        _end_held(request, failed=failed)
        self.scheduler.remove(request, keep=keep)

    def _drop(self, step: Sequence[Scheduled], reason: FinishReason, error: StepError | None = None) -> list[Event]:
        requests = list(dict.fromkeys(item.request.owner for item in step))
        for request in requests:
            self._end(request, keep=False, failed=reason == "error")
        return [event for request in requests for event in closing_events(request, reason, error)]

    def _fail(self, step: Sequence[Scheduled], error: Exception) -> list[Event]:
        wrapped = StepError(f"The model call failed: {type(error).__name__}: {error}")
        wrapped.__cause__ = error
        return self._drop(step, "error", wrapped)

    def _refuse_waiting(self) -> list[Event]:
        """Ends the first request, which no step can serve: what it needs is held by sequences outside the engine."""
        error = StepError(
            "The cache's memory is held by caches that are stepped by hand: close those, or raise kv_memory."
        )
        if not self.scheduler.waiting:
            return []
        request = self.scheduler.waiting[0]
        self._end(request, failed=True)
        return closing_events(request, "error", error)

    def _call(self, step: Sequence[Scheduled], began: float) -> ModelCall:
        return ModelCall(
            next(self._calls),
            tuple((item.start, item.start + item.count) for item in step),
            tuple(item.request.num_computed for item in step),
            self.manager.bytes_referenced,
            (time.perf_counter() - began) * 1e3,
        )


def _end_held(request: Request, *, failed: bool = False) -> None:
    """Lets a text have what a request has brought, before it gets the sequence back: that keeps what is its text."""
    if request.held is not None:
        request.held.end(None if failed else request.output_ids or None)


def _lines(params: SamplingParams) -> str:
    return f"{params.num_beams} beams" if params.num_beams > 1 else f"{params.n} samples"
