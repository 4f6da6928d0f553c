"""`kvine experiment endless`: what a window writes without end, with sinks and without."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvine.cli.experiment.options import Json, PlotFile, open_for_experiment
from kvine.cli.options import ModelOptions, spread_options
from kvine.cli.terminal import ended_by_interrupt, human_bytes, show_output, write_json

if TYPE_CHECKING:
    from rich.table import Table

    from kvine.evidence.experiments.endless import Endless


@spread_options
def endless(
    model: ModelOptions,
    tokens: Annotated[int, typer.Option(help="To read and write, past the model's context too.")] = 50_000,
    window: Annotated[int, typer.Option(help="Tokens that a query sees beside sinks.")] = 512,
    sinks: Annotated[int, typer.Option(help="First tokens that stay visible.")] = 4,
    places: Annotated[int, typer.Option(help="Parts that are judged, evenly from the first token to the last.")] = 12,
    piece: Annotated[int, typer.Option(help="Written tokens of each part.")] = 512,
    passage: Annotated[
        int, typer.Option(help="Tokens of prose that are read in each turn, and then written; 0: all is written.")
    ] = 128,
    seed: Annotated[int, typer.Option(help="Of the sampler; the same for both texts.")] = 0,
    plot: PlotFile = None,
    json: Json = False,
) -> None:
    """Read and write in turns without end, by a window with sinks and by one without: is it fluent, what does it hold?

    Parts of both texts are judged by the exact cache. docs/experiments.md says how to read it.
    """
    with ended_by_interrupt():
        from kvine.evidence.experiments.endless import check_endless, run_endless
    check_endless(tokens, window, sinks, places, piece, passage)
    llm = open_for_experiment(model, plot)
    from kvine.cli.evidence_progress import EvidenceProgress

    with EvidenceProgress() as progress:
        outcome = run_endless(
            llm,
            tokens=tokens,
            window=window,
            sinks=sinks,
            places=places,
            piece=piece,
            passage=passage,
            seed=seed,
            progress=progress,
        )
    if plot is not None:
        from kvine.evidence.experiments.pictures import draw_endless

        draw_endless(outcome, plot)
    if json:
        write_json(endless_json(outcome))
    else:
        show_endless(outcome)


def endless_json(outcome: "Endless") -> dict[str, Any]:
    """The outcome as `--json` prints it, the texts in `rows`, without their tokens."""
    rows = [
        {
            "name": text.name,
            "perplexity": text.perplexity,
            "circles_from": text.circles,
            "planned_bytes": text.planned,
            "pieces": [asdict(piece) for piece in text.pieces],
            "text": text.text,
        }
        for text in outcome.written
    ]
    told = ("model", "dtype", "packings", "device", "context", "tokens", "window", "sinks", "passage", "piece_tokens")
    return {name: getattr(outcome, name) for name in (*told, "seed")} | {"rows": rows}


def show_endless(outcome: "Endless") -> None:
    """The outcome as a table, and what it says in sentences."""
    from rich.text import Text

    lines = [
        f"{text.name}: perplexity {text.perplexity:,.1f} past the first place (geometric mean), at most "
        f"{human_bytes(text.planned)} of K and V by plan. It ends in: {text.text!r}"
        for text in outcome.written
    ]
    lines += [
        f"{text.name} goes round in circles by token {text.circles:,}: a low perplexity from there on is no fluency."
        for text in outcome.written
        if text.circles is not None
    ]
    lines.append(
        f"Perplexity: of {outcome.piece_tokens} written tokens from there on, by the exact cache from an empty one. "
        "Repeated: share of 4 tokens in a row that stood before among them. K/V: the most held up to the next place."
    )
    show_output(_table(outcome), *map(Text, lines))


def _table(outcome: "Endless") -> "Table":
    from rich.table import Table

    from kvine.models.packing import computes_in

    dtype = computes_in(outcome.dtype, outcome.packings)
    table = Table(
        title=f"{outcome.model}, {dtype} on {outcome.device}: {outcome.tokens:,} tokens of one text; the "
        f"model's context is {outcome.context:,}",
        box=None,
        pad_edge=False,
        header_style="dim",
    )
    table.add_column("\nfrom token", justify="right")
    for text in outcome.written:
        name = text.name.replace(",sink-rule=in_cache", "").replace(",", ", ")
        for column in (f"{name}\nperplexity", "\nrepeated", "\nK/V"):
            table.add_column(column, justify="right", no_wrap=True)
    for pieces in zip(*(text.pieces for text in outcome.written), strict=True):
        cells = [
            cell
            for piece in pieces
            for cell in (f"{piece.perplexity:,.1f}", f"{piece.repeated:.0%}", human_bytes(piece.held))
        ]
        table.add_row(f"{pieces[0].start:,}", *cells)
    return table
