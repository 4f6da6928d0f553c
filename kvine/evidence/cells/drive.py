"""Runs a cell: serves what came before, then computes the text among its mates, as its history says.

A history is a way to compute one text: queued and left to the engine, or stepped by hand with forks and cuts.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvine.engine.engine import EngineParts
from kvine.engine.runner import Runner
from kvine.engine.scheduler import Scheduler
from kvine.engine.stepped import SteppedCache
from kvine.errors import StepError
from kvine.evidence.cells.beams import RecordingEngine, SearchStep
from kvine.evidence.cells.setup import Setup
from kvine.evidence.paths import HeldSampler, Record
from kvine.sampling.params import SamplingParams
from kvine.spans import clipped

STEPS_PER_TOKEN = 20  # more than any healthy engine takes, preemption included
HEAD_START = 2  # steps that mates are ahead
WRONG_TOKENS = 5  # fed and taken back by the histories that crop


@dataclass(frozen=True)
class Computed:
    """What a cell computed.

    Attributes:
        records: of each copy of the text: one, or two after a fork.
        cached_tokens: tokens of the prompt that were found in the cache.
        preemptions: how often a request gave way.
        search: the steps of a beam search, if it was one; then there are no records.
    """

    records: tuple[Record, ...]
    cached_tokens: int
    preemptions: int
    search: tuple[SearchStep, ...] = ()


class YieldingScheduler(Scheduler):
    """A scheduler whose youngest request can be made to give way."""

    def give_way(self, params: SamplingParams) -> None:
        """Preempts the youngest request if it runs by these params, and forgets what it had computed.

        It forgets ever more rarely, so that a text of any length, fed in pieces of any size, comes to its end.
        """
        if self.running and self.running[-1].params is params:
            self._preempt(self.running[-1])
            if self.num_preemptions.bit_count() == 1:  # 1, 2, 4, 8, ...
                self.manager.clear()


class Stage:
    """An engine with a cell's requests on it.

    Args:
        setup: the cell.
        parts: of the engine under test.
    """

    def __init__(self, setup: Setup, parts: EngineParts) -> None:
        self.setup = setup
        self.ids = list(setup.prompt.ids)
        self.text = list(setup.prompt.text)
        self.cached_tokens = 0
        self._params = SamplingParams(max_tokens=len(self.text), ignore_eos=True, num_beams=setup.num_beams)
        self.sampler = HeldSampler(parts.sampler, self._params, self.text, lambda done: None)
        self.parts = replace(parts, sampler=self.sampler)
        self.engine = RecordingEngine(self.parts, setup.engine, self._params)
        self._scheduler = YieldingScheduler(parts.manager, setup.engine)
        self.engine.scheduler = self._scheduler
        self._others: list[int] = []

    def serve_earlier(self) -> None:
        """Serves the requests that came before, to their end."""
        for other in self.setup.earlier:
            if ids := other(self.ids, self.setup.cache.block_size):
                pinned = clipped(self.setup.pinned, 0, len(ids))
                request = self.engine.add(ids, SamplingParams(max_tokens=1, ignore_eos=True), pinned=pinned)
                self._run_until(request)

    def start_mates(self) -> None:
        """Has the mates begin, so that the text joins them in mid-flow."""
        mate = replace(self._params, max_tokens=len(self.text) + HEAD_START, num_beams=1)  # another object, so not held
        for other in self.setup.mates:
            if ids := other(self.ids, self.setup.cache.block_size):
                self._others.append(self.engine.add(ids, mate))
        for _ in range(HEAD_START):
            self.step_mates()

    def step_mates(self) -> None:
        """One step of the requests beside the text."""
        if self.engine.busy:
            self._step()

    def queue(self) -> None:
        """Computes the text as a request, which gives way now and then if it is to."""
        self._run_until(self.engine.add(self.ids, self._params, pinned=self.setup.pinned), self.setup.preempt_every)

    def open(self) -> SteppedCache:
        """A cache stepped by hand, which begins with what of the prompt was found."""
        runner = self.parts.runner
        assert isinstance(runner, Runner)
        pinned = self.setup.pinned
        sequence = self.parts.manager.open(self.ids, self.parts.namespace(None, pinned), pinned)
        self.cached_tokens = sequence.num_tokens
        return SteppedCache(runner, self.setup.engine, self.parts.max_context, sequence)

    def read(self, cache: SteppedCache, token_ids: list[int]) -> Tensor:
        """Feeds tokens by hand, beside the mates' next step; logits of the last, [vocabulary] fp32 on the CPU."""
        self.step_mates()
        return cache.extend(token_ids, last=True)[0, -1, : self.sampler.vocab_size].float().cpu()

    def close(self) -> None:
        """Ends what still runs."""
        for request in self._others:
            self.engine.abort(request)

    def _run_until(self, request: int, preempt_every: int | None = None) -> None:
        most = STEPS_PER_TOKEN * (len(self.ids) + len(self.text)) * (1 + len(self._others))
        try:
            for step in range(most):
                if preempt_every is not None and step and step % preempt_every == 0:
                    self._scheduler.give_way(self._params)
                if self._step(request):
                    return
            raise StepError(f"The request has not come to its end in {most} steps.")
        finally:
            self.engine.abort(request)

    def _step(self, request: int | None = None) -> bool:
        """Makes a step; whether `request` has ended. Raises what ended any request."""
        ended = False
        for event in self.engine.step():
            if event.error is not None:
                raise event.error
            if event.request_id == request:
                self.cached_tokens = event.cached_tokens
                ended = event.finish_reason is not None
        return ended


