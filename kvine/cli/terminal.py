"""What commands say beside their output: notes, errors and tables on stderr, so that stdout holds the output only."""

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvine.config import human_bytes as human_bytes

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

PIPED_WIDTH = 120


def stderr_console() -> "Console":
    """A console on stderr; where that is no terminal, wide enough for every table."""
    from rich.console import Console

    return Console(stderr=True, width=None if sys.stderr.isatty() else PIPED_WIDTH, highlight=False)


def note(text: str, *, style: str = "dim") -> None:
    """One line on stderr, taken as it stands; wrapped between words at a terminal, and nowhere else.

    It goes through `sys.stderr`, which a bar that is shown replaces to have it above itself.
    """
    console = stderr_console()
    with console.capture() as captured:
        console.print(text, style=style, markup=False, soft_wrap=not console.is_terminal)
    sys.stderr.write(captured.get())
    sys.stderr.flush()


def show(renderable: "RenderableType") -> None:
    """A table or the like on stderr."""
    stderr_console().print(renderable)


def show_output(*renderables: "RenderableType") -> None:
    """Tables that are a command's own output, on stdout."""
    from rich.console import Console

    console = Console(width=None if sys.stdout.isatty() else PIPED_WIDTH, highlight=False)
    for renderable in renderables:
        console.print(renderable)


def show_error(error: Exception) -> None:
    """A user's mistake, in its own words."""
    note(f"Error: {error}", style="red")


def stdin_is_terminal() -> bool:
    """Whether somebody types the input."""
    return sys.stdin.isatty()


def write(text: str) -> None:
    """Text of the model on stdout, at once."""
    sys.stdout.write(text)
    sys.stdout.flush()


def write_json(value: Any) -> None:
    """One JSON object on stdout; strict, without NaN."""
    write(json.dumps(value, allow_nan=False) + "\n")


@contextmanager
def ended_by_interrupt() -> Iterator[None]:
    """Has Ctrl-C end the process at once, for imports of large libraries, which it can leave half made or swallow."""
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def waiting(text: str) -> Iterator[None]:
    """Shows that something takes a while, on a terminal only."""
    console = stderr_console()
    if not console.is_terminal:
        yield
        return
    with console.status(text):
        yield


def seconds_since_start() -> float:
    """Seconds since this process was started, its interpreter's own start included."""
    if sys.platform == "linux":  # psutil counts from a boot time in whole seconds there
        start = Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]  # field 22 of proc(5), in ticks
        elapsed = time.clock_gettime(time.CLOCK_BOOTTIME) - int(start) / os.sysconf("SC_CLK_TCK")
    else:
        import psutil

        elapsed = time.time() - psutil.Process().create_time()
    return elapsed
