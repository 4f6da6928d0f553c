"""Holds the source to docs/architecture.md: who imports whom, and how large things may get."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import resolve_name
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = sorted((ROOT / "kvine").rglob("*.py"))
MAX_FILE_LINES = 420
MAX_FUNCTION_LINES = 70
WITHOUT_TORCH = (
    "kvine.config",
    "kvine.errors",
    "kvine.cache.spec",
    "kvine.cache.blocks",
    "kvine.cache.manager",
    "kvine.cache.tier",
    "kvine.cache.disk",
    "kvine.models.config",
    "kvine.models.packing",
    "kvine.toy",
    "kvine.sampling.params",
    "kvine.evidence.plan",
    "kvine.evidence.quality.policies",
    "kvine.formats.gguf_header",
    "kvine.formats.safetensors_headers",
)
Function = ast.FunctionDef | ast.AsyncFunctionDef


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def rooms() -> dict[str, int]:
    """Each room's module, and its row in the table: the larger, the lower."""
    page = (ROOT / "docs" / "architecture.md").read_text()
    section = page.split("## The rooms\n")[1].split("\n## ")[0]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `kvine/")]
    return {
        path.removesuffix("/").removesuffix(".py").replace("/", "."): level
        for level, cell in enumerate(rows)
        for path in re.findall(r"`([^`]+)`", cell)
    }


ROOMS = rooms()


def room_of(module: str) -> str:
    return ".".join(module.split(".")[:2])


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """Every module of Kvine that a file names in an import, wherever in the file, and the line."""
    package = module_name(path) if path.name == "__init__.py" else module_name(path).rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = resolve_name("." * node.level + (node.module or ""), package)
            names = [f"{base}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
            names = [arg.value for arg in node.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str)]
        yield from ((node.lineno, name) for name in names if name.split(".")[0] == "kvine")


def is_lazy_front(path: Path) -> bool:
    return path == ROOT / "kvine" / "__init__.py"


def test_the_table_and_the_folders_are_the_same_rooms() -> None:
    there = {module_name(path).split(".")[1] for path in SOURCES if not is_lazy_front(path)}
    assert {room.split(".")[1] for room in ROOMS} == there


def test_rooms_import_downwards() -> None:
    upwards = []
    for path in SOURCES:
        if is_lazy_front(path):
            continue
        own = ROOMS[room_of(module_name(path))]
        for line, name in imports(path):
            if name != "kvine.__version__" and ROOMS.get(room_of(name), -1) < own:
                upwards.append(f"{path.relative_to(ROOT)}:{line} imports {name}")
    assert not upwards, "\n".join(upwards)


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("from kvine.llm import LLM", "kvine.llm.LLM"),
        ("import kvine.engine.engine as e", "kvine.engine.engine"),
        ("def f():\n    from kvine import hub", "kvine.hub"),
        ("if TYPE_CHECKING:\n    from ..cli import app", "kvine.cli.app"),
        ("from . import blocks", "kvine.cache.blocks"),
        ("importlib.import_module('kvine.text')", "kvine.text"),
    ],
)
def test_no_way_to_import_is_overlooked(
    source: str, found: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "kvine" / "cache" / "somewhere.py"
    path.parent.mkdir(parents=True)
    path.write_text(source)
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    assert [name for _, name in imports(path)] == [found]


def test_what_decides_without_computing_loads_no_torch() -> None:
    code = f"import sys, {', '.join(WITHOUT_TORCH)}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_the_oracle_shares_nothing_with_what_it_checks() -> None:
    oracle = ROOT / "kvine" / "attention" / "dense.py"
    assert {name.rpartition(".")[0] for _, name in imports(oracle)} == {"kvine.rope"}


def test_files_and_functions_stay_small() -> None:
    large = []
    for path in SOURCES:
        tree, lines = ast.parse(path.read_text()), len(path.read_text().splitlines())
        sizes = [(path.name, lines, MAX_FILE_LINES)]
        sizes += [
            (f"{path.name}:{node.lineno} {node.name}", (node.end_lineno or 0) - node.lineno + 1, MAX_FUNCTION_LINES)
            for node in ast.walk(tree)
            if isinstance(node, Function)
        ]
        large += [f"{path.parent.name}/{what} has {size} lines" for what, size, most in sizes if size > most]
    assert not large, "\n".join(large)


def test_nothing_is_left_to_do() -> None:
    files = [*SOURCES, *(ROOT / "tests").rglob("*.py"), *(ROOT / "docs").rglob("*.md")]
    marks = re.compile(r"\b(TODO|FIXME)\b")
    left = [str(path.relative_to(ROOT)) for path in files if path != Path(__file__) and marks.search(path.read_text())]
    assert not left


def test_everything_public_says_what_it_is() -> None:
    silent = []
    for path in SOURCES:
        tree = ast.parse(path.read_text())
        public = [n for n in tree.body if isinstance(n, Function | ast.ClassDef) and not n.name.startswith("_")]
        silent += [
            f"{path.relative_to(ROOT)} {getattr(node, 'name', '')}"
            for node in (tree, *public)
            if not ast.get_docstring(node)
        ]
    assert not silent, "\n".join(silent)
