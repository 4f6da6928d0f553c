"""How fetching tells its progress: to the terminal's bars, or to the log where nobody watches."""

import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol

_LOG = logging.getLogger("kvine.hub")
_POLL_SECONDS = 0.2


class Progress(Protocol):
    """Shown one task at a time: `start`, any number of `advance`, `done`; `message` at any time.

    `advance` may be called from another thread.
    """

    def start(self, label: str, total_bytes: int | None) -> None:
        """A task begins; None where its size is not known."""

    def advance(self, nbytes: int) -> None:
        """So many more bytes of the task have been done."""

    def message(self, text: str) -> None:
        """Something the user should know: a wait, a fallback, a licence."""

    def done(self) -> None:
        """The task has ended, well or not."""


class LogProgress:
    """Messages go to the logger "kvine.hub" as warnings, tasks as information; advance is not shown."""

    def start(self, label: str, total_bytes: int | None) -> None:
        """Log that the task begins."""
        size = "" if total_bytes is None else f" ({total_bytes / 1e6:.1f} MB)"
        _LOG.info("%s%s", label, size)

    def advance(self, nbytes: int) -> None:
        """Show nothing."""

    def message(self, text: str) -> None:
        """Log the message as a warning, which Python shows by default."""
        _LOG.warning("%s", text)

    def done(self) -> None:
        """Show nothing."""


@contextmanager
def task(progress: Progress, label: str, total_bytes: int | None) -> Iterator[None]:
    """One task from `start` to `done`, whatever happens in between."""
    progress.start(label, total_bytes)
    try:
        yield
    finally:
        progress.done()


@contextmanager
def watching(progress: Progress, label: str, folder: Path, total_bytes: int) -> Iterator[None]:
    """A task that another program does: its progress is how much the files under `folder` grow."""
    stop = threading.Event()

    def poll() -> None:
        begin, shown = _folder_bytes(folder), 0
        while not stop.wait(_POLL_SECONDS):
            grown = min(_folder_bytes(folder) - begin, total_bytes)
            if grown > shown:
                progress.advance(grown - shown)
                shown = grown

    thread = threading.Thread(target=poll, name="kvine-download-progress", daemon=True)
    with task(progress, label, total_bytes):
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()


def _folder_bytes(folder: Path) -> int:
    """Of all files in it and below; what goes in the meantime, a file or a whole folder, is not counted."""
    total = 0
    for where, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                total += Path(where, name).stat().st_size
    return total
