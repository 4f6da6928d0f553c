"""`experiment walls`: a decode step over batch and context, and which of its two walls it stands at.

A step reads the weights once, however many sequences share it, and each sequence's own K and V. So a larger batch is
cheap while the weights rule, and as dear as its K and V once these do.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

import numpy as np

from kvine.cache.manager import BlockCopy, CacheManager
from kvine.cache.pool import KVPool
from kvine.cache.sequence import CachedSequence
from kvine.config import EngineConfig
from kvine.engine.build import DTYPE_NAMES, standard_parts
from kvine.engine.request import Request
from kvine.engine.resources import free_memory
from kvine.engine.runner import Runner
from kvine.engine.scheduler import Scheduled
from kvine.errors import ConfigError, ContextLengthError, RequestError
from kvine.evidence.experiments.counts import Counter, first_length
from kvine.evidence.experiments.trial import synchronize
from kvine.evidence.progress import Progress, silent
from kvine.llm import LLM
from kvine.models.packing import count_packings
from kvine.sampling.params import SamplingParams

MOST_SEQUENCES = 4096
SHARE_OF_FREE_MEMORY = 0.5  # that the caches of all sequences may take
# Milliseconds of one decode step of so many sequences, each of its own K and V.
StepTimer = Callable[[Runner, Sequence[Scheduled]], float]


@dataclass(frozen=True)
class Cell:
    """One batch at one context.

    Attributes:
        batch: sequences side by side.
        context: tokens that each has read.
        weight_bytes, kv_bytes: read by a step at least.
        ms: median time of a step; None where the caches did not fit.
    """

    batch: int
    context: int
    weight_bytes: int
    kv_bytes: int
    ms: float | None

    @property
    def kv_share(self) -> float:
        """Of the bytes of a step, those of K and V."""
        return self.kv_bytes / (self.kv_bytes + self.weight_bytes)

    @property
    def tokens_per_second(self) -> float | None:
        """Over all sequences."""
        return None if self.ms is None else self.batch / self.ms * 1e3

    @property
    def gigabytes_per_second(self) -> float | None:
        """Bytes that had to be read, over the time."""
        return None if self.ms is None else (self.kv_bytes + self.weight_bytes) / self.ms / 1e6


@dataclass(frozen=True)
class Crossover:
    """The context at which K and V come to rule a batch.

    Attributes:
        batch: sequences side by side.
        predicted: context from which their K and V are more bytes than the weights; None if that never happens.
        measured: context at which the part of the time that grows with it equals the part that does not, by a straight
            line through the measured times; None where these do not grow, or fewer than two were measured.
    """

    batch: int
    predicted: int | None
    measured: float | None


@dataclass(frozen=True)
class Walls:
    """What came of it.

    `budget_bytes` is what the caches were allowed to take, `packings` how many weights were packed, by type.
    """

    model: str
    dtype: str
    device: str
    steps: int
    budget_bytes: int
    cells: tuple[Cell, ...]
    crossovers: tuple[Crossover, ...]
    packings: Mapping[str, int] = field(default_factory=dict)


def run_walls(
    llm: LLM,
    *,
    batches: Sequence[int],
    contexts: Sequence[int],
    steps: int = 5,
    budget_bytes: int | None = None,
    progress: Progress = silent,
    timer: StepTimer | None = None,
) -> Walls:
    """Times decode steps of every batch at every context.

    Nothing but the step itself is computed: each sequence gets blocks of its own, filled by copying those of one text,
    since what K and V say makes no difference to the time of reading them.

    Args:
        llm: the model; its cache options hold here too, its budget does not.
        batches: numbers of sequences.
        contexts: tokens that each has read before.
        steps: to time, after one that is not counted.
        budget_bytes: for the caches; by default half of the free memory.
        progress: told of every cell.
        timer: times one step.

    Raises:
        RequestError: for a number below 1, or a batch above `MOST_SEQUENCES`.
        ContextLengthError: for a context that the model does not have.
    """
    if not batches or not contexts or min(steps, *batches, *contexts) < 1:
        raise RequestError("Batches, contexts and steps are whole numbers from 1.")
    if max(batches) > MOST_SEQUENCES:
        raise RequestError(
            f"A batch of {max(batches):,} is more than {MOST_SEQUENCES:,} sequences: choose a smaller one."
        )
    limit = llm.model.config.max_context
    if max(contexts) >= limit:
        raise ContextLengthError(f"{max(contexts)} tokens and a new one exceed the model's context of {limit}.")
    batches, contexts = sorted(set(batches)), sorted(set(contexts))
    budget = int(free_memory() * SHARE_OF_FREE_MEMORY) if budget_bytes is None else budget_bytes
    bench = _Bench(llm, batches[-1], contexts[-1], budget, steps, timer or time_step)
    cells: list[Cell] = []
    total = len(batches) * len(contexts)
    for context in contexts:
        for batch in batches:
            progress("decode steps", len(cells), total)
            cells.append(bench.cell(batch, context))
    progress("decode steps", total, total)
    bench.close()
    if all(cell.ms is None for cell in cells):
        raise RequestError("Memory is too short for any of these: choose smaller batches or contexts.")
    return Walls(
        llm.source.name,
        DTYPE_NAMES[llm.model.dtype],
        str(llm.model.device),
        steps,
        budget,
        tuple(sorted(cells, key=lambda cell: (cell.batch, cell.context))),
        tuple(_crossover(bench.counter, batch, [cell for cell in cells if cell.batch == batch]) for batch in batches),
        count_packings(llm.model.packings),
    )


def time_step(runner: Runner, step: Sequence[Scheduled]) -> float:
    """Milliseconds of one model call."""
    synchronize(runner.device)
    began = time.perf_counter()
    runner.run(step)
    synchronize(runner.device)
    return (time.perf_counter() - began) * 1e3


class _Bench:
    """Sequences of a given context, each with blocks of its own, in a cache that is just large enough."""

    def __init__(self, llm: LLM, most_sequences: int, longest: int, budget: int, steps: int, timer: StepTimer) -> None:
        dtype, specs = DTYPE_NAMES[llm.model.dtype], llm.parts.manager.specs
        self.counter = Counter(llm.model.config, specs, dtype, packings=llm.model.packings)
        if any(spec.packs for spec in specs):
            raise ConfigError("This experiment fills blocks with noise, which packed ones cannot hold: leave kv_dtype.")
        self._steps, self._timer = steps, timer
        needed = most_sequences * self._sequence_bytes(longest + 1)
        one_block = sum(spec.bytes_per_block(self.counter.dtype) for spec in self.counter.specs)
        config = replace(llm.cache_config, kv_memory=max(one_block, min(needed, budget)), prefix_caching=False)
        parts = standard_parts(llm.model, config, EngineConfig(), vocab_size=llm.tokenizer.vocab_size, eos_ids=())
        assert isinstance(parts.runner, Runner)
        self._runner, self._manager = parts.runner, parts.manager
        self._sequences: list[CachedSequence] = []
        self._context = 0

    def cell(self, batch: int, context: int) -> Cell:
        """Measures one batch; contexts come in ascending order, and batches within one."""
        if context != self._context:
            self.close()
            self._context = context
        work = self.counter.call(context, context + 1)
        ms = self._measure(batch) if self._grow(batch) else None
        return Cell(batch, context, work.weight_bytes, batch * work.kv_bytes, ms)

    def close(self) -> None:
        """Gives all blocks back."""
        for sequence in self._sequences:
            self._manager.release(sequence, keep_tail=False)
        self._sequences.clear()
        self._runner.give_back()

    def _sequence_bytes(self, num_tokens: int) -> int:
        """Whole blocks of a sequence, before a window has let go of any: room is made for all at once."""
        specs = self.counter.specs
        return sum(spec.num_blocks(num_tokens) * spec.bytes_per_block(self.counter.dtype) for spec in specs)

    def _grow(self, batch: int) -> bool:
        """Opens sequences until there are enough; false where memory is short."""
        while len(self._sequences) < batch:
            sequence = _open(self._manager, self._context)
            if sequence is None:
                return False
            for group, table in enumerate(sequence.tables):
                self._fill(group, table)
            self._sequences.append(sequence)
        return True

    def _fill(self, group: int, table: Sequence[int]) -> None:
        """Noise for the first sequence, copies for the others: untouched pages would all be the same page of zeros."""
        pool = self._runner.attention.pools[group]
        assert isinstance(pool, KVPool), "refused at the door"
        size = self._manager.block_size
        held = [index for index, block in enumerate(table) if block >= 0]
        if not self._sequences:
            for index in held:
                pool.k[:, table[index]].normal_()
                pool.v[:, table[index]].normal_()
            return
        source = self._sequences[0].tables[group]
        pool.copy(BlockCopy(group, source[index], table[index], size) for index in held)

    def _measure(self, batch: int) -> float:
        step = [_decode_one(sequence) for sequence in self._sequences[:batch]]
        times = [self._timer(self._runner, step) for _ in range(self._steps + 1)]
        return median(times[1:])


def _open(manager: CacheManager, context: int) -> CachedSequence | None:
    """A sequence that has read `context` tokens and has room for one; None, and nothing held, where memory is short."""
    sequence = manager.open(())
    if manager.reserve(sequence, context):
        manager.commit(sequence, [0] * context)
        if manager.reserve(sequence, 1):
            return sequence
    manager.release(sequence, keep_tail=False)
    return None


def _decode_one(sequence: CachedSequence) -> Scheduled:
    """The sequence's next token; it is never committed, so that each step is the same one."""
    context = sequence.num_tokens
    request = Request(
        -1,
        [0] * (context + 1),
        SamplingParams(),
        seed=0,
        namespace=b"",
        limit=context + 1,
        chunk=1,
        limit_detail="",
    )
    request.sequence = sequence
    return Scheduled(request, context, 1)


def _crossover(counter: Counter, batch: int, cells: Sequence[Cell]) -> Crossover:
    def rules(context: int) -> bool:
        return batch * counter.call(context - 1, context).kv_bytes >= counter.weight_bytes

    measured = None
    timed = [(cell.context, cell.ms) for cell in cells if cell.ms is not None]
    if len(timed) > 1:
        of_context, ms = np.asarray(timed, float).T
        slope, fixed = np.polyfit(of_context, ms, 1)
        measured = float(fixed / slope) if slope > 0 and fixed > 0 else None
    return Crossover(batch, first_length(rules), measured)
