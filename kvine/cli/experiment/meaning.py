"""`kvine experiment meaning`: the same word in two sentences, and where its keys and values part."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from kvine.cli.experiment.options import Json, PlotFile, open_for_experiment
from kvine.cli.options import ModelOptions, spread_options
from kvine.cli.terminal import show_output, write_json
from kvine.evidence.prompts import APPLE, BITTEN_APPLE, NEW_APPLE

if TYPE_CHECKING:
    from rich.table import Table

    from kvine.evidence.experiments.meaning import Meaning, TokenMeaning

BAR_WIDTH = 9  # characters
COLUMNS = ("\nlayer", "K\napart", "", "K\n1-cos", "V\napart", "", "V\n1-cos", "rotated\nK", "others\nK", "others\nV")
LEGEND = (
    "K apart and V apart: how different the token's K and V are in the two sentences, K before it is rotated; 0 is "
    "equal, 1.41 a right angle at equal length, 2 opposite.",
    "1-cos: the same by direction alone; 0 is the same direction, 1 a right angle.",
    "rotated K: how different K is as the cache keeps it, rotated to the token's position.",
    "others K and others V: how different its K and V are from another token's in its sentence (median): a scale.",
)


@spread_options
def meaning(
    model: ModelOptions,
    first: Annotated[str, typer.Option(metavar="TEXT", help="A sentence.")] = BITTEN_APPLE,
    second: Annotated[str, typer.Option(metavar="TEXT", help="Another.")] = NEW_APPLE,
    word: Annotated[str, typer.Option(metavar="TEXT", help="What both hold; the last occurrence counts.")] = APPLE,
    plot: PlotFile = None,
    json: Json = False,
) -> None:
    """Compare a word's keys and values in two sentences: equal in layer 0, apart from layer 1 on.

    By default: I took a bite of an apple; I got a new Apple. docs/experiments.md says how to read it.
    """
    llm = open_for_experiment(model, plot)
    from kvine.evidence.experiments.meaning import compare_meaning

    outcome = compare_meaning(llm, (first, second), word)
    if plot is not None:
        from kvine.evidence.experiments.pictures import draw_meaning

        draw_meaning(outcome, plot)
    if json:
        write_json(asdict(outcome) | {"layers": [asdict(layer) for layer in outcome.tokens[-1].layers]})
    else:
        show_meaning(outcome)


def show_meaning(outcome: "Meaning") -> None:
    """The word's last token as bars by layer, and what they say in sentences."""
    from rich.text import Text

    last = outcome.tokens[-1]
    lines = [
        f"{sentence}  →  {' | '.join(pieces)}"
        for sentence, pieces in zip(outcome.sentences, outcome.pieces, strict=True)
    ]
    if len(outcome.tokens) > 1:
        ids = ", ".join(str(token.token_id) for token in outcome.tokens)
        lines.append(
            f"{outcome.word} is {len(outcome.tokens)} tokens ({ids}); shown is the last, which alone has read them all."
        )
    show_output(*map(Text, lines), _layer_table(outcome, last), *map(Text, (*LEGEND, *_sentences(last))))


def _sentences(token: "TokenMeaning") -> list[str]:
    first, deepest = token.layers[0], max(token.layers, key=lambda layer: layer.value.relative)
    lines = [
        f"Layer 0: K differs by {first.key.relative:.1e}, V by {first.value.relative:.1e}. Both are made from the "
        f"token alone. Later layers have read the sentence: V is furthest apart in layer {deepest.layer}, at "
        f"{deepest.value.relative:.2f}, where other tokens of the sentence are at {deepest.others_value.relative:.2f}."
    ]
    one, two = token.positions
    if one == two:
        lines.append(f"Both stand at position {one}, so the rotation in the cache is the same and changes no distance.")
    else:
        lines.append(
            f"They stand at positions {one} and {two}. The cache keeps K rotated by position, which alone makes "
            f"{first.rotated_key.relative:.2f} in layer 0: compare K before rotation, or at equal positions."
        )
    return lines


def _layer_table(outcome: "Meaning", token: "TokenMeaning") -> "Table":
    from rich.table import Table
    from rich.text import Text

    from kvine.models.packing import computes_in

    dtype = computes_in(outcome.dtype, outcome.packings)
    table = Table(
        title=Text(
            f"{outcome.model}, {dtype} on {outcome.device}: {token.piece!r} ({token.token_id}) at positions "
            f"{token.positions[0]} and {token.positions[1]}"
        ),
        box=None,
        pad_edge=False,
        header_style="dim",
    )
    for name in COLUMNS:
        table.add_column(name, justify="left" if not name else "right")
    most = max(max(layer.key.relative, layer.value.relative) for layer in token.layers) or 1.0
    for layer in token.layers:
        table.add_row(
            str(layer.layer),
            f"{layer.key.relative:.3f}",
            Text(_bar(layer.key.relative / most), style="cyan"),
            f"{layer.key.cosine:.3f}",
            f"{layer.value.relative:.3f}",
            Text(_bar(layer.value.relative / most), style="magenta"),
            f"{layer.value.cosine:.3f}",
            f"{layer.rotated_key.relative:.3f}",
            f"{layer.others_key.relative:.2f}",
            f"{layer.others_value.relative:.2f}",
        )
    return table


def _bar(share: float) -> str:
    whole, eighths = divmod(round(share * BAR_WIDTH * 8), 8)
    return "█" * whole + " ▏▎▍▌▋▊▉"[eighths].strip()
