"""`kvine explain`: a prompt through the cache with its real numbers, or attention over four vectors by hand."""

import enum
import heapq
from typing import TYPE_CHECKING, Annotated

import typer

from kvine.cli.generate import read_stdin
from kvine.cli.loading import open_llm
from kvine.cli.options import CacheOptions, ModelOptions, spread_options
from kvine.cli.terminal import show_output, waiting, write_json
from kvine.errors import RequestError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from kvine.explain import Explanation
    from kvine.explain.explanation import Candidate, DecodeStep
    from kvine.toy import ToyAttention

BAR_WIDTH = 24
MOST_BARS = 40  # positions shown of a long prompt
MOST_PIECE_WIDTH = 24


class Switch(enum.StrEnum):
    """A choice of two."""

    ON = "on"
    OFF = "off"


def _toy_option(help: str) -> typer.models.OptionInfo:
    option: typer.models.OptionInfo = typer.Option(help=help, rich_help_panel="Toy")
    return option


@spread_options
def explain(
    model: ModelOptions,
    cache: CacheOptions,
    prompt: Annotated[str | None, typer.Argument(help="The prompt as it stands; - reads stdin to its end.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Put the prompt as a question, by the chat template.")] = False,
    steps: Annotated[int, typer.Option(help="Decode steps after the prompt.")] = 4,
    layer: Annotated[int | None, typer.Option(help="Attention of this layer, from 0; else the mean of all.")] = None,
    head: Annotated[
        int | None, typer.Option(help="Attention of this query head, from 0; else the mean of all.")
    ] = None,
    top: Annotated[int, typer.Option(help="Likely next tokens to list.")] = 10,
    json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
    toy: Annotated[bool, typer.Option("--toy", help="Four vectors of two numbers instead of a model.")] = False,
    position: Annotated[int | None, _toy_option("Whose query it is, 0 to 3; 2 by default.")] = None,
    q_scale: Annotated[
        float | None,
        _toy_option(
            "Factor on the query, for trying softmax: 0 weighs all that it sees alike, a large one leaves the best "
            "match alone, a negative one turns the order round; 1 by default."
        ),
    ] = None,
    mask: Annotated[Switch | None, _toy_option("Whether later positions are hidden; on by default.")] = None,
) -> None:
    """Follow a prompt through the cache: attention, likely next tokens, what each step computes and what it reads.

    All numbers are those of the run. docs/explain.md says how to read them; --toy shows attention by hand.
    """
    toy_values = {"position": position, "q_scale": q_scale, "mask": None if mask is None else mask is Switch.ON}
    given = {name: value for name, value in toy_values.items() if value is not None}
    if toy:
        if prompt is not None or layer is not None or head is not None or chat:
            raise RequestError("--toy has four vectors of its own: leave out the prompt, --chat, --layer and --head.")
        model.check()
        cache.configs()
        from kvine.toy import attend

        result = attend(**given)  # type: ignore[arg-type]  # each has its option's type
        if json:
            write_json(result.to_json())
        else:
            show_output(*toy_view(result))
        return
    if given:
        raise RequestError("--position, --q-scale and --mask belong to --toy: give --toy as well.")
    if prompt is None:
        raise RequestError('Give a prompt, such as kvine explain "The capital of France is", or --toy.')
    text = read_stdin() if prompt == "-" else prompt
    llm = open_llm(model, cache)
    ids = llm.encode_chat([{"role": "user", "content": text}]) if chat else llm.encode(text)
    with waiting("following the prompt"):
        explanation = llm.explain(ids, steps=steps, layer=layer, head=head, top=top)
    if json:
        write_json(explanation.to_json())
    else:
        show_output(*explanation_view(explanation))


def explanation_view(explanation: "Explanation") -> list["RenderableType"]:
    """An explanation as tables and sentences; 80 columns are enough."""
    from rich.text import Text

    from kvine.explain import words
    from kvine.explain.explanation import NOT_CACHED

    view: list[RenderableType] = [Text(words.summary(explanation)), Text(), _groups(explanation), Text()]
    view += [*_attention(explanation), Text(), _candidates(explanation.candidates), Text()]
    for step in explanation.steps:
        view += [_title(words.step_title(step)), _step(step), Text(words.step_lesson(step), style="green"), Text()]
    if (ended := words.ending(explanation)) is not None:
        view.append(Text(ended, style="yellow"))
    return [*view, Text(f"Queries are not cached. {NOT_CACHED['queries']}")]


