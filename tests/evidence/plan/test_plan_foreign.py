"""Models that Kvine does not run: counted like transformers counts them, or refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from planned import CONFIGS, planned

from kvine.config import ConfigError
from kvine.errors import ModelLoadError

SIZES: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
MIXTURES: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8},
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "attention_bias": True, "sliding_window": 8},
    "gemma2": {"sliding_window": 8},
    "phi3": {"pad_token_id": 0, "sliding_window": 8},
}


def write(folder: Path, **values: Any) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps({"architectures": ["SomethingElse"], **SIZES, **values}))
    return path


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", MIXTURES)
def test_parameters_are_those_of_transformers(kind: str, tied: bool, tmp_path: Path) -> None:
    import transformers

    values = {**SIZES, **MIXTURES[kind], "tie_word_embeddings": tied}
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(kind, **values))
    subject = planned(write(tmp_path, model_type=kind, **MIXTURES[kind], tie_word_embeddings=tied)).subject
    assert subject.weights.parameters == model.num_parameters()
    assert subject.weights.nbytes == 2 * model.num_parameters()
    experts = [p for name, p in model.named_parameters() if "experts" in name and "bias" not in name]
    assert subject.weights.expert_bytes == 2 * sum(parameter.numel() for parameter in experts)
    if kind in ("gpt_oss", "gemma2"):  # those of several kinds of layer
        assert [layer.window == 8 for layer in subject.layers] == [
            layer == "sliding_attention" for layer in model.config.layer_types
        ]


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"num_hidden_layers": None}, "'num_hidden_layers' is missing"),
        ({"num_key_value_heads": None}, "'num_key_value_heads' is missing"),
        ({"num_attention_heads": None}, "'num_attention_heads' is missing"),
        ({"max_position_embeddings": None}, "'max_position_embeddings' is missing"),
        ({"head_dim": None, "num_attention_heads": 3}, "does not divide hidden_size"),
        ({"kv_lora_rank": 512}, "compressed latent"),
        ({"num_kv_shared_layers": 2}, "no K and V of their own"),
        ({"layer_types": ["full_attention"] * 3 + ["linear_attention"]}, "must name 4 layers"),
        ({"layer_types": ["full_attention"] * 3 + ["sliding_attention"]}, "'sliding_window' is missing"),
        ({"sliding_window": 8}, "not known which layers slide"),
        ({"torch_dtype": "int7"}, "known are"),
        ({"model_type": None}, "'model_type' is missing"),
        ({"model_type": "mixtral"}, "'num_local_experts' is missing"),
    ],
)
def test_what_cannot_be_planned_is_refused_by_name(change: dict[str, Any], complaint: str, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=complaint):
        planned(write(tmp_path, **{"model_type": "novelty", **change}))


def test_weights_that_cannot_be_counted_are_asked_for(tmp_path: Path) -> None:
    path = write(tmp_path, model_type="novelty")
    plan = planned(path, context=64)
    assert plan.weight_bytes is None and plan.walls.ms_per_token is None and plan.walls.crossover_context is None
    assert plan.kv_bytes == 64 * 4 * 2 * 16 * 2 * 2
    assert any("--params" in warning for warning in plan.warnings)
    assert planned(path, params=10**6).weight_bytes == 2 * 10**6
    assert planned(path, params=10**6, dtype="fp32").weight_bytes == 4 * 10**6


def test_the_index_of_the_shards_says_what_is_stored(tmp_path: Path) -> None:
    write(tmp_path, model_type="novelty")
    index = {"metadata": {"total_size": 123_456}, "weight_map": {"a": "model-00001-of-00001.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    plan = planned(tmp_path)
    assert plan.weight_bytes == plan.subject.weights.stored_bytes == 123_456


def test_packed_weights_of_a_known_architecture(tmp_path: Path) -> None:
    values = json.loads((CONFIGS / "llama-3.1-8b.json").read_text()) | {"quantization_config": {"quant_method": "awq"}}
    (tmp_path / "config.json").write_text(json.dumps(values))
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {"total_size": 5 * 10**9}}))
    plan = planned(tmp_path)
    assert plan.weight_bytes == 5 * 10**9 and plan.kv_bytes_per_token == 131_072
    assert "from GGUF files only" in plan.subject.not_run


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"context": 0}, "context is 0"),
        ({"context": 2**31}, "context is"),
        ({"batch": -1}, "batch is -1"),
        ({"memory": "lots"}, "'lots' is not a size"),
        ({"bandwidth": "fast"}, "is not a bandwidth"),
        ({"bandwidth": "19000000000"}, "a bare bandwidth is in GB/s"),
        ({"dtype": "fp8"}, "dtype 'fp8' is unknown"),
        ({"device": "tpu"}, "Device 'tpu' is unknown"),
    ],
)
def test_options_are_checked(options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        planned(CONFIGS / "qwen3-4b.json", **options)


@pytest.mark.parametrize(("given", "bytes_a_second"), [("19", 19e9), ("19.5GB/s", 19.5e9), ("1TB/s", 1e12), (7, 7)])
def test_bandwidth(given: int | str, bytes_a_second: float) -> None:
    assert planned(CONFIGS / "qwen3-4b.json", bandwidth=given).walls.bandwidth.value == bytes_a_second
