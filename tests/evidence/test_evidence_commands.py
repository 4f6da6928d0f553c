"""`kvine verify` and `kvine experiment cache` as they are typed: output, JSON and exit codes."""

import json
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import broken_parts
import pytest
import typer
from broken_parts import with_fault
from tiny_models import write_checkpoint, write_tokenizer
from typer.testing import CliRunner, Result

from kvine.cli.app import Commands
from kvine.cli.experiment import experiment
from kvine.cli.verify import verify
from kvine.engine.build import standard_parts

PROMPT = " ".join(f"w{i * 37 % 131}" for i in range(40))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    write_checkpoint(folder, "llama")
    write_tokenizer(folder)
    return folder


@pytest.fixture
def faulty() -> Iterator[None]:
    def parts_with_fault(*args: object, **options: object):
        return with_fault(standard_parts(*args, **options), broken_parts.late_positions)  # type: ignore[arg-type]

    with patch("kvine.llm.standard_parts", parts_with_fault):
        yield


def run(*arguments: str | Path) -> Result:
    app = typer.Typer(cls=Commands)
    app.command()(verify)
    app.add_typer(experiment, name="experiment")
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_verify_finds_a_healthy_engine_healthy(folder: Path) -> None:
    result = run("verify", "-m", folder, "--prompt", PROMPT, "--new-tokens", "6", "--threads", "1", "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["ok"] is True and report["prompt_tokens"] == 40
    assert [(run["path"], run["dtype"]) for run in report["runs"]] == [
        ("cache-free", "fp32"),
        ("cached", "fp32"),
        ("cached, chunks in a batch", "fp32"),
        ("transformers", "fp32"),
    ], "stored as fp32, so that is the compute dtype, and one round is enough"
    for path in report["runs"]:
        assert path["identical"] is True and path["tokens"] == 6 and path["first_divergence"] is None


def test_verify_runs_fp32_beside_the_compute_dtype(folder: Path) -> None:
    result = run("verify", "-m", folder, "--prompt", PROMPT, "--new-tokens", "4", "--threads", "1", "--dtype", "bf16")
    assert result.exit_code == 0, result.output
    assert result.stdout.count("transformers") >= 2
    assert "bf16: two right computations differ by up to" in result.stdout
    assert "fp32: two right computations differ by up to" in result.stdout
    assert "No fault" in result.stdout


@pytest.mark.usefixtures("faulty")
def test_verify_ends_with_1_on_a_fault_and_says_where(folder: Path) -> None:
    arguments = ("verify", "-m", folder, "--prompt", PROMPT, "--new-tokens", "12", "--threads", "1")
    result = run(*arguments, "--json")
    assert result.exit_code == 1, result.output
    report = json.loads(result.stdout)
    assert report["ok"] is False
    by_path = {run["path"]: run for run in report["runs"]}
    assert by_path["transformers"]["verdict"] == "identical", "it does not share the fault"
    cached = by_path["cached"]
    assert cached["verdict"] == "fault" and cached["identical"] is False
    first = cached["first_divergence"]
    assert first["position"] == 40 + first["step"] and first["step"] == cached["matching"] > 0
    assert len(first["candidates"]) == 2 and first["candidates"][0]["text"].startswith("w")
    assert first["verdict"] == "fault" and first["gap"] >= 0

    shown = run(*arguments)
    assert shown.exit_code == 1
    assert "2 of 4 runs show a fault" in shown.stdout and "the reference takes 'w" in shown.stdout


def test_verify_without_transformers_says_how_to_install_it(folder: Path) -> None:
    with patch.dict("sys.modules", {"transformers": None}):
        result = run("verify", "-m", folder, "--prompt", PROMPT, "--new-tokens", "2", "--threads", "1", "--json")
    assert result.exit_code == 0, "a path that cannot run is no fault"
    last = json.loads(result.stdout)["runs"][-1]
    assert (last["path"], last["verdict"], last["identical"]) == ("transformers", "not run", None)
    assert "pip install 'kvine[verify]'" in last["reason"]


def test_a_users_mistake_ends_with_2(folder: Path) -> None:
    for arguments in (
        ("verify", "-m", folder, "--new-tokens", "2", "--threads", "1"),  # the default prompt has more than 512 tokens
        ("verify", "-m", folder / "nothing"),
        ("experiment", "cache", "-m", folder, "--repeats", "0"),
        ("experiment", "cache", "-m", folder, "--prompt", "w1", "--tokens", "600", "--repeats", "1"),
    ):
        result = run(*arguments)
        assert result.exit_code == 2, result.output
        assert "Error:" in result.stderr


def test_experiment_cache_reports_rows_and_speedup(folder: Path) -> None:
    arguments = ("--prompt", PROMPT, "--tokens", "3", "--repeats", "1", "--threads", "1")
    result = run("experiment", "cache", "-m", folder, *arguments, "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert [(row["path"], row["logits"]) for row in report["rows"]] == [("cache-free", "all"), ("cached", "all")]
    assert {"total_ms", "prefill_ms", "decode_ms", "peak_bytes"} <= report["rows"][0].keys()
    assert report["speedup"] == report["rows"][0]["total_ms"] / report["rows"][1]["total_ms"]
    assert report["same_tokens"] is True
