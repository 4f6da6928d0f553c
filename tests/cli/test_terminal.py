"""Lines on stderr, alone and beside a bar that is redrawn there."""

import io
import sys

from rich.console import Console
from rich.file_proxy import FileProxy

from kvine.cli.terminal import note


def test_a_line_stands_above_a_bar_that_is_shown(monkeypatch, capsys):
    """While a bar is shown, rich has put a proxy in the place of `sys.stderr`, which moves the bar out of the way."""
    terminal, around_it = io.StringIO(), io.StringIO()
    monkeypatch.setattr(sys, "stderr", FileProxy(Console(file=terminal), around_it))
    note("as it [stands]")
    assert (terminal.getvalue(), around_it.getvalue()) == ("as it [stands]\n", "")
    monkeypatch.undo()
    note("as it [stands]")
    assert capsys.readouterr().err == "as it [stands]\n"
