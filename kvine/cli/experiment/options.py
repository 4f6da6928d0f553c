"""What the experiments' commands share: options, and what comes before any of them measures."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvine.cli.options import CacheOptions, ModelOptions
from kvine.errors import RequestError

if TYPE_CHECKING:
    from kvine.llm import LLM

Json = Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")]
PlotFile = Annotated[
    Path | None, typer.Option("--plot", metavar="FILE", help="Draw it too, into a file that ends in .svg or .png.")
]
TextFile = Annotated[
    Path | None, typer.Option("--text", metavar="FILE", help="A text in UTF-8; by default Python's own help pages.")
]


def read_text(path: Path | None) -> str | None:
    """A user's text; None if there is none. Raises RequestError for a file that cannot be read, or holds nothing."""
    if path is None:
        return None
    try:
        words = path.read_text("utf-8")
    except UnicodeDecodeError:
        raise RequestError(f"{path} is no text in UTF-8: convert it first.") from None
    except OSError as error:
        raise RequestError(f"{path} cannot be read: {error.strerror}.") from None
    if not words.strip():
        raise RequestError(f"{path} is empty: give a file with some text.")
    return words


def whole_numbers(option: str, text: str) -> list[int]:
    """Reads numbers with commas between, such as `1,4,16`.

    Raises:
        RequestError: for anything else, naming the option.
    """
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise RequestError(f"{option} {text!r} is no list of numbers: write for example 64,128,256.") from None


def open_for_experiment(model: ModelOptions, plot: Path | None) -> "LLM":
    """Makes sure that a plot could be written, then loads the model.

    Raises:
        ConfigError, FetchError, ModelLoadError: with a sentence that says what to do.
    """
    check_plot_file(plot)
    from kvine.cli.loading import open_llm

    return open_llm(model, CacheOptions())


def check_plot_file(plot: Path | None) -> None:
    """Says before the first minute of work if a plot cannot be written. Raises ConfigError."""
    if plot is not None:
        from kvine.evidence.plots import check_plot

        check_plot(plot)
