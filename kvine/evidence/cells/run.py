"""Designs the cells of a model, and runs those of one dtype at a time, so that one model is loaded at a time."""

import math
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from kvine.cache.shelf import shelves_of
from kvine.config import CacheConfig, EngineConfig
from kvine.engine.engine import EngineParts
from kvine.errors import ConfigError, KvineError
from kvine.evidence.cells.beams import SearchStep
from kvine.evidence.cells.covering import Choice, Design
from kvine.evidence.cells.drive import HEAD_START, closing_store, compute, queued, serve_earlier
from kvine.evidence.cells.factors import Scope
from kvine.evidence.cells.oracle import Oracle
from kvine.evidence.cells.outcome import Cell, CellsReport, judge_cell, judge_search
from kvine.evidence.cells.setup import Prompt, Setup
from kvine.evidence.judge import judge_reference
from kvine.evidence.locate import locate
from kvine.evidence.progress import Progress, silent
from kvine.evidence.transformers_path import OtherPath, PathUnavailableError
from kvine.models.cache_specs import cache_specs
from kvine.models.config import ModelConfig

# The parts of an engine under test, for a cell's options.
MakeParts = Callable[[CacheConfig, EngineConfig], EngineParts]

MOST_LOCATED = 3  # faults that are looked for in the hidden states; each takes a run of its own
AMPLE = 16  # times what one request needs
STORE_SIZE = "64MiB"


@dataclass(frozen=True)
class Bench:
    """A model loaded in one dtype, for cells to run on.

    Attributes:
        dtype: `fp32`, `bf16` or `fp16`.
        model: its numbers.
        oracle: of this model and dtype.
        make_parts: the engine under test.
        open_other: loads the model into another library; raises `PathUnavailableError` where that cannot be done.
    """

    dtype: str
    model: ModelConfig
    oracle: Oracle
    make_parts: MakeParts
    open_other: Callable[[], OtherPath] | None = None


class CellRuns:
    """The cells of one `verify`, run dtype by dtype.

    Args:
        scope: what they are about.
        design: which they are.
        progress: told of every cell.

    Raises:
        ConfigError: if not a single cell can be run.
    """

    def __init__(self, scope: Scope, design: Design, progress: Progress = silent) -> None:
        if not design.cells:
            reasons = "; ".join(dict.fromkeys(refusal.reason for refusal in design.refused))
            raise ConfigError(f"No cell can be run on this model: {reasons}")
        self.design = design
        self._scope = scope
        self._progress = progress
        self._texts: dict[str, Prompt] = {}
        self._done: list[Cell] = []
        self._others = 0  # of these, by another library
        self._seconds = 0.0
        self._located = 0

    def run(self, bench: Bench) -> None:
        """Runs the cells of one dtype."""
        began = time.perf_counter()
        for choice in self.design.cells:
            setup = self._setup(choice)
            if setup.dtype == bench.dtype:
                self._progress("cells", len(self._done) - self._others, len(self.design.cells))
                self._done.append(self._run_cell(bench, setup, {name: level.name for name, level in choice.items()}))
        self._progress("cells", len(self._done) - self._others, len(self.design.cells))
        if bench.open_other is not None:
            others = self._run_other(bench, bench.open_other)
            self._others += len(others)
            self._done += others
        self._seconds += time.perf_counter() - began

    @property
    def report(self) -> CellsReport:
        """What came of the cells that have run."""
        return CellsReport(tuple(self._done), self.design.pairs, self.design.refused, self.design.seed, self._seconds)

    def _setup(self, choice: Choice) -> Setup:
        setup = Setup(self._scope.prompts[0], self._scope.dtypes[0], queued)
        for level in choice.values():
            setup = level.apply(setup)
        return setup

    def _run_cell(self, bench: Bench, setup: Setup, names: dict[str, str]) -> Cell:
        setup = replace(setup, prompt=self._text(bench, setup.prompt))
        reference = bench.oracle.reference(setup)
        doubt = judge_reference("", reference.record, reference.rounding)
        if doubt.verdict == "fault":
            return Cell(names, "fault", gap=doubt.difference, reason=f"The reference itself: {doubt.reason}")
        with tempfile.TemporaryDirectory(prefix="kvine-verify-") as folder:
            try:
                if setup.on_disk:
                    setup = replace(setup, cache=replace(setup.cache, cache_dir=folder, cache_size=STORE_SIZE))
                    serve_earlier(setup, _parts(bench, setup))
                    setup = replace(setup, earlier=())
                parts = _parts(bench, setup)
                with closing_store(parts):
                    computed = compute(setup, parts)
            except Exception as error:  # a broken engine may raise anything, and other cells say more about it
                cell = Cell(names, "fault", reason=str(error) if isinstance(error, KvineError) else repr(error))
            else:
                expects_hit = setup.expects_hit and not setup.tight  # short of memory, it may have been evicted
                if computed.search:
                    cell, setup = _judge_search(bench, names, setup, computed.search)
                else:
                    cell = judge_cell(names, computed.records, reference)
                if expects_hit and not computed.cached_tokens:
                    cell = Cell(names, "not run", reason="The beginning of the prompt was not found in the cache.")
            if cell.verdict == "fault" and self._located < MOST_LOCATED:
                self._located += 1
                fresh = _parts(bench, setup)  # the fault may have left the others in any state
                with closing_store(fresh):
                    cell = replace(cell, location=locate(bench.oracle.trace(setup), fresh, partial(compute, setup)))
        return cell

    def _run_other(self, bench: Bench, open_other: Callable[[], OtherPath]) -> list[Cell]:
        """Each prompt by another library's own cache."""
        names = {"path": "transformers", "dtype": bench.dtype}
        prompts = {choice["prompt"].name: choice["prompt"].value for choice in self.design.cells}
        cells: list[Cell] = []
        try:
            other = open_other()
            for prompt in prompts.values():
                self._progress("prompts by transformers", len(cells), len(prompts))
                setup = Setup(self._text(bench, prompt), bench.dtype, queued)
                record = other(setup.prompt.ids, setup.prompt.text, bench.oracle.vocab_size, lambda done: None)
                reference = bench.oracle.reference_of_others(setup)
                cells.append(judge_cell({**names, "prompt": prompt.name}, (record,), reference))
        except PathUnavailableError as error:
            cells.append(Cell(names, "not run", reason=str(error)))
        return cells

    def _text(self, bench: Bench, prompt: Prompt) -> Prompt:
        """The prompt and what every cell is held to, in all dtypes alike."""
        if prompt.name not in self._texts:
            self._texts[prompt.name] = bench.oracle.choose_text(prompt, self._scope.new_tokens)
        return self._texts[prompt.name]


