"""Lines that say how far a measurement has come, and how long it will yet take as far as that is known."""

from types import SimpleNamespace

import pytest

from kvine.cli import evidence_progress
from kvine.cli.evidence_progress import EvidenceProgress, time_left


def test_there_is_no_time_left_before_something_was_measured() -> None:
    assert time_left(50.0, 0, 10) == ""
    assert time_left(50.0, 5, 10) == ", about 50 s left"
    assert time_left(60.0, 1, 10) == ", about 9 min left"
    assert time_left(60.0, 10, 10) == ", about 0 s left"


def test_loading_is_no_measure(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Two loads of 40 seconds, and measurements of 2 s each."""
    clock = iter([0.0, 0.0, 40.0, 80.0, 82.0, 120.0])
    monkeypatch.setattr(evidence_progress, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    with EvidenceProgress("measurements") as progress:
        progress("a: start", 0, 20)
        progress("b: start", 0, 20)
        progress("a: decode, 1", 0, 20)
        progress("b: decode, 1", 1, 20)
        progress("a: batch, 2", 10, 20)
    assert capsys.readouterr().err.splitlines() == [
        "b: start: 0 of 20 measurements",
        "a: decode, 1: 0 of 20 measurements",
        "b: decode, 1: 1 of 20 measurements, about 38 s left",
        "a: batch, 2: 10 of 20 measurements, about 40 s left",
    ]
