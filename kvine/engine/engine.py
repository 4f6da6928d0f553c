"""The engine: requests in, events out, one step at a time. Synchronous and deterministic; token ids only."""

import itertools
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from kvine.cache.manager import CacheManager
from kvine.config import EngineConfig
from kvine.engine.interrupt import uninterrupted
from kvine.engine.outcome import finish_reason, sample_row
from kvine.engine.request import Event, Request, StopChecker, checked_ids
from kvine.engine.scheduler import Scheduled, Scheduler
from kvine.errors import ContextLengthError, KvineError, StepError
from kvine.sampling.noise import fresh_seed
from kvine.sampling.params import SamplingParams
from kvine.sampling.sampler import Sample, Sampler


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


@dataclass(frozen=True)
class EngineParts:
    """What an engine is made of. A test engine replaces one part; the engine itself has no switches for it.

    Attributes:
        manager, runner, sampler: see there.
        eos_ids: ids that end a text, of the generation config and the tokenizer joined.
        vocab_size: ids that a prompt may hold: the model's, padding included.
        max_context: most tokens of prompt and output; None where a window with moved sinks has no end.
        namespace: key of the tree of blocks that requests with a given salt share.
    """

    manager: CacheManager
    runner: StepRunner
    sampler: Sampler
    eos_ids: Collection[int]
    vocab_size: int
    max_context: int | None
    namespace: Callable[[str | None], bytes]


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
        stop: StopChecker | None = None,
        salt: str | None = None,
    ) -> int:
        """Queues a request and returns its id.

        Args:
            prompt_ids: the prompt, at least one token.
            params: how to sample.
            stop: watches for stop strings.
            salt: only requests with the same salt share cached blocks.

        Raises:
            RequestError: for an empty prompt or an id that the model does not know.
            ContextLengthError: for a prompt that the model's context or the cache can never hold.
        """
        prompt_ids = checked_ids(prompt_ids, self.parts.vocab_size)
        limit, detail = self._limit(prompt_ids, params)
        request = Request(
            next(self._ids),
            prompt_ids,
            params,
            seed=fresh_seed() if params.seed is None else params.seed,
            namespace=self.parts.namespace(salt),
            limit=limit,
            chunk=self.manager.max_chunk(limit - 1, self.config.max_step_tokens),
            limit_detail=detail,
            stop=stop,
        )
        if params.max_tokens == 0:
            self._pending.append(Event(request.id, finish_reason="length"))
        else:
            self._requests[request.id] = request
            self.scheduler.add(request)
        return request.id

    def abort(self, request_id: int) -> None:
        """Ends a request and frees what it holds at once; unknown and finished ids are ignored."""
        request = self._requests.pop(request_id, None)
        if request is not None:
            self.scheduler.remove(request)
            self.parts.runner.give_back()
            self._pending.append(Event(request_id, finish_reason="abort"))

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
        sampled = [item.request for item in step if item.samples]
        try:
            logits = self.parts.runner.run(step)
            outcomes = self.parts.sampler.sample(logits, [sample_row(r, self.parts.eos_ids) for r in sampled])
        except Exception as error:
            return events + self._fail(step, error)
        except BaseException:  # Ctrl-C: what the step wrote is not to be trusted, and its requests must hear of it
            self._drop(step)
            self._pending = events + [Event(item.request.id, finish_reason="abort") for item in step]
            raise
        with uninterrupted():
            call = self._accept(step, sampled, outcomes, began)
            self._pending = events + self._pending  # what follows may raise, and must lose nothing
        if self.on_call is not None:
            self.on_call(call)
        return self.take_pending()

    # -- inside -------------------------------------------------------------------------------------------------------

    def _accept(
        self,
        step: Sequence[Scheduled],
        sampled: Sequence[Request],
        outcomes: Sequence[Sample | KvineError],
        began: float,
    ) -> ModelCall:
        """Makes a step's tokens part of its sequences, and its samples part of its requests."""
        broken = {r for r, outcome in zip(sampled, outcomes, strict=True) if isinstance(outcome, StepError)}
        for item in step:
            assert item.request.sequence is not None
            if item.request not in broken:  # logits of NaN come from K and V that nobody else should find
                self.manager.commit(item.request.sequence, item.request.tokens(item.start, item.start + item.count))
        call = self._call(step, began)
        if self.manager.tier is not None:
            self.manager.tier.computed(sum(item.count for item in step), call.ms / 1e3)
        self._pending += [self._take(request, outcome) for request, outcome in zip(sampled, outcomes, strict=True)]
        self.parts.runner.give_back()
        return call

    def _limit(self, prompt_ids: Sequence[int], params: SamplingParams) -> tuple[int, str]:
        length = len(prompt_ids)
        context = self.parts.max_context
        needs_room = params.max_tokens != 0
        if context is not None and length + needs_room > context:
            raise ContextLengthError(
                f"The prompt has {length} tokens and the model's context {context}, which leaves no room for an "
                "answer: shorten the prompt, or keep a window with in_cache sinks."
            )
        if not self.manager.fits_ever(length, 1):
            raise ContextLengthError(
                f"The prompt has {length} tokens, more than the cache of {self.manager.budget:,} bytes can hold: "
                "raise kv_memory or shorten the prompt."
            )
        limit = context if context is not None else (1 << 62)
        detail = f"The model's context of {context} tokens is full: shorten the prompt, or keep a window with sinks."
        if params.max_tokens is not None:
            limit = min(limit, length + params.max_tokens)
        if not self.manager.fits_ever(limit - 1, 1):  # the last token is never fed, so never cached
            low, high = length, limit - 1
            while high - low > 1:
                middle = (low + high) // 2
                low, high = (middle, high) if self.manager.fits_ever(middle, 1) else (low, middle)
            limit = low + 1
            detail = f"The cache of {self.manager.budget:,} bytes is full at {low} tokens: raise kv_memory."
        return limit, detail

    def _take(self, request: Request, outcome: Sample | KvineError) -> Event:
        """Appends a sampled token, or ends the request with what went wrong."""
        if isinstance(outcome, KvineError):
            self._end(request, keep=not isinstance(outcome, StepError))
            return Event(request.id, finish_reason="error", error=outcome)
        token = outcome.token_id
        request.output_ids.append(token)
        reason = finish_reason(request, token, self.parts.eos_ids)
        if reason is not None:
            self._end(request)
        return Event(
            request.id,
            outcome,
            reason,
            request.limit_detail if reason == "context" else None,
            cached_tokens=request.cached_tokens or 0,
        )

    def _end(self, request: Request, *, keep: bool = True) -> None:
        del self._requests[request.id]
        self.scheduler.remove(request, keep=keep)

    def _drop(self, step: Sequence[Scheduled]) -> None:
        for item in step:
            self._end(item.request, keep=False)

    def _fail(self, step: Sequence[Scheduled], error: Exception) -> list[Event]:
        self._drop(step)
        wrapped = StepError(f"The model call failed: {type(error).__name__}: {error}")
        wrapped.__cause__ = error
        return [Event(item.request.id, finish_reason="error", error=wrapped) for item in step]

    def _refuse_waiting(self) -> list[Event]:
        """Ends the first request, which no step can serve: what it needs is held by sequences outside the engine."""
        error = StepError(
            "The cache's memory is held by caches that are stepped by hand: close those, or raise kv_memory."
        )
        if not self.scheduler.waiting:
            return []
        request = self.scheduler.waiting[0]
        self._end(request)
        return [Event(request.id, finish_reason="error", error=error)]

    def _call(self, step: Sequence[Scheduled], began: float) -> ModelCall:
        return ModelCall(
            next(self._calls),
            tuple((item.start, item.start + item.count) for item in step),
            tuple(item.request.num_computed for item in step),
            self.manager.bytes_referenced,
            (time.perf_counter() - began) * 1e3,
        )
