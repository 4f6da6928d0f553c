"""From a diagnosis to a line of code: every kind says where to look, and what it names is there."""

import ast
import re
from pathlib import Path

import pytest

from kvine.evidence.traps.catalogue import TRAPS
from kvine.evidence.traps.kinds import KINDS
from kvine.evidence.traps.places import kind_named

ROOT = Path(__file__).parents[2]


def functions(file: str) -> set[str]:
    """Names of a file's functions, with their class before methods."""
    text = (ROOT / file).read_text(encoding="utf-8")
    if file.endswith((".cpp", ".hpp")):  # a method stands indented in the class that was begun last
        found, cls = set(), ""
        for line in text.splitlines():
            if begun := re.match(r"(?:class|struct) (\w+)", line):
                cls = f"{begun[1]}::"
            elif method := re.match(r"    [\w:]+ (\w+)\(.*[{,]$", line):
                found.add(cls + method[1])
            elif function := re.match(r"(?:inline )?[\w:]+ (\w+)\(.*[{,]$", line):
                found.add(function[1])
        return found
    body = ast.parse(text).body
    methods = {
        f"{cls.name}.{node.name}"
        for cls in body
        if isinstance(cls, ast.ClassDef)
        for node in cls.body
        if isinstance(node, ast.FunctionDef)
    }
    return methods | {node.name for node in body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_names_functions_that_there_are(name: str) -> None:
    kind = kind_named(name)
    assert kind.meaning == KINDS[name] and kind.places
    for place in kind.places:
        assert set(place.functions) <= functions(place.file), place


@pytest.mark.parametrize("name", KINDS)
def test_the_traps_of_a_kind_are_traps(name: str) -> None:
    kind = kind_named(name)
    assert kind.traps == (name,) if name in TRAPS else name not in kind.traps and set(kind.traps) <= TRAPS.keys()
