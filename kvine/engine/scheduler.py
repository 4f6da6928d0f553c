"""Who computes how many tokens in the next step.

There are no phases. Each step lets requests catch up with their own tokens under one budget, so that prefill, its
chunks, decode, prefix hits and resuming after preemption are one path.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from kvine.cache.manager import CachedSequence, CacheManager
from kvine.cache.prefix import common_prefix
from kvine.config import EngineConfig
from kvine.engine.held import HeldTexts
from kvine.engine.request import Line, Request


@dataclass(frozen=True)
class Scheduled:
    """Tokens start … start + count - 1 of a request's line, to be computed in this step."""

    request: Line
    start: int
    count: int

    @property
    def samples(self) -> bool:
        """Whether the line has caught up after this step, so that a token is chosen."""
        return self.start + self.count == self.request.num_tokens


class Scheduler:
    """First come, first served. Whoever came last gives way when memory is short; the oldest never does.

    Before anybody waits or gives way, texts that are only held between requests do. A request with several lines is let
    in, computed and sent away as one.

    Args:
        manager: hands out blocks.
        config: token budget and number of running requests.
    """

    def __init__(self, manager: CacheManager, config: EngineConfig) -> None:
        self.manager = manager
        self.config = config
        self.held = HeldTexts(manager)
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # oldest first
        self.num_preemptions = 0
        self._blocked: tuple[int, int] | None = None  # who could not be admitted, after how much had become free

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
        if request.held is not None and request.sequence is not None and keep:
            self.held.keep(request.held, request.sequence)
            request.sequence = None
        self._let_go(request.lines, keep=keep)

    def schedule(self) -> list[Scheduled]:
        """The next step; every block it writes is reserved. Empty only when nothing waits or runs."""
        self.held.sweep()
        step: dict[Request, list[Scheduled]] = {}
        budget = self.config.max_step_tokens
        # Requests that need one token go first: a long prompt may slow the others' next token, never withhold it.
        decoding = [r for r in self.running if all(line.num_left == 1 for line in r.lines)]
        catching_up = [r for r in self.running if any(line.num_left != 1 for line in r.lines)]
        preempted = False
        for request in decoding + catching_up:
            if request not in self.running:  # preempted in this very step
                continue
            items = self._share(request, budget)
            while not self._reserve(items):
                if self.held.give_way():
                    continue
                preempted = True
                victim = self.running[-1]
                budget += _count(step.pop(victim, ()))  # a younger one may decode in this step already
                self._preempt(victim)
                if victim is request:
                    break
            else:
                step[request] = items
                budget -= _count(items)
        while self.waiting and budget and not preempted and len(self.running) < self.config.max_running:
            request = self.waiting[0]
            if self._blocked == (request.id, self._num_freed()):
                break  # looking its prompt up again would find no more room than before
            admitted = self._admit(request, budget)
            while admitted is None and self.held.give_way():
                admitted = self._admit(request, budget)
            if admitted is None:
                self._blocked = (request.id, self._num_freed())
                break
            self.waiting.popleft()
            self.running.append(request)
            step[request] = admitted
            budget -= _count(admitted)
        return [item for items in step.values() for item in items]

    def _share(self, request: Request, budget: int) -> list[Scheduled]:
        """What a running request computes next, of `budget` tokens at most.

        Its lines' last tokens are computed in one step, so that all are chosen at once; what comes before, line after
        line. What all lines begin with is computed by the first, from which the others then fork.
        """
        lines = request.lines
        if any(line.sequence is None for line in lines):
            count = min(budget, request.chunk, request.trunk - lines[0].num_computed)
            if count:
                return [Scheduled(lines[0], lines[0].num_computed, count)]
            if lines[0].num_computed < request.trunk:
                return []
            self._fork(lines)
        room = min(budget, max(request.chunk, len(lines)))
        if sum(line.num_left for line in lines) <= room:
            return [Scheduled(line, line.num_computed, line.num_left) for line in lines]
        items = []
        for line in lines:
            if count := min(room, line.num_left - 1):
                items.append(Scheduled(line, line.num_computed, count))
                room -= count
        return items

    def _fork(self, lines: Sequence[Line]) -> None:
        first = lines[0].sequence
        assert first is not None
        for line in lines[1:]:
            line.sequence = self.manager.fork(first)

    def _reserve(self, items: Sequence[Scheduled]) -> bool:
        """Room for all of these; where there is none, lines that have got theirs keep it until their request goes."""
        for item in items:
            assert item.request.sequence is not None
            if not self.manager.reserve(item.request.sequence, item.count):
                return False
        return True

    def _admit(self, request: Request, budget: int) -> list[Scheduled] | None:
        """Opens the request's first line and reserves its first chunk, if all present tokens of all lines will fit."""
        first = request.lines[0]
        sequence, lent = self._begin(request)
        first.sequence = sequence
        remainder = sequence.num_tokens % self.manager.block_size
        # Copying a partly matching block needs room for both; where there is none, its tokens are computed instead.
        for length in (sequence.num_tokens, sequence.num_tokens - remainder):
            self.manager.crop(sequence, length)
            fits = self.manager.fits_now(
                sequence, first.num_tokens, request.chunk, request.width, len(request.prompt_ids)
            )
            if fits and self._reserve(items := self._share(request, budget)):
                if request.cached_tokens is None:
                    request.cached_tokens = sequence.num_tokens
                return items
            self._let_go(request.lines[1:])
        if request.held is not None and lent:  # once only: if it has to give way meanwhile, the next one is released
            self.held.keep(request.held, sequence)
            first.sequence = None
        self._let_go(request.lines)
        return None

    def _begin(self, request: Request) -> tuple[CachedSequence, bool]:
        """What the cache has of a request's beginning, and whether a text lent it that is held between its requests."""
        tokens = request.lines[0].tokens(0, request.trunk + 1)
        lent = None if request.held is None else self.held.lend(request.held)
        same = 0
        if lent is not None:
            same = self.manager.crop(lent, min(common_prefix(lent.tokens, tokens), request.trunk))
            if same == request.trunk:
                return lent, True
        opened = self.manager.open(tokens, request.namespace, request.pinned)
        if lent is None:
            return opened, False
        worse = lent if same < opened.num_tokens else opened
        self.manager.release(worse, keep_tail=worse is lent)
        return (opened, False) if worse is lent else (lent, True)

    def _num_freed(self) -> int:
        return self.manager.num_releases + self.held.num_kept

    def _preempt(self, request: Request) -> None:
        """Frees what a request holds; it will recompute what the cache no longer has."""
        self.running.remove(request)
        self._let_go(request.lines)
        self.waiting.appendleft(request)
        self.num_preemptions += 1

    def _let_go(self, lines: Sequence[Line], *, keep: bool = True) -> None:
        for line in lines:
            if line.sequence is not None:
                self.manager.release(line.sequence, keep_tail=keep)
                line.sequence = None


def _count(items: Sequence[Scheduled]) -> int:
    return sum(item.count for item in items)
