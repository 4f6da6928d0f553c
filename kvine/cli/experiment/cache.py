"""`kvine experiment cache`: what a KV cache saves in time, and what it costs and saves in memory."""

import enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvine.cli.experiment.curves import curves_json, show_curves
from kvine.cli.experiment.options import Json, PlotFile, check_plot_file, open_for_experiment, whole_numbers
from kvine.cli.options import ModelOptions, spread_options
from kvine.cli.terminal import ended_by_interrupt, human_bytes, show_output, write_json
from kvine.errors import RequestError

if TYPE_CHECKING:
    from kvine.evidence.experiments.cache import CacheExperiment
    from kvine.evidence.experiments.curves import Grow


NEW_TOKENS = 64


def _growing(help: str) -> Any:
    return typer.Option(metavar="N,N,…", help=help)


class LogitsChoice(enum.StrEnum):
    """Which of a call's logits are computed."""

    ALL = "all"
    LAST = "last"
    BOTH = "both"


class Growing(enum.StrEnum):
    """What grows from measurement to measurement."""

    PROMPT = "prompt"
    OUTPUT = "output"
    BOTH = "both"


GROWING: "dict[Growing, tuple[Grow, ...]]" = {
    Growing.PROMPT: ("prompt",),
    Growing.OUTPUT: ("output",),
    Growing.BOTH: ("prompt", "output"),
}


@spread_options
def cache(
    model: ModelOptions,
    tokens: Annotated[int | None, typer.Option(help=f"Tokens to generate; {NEW_TOKENS} by default.")] = None,
    repeats: Annotated[int, typer.Option(help="Times that each path is measured; medians are shown.")] = 3,
    prompt: Annotated[str | None, typer.Option(metavar="TEXT", help="Instead of the default of 1,929 tokens.")] = None,
    logits: Annotated[
        LogitsChoice,
        typer.Option(help="all: of every position a call computes, as a textbook loop does; last: of the last only."),
    ] = LogitsChoice.ALL,
    grow: Annotated[
        Growing | None, typer.Option(help="Measure curves instead: how time and work grow, with fitted exponents.")
    ] = None,
    prompt_sizes: Annotated[str, _growing("Prompts that --grow measures, in tokens.")] = "64,128,256,512,1024",
    output_sizes: Annotated[str, _growing("Outputs that --grow measures, in tokens.")] = "16,32,64,128,256",
    plot: PlotFile = None,
    json: Json = False,
) -> None:
    """Generate with and without a KV cache: time, speedup and peak memory of both.

    Each measurement has a process of its own; the paths take turns. With --grow all of them share one, and memory is
    not measured. docs/benchmarks.md and docs/experiments.md define the figures.
    """
    if (tokens is not None and tokens < 1) or repeats < 1:
        raise RequestError("An experiment needs at least 1 token and 1 repeat.")
    if grow is None:
        _compare(model, NEW_TOKENS if tokens is None else tokens, repeats, prompt, logits, plot, json)
        return
    if prompt is not None or tokens is not None:
        raise RequestError(
            "--grow has sizes of its own: give --prompt-sizes and --output-sizes, not --prompt, --tokens."
        )
    if logits is LogitsChoice.BOTH:
        raise RequestError("--grow measures one kind of logits at a time: give --logits all or --logits last.")
    sizes = whole_numbers("--prompt-sizes", prompt_sizes), whole_numbers("--output-sizes", output_sizes)
    _grow(model, grow, sizes, repeats, logits, plot, json)


