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
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self._console = stderr_console()
        self._bars = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[unit]}, about"),
            TimeRemainingColumn(),
            TextColumn("left"),
            console=self._console,
            transient=True,
        )
        self._unit = unit
        self._units = units or {}
        self._what: str | None = None
        self._began = self._said = 0.0

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._bars.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._console.is_terminal:  # elsewhere rich would write an empty line
            self._bars.stop()

    def __call__(self, what: str, done: int, total: int) -> None:
        """Shows how far `what` has come; a new name begins a new task."""
        now = time.perf_counter()
        if done == 0:  # what comes before the first token, such as loading, is no measure for the others
            self._began = self._said = now
        if what != self._what:
            self._what = what
            if self._console.is_terminal:
                for task in self._bars.task_ids:
                    self._bars.remove_task(task)
                self._bars.add_task(what, total=total, unit=self._units.get(what, self._unit))
        if self._console.is_terminal:
            self._bars.update(self._bars.task_ids[-1], completed=done)
        elif (done == 1 and now - self._began > 1) or now - self._said > REPORT_SECONDS:
            self._said = now
            left = (now - self._began) / done * (total - done) if done else 0.0
            note(f"{what}: {done} of {total} {self._units.get(what, self._unit)}, about {left:.0f} s left")
