"""G03: threads by what the process may use, not by what the host has."""

import os
from pathlib import Path

import pytest

from kvine.engine.resources import free_memory, usable_cores


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


def test_free_memory_is_at_most_what_the_cgroup_leaves(tmp_path: Path) -> None:
    whole = free_memory(tmp_path)
    assert whole > 0
    for limit, used, left in (("3000", "1000", 2_000), ("1000", "3000", 0)):
        (tmp_path / "memory.max").write_text(limit)
        (tmp_path / "memory.current").write_text(used)
        assert free_memory(tmp_path) == left
    (tmp_path / "memory.max").write_text("max")
    assert free_memory(tmp_path) > 2_000
