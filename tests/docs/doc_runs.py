"""Runs the code of a page: what the tests compare, and what the page shows.

    python tests/docs/doc_runs.py docs/quiz.md ...

writes into pages, and into their translations, what their code prints now; look at the difference before you commit it.
"""

import contextlib
import io
import os
import shlex
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from doc_pages import TRANSLATED, Block, Command, blocks, commands
from typer.testing import CliRunner

import kvine.llm
from kvine.cli.app import app


@dataclass(frozen=True)
class Shown:
    """What a page shows, in lines `begin` to `end` of a block, and what was printed instead."""

    block: Block
    begin: int
    end: int
    printed: str
    code: int = 0

    @property
    def text(self) -> str:
        """The lines of the page."""
        return "\n".join(self.block.text.splitlines()[self.begin : self.end]).rstrip()


@contextlib.contextmanager
def weights_read_once() -> Iterator[None]:
    """Each `LLM` of a page is its own, with its own cache; the weights that it reads are those of the one before."""
    read: dict[str, Any] = {}
    load_model, load_tokenizer = kvine.llm.load_model, kvine.llm.load_tokenizer

    def once(load: Any) -> Any:
        def loaded(*args: Any, **more: Any) -> Any:
            key = repr(
                (load.__name__, args[0], sorted((name, value) for name, value in more.items() if name != "file"))
            )
            if key not in read:
                read[key] = load(*args, **more)
            return read[key]

        return loaded

    kvine.llm.load_model, kvine.llm.load_tokenizer = once(load_model), once(load_tokenizer)
    try:
        yield
    finally:
        kvine.llm.load_model, kvine.llm.load_tokenizer = load_model, load_tokenizer


def run_python(page: Path) -> Iterator[Shown]:
    """Runs a page's Python blocks from top to bottom in one namespace; each output that is shown beneath one."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    printed: str | None = None
    for block in blocks(page):
        if block.language == "python" and "not run" not in block.marks:
            out = io.StringIO()
            with contextlib.redirect_stdout(out):
                source = "\n" * block.line + block.text  # a traceback then names the page's own line
                exec(compile(source, str(page), "exec"), namespace)
            printed = out.getvalue().rstrip()
        elif block.language == "text" and block.follows and printed is not None:
            yield Shown(block, 0, len(block.text.splitlines()), printed)
            printed = None
        else:
            printed = None


def run_commands(page: Path) -> Iterator[Shown]:
    """Runs a page's `kvine` commands, but those marked as not run; `echo $?` shows how the one before has ended."""
    code = 0
    for command in commands(page):
        if command.line == "echo $?":
            yield Shown(command.block, command.begin, command.end, str(code))
            code = 0
        elif command.line.startswith("kvine ") and "not run" not in command.block.marks:
            assert code == 0, f"{page}: the command before `{command.line}` ended with {code}"
            code, printed = _run(command)
            yield Shown(command.block, command.begin, command.end, printed, code)
    assert code == 0, f"{page}: the last command ended with {code}"


def _run(command: Command) -> tuple[int, str]:
    words = shlex.split(command.line, comments=True)
    assert "|" not in words, f"mark it as not run: {command.line}"
    result = CliRunner().invoke(app, words[1:])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output.rstrip()


def rewrite(page: Path) -> None:
    """Puts what the code of a page prints where the page shows it, and where its translation does."""
    printed = {_place(page, shown): shown.printed for shown in (*run_python(page), *run_commands(page))}
    for file in filter(Path.exists, (page, page.with_suffix(TRANSLATED))):
        there = [
            Shown(block, 0, len(block.text.splitlines()), "") for block in blocks(file) if block.language == "text"
        ]
        there += [Shown(command.block, command.begin, command.end, "") for command in commands(file)]
        lines = file.read_text(encoding="utf-8").split("\n")
        for shown in sorted(there, key=lambda shown: shown.block.line + shown.begin, reverse=True):
            if shown.begin < shown.end and (new := printed.get(_place(file, shown))) is not None:
                begin, end = (shown.block.line + offset for offset in (shown.begin, shown.end))
                lines[begin:end] = [(shown.block.indent + line).rstrip() for line in new.split("\n")]
        file.write_text("\n".join(lines), encoding="utf-8")


def _place(page: Path, shown: Shown) -> tuple[int, int]:
    """Which block of a page, and how many commands of that block come before: the same in a translation."""
    lines = shown.block.text.splitlines()[: shown.begin]
    return blocks(page).index(shown.block), sum(line.startswith("$ ") for line in lines)


if __name__ == "__main__":
    named = [Path(name).resolve() for name in sys.argv[1:]]
    with weights_read_once(), tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        for path in named:
            rewrite(path)
        os.chdir("/")
