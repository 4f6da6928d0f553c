"""`kvine experiment window`: what a sliding window forgets, and what sinks and a pinned prompt keep of it."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvine.cli.experiment.options import Json, PlotFile, open_for_experiment
from kvine.cli.options import ModelOptions, spread_options
from kvine.cli.terminal import ended_by_interrupt, show_output, write_json

if TYPE_CHECKING:
    from rich.table import Table

    from kvine.evidence.experiments.edge import Edge
    from kvine.evidence.experiments.window import WindowExperiment


@spread_options
def window(
    model: ModelOptions,
    window: Annotated[int, typer.Option(help="Tokens that a query sees beside sinks.")] = 128,
    turns: Annotated[int, typer.Option(help="Questions and answers between telling a fact and asking for it.")] = 8,
    edge: Annotated[int, typer.Option(help="A window whose end is shown key by key.")] = 4096,
    plot: PlotFile = None,
    json: Json = False,
) -> None:
    """Tell a model something, talk past its window, and ask: what is left with a window, with sinks, with a pin?

    Four facts, told in the system message. docs/experiments.md says how to read it.
    """
    from kvine.cli.evidence_progress import EvidenceProgress

    with ended_by_interrupt():
        from kvine.evidence.experiments.window import check_request, run_window_experiment
    check_request(window, turns, edge)
    llm = open_for_experiment(model, plot)
    with EvidenceProgress("texts") as progress:
        outcome = run_window_experiment(llm, window=window, turns=turns, edge_window=edge, progress=progress)
    if plot is not None:
        from kvine.evidence.experiments.pictures import draw_window

        draw_window(outcome, plot)
    if json:
        write_json(window_json(outcome))
    else:
        show_window(outcome)


def window_json(outcome: "WindowExperiment") -> dict[str, Any]:
    """The outcome as `--json` prints it; a rank of 1 means that no token is likelier than the right one."""
    return {
        "model": outcome.model,
        "dtype": outcome.dtype,
        "packings": outcome.packings,
        "device": outcome.device,
        "window": outcome.window,
        "prompt_tokens": outcome.prompt_tokens,
        "rows": [
            {
                "kept": kept.name,
                "visible_tokens": kept.visible,
                "probability": kept.probability,
                "perplexity": kept.perplexity,
                "scenes": [asdict(recall) for recall in kept.recalls],
            }
            for kept in outcome.kept
        ],
        "edges": [asdict(edge) for edge in outcome.edges],
        "first_key": asdict(outcome.seen),
    }


def show_window(outcome: "WindowExperiment") -> None:
    """The outcome as two tables, and what they say in sentences."""
    from rich.text import Text

    kept = [row.name for row in outcome.kept if outcome.keeps(row)]
    forgotten = [row.name for row in outcome.kept[2:] if not outcome.keeps(row)]
    if not outcome.tells:
        lines = ["This model hardly finds the facts with everything kept, so the rest says nothing: try a larger one."]
    else:
        lines = [f"The fact is kept by: {', '.join(kept)}.", f"It is forgotten by: {', '.join(forgotten) or 'none'}."]
    lines.append(
        "P(answer) is the geometric mean over the facts; perplexity is of the talk past the window: what a way of "
        "keeping does to reading on, whether or not it keeps the fact."
    )
    show_output(_recall_table(outcome), *map(Text, lines), _edge_table(outcome.edges), Text(_seen_line(outcome)))


def _recall_table(outcome: "WindowExperiment") -> "Table":
    from rich.table import Table

    from kvine.models.packing import computes_in

    dtype = computes_in(outcome.dtype, outcome.packings)
    table = Table(
        title=f"{outcome.model}, {dtype} on {outcome.device}: a fact told at the start, asked for after up to "
        f"{outcome.prompt_tokens} tokens",
        caption="sees: tokens that a query sees at most. P: of the right answer. #: rank of its first token.",
        box=None,
        pad_edge=False,
        header_style="dim",
    )
    table.add_column("what is kept")
    for name in ("sees", "P(answer)", *(recall.scene for recall in outcome.kept[0].recalls), "perplexity"):
        table.add_column(name, justify="right")
    for kept in outcome.kept:
        recalls = [f"{_share(recall.probability)}\n#{recall.rank:,}" for recall in kept.recalls]
        style = "green" if outcome.keeps(kept) else "red"
        table.add_row(
            kept.name,
            f"{kept.visible:,}",
            f"{_share(kept.probability)}",
            *recalls,
            f"{kept.perplexity:.2f}",
            style=style,
        )
    return table


def _edge_table(edges: "tuple[Edge, ...]") -> "Table":
    from rich.table import Table

    table = Table(title=f"Where a window of {edges[0].window:,} ends", box=None, pad_edge=False, header_style="dim")
    for name in ("sinks", "query at", "token no.", "sees", "keys past the sinks", "lost", "its block is freed"):
        table.add_column(name, justify="right")
    for edge in edges:
        lost = ", ".join(f"key {key:,}" for key in edge.lost) or "none"
        freed = (
            "" if not edge.lost else "never: sinks" if edge.block_freed_at is None else f"at {edge.block_freed_at:,}"
        )
        table.add_row(
            str(edge.sink_tokens),
            f"{edge.query:,}",
            f"{edge.query + 1:,}",
            f"{edge.seen:,}",
            f"{edge.first:,} – {edge.last:,}",
            lost,
            freed,
        )
    return table


def _seen_line(outcome: "WindowExperiment") -> str:
    seen = outcome.seen
    return (
        f"Checked in the model, window {seen.window}: with another first token, layer 0's attention changes by "
        f"{seen.last_to_see:.2g} at position {seen.window - 1}, which still sees key 0, and by "
        f"{seen.first_to_miss:.2g} at position {seen.window}, which does not."
    )


def _share(probability: float) -> str:
    return f"{probability:.3f}" if probability >= 1e-3 else f"{probability:.0e}"
