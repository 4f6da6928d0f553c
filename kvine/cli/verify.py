"""`kvine verify`: does the cache change anything? Exit code 0 without a fault, 1 with one."""

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvine.cli.options import ExactModelOptions, spread_options
from kvine.cli.terminal import ended_by_interrupt, show_output, write_json
from kvine.cli.verify_cells import cells_json, cells_view
from kvine.errors import RequestError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from kvine.evidence.judge import Divergence, Report, Rounding, Run
    from kvine.evidence.verify import CellOptions, PathOptions

FAULT = 1
NEW_TOKENS, QUICK_NEW_TOKENS = 64, 16
CELL_TOKENS, QUICK_CELL_TOKENS = 8, 4
STYLES = {"reference": "dim", "identical": "green", "rounding": "yellow", "fault": "bold red", "not run": "dim"}


class Part(StrEnum):
    """A part of `kvine verify` that can be run alone."""

    PATHS = "paths"
    CELLS = "cells"


@dataclass(frozen=True)
class TextOptions:
    """What is computed, and how much of it."""

    new_tokens: Annotated[
        int | None,
        typer.Option(
            help=f"Tokens to generate; paths: {NEW_TOKENS}, or {QUICK_NEW_TOKENS} with --quick; cells: {CELL_TOKENS}, "
            f"or {QUICK_CELL_TOKENS}."
        ),
    ] = None
    quick: Annotated[
        bool, typer.Option("--quick", help="Paths on 69 tokens of prompt instead of 1,929; fewer cells.")
    ] = False
    only: Annotated[
        Part | None, typer.Option(help="Only the long text by several paths, or only short ones with all options.")
    ] = None
    prompt: Annotated[str | None, typer.Option(metavar="TEXT", help="Another prompt, for paths and cells.")] = None
    prompts: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Prompts of the cells: one a line, or what `kvine generate --json` wrote."),
    ] = None
    seed: Annotated[int, typer.Option(help="Of the choice of cells.")] = 0

    def paths(self) -> "PathOptions | None":
        """The long text; None if it is left out."""
        from kvine.evidence.prompts import DEFAULT_PROMPT, QUICK_PROMPT
        from kvine.evidence.verify import PathOptions

        if self.only == Part.CELLS:
            return None
        usual, tokens = (QUICK_PROMPT, QUICK_NEW_TOKENS) if self.quick else (DEFAULT_PROMPT, NEW_TOKENS)
        return PathOptions(
            usual if self.prompt is None else self.prompt, tokens if self.new_tokens is None else self.new_tokens
        )

    def cells(self) -> "CellOptions | None":
        """The short texts; None if they are left out. Raises RequestError for a file that holds no prompts."""
        from kvine.evidence.cells.prompts import Source, built_in, read_prompts
        from kvine.evidence.verify import CellOptions

        if self.only == Part.PATHS:
            return None
        if self.prompts is not None:
            if self.prompt is not None:
                raise RequestError("--prompt and --prompts both say what the cells read: give one of them.")
            sources = read_prompts(self.prompts)
        else:
            sources = built_in(quick=self.quick) if self.prompt is None else [Source("--prompt", self.prompt)]
        tokens = QUICK_CELL_TOKENS if self.quick else CELL_TOKENS
        return CellOptions(sources, tokens if self.new_tokens is None else self.new_tokens, self.quick, self.seed)


