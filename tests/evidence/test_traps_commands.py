"""`kvine verify --inject` and `kvine traps --examine` as they are typed: output, JSON and exit codes."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from unittest.mock import patch

import pytest
import typer
from tiny_models import write_checkpoint, write_tokenizer
from typer.testing import CliRunner, Result

from kvine.cli.app import Commands
from kvine.cli.traps import traps
from kvine.cli.verify import verify
from kvine.evidence.traps.catalogue import TRAPS
from kvine.evidence.traps.seams import healthy

NAME = "position-stuck-at-0"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    write_checkpoint(folder, "llama")
    write_tokenizer(folder)
    return folder


@pytest.fixture
def misnamed() -> Iterator[None]:
    """The trap has the fault of another one."""
    other = replace(TRAPS[NAME], fault=TRAPS["position-stuck-at-1"].fault)
    with patch("kvine.evidence.traps.catalogue.TRAPS", MappingProxyType({NAME: other})):
        yield


def run(*arguments: str | Path) -> Result:
    app = typer.Typer(cls=Commands)
    app.command()(verify)
    app.command()(traps)
    return CliRunner().invoke(app, [*map(str, arguments), "--threads", "1"])


def test_an_injected_fault_is_reported_with_its_name_and_place(folder: Path) -> None:
    result = run("verify", "-m", folder, "--inject", NAME, "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["ok"] is True and report["healthy"]["caught"] is False
    (fault,) = report["faults"]
    assert {key: fault[key] for key in ("name", "caught", "named_as", "layer", "position")} == {
        "name": NAME,
        "caught": True,
        "named_as": NAME,
        "layer": 0,
        "position": 11,
    }


@pytest.mark.usefixtures("misnamed")
def test_a_wrong_name_ends_with_1(folder: Path) -> None:
    result = run("verify", "-m", folder, "--inject", "all")
    assert result.exit_code == 1, result.output
    assert "position-stuck-at-1" in result.stdout and "0 of 1 faults were caught and named" in result.stdout


@pytest.mark.parametrize("option", [("--quick",), ("--prompt", "Hello"), ("--seed", "1"), ("--only", "cells")])
def test_options_that_an_injection_does_not_read_are_refused(option: tuple[str, ...]) -> None:
    result = run("verify", "--inject", NAME, *option)
    assert result.exit_code == 2 and "--inject reads texts of its own" in result.stderr


def test_an_unknown_name_ends_with_2_before_a_model_is_looked_for(tmp_path: Path) -> None:
    result = run("verify", "-m", tmp_path / "nothing", "--inject", "no-such-trap")
    assert result.exit_code == 2 and "There is no trap named 'no-such-trap'" in result.stderr


def test_a_kind_that_no_trap_builds_in_is_not_injected(tmp_path: Path) -> None:
    result = run("verify", "-m", tmp_path / "nothing", "--inject", "values-misaligned")
    assert result.exit_code == 2 and "`kvine traps values-misaligned` says where to look" in result.stderr


def test_the_engine_as_it_is_passes(folder: Path) -> None:
    result = run("traps", "--examine", "-m", folder)
    assert result.exit_code == 0 and "No fault" in result.stdout


def test_a_fault_in_the_engine_is_named(folder: Path) -> None:
    build = lambda model, cache: TRAPS["kv-heads-tiled"].fault(healthy(model, cache))  # noqa: E731
    with patch("kvine.evidence.traps.seams.healthy", build):
        result = run("traps", "--examine", "-m", folder)
        machine = run("traps", "--examine", "-m", folder, "--json")
    assert result.exit_code == machine.exit_code == 1
    assert "It looks like kv-heads-tiled" in result.stdout and "layer 0" in result.stdout
    assert "Where to look, the likeliest first:\n  kvine/attention/sdpa.py: _fused, _by_hand" in result.stdout
    report = json.loads(machine.stdout)
    assert (report["ok"], report["named_as"], report["layer"]) == (False, "kv-heads-tiled", 0)
    assert report["kind"]["places"][0] == {"file": "kvine/attention/sdpa.py", "functions": ["_fused", "_by_hand"]}
