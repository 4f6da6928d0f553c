"""Reads the documentation: its pages, their code, and what the pages say that the code prints."""

import ast
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
TRANSLATED = ".zh-TW.md"
FENCE = re.compile(r"^(?P<indent>\s*)```(?P<language>[\w-]*)[^`]*$")
MARK = re.compile(r"<!-- (?P<mark>not run|varies)\b.*-->")


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, its text without indentation, where that begins, and the marks before it.

    `not run` stands before what takes too long for a test; `varies` before output whose decimal numbers are another
    run's, such as times. `follows` says that nothing but blank lines and marks lies between it and the block before.
    """

    language: str
    text: str
    line: int  # of the first line within, from 0
    indent: str
    marks: frozenset[str]
    follows: bool


@dataclass(frozen=True)
class Command:
    """A line typed at a prompt, and what a page shows beneath it: those lines of its block from `begin` to `end`."""

    line: str
    output: str
    block: Block
    begin: int
    end: int


def pages() -> list[Path]:
    """Every page in English, README included."""
    docs = sorted(page for page in (ROOT / "docs").rglob("*.md") if not page.name.endswith(TRANSLATED))
    return [ROOT / "README.md", *docs]


def translations() -> list[Path]:
    """Every page in Traditional Chinese, README included."""
    return sorted([ROOT / "README.zh-TW.md", *(ROOT / "docs").rglob(f"*{TRANSLATED}")])


def title(page: Path) -> str:
    """Names a page in a test's id."""
    return str(page.relative_to(ROOT))


@cache
def blocks(page: Path) -> tuple[Block, ...]:
    """All fenced blocks of a page, those inside of admonitions and lists too."""
    return tuple(_blocks(page.read_text(encoding="utf-8").splitlines()))


def _blocks(lines: list[str]) -> Iterator[Block]:
    marks: set[str] = set()
    follows = False
    number = 0
    while number < len(lines):
        line = lines[number]
        number += 1
        if fence := FENCE.match(line):
            begin = number
            while lines[number].strip() != "```":
                number += 1
            text = "\n".join(inner.removeprefix(fence["indent"]) for inner in lines[begin:number])
            yield Block(fence["language"], text, begin, fence["indent"], frozenset(marks), follows)
            marks, follows = set(), True
            number += 1
        elif mark := MARK.search(line):
            marks.add(mark["mark"])
        elif line.strip():
            marks, follows = set(), False


def commands(page: Path) -> Iterator[Command]:
    """Every `$ …` line of a page's console blocks."""
    for block in blocks(page):
        lines = block.text.splitlines() if block.language == "console" else []
        starts = [number for number, line in enumerate(lines) if line.startswith("$ ")]
        for start, end in pairwise([*starts, len(lines)]):
            output = "\n".join(lines[start + 1 : end]).rstrip()
            yield Command(lines[start].removeprefix("$ "), output, block, start + 1, end)


def kvine_lines(page: Path) -> Iterator[list[str]]:
    """The arguments of every `kvine …` in a page's shell blocks, whether or not it is run, from a pipe's every part."""
    for block in blocks(page):
        if block.language in ("console", "bash", "sh", "shell", ""):
            for line in block.text.splitlines():
                if "kvine " in line:
                    yield from _kvine_parts(line.removeprefix("$ "))


def _kvine_parts(line: str) -> Iterator[list[str]]:
    try:
        words = shlex.split(line, comments=True)
    except ValueError:  # prose or a table, such as a command's own output
        return
    part: list[str] = []
    for word in [*words, "|"]:
        if word not in ("|", ">", "&&", "<"):
            part.append(word)
            continue
        if part[:1] == ["kvine"]:
            yield part[1:]
        part = []


def same_code(ours: Block, theirs: Block) -> bool:
    """Whether two Python blocks do the same, comments aside."""
    return ast.dump(ast.parse(ours.text)) == ast.dump(ast.parse(theirs.text))


def without_decimals(text: str) -> str:
    """A text whose decimal numbers, and the width that they take, do not count."""
    return " ".join(re.sub(r"\d+\.\d+", "#", text).split())
