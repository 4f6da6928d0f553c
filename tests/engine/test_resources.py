"""G03: threads by what the process may use, not by what the host has."""

import os
import warnings
from pathlib import Path

import pytest

from kvine.engine import resources
from kvine.engine.resources import checked_threads, default_threads, free_memory, most_threads, usable_cores
from kvine.errors import ConfigError, KvineWarning


@pytest.mark.parametrize(
    ("affinity", "cpu_max", "cores"),
    [
        (8, "max 100000", 8),
        (8, "100000 100000", 1),
        (8, "200000 100000", 2),
        (8, "250000 100000", 2),  # two and a half: three threads would be throttled
        (8, "50000 100000", 1),
        (2, "400000 100000", 2),
        (1, "max 100000", 1),
        (4, "", 4),
        (4, "nonsense", 4),
        (4, "100000 0", 4),
        (4, None, 4),
    ],
)
def test_g03_cores_are_the_smaller_of_affinity_and_quota(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, affinity: int, cpu_max: str | None, cores: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(affinity)), raising=False)
    if cpu_max is not None:
        (tmp_path / "cpu.max").write_text(cpu_max + "\n")
    assert usable_cores(tmp_path) == cores
    assert most_threads(tmp_path) == cores + (cpu_max == "250000 100000")


def test_threads_beyond_the_cores_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cpu.max").write_text("200000 100000")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)), raising=False)
    monkeypatch.setattr(resources.most_threads, "__defaults__", (tmp_path,))
    monkeypatch.setattr(resources.usable_cores, "__defaults__", (tmp_path,))
    assert [checked_threads(number) for number in (1, 2)] == [1, 2]
    for number in (0, 3, 16, True, "2", 1.5):
        with pytest.raises(ConfigError, match=r"this process may use 2 cores: give a whole number from 1 to 2\."):
            checked_threads(number)  # type: ignore[arg-type]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for asked, threads in (("1", 1), ("2", 2), ("", 2)):
            monkeypatch.setenv("OMP_NUM_THREADS", asked)
            assert default_threads() == checked_threads(None) == threads
    for asked in ("16", "0", "many", "2,1"):
        monkeypatch.setenv("OMP_NUM_THREADS", asked)
        said = f"OMP_NUM_THREADS is '{asked}', and this process may use 2 cores: computing with 2 threads."
        for threads in (default_threads, lambda: checked_threads(None)):
            with pytest.warns(KvineWarning, match=f"^{said}$"):
                assert threads() == 2


def test_free_memory_is_at_most_what_the_cgroup_leaves(tmp_path: Path) -> None:
    whole = free_memory(tmp_path)
    assert whole > 0
    for limit, used, left in (("3000", "1000", 2_000), ("1000", "3000", 0)):
        (tmp_path / "memory.max").write_text(limit)
        (tmp_path / "memory.current").write_text(used)
        assert free_memory(tmp_path) == left
    (tmp_path / "memory.max").write_text("max")
    assert free_memory(tmp_path) > 2_000
