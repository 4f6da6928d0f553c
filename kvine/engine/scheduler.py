"""Who computes how many tokens in the next step.

There are no phases. Each step lets requests catch up with their own tokens under one budget, so that prefill, its
chunks, decode, prefix hits and resuming after preemption are one path.
"""

from collections import deque
from dataclasses import dataclass

from kvine.cache.manager import CacheManager
from kvine.config import EngineConfig
from kvine.engine.request import Request


@dataclass(frozen=True)
class Scheduled:
    """Tokens start … start + count - 1 of a request, to be computed in this step."""

    request: Request
    start: int
    count: int

    @property
    def samples(self) -> bool:
        """Whether the request has caught up after this step, so that a token is sampled."""
        return self.start + self.count == self.request.num_tokens


class Scheduler:
    """First come, first served. Whoever came last gives way when memory is short; the oldest never does.

    Args:
        manager: hands out blocks.
        config: token budget and number of running requests.
    """

    def __init__(self, manager: CacheManager, config: EngineConfig) -> None:
        self.manager = manager
        self.config = config
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # oldest first
        self.num_preemptions = 0
        self._blocked: tuple[int, int] | None = None  # who could not be admitted, after how many releases

    def add(self, request: Request) -> None:
        """Queues a request."""
        self.waiting.append(request)

    def remove(self, request: Request, *, keep: bool = True) -> None:
        """Takes a request out, wherever it is, and frees what it holds at once.

        Args:
            request: one that was added and not removed.
            keep: whether its unfinished last block may serve later requests; false after a failed step.
        """
        if request in self.running:
            self.running.remove(request)
        else:
            self.waiting.remove(request)
        self._let_go(request, keep=keep)

    def schedule(self) -> list[Scheduled]:
        """The next step; every block it writes is reserved. Empty only when nothing waits or runs."""
        step: dict[Request, Scheduled] = {}
        budget = self.config.max_step_tokens
        # Requests that need one token go first: a long prompt may slow the others' next token, never withhold it.
        decoding = [r for r in self.running if r.num_tokens - r.num_computed == 1]
        catching_up = [r for r in self.running if r.num_tokens - r.num_computed > 1]
        preempted = False
        for request in decoding + catching_up:
            count = min(budget, request.chunk, request.num_tokens - request.num_computed)
            if not count or request not in self.running:  # no budget left, or preempted in this very step
                continue
            while not self._reserve(request, count):
                preempted = True
                victim = self.running[-1]
                dropped = step.pop(victim, None)  # a younger one may decode in this step already
                budget += dropped.count if dropped else 0
                self._preempt(victim)
                if victim is request:
                    break
            else:
                step[request] = Scheduled(request, request.num_computed, count)
                budget -= count
        while self.waiting and budget and not preempted and len(self.running) < self.config.max_running:
            request = self.waiting[0]
            if self._blocked == (request.id, self.manager.num_releases):
                break  # looking its prompt up again would find no more room than before
            if not self._admit(request, budget):
                self._blocked = (request.id, self.manager.num_releases)
                break
            self.waiting.popleft()
            self.running.append(request)
            count = min(budget, request.chunk, request.num_tokens - request.num_computed)
            step[request] = Scheduled(request, request.num_computed, count)
            budget -= count
        return list(step.values())

    def _reserve(self, request: Request, count: int) -> bool:
        assert request.sequence is not None
        return self.manager.reserve(request.sequence, count)

    def _admit(self, request: Request, budget: int) -> bool:
        """Opens the request's sequence and reserves its first chunk, if all of its present tokens will fit."""
        sequence = self.manager.open(request.tokens(0, request.num_tokens), request.namespace)
        request.sequence = sequence
        remainder = sequence.num_tokens % self.manager.block_size
        # Copying a partly matching block needs room for both; where there is none, its tokens are computed instead.
        for length in (sequence.num_tokens, sequence.num_tokens - remainder):
            self.manager.crop(sequence, length)
            count = min(budget, request.chunk, request.num_tokens - sequence.num_tokens)
            fits = self.manager.fits_now(sequence, request.num_tokens, request.chunk)
            if fits and self._reserve(request, count):
                if request.cached_tokens is None:
                    request.cached_tokens = sequence.num_tokens
                return True
        self._let_go(request)
        return False

    def _preempt(self, request: Request) -> None:
        """Frees what a request holds; it will recompute what the cache no longer has."""
        self.running.remove(request)
        self._let_go(request)
        self.waiting.appendleft(request)
        self.num_preemptions += 1

    def _let_go(self, request: Request, *, keep: bool = True) -> None:
        if request.sequence is not None:
            self.manager.release(request.sequence, keep_tail=keep)
            request.sequence = None