def _judge_search(bench: Bench, names: dict[str, str], setup: Setup, steps: Sequence[SearchStep]) -> tuple[Cell, Setup]:
    """What came of a beam search, and its cell held to the line that is furthest from right."""
    best = steps[-1].chosen[0]
    rounding = bench.oracle.reference(replace(setup, prompt=replace(setup.prompt, text=best))).rounding
    right = bench.oracle.after(setup, [line for step in steps for line in step.lines])
    off = {
        line: float((row - right[line]).abs().nan_to_num(nan=math.inf).max())
        for step in steps
        for line, row in zip(step.lines, step.logits, strict=True)
    }
    worst = max(off, key=lambda line: (off[line], len(line)))
    held = replace(setup, prompt=replace(setup.prompt, text=(*worst, best[len(worst)])))  # its last token is not fed
    of_line = bench.oracle.reference(held).rounding  # how much it moves depends on the text, and that line is another
    if of_line.measured > of_line.limit:
        reason = "Rounding alone moves the reference of a beam further than any bound may be: that beam proves nothing."
        return Cell(names, "not run", reason=reason), held
    rounding = max(rounding, of_line, key=lambda measured: measured.bound)
    return judge_search(names, steps, right, rounding), held


def _parts(bench: Bench, setup: Setup) -> EngineParts:
    """The engine's parts, with memory for what the cell needs, or for its longest request alone."""
    specs = cache_specs(bench.model, setup.cache)
    size = setup.cache.block_size
    others = [other(setup.prompt.ids, size) for other in (*setup.earlier, *setup.mates)]
    longest = max(len(ids) for ids in [setup.prompt.ids, *others]) + len(setup.prompt.text) + HEAD_START
    shelves = shelves_of(specs, setup.pinned)
    step, beams, shared = setup.engine.max_step_tokens, setup.num_beams, len(setup.prompt.ids)
    blocks = [shelf.max_live_blocks(longest, step) + 1 for shelf in shelves]  # one to copy to
    if beams > 1:
        forked = [shelf.max_forked_blocks(longest, step, beams, shared) for shelf in shelves]
        blocks = [max(both) for both in zip(blocks, forked, strict=True)]
    needed = sum(n * shelf.bytes_per_block(bench.dtype) for n, shelf in zip(blocks, shelves, strict=True))
    cache = replace(setup.cache, kv_memory=needed if setup.tight else AMPLE * needed)
    parts = bench.make_parts(cache, setup.engine)
    for exchange in setup.exchange:
        parts = exchange(parts)
    return parts
