"""`kvine experiment walls`: decode steps over batch and context, and whether weights or K and V rule them."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvine.cli.experiment.options import Json, PlotFile, open_for_experiment, whole_numbers
from kvine.cli.options import ModelOptions, spread_options
from kvine.cli.terminal import human_bytes, show_output, write_json

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

    from kvine.evidence.experiments.walls import Cell, Walls

WEIGHTS_COLOUR, KV_COLOUR = (30, 60, 140), (170, 40, 40)  # of a step that reads only the one or only the other


@spread_options
def walls(
    model: ModelOptions,
    batches: Annotated[str, typer.Option(metavar="N,N,…", help="Sequences side by side.")] = "1,2,4,8,16,32,64",
    contexts: Annotated[str, typer.Option(metavar="N,N,…", help="Tokens that each has read.")] = "128,512,2048",
    steps: Annotated[int, typer.Option(help="Steps to time for each; the median is shown.")] = 5,
    plot: PlotFile = None,
    json: Json = False,
) -> None:
    """Time decode steps of many sequences at many contexts: where do the weights rule, where K and V?

    What does not fit half of the free memory is left out and said. docs/experiments.md says how to read it.
    """
    batch_sizes, context_sizes = whole_numbers("--batches", batches), whole_numbers("--contexts", contexts)
    llm = open_for_experiment(model, plot)
    from kvine.cli.evidence_progress import EvidenceProgress
    from kvine.evidence.experiments.walls import run_walls

    with EvidenceProgress("cells") as progress:
        outcome = run_walls(llm, batches=batch_sizes, contexts=context_sizes, steps=steps, progress=progress)
    if plot is not None:
        from kvine.evidence.experiments.pictures import draw_walls

        draw_walls(outcome, plot)
    if json:
        write_json(walls_json(outcome))
    else:
        show_walls(outcome)


def walls_json(outcome: "Walls") -> dict[str, Any]:
    """The outcome as `--json` prints it; null for what did not fit, and for a crossover that there is not."""
    return {
        "model": outcome.model,
        "dtype": outcome.dtype,
        "packings": outcome.packings,
        "device": outcome.device,
        "steps": outcome.steps,
        "budget_bytes": outcome.budget_bytes,
        "cells": [
            {
                "batch": cell.batch,
                "context": cell.context,
                "ms": cell.ms,
                "tokens_per_second": cell.tokens_per_second,
                "gigabytes_per_second": cell.gigabytes_per_second,
                "weight_bytes": cell.weight_bytes,
                "kv_bytes": cell.kv_bytes,
                "kv_share": cell.kv_share,
            }
            for cell in outcome.cells
        ],
        "crossovers": [vars(crossover) for crossover in outcome.crossovers],
    }


def show_walls(outcome: "Walls") -> None:
    """The outcome as a heat table, the crossovers, and what did not fit."""
    from rich.text import Text

    first = outcome.cells[0]
    lines = [
        f"A step reads {human_bytes(first.weight_bytes)} of weights once, whatever the batch; colour and percentage "
        "are the share of K and V in what it reads: blue where the weights rule, red where K and V do.",
        "Predicted: context from which K and V are more bytes than the weights. Measured: context from which the part "
        "of the time that grows with it is more than the rest, by a line through the times of one batch.",
    ]
    missing = [f"{cell.batch} × {cell.context:,}" for cell in outcome.cells if cell.ms is None]
    if missing:
        lines.append(
            f"Not measured, for K and V do not fit {human_bytes(outcome.budget_bytes)}: {', '.join(missing)} "
            "(batch × context)."
        )
    show_output(_heat_table(outcome), *map(Text, lines))


def _heat_table(outcome: "Walls") -> "Table":
    from rich.table import Table

    from kvine.models.packing import computes_in

    dtype = computes_in(outcome.dtype, outcome.packings)
    contexts = sorted({cell.context for cell in outcome.cells})
    table = Table(
        title=f"{outcome.model}, {dtype} on {outcome.device}: a decode step, median of {outcome.steps}",
        show_lines=True,
    )
    table.add_column("batch", justify="right")
    for context in contexts:
        table.add_column(f"{context:,} tokens", justify="right")
    table.add_column("crossover at\npredicted / measured", justify="right")
    for crossover in outcome.crossovers:
        cells = {cell.context: cell for cell in outcome.cells if cell.batch == crossover.batch}
        predicted = "never" if crossover.predicted is None else f"{crossover.predicted:,}"
        measured = "unknown" if crossover.measured is None else f"{crossover.measured:,.0f}"
        table.add_row(
            str(crossover.batch), *(_heat(cells[context]) for context in contexts), f"{predicted} / {measured}"
        )
    return table


def _heat(cell: "Cell") -> "Text":
    from rich.text import Text

    if cell.ms is None:
        return Text("does not fit", style="dim")
    mixed = (round(a + (b - a) * cell.kv_share) for a, b in zip(WEIGHTS_COLOUR, KV_COLOUR, strict=True))
    text = f"{cell.ms:,.1f} ms\n{cell.tokens_per_second:,.1f} tokens/s\nK/V {cell.kv_share:.0%}"
    return Text(text, style=f"white on rgb({','.join(map(str, mixed))})")
