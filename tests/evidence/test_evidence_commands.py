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

    with (
        patch("kvine.llm.standard_parts", parts_with_fault),
        patch("kvine.evidence.verify.standard_parts", parts_with_fault),
    ):
        yield


def run(*arguments: str | Path) -> Result:
    app = typer.Typer(cls=Commands)
    app.command()(verify)
    app.add_typer(experiment, name="experiment")
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_verify_finds_a_healthy_engine_healthy(folder: Path) -> None:
    result = run(
        "verify", "-m", folder, "--only", "paths", "--prompt", PROMPT, "--new-tokens", "6", "--threads", "1", "--json"
    )
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


def test_verify_computes_with_packed_weights_where_asked(folder: Path) -> None:
    """Weights that are rounded on loading are not those that transformers would read."""
    arguments = ("verify", "-m", folder, "--prompt", PROMPT, "--new-tokens", "4", "--threads", "1", "--dtype", "bf16")
    result = run(*arguments, "--only", "paths", "--weights", "q8", "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["packings"] == {"bf16": {"Q8_0": 23}, "fp32": {"Q8_0": 23}}
    others = [path for path in report["runs"] if path["path"] == "transformers"]
    assert len(others) == 2 and all(path["verdict"] == "not run" for path in others)
    assert all("rounded on loading" in path["reason"] for path in others)
    shown = run(*arguments, "--only", "cells", "--quick", "--weights", "q8")
    assert shown.exit_code == 0, shown.output
    assert "fp32: 23 weights were packed (Q8_0)." in shown.stdout
    exact = run(*arguments, "--only", "paths", "--json")
    assert json.loads(exact.stdout)["packings"] == {"bf16": {}, "fp32": {}}


def test_verify_runs_fp32_beside_the_compute_dtype(folder: Path) -> None:
    arguments = ("--only", "paths", "--prompt", PROMPT, "--new-tokens", "4", "--threads", "1", "--dtype", "bf16")
    result = run("verify", "-m", folder, *arguments)
    assert result.exit_code == 0, result.output
    assert result.stdout.count("transformers") == 2
    assert "bf16: two right computations differ by up to" in result.stdout
    assert "fp32: two right computations differ by up to" in result.stdout
    assert "No fault" in result.stdout


@pytest.mark.usefixtures("faulty")
def test_verify_ends_with_1_on_a_fault_and_says_where(folder: Path) -> None:
    arguments = ("verify", "-m", folder, "--only", "paths", "--prompt", PROMPT, "--new-tokens", "12", "--threads", "1")
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


CELLS = ("--only", "cells", "--quick", "--new-tokens", "4", "--threads", "1")


def test_cells_of_a_healthy_engine_are_healthy(folder: Path, tmp_path: Path) -> None:
    """On prompts of a file, one of them a recorded run."""
    prompts = tmp_path / "prompts.jsonl"
    ids = [i * 37 % 131 for i in range(40)]
    prompts.write_text(json.dumps({"prompt_ids": ids, "token_ids": [5, 6, 7]}) + "\nw1 w2\n")
    with patch.dict("sys.modules", {"transformers": None}):
        result = run("verify", "-m", folder, *CELLS, "--prompts", prompts, "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["ok"] is True and report["runs"] == [] and report["covered_pairs"] > 200
    own, other = report["cells"][:-1], report["cells"][-1]
    assert {cell["verdict"] for cell in own} == {"identical"}
    assert {cell["factors"]["prompt"] for cell in own} == {"line 1", "line 2"}
    assert all(0 <= cell["gap"] <= cell["bound"] and 0 <= cell["kl"] <= cell["kl_max"] < 1e-6 for cell in own)
    assert all(cell["agreement"] == 1 and cell["location"] is None for cell in own)
    assert (other["factors"]["path"], other["verdict"]) == ("transformers", "not run")
    assert all(refusal["reason"] and refusal["levels"] for refusal in report["refused"])


def test_transformers_reads_the_prompts_of_cells_too(folder: Path) -> None:
    result = run("verify", "-m", folder, *CELLS, "--prompt", PROMPT, "--json")
    assert result.exit_code == 0, result.output
    (other,) = [cell for cell in json.loads(result.stdout)["cells"] if cell["factors"].get("path") == "transformers"]
    assert other["verdict"] == "identical" and other["tokens"] == 4


@pytest.mark.usefixtures("faulty")
def test_cells_end_with_1_on_a_fault_and_say_where(folder: Path) -> None:
    with patch.dict("sys.modules", {"transformers": None}):
        result = run("verify", "-m", folder, *CELLS, "--prompt", PROMPT, "--json")
        shown = run("verify", "-m", folder, *CELLS, "--prompt", PROMPT)
    assert result.exit_code == shown.exit_code == 1, result.output
    report = json.loads(result.stdout)
    location = next(cell["location"] for cell in report["cells"] if cell["location"])
    assert (location["layer"], location["tensor"], location["position"]) == (0, "cached_k", 40)
    assert location["difference"] > location["bound"]
    assert "First wrong: cached_k of layer 0 at position 40" in " ".join(shown.stdout.split())


def test_verify_without_transformers_says_how_to_install_it(folder: Path) -> None:
    with patch.dict("sys.modules", {"transformers": None}):
        result = run(
            "verify",
            "-m",
            folder,
            "--only",
            "paths",
            "--prompt",
            PROMPT,
            "--new-tokens",
            "2",
            "--threads",
            "1",
            "--json",
        )
    assert result.exit_code == 0, "a path that cannot run is no fault"
    last = json.loads(result.stdout)["runs"][-1]
    assert (last["path"], last["verdict"], last["identical"]) == ("transformers", "not run", None)
    assert "pip install 'kvine[verify]'" in last["reason"]


def test_a_users_mistake_ends_with_2(folder: Path) -> None:
    for arguments in (
        ("verify", "-m", folder, "--new-tokens", "2", "--threads", "1"),  # the default prompt has more than 512 tokens
        ("verify", "-m", folder / "nothing"),
        ("verify", "-m", folder, "--prompts", folder / "nothing"),
        ("verify", "-m", folder, "--prompts", folder / "nothing", "--prompt", "w1"),
        ("verify", "-m", folder, *CELLS, "--new-tokens", "0"),
        ("verify", "-m", folder, *CELLS, "--prompt", " ".join(["w1"] * 510)),
        ("experiment", "cache", "-m", folder, "--repeats", "0"),
        ("experiment", "cache", "-m", folder, "--prompt", "w1", "--tokens", "600", "--repeats", "1"),
    ):
        result = run(*arguments)
        assert result.exit_code == 2, result.output
        assert result.stderr.startswith("Error: ")


def test_experiment_cache_reports_rows_and_speedup(folder: Path) -> None:
    arguments = ("--prompt", PROMPT, "--tokens", "3", "--repeats", "1", "--threads", "1")
    result = run("experiment", "cache", "-m", folder, *arguments, "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert [(row["path"], row["logits"]) for row in report["rows"]] == [("cache-free", "all"), ("cached", "all")]
    assert {"total_ms", "prefill_ms", "decode_ms", "peak_bytes"} <= report["rows"][0].keys()
    assert report["speedup"] == report["rows"][0]["total_ms"] / report["rows"][1]["total_ms"]
    assert report["same_tokens"] is True
