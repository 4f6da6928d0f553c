"""`kvine`: the commands together, and how each ends: 0 fine, 1 a failed check, 2 a user's mistake, 130 Ctrl-C.

A command's module loads torch and the model inside the command, so that `kvine --help` answers at once.
"""

import errno
import os
import sys
import warnings
from collections.abc import Callable
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from kvine import __version__
from kvine.cli.bench import bench
from kvine.cli.cache import cache
from kvine.cli.chat import chat
from kvine.cli.eval import evaluate
from kvine.cli.experiment import experiment
from kvine.cli.explain import explain
from kvine.cli.generate import generate
from kvine.cli.models import models
from kvine.cli.plan import plan
from kvine.cli.pull import pull
from kvine.cli.terminal import note, show_error
from kvine.cli.traps import traps
from kvine.cli.verify import verify
from kvine.errors import KvineError, KvineWarning

MISTAKE = 2
BROKEN_PIPE = 141  # 128 + SIGPIPE, what a shell reports of `yes | head`


class Commands(TyperGroup):
    """Turns a user's mistake into one sentence and exit code 2; anything else is a bug and shows its traceback."""

    def invoke(self, ctx: Any) -> Any:
        """Runs the command that was asked for."""
        try:
            return super().invoke(ctx)
        except KvineError as error:
            show_error(error)
            raise typer.Exit(MISTAKE) from error
        except BrokenPipeError as error:  # the reader has gone, as `head` does: Python must not try to flush again
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(BROKEN_PIPE) from error
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            show_error(error)
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(MISTAKE) from error


app = typer.Typer(cls=Commands, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


def _show_version(asked: bool) -> None:
    if asked:
        print(f"kvine {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Run language models on this machine, and see what their KV cache does."""


app.command()(generate)
app.command()(chat)
app.command()(pull)
app.command()(models)
app.command()(verify)
app.command()(traps)
app.command()(plan)
app.command()(explain)
app.command()(bench)
app.command("eval")(evaluate)
app.add_typer(experiment, name="experiment")
app.add_typer(cache, name="cache")


def _warnings_shown() -> Callable[..., None]:
    """A warning of Kvine's own is for the user, who has no use for a line of source; the rest as Python shows it.

    Each is shown once. Python's own count begins again whenever a library changes what it shows of warnings.
    """
    shown: set[str] = set()

    def show(
        message: Warning | str, category: type[Warning], filename: str, lineno: int, file: Any = None, line: Any = None
    ) -> None:
        if not issubclass(category, KvineWarning):
            sys.stderr.write(warnings.formatwarning(message, category, filename, lineno, line))
        elif str(message) not in shown:
            shown.add(str(message))
            note(f"Note: {message}")

    return show


def main() -> None:
    """Runs the command line; `start.main` calls it."""
    warnings.showwarning = _warnings_shown()
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:  # the caller has closed it
            setattr(sys, name, open(os.devnull, "r" if number == 0 else "w"))  # noqa: SIM115, PTH123  # for good
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="replace")  # type: ignore[union-attr]  # a terminal may lack a character
    app()


if __name__ == "__main__":
    main()
