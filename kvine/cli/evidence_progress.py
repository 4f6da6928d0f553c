"""Progress of measurements that take minutes, with an estimate that follows from what has been measured so far."""

import time
from collections.abc import Mapping
from types import TracebackType
from typing import Self

from kvine.cli.terminal import note, stderr_console

REPORT_SECONDS = 30.0  # between lines where there is no terminal to redraw


class EvidenceProgress:
    """Implements `kvine.evidence.progress.Progress` on stderr: a bar at a terminal, a line now and then elsewhere.

    Args:
        unit: what is counted.
        units: what is counted instead, by what is being done.
    """

    def __init__(self, unit: str = "tokens", units: Mapping[str, str] | None = None) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        self._console = stderr_console()
        self._bars = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[said]}"),
            console=self._console,
            transient=True,
        )
        self._unit = unit
        self._units = units or {}
        self._what: str | None = None
        self._began = self._told = time.perf_counter()

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._bars.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._console.is_terminal:  # elsewhere rich would write an empty line
            self._bars.stop()

    def __call__(self, what: str, done: int, total: int) -> None:
        """Shows how far `what` has come; a new name begins a new bar, and 0 that are done a new estimate."""
        now = time.perf_counter()
        if done == 0:  # what comes before the first token, such as loading, is no measure for the others
            self._began = now
        said = self._units.get(what, self._unit) + time_left(now - self._began, done, total)
        if self._console.is_terminal:
            if what != self._what:
                for task in self._bars.task_ids:
                    self._bars.remove_task(task)
                self._bars.add_task(what, total=total, completed=done, said=said)
            self._bars.update(self._bars.task_ids[-1], completed=done, total=total, said=said)
        elif (done == 1 and now - self._began > 1) or now - self._told > REPORT_SECONDS:
            self._told = now
            note(f"{what}: {done} of {total} {said}")
        self._what = what


def time_left(seconds: float, done: int, total: int) -> str:
    """How long the rest will take if `done` have taken so long, as the end of a line; nothing while none is done."""
    if done == 0:
        return ""
    left = seconds / done * (total - done)
    return f", about {left:.0f} s left" if left < 120 else f", about {left / 60:.0f} min left"
