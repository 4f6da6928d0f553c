"""`kvine experiment bits`: what fewer bits do to a model's own keys and values, by channel and by token."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvine.cli.experiment.options import Json, PlotFile, TextFile, open_for_experiment, read_text, whole_numbers
from kvine.cli.options import ModelOptions, spread_options
from kvine.cli.terminal import ended_by_interrupt, show_output, write_json

if TYPE_CHECKING:
    from rich.table import Table

    from kvine.evidence.experiments.bits import Bits, Quantized

LEGEND = (
    "Relative errors, means over layers and heads. K or V: of the numbers themselves; scores: of queries and keys, "
    "before softmax; weights: after it; outputs: of what attention brings. Only keys, or only values, have fewer bits."
)


@spread_options
def bits(
    model: ModelOptions,
    text: TextFile = None,
    tokens: Annotated[int, typer.Option(help="Tokens of it.")] = 1024,
    bits: Annotated[str, typer.Option(metavar="N,N,…", help="Bits of a number, of 8, 4 and 2.")] = "8,4,2",
    block_size: Annotated[int, typer.Option(help="Tokens of a block, whose channels share a scale.")] = 32,
    layers: Annotated[bool, typer.Option("--layers", help="A table of each layer's outputs too.")] = False,
    plot: PlotFile = None,
    json: Json = False,
) -> None:
    """Quantize a model's own keys and values, by channel and by token, and see what attention makes of it.

    KIVI's comparison on your model and text: keys should be grouped by channel, values by token. docs/experiments.md
    says how to read it.
    """
    with ended_by_interrupt():
        from kvine.evidence.experiments.bits import check_bits, run_bits
        from kvine.evidence.quality.texts import first_tokens, prose
    widths = whole_numbers("--bits", bits)
    check_bits(tokens, block_size, widths)
    words = read_text(text)
    llm = open_for_experiment(model, plot)
    from kvine.cli.evidence_progress import EvidenceProgress

    ids = first_tokens(llm.tokenizer, prose(tokens) if words is None else words, tokens)
    with EvidenceProgress("layers") as progress:
        outcome = run_bits(llm, ids, widths=widths, block_size=block_size, progress=progress)
    if plot is not None:
        from kvine.evidence.experiments.pictures import draw_bits

        draw_bits(outcome, plot)
    if json:
        write_json(bits_json(outcome))
    else:
        show_bits(outcome, layers)


def bits_json(outcome: "Bits") -> dict[str, Any]:
    """The outcome as `--json` prints it; `layers` are in the model's order."""
    told = asdict(outcome)
    rows = [{name: row[name] for name in ("part", "grouping", "bits")} | row["errors"] | row for row in told["rows"]]
    return told | {"rows": [{name: row[name] for name in row if name != "errors"} for row in rows]}


def show_bits(outcome: "Bits", layers: bool) -> None:
    """The outcome as a table, what it says in sentences, and each layer's outputs."""
    from rich.text import Text

    tables = [_table(outcome)]
    if layers:
        tables.append(_layer_table(outcome))
    show_output(*tables, Text(LEGEND), *map(Text, _sentences(outcome)))


def _pairs(outcome: "Bits") -> "list[tuple[Quantized, Quantized]]":
    """By channel and by token, of the same part and bits."""
    return list(zip(outcome.rows[::2], outcome.rows[1::2], strict=True))


def _sentences(outcome: "Bits") -> list[str]:
    lines = []
    for channel, token in _pairs(outcome):
        better, worse = sorted((channel, token), key=lambda row: row.errors.outputs)
        lines.append(
            f"{channel.part.capitalize()}s in {channel.bits} bits: by {better.grouping} attention's outputs are off by "
            f"{better.errors.outputs:.1%}, by {worse.grouping} by {worse.errors.outputs:.1%}."
        )
    causes = outcome.causes
    lines.append(
        f"The largest channel of a head's keys is {causes.key_outlier:.1f} times its median one, that of its values "
        f"{causes.value_outlier:.1f} times. The first token has {causes.first_weight:.0%} of the attention of later "
        f"blocks, and its values are {causes.first_value:.2f} times as long as the median token's."
    )
    return lines


def _title(outcome: "Bits") -> str:
    from kvine.models.packing import computes_in

    dtype = computes_in(outcome.dtype, outcome.packings)
    return (
        f"{outcome.model}, {dtype} on {outcome.device}: {outcome.tokens:,} tokens, keys and values in blocks of "
        f"{outcome.block_size}"
    )


def _table(outcome: "Bits") -> "Table":
    from rich.table import Table

    table = Table(title=_title(outcome), box=None, pad_edge=False, header_style="dim")
    for name in ("", "bits", "grouped by", "K or V", "scores", "weights", "outputs"):
        table.add_column(name, justify="left" if name in ("", "grouped by") else "right")
    for pair in _pairs(outcome):
        best = min(pair, key=lambda row: row.errors.outputs)
        for row in pair:
            errors = row.errors
            figures = (errors.numbers, errors.scores, errors.weights, errors.outputs)
            table.add_row(
                f"{row.part}s",
                str(row.bits),
                row.grouping,
                *("" if figure is None else f"{figure:.2%}" for figure in figures),
                style="green" if row is best else "",
            )
    return table


def _layer_table(outcome: "Bits") -> "Table":
    from rich.table import Table

    table = Table(title="Errors of the outputs by layer", box=None, pad_edge=False, header_style="dim")
    table.add_column("\nlayer", justify="right")
    for row in outcome.rows:
        table.add_column(f"{row.part}s {row.bits}\n{row.grouping}", justify="right")
    for layer in range(len(outcome.rows[0].layers)):
        table.add_row(str(layer), *(f"{row.layers[layer].outputs:.1%}" for row in outcome.rows))
    return table