def toy_view(result: "ToyAttention") -> list["RenderableType"]:
    """The toy's steps, a column each."""
    from rich.bar import Bar
    from rich.table import Table
    from rich.text import Text

    from kvine.toy import shown, shown_masked

    table = Table(box=None, header_style="dim")
    for name in ("position", "key", "query·key", "÷ √2", "mask", "softmax"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("")
    table.add_column("value", justify="right", no_wrap=True)
    for i, weight in enumerate(result.weights):
        numbers = (f"{result.scores[i]:.3g}", f"{result.scaled[i]:.3f}", shown_masked(result.masked[i]))
        bar = Bar(1.0, 0.0, weight, width=16, color="cyan")
        table.add_row(str(i), shown(result.keys[i]), *numbers, f"{weight:.4f}", bar, shown(result.values[i]))
    return [_title(result.heading()), table, Text(result.sum_line())]


def _title(text: str) -> "RenderableType":
    """Above a table rather than its title, which would be wrapped to the width of the table."""
    from rich.text import Text

    return Text(text, style="bold")


def _groups(explanation: "Explanation") -> "RenderableType":
    from rich.table import Table
    from rich.text import Text

    from kvine.explain import words

    table = Table(box=None, header_style="dim")
    for i, name in enumerate(words.GROUP_COLUMNS):
        table.add_column(name, justify="right" if i else "left")
    for group in explanation.groups:
        table.add_row(*map(Text, words.group_row(group)))  # Text: brackets are no markup here
    return table


def _attention(explanation: "Explanation") -> list["RenderableType"]:
    from rich.bar import Bar
    from rich.table import Table
    from rich.text import Text

    from kvine.explain import words

    attention = explanation.attention(explanation.layer, explanation.head)
    weights = attention.weights
    largest = max(weights)
    rows = sorted(heapq.nlargest(MOST_BARS, range(len(weights)), key=weights.__getitem__))
    title = _title(f"Attention of position {attention.position}, {words.view_name(attention)}")
    table = Table(box=None, header_style="dim")
    table.add_column("position", justify="right")
    table.add_column("id", justify="right")
    table.add_column("token", no_wrap=True, overflow="ellipsis", max_width=MOST_PIECE_WIDTH)
    table.add_column("weight", justify="right", no_wrap=True)
    table.add_column("")
    for i in rows:
        token, seen = explanation.tokens[i], attention.visible[i]
        text = Text(words.piece(token), style="magenta" if token.special else "")
        shown = f"{weights[i]:.4f}" if seen else "not seen"
        bar = Bar(1.0, 0.0, weights[i] / largest, width=BAR_WIDTH, color="cyan")
        table.add_row(str(i), str(token.token_id), text, shown, bar, style="" if seen else "dim")
    if len(rows) == len(weights):
        return [title, table]
    rest = len(weights) - len(rows)
    share = sum(weights) - sum(weights[i] for i in rows)
    return [title, table, Text(f"{rest:,} other positions have {max(share, 0):.2%} together; --json lists them.")]


def _candidates(candidates: tuple["Candidate", ...]) -> "RenderableType":
    from rich.bar import Bar
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, header_style="dim")
    for name in ("rank", "id", "likely next", "logit", "probability", ""):
        table.add_column(name, justify="left" if name == "likely next" else "right", no_wrap=True)
    table.columns[2].max_width, table.columns[2].overflow = MOST_PIECE_WIDTH, "ellipsis"
    most = candidates[0].probability
    for rank, candidate in enumerate(candidates, 1):
        bar = Bar(1.0, 0.0, candidate.probability / most, width=BAR_WIDTH, color="cyan")
        numbers = (f"{candidate.logit:.3f}", f"{candidate.probability:.4f}")
        table.add_row(str(rank), str(candidate.token_id), Text(repr(candidate.text)), *numbers, bar)
    return table


def _step(step: "DecodeStep") -> "RenderableType":
    from rich.table import Table

    from kvine.explain import words

    table = Table(box=None, header_style="dim")
    for i, name in enumerate(words.STEP_COLUMNS):
        side = {1: "with cache", 4: "without"}.get(i, "")
        table.add_column(f"{side}\n{name}", justify="right" if i else "left", no_wrap=True)
    for row in words.step_rows(step):
        table.add_row(*row, style="bold" if row[0].startswith("read") else "")
    return table