@spread_options
def verify(
    model: ExactModelOptions,
    texts: TextOptions,
    inject: Annotated[
        str | None,
        typer.Option(metavar="NAME|all", help="Check the checker: build in a fault of `kvine traps` and find it."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Check that the cache changes nothing: compare it with cache-free computing, and with transformers.

    A long text by four paths, and short ones in cells that combine all options (block size, chunks, prefix hits, batch
    mates, preemption, forks, windows, ...) two by two; in fp32 and in the compute dtype. A difference counts as
    rounding only within a bound that is measured; docs/verify.md says how. Takes many minutes; --quick a few.
    """
    model.check()
    if inject is not None:
        if texts != TextOptions():
            raise RequestError("--inject reads texts of its own: of the other options it takes the model's and --json.")
        from kvine.cli.traps import inject as inject_faults

        inject_faults(model, inject, json)
        return
    from kvine.cli.evidence_progress import EvidenceProgress
    from kvine.cli.progress import FetchProgress
    from kvine.hub import resolve

    with FetchProgress() as fetching:
        source = resolve(model.model, progress=fetching)
    with ended_by_interrupt():
        from kvine.evidence.verify import verify as run_verify

    paths, cells = texts.paths(), texts.cells()
    with EvidenceProgress(units={"cells": "cells", "prompts by transformers": "prompts"}) as progress:
        report = run_verify(
            source,
            paths,
            cells,
            dtype=model.dtype,
            device=model.device,
            weights=model.weights,
            threads=model.threads,
            progress=progress,
        )
    if json:
        write_json(report_json(report))
    else:
        show_report(report)
    if not report.ok:
        raise typer.Exit(FAULT)


def report_json(report: "Report") -> dict[str, Any]:
    """The report as `--json` prints it; numbers that are not finite become null."""
    return ({} if report.cells is None else cells_json(report.cells)) | {
        "ok": report.ok,
        "model": report.model,
        "prompt_tokens": report.prompt_tokens,
        "packings": report.packings,
        "runs": [_run_json(run) for run in report.runs],
        "rounding": [
            {"dtype": r.dtype, "measured": _finite(r.measured), "bound": r.bound, "logit_range": _finite(r.logit_range)}
            for r in report.rounding
        ],
    }


def show_report(report: "Report") -> None:
    """The report as tables, and its outcome in one line."""
    from rich.text import Text

    views = [] if report.cells is None else cells_view(report.cells)
    if report.runs:
        views += _runs_view(report)
    views += [
        Text(f"{dtype}: {sum(packings.values()):,} weights were packed ({', '.join(packings)}).")
        for dtype, packings in report.packings.items()
        if packings
    ]
    faults = [f"{sum(run.verdict == 'fault' for run in report.runs)} of {len(report.runs)} runs"] if report.runs else []
    if report.cells is not None:
        faults.append(f"{len(report.cells.faults)} of {len(report.cells.cells)} cells")
    if not report.ok:
        views.append(Text(f"{' and '.join(faults)} show a fault.", style="bold red"))
    else:
        outcome = "No fault: all differences are within rounding. The reference is the cache-free path."
        cells = () if report.cells is None else report.cells.cells
        if "not run" in {*(run.verdict for run in report.runs), *(cell.verdict for cell in cells)}:
            outcome += " What was not run is not part of this."
        views.append(Text(outcome, style="green"))
    show_output(*views)


def _runs_view(report: "Report") -> list["RenderableType"]:
    """The paths as a table, then a line for all that needs one."""
    from rich.table import Table
    from rich.text import Text

    table = Table(title=f"{report.model}: {report.prompt_tokens:,} tokens of prompt")
    for name, justify in (("dtype", "left"), ("path", "left"), ("tokens as the reference's", "right")):
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    for name in ("largest difference", "bound", "verdict"):
        table.add_column(name, justify="left" if name == "verdict" else "right")
    for run in report.runs:
        same = "" if run.identical is None else f"{run.matching} of {run.tokens}"
        table.add_row(
            run.dtype,
            run.path,
            same,
            _number(run.difference),
            _number(run.bound),
            run.verdict,
            style=STYLES[run.verdict],
        )
    lines = [Text(f"{run.path}, {run.dtype}: {run.reason}") for run in report.runs if run.reason is not None]
    lines += [Text(_divergence_line(run, run.first_divergence)) for run in report.runs if run.first_divergence]
    lines += [Text(_rounding_line(rounding)) for rounding in report.rounding]
    return [table, *lines]


def _divergence_line(run: "Run", at: "Divergence") -> str:
    ours, theirs = at.candidates
    return (
        f"{run.path}, {run.dtype}: at step {at.step} (position {at.position}) the reference takes {ours.text!r} "
        f"({ours.token_id}), this path {theirs.text!r} ({theirs.token_id}). The reference prefers its own by "
        f"{at.gap:.3g}; rounding explains up to {at.bound:.3g}: {at.verdict}."
    )


def _rounding_line(rounding: "Rounding") -> str:
    return (
        f"{rounding.dtype}: two right computations differ by up to {rounding.measured:.3g}, "
        f"{rounding.measured / rounding.logit_range:.1e} of the logits' range; the bound is {rounding.bound:.3g}."
    )


def _run_json(run: "Run") -> dict[str, Any]:
    first = run.first_divergence
    return {
        "path": run.path,
        "dtype": run.dtype,
        "verdict": run.verdict,
        "identical": run.identical,
        "tokens": run.tokens,
        "matching": run.matching,
        "difference": _finite(run.difference),
        "difference_step": run.difference_step,
        "bound": run.bound,
        "reason": run.reason,
        "first_divergence": None
        if first is None
        else {
            "step": first.step,
            "position": first.position,
            "candidates": [
                {
                    "token_id": candidate.token_id,
                    "text": candidate.text,
                    "reference_logit": _finite(candidate.reference_logit),
                    "path_logit": _finite(candidate.path_logit),
                }
                for candidate in first.candidates
            ],
            "gap": first.gap,
            "bound": first.bound,
            "verdict": first.verdict,
        },
    }


def _finite(value: float | None) -> float | None:
    import math

    return value if value is not None and math.isfinite(value) else None


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"
