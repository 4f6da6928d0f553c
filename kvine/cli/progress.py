"""The hub's progress on stderr: a bar at a terminal, plain lines elsewhere."""

from types import TracebackType
from typing import Self

from kvine.cli.terminal import human_bytes, note, stderr_console


class FetchProgress:
    """Implements `kvine.hub.Progress`; where nothing is fetched, nothing shows."""

    def __init__(self) -> None:
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

        self._console = stderr_console()
        self._bars = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            DownloadColumn(binary_units=True),
            TransferSpeedColumn(),
            console=self._console,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.done()

    def start(self, label: str, total_bytes: int | None) -> None:
        """A task begins; None where its size is not known."""
        if self._console.is_terminal:
            self._bars.start()
            self._task = self._bars.add_task(label, total=total_bytes)
        else:
            note(label if total_bytes is None else f"{label} ({human_bytes(total_bytes)})")

    def advance(self, nbytes: int) -> None:
        """So many more bytes of the task have been done."""
        if self._console.is_terminal:
            self._bars.advance(self._task, nbytes)

    def message(self, text: str) -> None:
        """Something the user should know."""
        self._console.print(text, markup=False, soft_wrap=True)

    def done(self) -> None:
        """The task has ended: its bar stays as it is."""
        if self._console.is_terminal:
            self._bars.stop()
