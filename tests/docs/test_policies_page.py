"""docs/policies.md: its tables are those of benchmarks/policies.py, and bear out what the page says of them."""

import importlib.util
import json
import re
import shutil
import sys
from pathlib import Path
from types import ModuleType

import pytest
from doc_pages import ROOT

PAGE = ROOT / "docs" / "policies.md"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("policies_script", ROOT / "benchmarks" / "policies.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def rows(length: int, page: Path = PAGE) -> dict[str, list[str]]:
    """The cells of a length's table, by policy."""
    part = page.read_text("utf-8").split(f"<!-- policies {length} -->")[1].split("<!-- end of policies -->")[0]
    lines = [line for line in part.splitlines() if line.startswith("| `")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {cell[0].strip("`"): cell[1:] for cell in cells}


@pytest.mark.parametrize("length", [512, 4096, 8192])
def test_the_tables_have_every_policy_and_say_what_the_page_says(script: ModuleType, length: int) -> None:
    found = rows(length)
    assert list(found) == [policy.name for policy in script.policies(length)]
    assert (ROOT / "docs" / "assets" / f"policies-{length}.svg").exists()
    kl = {name: float(cells[2]) for name, cells in found.items()}
    mib = {name: float(cells[5].removesuffix(" MiB")) for name, cells in found.items()}
    for window in script.WINDOWS[length]:
        kept, dropped = kl[f"window={window},sinks=4,sink-rule=in_cache"], kl[f"window={window}"]
        assert kept < dropped / 2.5, "four sinks"
    assert kl["kv-dtype=int8"] < 1e-4 < kl["kv-dtype=k8v4"] < kl["kv-dtype=int4"] < 0.02 < kl["kv-dtype=int2"]
    for bits in (4, 2):
        if f"kv-dtype=int{bits}-token" in kl:
            assert kl[f"kv-dtype=int{bits}"] < kl[f"kv-dtype=int{bits}-token"] / 2, "keys by channel"
            assert mib[f"kv-dtype=int{bits}"] == mib[f"kv-dtype=int{bits}-token"]
    assert mib["kv-dtype=int4"] < mib["kv-dtype=k8v4"] < mib["kv-dtype=int8"] < 0.7 * mib["exact"]


def test_filling_the_page_puts_in_what_was_measured_and_nothing_else(script: ModuleType, tmp_path: Path) -> None:
    page = tmp_path / "docs" / "policies.md"
    (page.parent / "assets").mkdir(parents=True)
    shutil.copy(PAGE, page)
    names = [policy.name for policy in script.policies(512)]
    figures = {"tokens": 511, "perplexity": 12.5, "kl": 0.25, "top1": 0.75, "mass_lost": 0, "mass_lost_by_layer": [0]}
    told = {"model": "tiny", "text_tokens": 512, "policies": [figures | {"name": name} for name in names]}
    (tmp_path / "quality-512.json").write_text(json.dumps(told))
    speed = {name: {"ms": 4.25, "bytes": 2**20, "peak_bytes": 3 * 2**20} for name in names}
    (tmp_path / "speed-512.json").write_text(json.dumps(speed))
    script.fill(tmp_path, page)
    assert set(map(tuple, rows(512, page).values())) == {
        ("12.50", "+0.0%", "0.25", "75.0%", "0.0%", "1.0 MiB", "3.0 MiB", "4.2 ms")
    }
    assert rows(4096, page) == rows(4096) and b"</svg>" in (page.parent / "assets" / "policies-512.svg").read_bytes()
    numbers = re.compile(r"<!-- policies 512 -->.*?<!-- end of policies -->", re.DOTALL)
    assert numbers.sub("", page.read_text("utf-8")) == numbers.sub("", PAGE.read_text("utf-8"))
