"""How long-running evidence says how far it has come; whoever calls decides what to show."""

from typing import Protocol


class Progress(Protocol):
    """Called as work goes on: what is being done, how many of its tokens are done, and how many there are."""

    def __call__(self, what: str, done: int, total: int) -> None: ...  # noqa: D102


def silent(what: str, done: int, total: int) -> None:
    """Shows nothing."""
