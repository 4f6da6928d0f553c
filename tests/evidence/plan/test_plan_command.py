"""`kvine plan` as it is typed: output, JSON, pictures, exit codes; and what it costs to ask."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from planned import CONFIGS
from typer.testing import CliRunner, Result

from kvine.cli.app import app
from kvine.evidence.plan import Prices, plan, request_cost
from kvine.evidence.plan.machine import measure_bandwidth
from kvine.evidence.plan.subject import parse_count

FIGURES = ("--layers", "46", "--kv-width", "4096", "--kv-dtype", "fp16", "--params", "27e9")
MACHINE = ("--memory", "80GiB", "--bandwidth", "900", "--device", "cpu")
GEMMA = CONFIGS / "gemma-3-27b.json"


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["plan", *map(str, arguments), *MACHINE])


def answer(*arguments: object) -> dict[str, Any]:
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    assert result.stdout.count("\n") == 1
    return json.loads(result.stdout)


def test_the_contract_of_its_json() -> None:
    out = answer(*FIGURES, "--context", 8000)
    assert out["weight_bytes"] == 54 * 10**9
    assert out["kv_bytes_per_token"] == 753_664 and out["kv_bytes"] == 6_029_312_000
    [group] = out["groups"]
    assert (group["layers"], group["window"], group["bytes_per_token"]) == (46, None, 753_664)
    free = 80 * 2**30 - 54 * 10**9
    assert out["fits"]["max_context"] == free // (32 * 753_664) * 32
    assert out["fits"]["max_batch"] == free // 6_029_312_000 == 5
    walls = out["walls"]
    assert walls["weight_bytes_per_step"] == 54 * 10**9 and walls["kv_bytes_per_step"] == 6_029_312_000
    assert walls["ms_per_token"] == pytest.approx(60_029_312_000 / 900e9 * 1e3)
    assert walls["crossover_context"] == 54 * 10**9 // 753_664 + 1


def test_a_model_by_its_config_and_variants_of_it() -> None:
    out = answer(
        GEMMA, "--context", 131_072, *("--compare", "attention"), *("--compare", "bits", "--compare", "window")
    )
    assert [(group["layers"], group["window"]) for group in out["groups"]] == [(52, 1024), (10, None)]
    rows = {(row["axis"], row["name"]): row for row in out["variants"]}
    own = rows["attention", "GQA, 16 KV heads (as it is)"]
    assert own["kv_bytes"] == out["kv_bytes"] and own["fits"] == out["fits"]
    full = rows["attention", "MHA, 32 KV heads"]
    assert full["kv_bytes"] == 2 * out["kv_bytes"]
    assert full["weight_bytes"] - out["weight_bytes"] == 62 * 2 * 16 * 128 * 5376 * 2, "k and v projections grow too"
    assert rows["bits", "4 bits"]["kv_bytes"] * 4 == rows["bits", "16 bits"]["kv_bytes"] == out["kv_bytes"]
    assert rows["bits", "8 bits"]["weight_bytes"] == 27_009_346_304
    assert rows["window", "window of 4,096"]["kv_bytes"] == 1024 * 425_984 + 4096 * 81_920


def test_a_model_by_its_config_in_packed_weights() -> None:
    """Of 27 billion: 62 layers and a tied table of 262,208 rows, all of which are multiples of 32 long."""
    exact, packed, wished = answer(GEMMA), answer(GEMMA, "--weights", "q4"), answer(GEMMA, "--weights", "packed")
    assert exact["packings"] == {} and wished["weight_bytes"] == exact["weight_bytes"]
    assert packed["packings"] == {"Q4_1": 62 * 7, "Q8_0": 1}
    table, norms = 262_208 * 5376, 62 * (4 * 5376 + 2 * 128) + 5376
    assert packed["weight_bytes"] == (packed["parameters"] - table - norms) * 20 // 32 + table * 34 // 32 + 4 * norms
    assert packed["walls"]["weight_bytes_per_step"] == packed["weight_bytes"]
    assert packed["dtype_reason"].endswith("435 weights are packed (434 Q4_1, 1 Q8_0).")
    fewer = {
        row["name"]: row["weight_bytes"]
        for row in answer(GEMMA, "--weights", "q4", "--compare", "attention")["variants"]
    }
    assert fewer["MQA, 1 KV head"] == packed["weight_bytes"] - 62 * 2 * 15 * 128 * 5376 * 20 // 32


def test_a_person_reads_what_fits_and_what_limits() -> None:
    result = run(*FIGURES, "--context", 8000)
    assert result.exit_code == 0
    text = " ".join(result.stdout.split())
    for said in (
        "50.29",
        "753,664 bytes (0.72 MiB) a token",
        "1 request of up to 42,304 tokens, or 5 requests of 8,000 tokens",
        "54.00 GB of weights, once for all requests, and 6.03 GB of K/V, each request its own",
        "at least 66.7 ms a token",
        "K/V outweigh the weights from 71,650 tokens on (1 request), or from 9 requests on",
    ):
        assert said in text, text
    mixture = " ".join(run(CONFIGS / "gpt-oss-20b.json", "--compare", "bits").stdout.split())
    assert "the last 128" in mixture and "does not run 'GptOssForCausalLM'" in mixture and "4 bits" in mixture
    endless = "1 request of any length (but 8,192 tokens are the model's context, which only in_cache sinks go past)"
    windowed = ("smollm2-135m", "--window", 64, "--sinks", 4)
    assert endless in " ".join(run(*windowed).stdout.split())
    assert "1 request of any length, or" in " ".join(run(*windowed, "--sink-rule", "in-cache").stdout.split())
    packed = " ".join(run("smollm2-135m", "--kv-dtype", "k8v4", "--compare", "bits").stdout.split())
    assert all(f"{bits} bits" in packed for bits in (16, 8, 4))
    unknown = run("--layers", 46, "--kv-width", 4096).stdout
    assert "not counted" in unknown


def test_what_a_request_costs() -> None:
    asked = ("--prompt-tokens", 10_000, "--cached-tokens", 9_000, "--output-tokens", 501)
    prices = ("--price-prefill", 3, "--price-cached", 0.3, "--price-decode", 15)
    request = answer(*FIGURES, *asked, *prices)["request"]
    assert (request["prefill_tokens"], request["cached_tokens"], request["decode_tokens"]) == (1000, 9000, 501)
    assert request["price"] == pytest.approx(0.003 + 0.0027 + 0.007515)
    assert request["uncached_price"] == pytest.approx(0.03 + 0.007515)
    read = sum(54 * 10**9 + t * 753_664 for t in range(10_001, 10_501))
    assert request["decode_bytes"] == read and request["decode_ms"] == pytest.approx(read / 900e9 * 1e3)
    assert request["attention_pairs"] == sum(range(9_001, 10_001))
    assert "0.0132" in run(*FIGURES, *asked, *prices).stdout
    windowed = plan(str(GEMMA), context=4000, memory="80GiB", bandwidth="900", device="cpu")
    pairs = request_cost(windowed, prompt=3000, output=1, prices=Prices()).attention_pairs
    of_window = sum(min(t, 1024) for t in range(1, 3001))
    assert pairs == pytest.approx((52 * of_window + 10 * sum(range(1, 3001))) / 62)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ((), "What to plan?"),
        ((GEMMA, "--layers", 4), "a model or its figures"),
        ((GEMMA, "--params", "4B"), "leave out --params"),
        (("--layers", 4), "How wide is K?"),
        (("--kv-width", 4), "How many layers?"),
        (("--layers", 4, "--kv-width", 100, "--head-dim", 64), "does not divide into"),
        (("--layers", 4, "--heads", 6, "--kv-heads", 4, "--head-dim", 8), "cannot share"),
        (("--layers", 4, "--kv-width", 64, "--compare", "attention"), "How many query heads"),
        (("--layers", 0, "--kv-width", 64), "--layers is 0"),
        ((*FIGURES, "--params", "many"), "is no number of parameters"),
        ((*FIGURES, "--cached-tokens", 5), "Give --prompt-tokens"),
        ((*FIGURES, "--prompt-tokens", 5, "--cached-tokens", 5), "from 0 to 4"),
        ((*FIGURES, "--prompt-tokens", 5, "--price-decode", -1), "at least 0"),
        ((*FIGURES, "--sinks", 4), "Sinks need a window"),
        ((*FIGURES, "--plot", "plan.pdf"), "is no name for a plot"),
        ((*FIGURES, "--weights", "q8"), "leave out --weights"),
        ((CONFIGS / "gpt-oss-20b.json", "--weights", "exact"), "Leave out --weights"),
        ((GEMMA, "--weights", "q3"), "choose one of auto, exact, packed, q8, q4"),
        (("nonsense",), "is no model that Kvine knows"),
        (("./nonsense.json",), "no such file"),
        (("nosuch.json",), "nosuch.json: there is no such file"),
        (("models/nosuch.json",), "models/nosuch.json: there is no such file"),
        (("some/deep/folder",), "some/deep/folder: there is no such file"),
        (("nosuch",), "a folder with config.json, a config.json of its own, a .gguf file"),
        ((Path(__file__),), "no model"),
    ],
)
def test_a_mistake_is_one_sentence(arguments: tuple[object, ...], complaint: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2, result.output
    assert complaint in " ".join(result.stderr.split()) and result.stdout == ""


def test_pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn, compared = tmp_path / "plan.svg", tmp_path / "variants.png"
    assert run(*FIGURES, "--plot", drawn).exit_code == 0
    assert "<svg" in drawn.read_text()
    assert run(GEMMA, "--compare", "bits", "--plot", compared).exit_code == 0
    assert compared.read_bytes().startswith(b"\x89PNG")
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "matplotlib" else find(name))
    result = run(*FIGURES, "--plot", tmp_path / "other.svg")
    assert result.exit_code == 2 and "kvine[plot]" in result.stderr


def test_planning_loads_no_torch_and_no_picture(tiny: Any) -> None:
    folder = tiny("llama")[1]
    code = (
        "import sys; sys.argv[0] = 'kvine'\n"
        "from kvine.cli.app import app\n"
        "try: app()\n"
        "except SystemExit as end: assert end.code == 0, end.code\n"
        "sys.exit(len({'torch', 'matplotlib', 'transformers'} & set(sys.modules)))"
    )
    command = [sys.executable, "-c", code, "plan", str(folder), "--memory", "1GiB", "--bandwidth", "19", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["runs"] is True


def test_figures_measured_here() -> None:
    planned = plan(str(GEMMA), device="cpu")
    assert planned.fits.memory.source == "free on this machine" and planned.fits.memory.value > 2**20
    assert planned.walls.bandwidth.source == "measured in 2 s"
    assert 1e8 < planned.walls.bandwidth.value < 1e14
    assert measure_bandwidth("cpu", 0.05).value > 1e8


@pytest.mark.parametrize(
    ("text", "number"),
    [("27e9", 27 * 10**9), ("27B", 27 * 10**9), ("1.5b", 1.5e9), ("270M", 270_000_000), ("1,024", 1024)],
)
def test_numbers_of_parameters(text: str, number: float) -> None:
    assert parse_count(text) == number