def _grow(
    model: ModelOptions,
    grow: Growing,
    sizes: tuple[list[int], list[int]],
    repeats: int,
    logits: LogitsChoice,
    plot: Path | None,
    json: bool,
) -> None:
    llm = open_for_experiment(model, plot)
    from kvine.cli.evidence_progress import EvidenceProgress
    from kvine.evidence.experiments.curves import run_curves

    with EvidenceProgress() as progress:
        outcome = run_curves(
            llm,
            GROWING[grow],
            prompt_sizes=sizes[0],
            output_sizes=sizes[1],
            repeats=repeats,
            logits="last" if logits is LogitsChoice.LAST else "all",
            progress=progress,
        )
    if plot is not None:
        from kvine.evidence.experiments.pictures import draw_curves

        draw_curves(outcome, plot)
    if json:
        write_json(curves_json(outcome))
    else:
        show_curves(outcome)


def _compare(
    model: ModelOptions,
    tokens: int,
    repeats: int,
    prompt: str | None,
    logits: LogitsChoice,
    plot: Path | None,
    json: bool,
) -> None:
    model.check()
    check_plot_file(plot)
    from kvine.cli.evidence_progress import EvidenceProgress
    from kvine.cli.progress import FetchProgress
    from kvine.evidence.prompts import DEFAULT_PROMPT
    from kvine.hub import resolve

    with FetchProgress() as fetching:
        source = resolve(model.model, progress=fetching)
    with ended_by_interrupt():
        from kvine.evidence.experiments.cache import run_cache_experiment

    with EvidenceProgress() as progress:
        outcome = run_cache_experiment(
            source,
            prompt=DEFAULT_PROMPT if prompt is None else prompt,
            new_tokens=tokens,
            repeats=repeats,
            logits=logits.value,
            dtype=model.dtype,
            device=model.device,
            weights=model.weights,
            threads=model.threads,
            progress=progress,
        )
    if plot is not None:
        from kvine.evidence.experiments.pictures import draw_cache

        draw_cache(outcome, plot)
    if json:
        write_json(experiment_json(outcome))
    else:
        show_experiment(outcome)


def experiment_json(outcome: "CacheExperiment") -> dict[str, Any]:
    """The outcome as `--json` prints it. `speedup` is that of the first mode of logits, `speedups` has them all."""
    return {
        "model": outcome.model,
        "dtype": outcome.dtype,
        "packings": outcome.packings,
        "device": outcome.device,
        "prompt_tokens": outcome.prompt_tokens,
        "new_tokens": outcome.new_tokens,
        "repeats": outcome.repeats,
        "same_tokens": outcome.same_tokens,
        "rows": [vars(row) for row in outcome.rows],
        "speedup": outcome.speedup(outcome.modes[0]),
        "speedups": {mode: outcome.speedup(mode) for mode in outcome.modes},
    }


def show_experiment(outcome: "CacheExperiment") -> None:
    """The outcome as a table, and what it says in sentences."""
    from rich.table import Table
    from rich.text import Text

    from kvine.evidence.experiments.cache import memory_sentence
    from kvine.models.packing import computes_in

    dtype = computes_in(outcome.dtype, outcome.packings)
    table = Table(
        title=f"{outcome.model}, {dtype} on {outcome.device}: {outcome.prompt_tokens:,} tokens of prompt, "
        f"{outcome.new_tokens} new ones, median of {outcome.repeats}"
    )
    table.add_column("path")
    table.add_column("logits")
    for name in ("total, s", "first token, s", "further, ms", "speedup", "peak memory", "beside model"):
        table.add_column(name, justify="right")
    for row in outcome.rows:
        table.add_row(
            row.path,
            row.logits,
            f"{row.total_ms / 1e3:,.2f}",
            f"{row.prefill_ms / 1e3:,.2f}",
            f"{row.decode_ms:,.1f}",
            f"{outcome.speedup(row.logits):.2f}x" if row.path == "cached" else "",
            "unknown" if row.peak_bytes is None else human_bytes(row.peak_bytes),
            "" if row.own_bytes is None else human_bytes(row.own_bytes),
        )
    lines = [memory_sentence(outcome)]
    if not outcome.same_tokens:
        lines.append("The paths did not all generate the same tokens: kvine verify tells whether that is rounding.")
    show_output(table, *(Text(line) for line in lines if line))
