"""Runs the documentation: every Python block, every command that is not marked as long; what is shown is compared."""

import ast
import contextlib
import shlex
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main
from doc_pages import blocks, commands, kvine_lines, pages, same_code, title, translations, without_decimals
from doc_runs import Shown, run_commands, run_python, weights_read_once

from kvine.cli.app import app


@pytest.fixture(scope="module", autouse=True)
def weights() -> Iterator[None]:
    with weights_read_once():
        yield


def with_language(*languages: str) -> list[Path]:
    return [page for page in pages() if any(block.language in languages for block in blocks(page))]


@pytest.mark.parametrize("page", with_language("python"), ids=title)
def test_python_blocks_run_and_print_what_is_shown(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for shown in run_python(page):
        assert_shown(shown)


@pytest.mark.parametrize("page", with_language("console"), ids=title)
def test_commands_run_and_print_what_is_shown(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for shown in run_commands(page):
        if shown.text:
            assert_shown(shown)
        else:
            assert shown.code == 0, shown.printed


def assert_shown(shown: Shown) -> None:
    text, printed = shown.text, shown.printed
    if "varies" in shown.block.marks:
        text, printed = without_decimals(text), without_decimals(printed)
    assert [line.rstrip() for line in printed.splitlines()] == text.splitlines()


@pytest.mark.parametrize("page", [*pages(), *translations()], ids=title)
def test_commands_are_commands(page: Path) -> None:
    for arguments in kvine_lines(page):
        command: Any = typer.main.get_command(app)
        rest = list(arguments)
        while rest and rest[0] in getattr(command, "commands", {}):
            command = command.commands[rest.pop(0)]
        with contextlib.suppress(typer.Exit):  # --help and --version end at once
            command.make_context("kvine", rest)


@pytest.mark.parametrize("page", translations(), ids=title)
def test_a_translation_has_the_code_of_its_page(page: Path) -> None:
    original = page.with_name(page.name.replace(".zh-TW.md", ".md"))
    assert original.exists(), f"{title(page)} translates no page"
    ours, theirs = ([block for block in blocks(p) if block.language in ("python", "console")] for p in (page, original))
    assert [block.language for block in ours] == [block.language for block in theirs]
    for our, their in zip(ours, theirs, strict=True):
        if our.language == "python":
            assert same_code(our, their), f"{title(page)}:{our.line}"
    typed = [[(shlex.split(c.line, comments=True), c.output) for c in commands(p)] for p in (page, original)]
    assert typed[0] == typed[1]
    shown = [[b.text for b in blocks(p) if b.language == "text" and b.follows] for p in (page, original)]
    assert shown[0] == shown[1]


def test_nothing_that_is_documented_is_hidden_from_these_tests() -> None:
    """Code in a language that is not run must be one of these; `py` is what the traps show, and only parses."""
    known = {"python", "py", "text", "console", "bash", "", "json", "yaml", "html"}
    assert {block.language for page in pages() for block in blocks(page)} <= known


def test_the_fragments_of_the_traps_are_python() -> None:
    fragments = [block for page in pages() for block in blocks(page) if block.language == "py"]
    assert len(fragments) > 40
    for block in fragments:
        ast.parse(textwrap.dedent(block.text))
