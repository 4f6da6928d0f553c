"""Configs, indexes and options that no model has: one sentence each, no traceback, and no hang."""

import json
from pathlib import Path
from typing import Any

import pytest
from planned import CONFIGS, planned
from typer.testing import CliRunner, Result

from kvine.cli.app import app
from kvine.config import CacheConfig, ConfigError
from kvine.errors import ModelLoadError
from kvine.evidence.plan import Figures
from kvine.evidence.plan.subject import parse_count
from kvine.models.config_gguf import config_from_gguf

LLAMA = json.loads((CONFIGS / "llama-3.1-8b.json").read_text())
FOREIGN = {**LLAMA, "architectures": ["SomethingElse"]}
MIXTURE = {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 99}
HUGE = 10**400
MACHINE = ("--memory", "80GiB", "--bandwidth", "900", "--device", "cpu")
SMALL = ("--layers", "4", "--kv-width", "64", "--params", "1M")


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["plan", *map(str, arguments), *MACHINE])


def refuses(result: Result, complaint: str) -> None:
    assert result.exit_code == 2, result.output
    assert complaint in " ".join(result.stderr.split()) and result.stdout == ""


@pytest.mark.parametrize("values", [LLAMA, FOREIGN], ids=["llama", "foreign"])
@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"num_hidden_layers": 10**9}, "'num_hidden_layers' must be a whole number of at most 100000"),
        ({"num_hidden_layers": 10**12}, "'num_hidden_layers' must be a whole number of at most 100000"),
        ({"num_key_value_heads": 5}, "num_attention_heads"),
        ({"num_key_value_heads": 64}, "num_attention_heads"),
        ({"max_position_embeddings": 10**20}, "'max_position_embeddings' must be a whole number of at most"),
        ({"hidden_size": HUGE, "head_dim": 128}, "'hidden_size' must be a whole number of at most"),
        ({"intermediate_size": HUGE}, "'intermediate_size' must be a whole number of at most"),
    ],
)
def test_figures_of_a_config_that_no_model_has(
    values: dict[str, Any], change: dict[str, Any], complaint: str, tmp_path: Path
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**values, **change}))
    refuses(run(path, "--json"), complaint)


def test_layers_of_a_gguf_file() -> None:
    metadata = {
        "general.architecture": "llama",
        "llama.embedding_length": 64,
        "llama.attention.head_count": 4,
        "llama.block_count": 10**9,
    }
    with pytest.raises(ModelLoadError, match=r"llama\.block_count' must be a whole number of at most 100000"):
        config_from_gguf(metadata, {}, "model.gguf")


def test_numbers_of_a_rotation(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**LLAMA, "rope_theta": HUGE}))
    refuses(run(path), "'rope_theta' must be a positive number")
    path.write_text(json.dumps({**LLAMA, "rope_scaling": {"rope_type": "yarn", "factor": 1e308}}))
    assert planned(path).subject.max_context == 2**31 - 1


def test_more_experts_a_token_than_there_are(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**FOREIGN, **MIXTURE}))
    refuses(run(path), "'num_experts_per_tok' is 99, of 8 experts")


@pytest.mark.parametrize("total", [float("inf"), HUGE, -1, "much"])
def test_a_sum_that_no_checkpoint_stores(total: object, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(FOREIGN))
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": {}}))
    refuses(run(tmp_path), "'metadata.total_size' must be a whole number")


@pytest.mark.parametrize("price", ["1e308", "inf", "nan", "-1"])
@pytest.mark.parametrize("option", ["prefill", "cached", "decode"])
def test_prices_beyond_reckoning(option: str, price: str) -> None:
    asked = ("--prompt-tokens", 2**31 - 1, "--output-tokens", 2**31 - 1, f"--price-{option}", price)
    refuses(run(*SMALL, *asked, "--json"), f"The price of {option} tokens is")
    highest = json.loads(run(*SMALL, *asked[:-1], "1e15", "--json").stdout)["request"]
    assert highest["uncached_price"] + highest["price"] < 1e20


@pytest.mark.parametrize(
    ("figures", "complaint"),
    [
        (Figures(layers=4, kv_width=4, head_dim=8), "K of width 4 does not divide into heads of 8."),
        (Figures(layers=4, kv_width=4096, kv_heads=7), "K of width 4096 does not divide into 7 KV heads."),
        (Figures(layers=4, kv_width=64, kv_heads=4, head_dim=8), "does not divide into 4 KV heads of 8."),
        (Figures(layers=4, kv_width=64, kv_heads=1, head_dim=8), "does not divide into 1 KV head of 8."),
    ],
)
def test_widths_that_do_not_divide_say_only_what_was_given(figures: Figures, complaint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        figures.subject("fp16")
    assert str(caught.value).endswith(complaint)


@pytest.mark.parametrize(
    "text", ["1,2,3", "1,0000", ",100", "1,", "1234,567", "1,000_000", "_1", "", ".", "e9", "1..5"]
)
def test_no_numbers_of_parameters(text: str) -> None:
    with pytest.raises(ConfigError, match="is no number of parameters"):
        parse_count(text)


@pytest.mark.parametrize(
    ("text", "number"),
    [("134,515,008", 134_515_008), ("1_000_000", 10**6), (".5B", 5 * 10**8), ("1,024.5k", 1_024_500)],
)
def test_numbers_of_parameters_in_groups(text: str, number: int) -> None:
    assert parse_count(text) == number


@pytest.mark.parametrize(
    ("given", "bytes_a_second"),
    [("900GB/S", 900e9), ("900gb/s", 900e9), ("1e3", 1e12), ("1E3", 1e12), ("1.5e+2", 150e9), (" 900 GB/s ", 900e9)],
)
def test_bandwidth_in_any_case(given: str, bytes_a_second: float) -> None:
    assert planned(Figures(layers=4, kv_width=64), bandwidth=given).walls.bandwidth.value == bytes_a_second


@pytest.mark.parametrize("given", ["1e400", "1e-400", "1e", "e3", "0", "900GB/m"])
def test_no_bandwidth(given: str) -> None:
    with pytest.raises(ConfigError, match="bandwidth"):
        planned(Figures(layers=4, kv_width=64), bandwidth=given)


def test_the_longest_text_is_a_number_unless_a_window_bounds_it() -> None:
    tiny = Figures(layers=1, kv_width=1, params=1)
    assert planned(tiny).fits.max_context == 2**31 - 1
    assert planned(tiny, cache=CacheConfig(window=8)).fits.max_context is None
