"""Healthy engines raise no alarm, whatever options meet; every level does what it says."""

import random
from collections import Counter
from pathlib import Path

import pytest
from cell_lab import Lab


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    return Lab(tmp_path_factory.mktemp("healthy"), "gemma3")


def test_random_healthy_cells_raise_no_alarm(lab: Lab) -> None:
    chance = random.Random(7)
    report = lab.run([lab.draw(chance) for _ in range(20)])
    assert [cell for cell in report.cells if cell.verdict not in ("identical", "rounding")] == []
    assert all(cell.verdict == "identical" for cell in report.cells if cell.factors["dtype"] == "fp32")
    assert all(cell.kl_max is not None and 0 <= cell.kl_max < 0.1 for cell in report.cells)
    forks = [cell for cell in report.cells if cell.factors["history"] == "fork"]
    assert forks and all(cell.tokens == 8 for cell in forks), "both branches are compared"
    searches = [cell for cell in report.cells if cell.factors["beams"] == "3"]
    assert searches and all(cell.tokens == 12 for cell in searches), "three beams are compared at each of four steps"
    assert any(cell.factors["store"] == "disk" for cell in searches)


def test_random_healthy_cells_with_packed_weights_raise_no_alarm(tmp_path: Path) -> None:
    chance, lab = random.Random(8), Lab(tmp_path, "llama", weights="q8")
    report = lab.run([lab.draw(chance) for _ in range(12)])
    assert [cell for cell in report.cells if cell.verdict not in ("identical", "rounding")] == []


@pytest.mark.slow
def test_two_hundred_random_healthy_configurations_raise_no_alarm(tmp_path: Path) -> None:
    verdicts: Counter[str] = Counter()
    worst = 0.0
    for seed in range(30):
        kind = ("llama", "qwen3", "gemma3")[seed % 3]
        lab = Lab(tmp_path / str(seed), kind, seed + 100, quick=False)
        chance = random.Random(seed)
        report = lab.run([lab.draw(chance) for _ in range(8)])
        verdicts.update(cell.verdict for cell in report.cells)
        assert not report.faults, report.faults
        worst = max(worst, *(cell.gap / cell.bound for cell in report.cells if cell.gap is not None and cell.bound))
    assert sum(verdicts.values()) == 240 and verdicts["not run"] == 0, verdicts
    assert worst < 0.9, f"the bound is all but used up: {worst}"