History = Callable[[Stage], list[Record]]


def compute(setup: Setup, parts: EngineParts) -> Computed:
    """Runs a cell.

    Args:
        setup: what it does.
        parts: of the engine under test, made for the setup's options; nothing of the text is in its cache.

    Raises:
        KvineError: if the engine fails.
    """
    stage = Stage(setup, parts)
    try:
        stage.serve_earlier()
        stage.start_mates()
        records = setup.history(stage)
    finally:
        stage.close()
    found = stage.engine.recorded
    steps = () if found is None else tuple(found.steps)
    return Computed(tuple(records), stage.cached_tokens, stage.engine.scheduler.num_preemptions, steps)


def serve_earlier(setup: Setup, parts: EngineParts) -> None:
    """Serves the requests before a cell's text by an engine of their own, and closes its store."""
    with closing_store(parts):
        Stage(setup, parts).serve_earlier()


@contextlib.contextmanager
def closing_store(parts: EngineParts) -> Iterator[None]:
    """Lets go of the folder of an engine's store at the end."""
    try:
        yield
    finally:
        if parts.manager.tier is not None:
            parts.manager.tier.close()


def queued(stage: Stage) -> list[Record]:
    """The text is a request like any other; a beam search writes its own."""
    stage.queue()
    return [stage.sampler.record] if stage.setup.num_beams == 1 else []


def forked(stage: Stage) -> list[Record]:
    """Forks after the prompt. The original and one fork continue the text in turn; another fork soon goes astray.

    What it writes comes after the others have written there, so that they read it if it should have gone elsewhere.
    """
    with contextlib.closing(stage.open()) as first:
        logits = stage.read(first, stage.ids[len(first) :])
        with contextlib.closing(first.fork()) as stray, contextlib.closing(first.fork()) as second:
            taken: list[list[Tensor]] = [[logits], [logits]]
            for index, token in enumerate(stage.text[:-1]):
                for cache, into in zip((second, first), taken, strict=True):
                    into.append(stage.read(cache, [token]))
                if index == 0:
                    stage.read(stray, _others_than(stage.text, stage, 2))
    return [_record(logits) for logits in taken]


def cropped(stage: Stage) -> list[Record]:
    """Feeds some wrong tokens after the prompt, takes them back, and continues."""
    with contextlib.closing(stage.open()) as cache:
        logits = [stage.read(cache, stage.ids[len(cache) :])]
        stage.read(cache, _others_than(stage.text, stage, WRONG_TOKENS))
        _take_back(stage, cache, len(stage.ids))
        logits += [stage.read(cache, [token]) for token in stage.text[:-1]]
    return [_record(logits)]


def edited(stage: Stage) -> list[Record]:
    """Reads a prompt whose last third is another, goes back to where they part, and reads the right one."""
    keep = max(1, len(stage.ids) * 2 // 3)
    other = _others_than(stage.ids[keep:], stage, len(stage.ids) - keep)
    with contextlib.closing(stage.open()) as cache:
        if len(cache) > keep:
            _take_back(stage, cache, keep)
        stage.read(cache, stage.ids[len(cache) : keep] + other)
        _take_back(stage, cache, keep)
        logits = [stage.read(cache, stage.ids[len(cache) :])]
        logits += [stage.read(cache, [token]) for token in stage.text[:-1]]
    return [_record(logits)]


def _take_back(stage: Stage, cache: SteppedCache, num_tokens: int) -> None:
    """Crops to num_tokens, and computes again what a window could not restore."""
    cache.crop(num_tokens)
    if missing := stage.ids[len(cache) : num_tokens]:
        stage.read(cache, missing)


def _others_than(token_ids: list[int], stage: Stage, count: int) -> list[int]:
    """Tokens of which each is another than the one of token_ids at its place."""
    vocabulary = stage.sampler.vocab_size
    return [((token_ids[i] if i < len(token_ids) else 0) + 1) % vocabulary for i in range(count)]


def _record(logits: list[Tensor]) -> Record:
    stacked = torch.stack(logits)
    return Record(stacked.argmax(1).tolist(), stacked)
