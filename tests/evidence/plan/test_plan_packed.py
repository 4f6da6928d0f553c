"""Packed weights of models that Kvine does not run: what their parts take, and what is said to be assumed."""

import json
from pathlib import Path
from typing import Any

import pytest
from planned import CONFIGS, planned

from kvine.errors import ModelLoadError
from kvine.evidence.plan import compare

MIXTRAL: dict[str, Any] = {  # 8x7B
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "vocab_size": 32_000,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 32_768,
    "torch_dtype": "bfloat16",
}
EXPERTS = 32 * 8 * 3 * 4096 * 14_336
ATTENTION = 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024)
TABLE = 32_000 * 4096
REST = 2 * TABLE + 32 * 4096 * 8 + 65 * 4096  # two tables, routers, norms
IN_4_BITS = (EXPERTS + ATTENTION) // 2 + REST * 2
LLAMA = json.loads((CONFIGS / "llama-3.1-8b.json").read_text())
LLAMA_MATRICES = 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14_336)
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128}


def write(folder: Path, values: dict[str, Any], total_size: float | None = None) -> Path:
    (folder / "config.json").write_text(json.dumps(values))
    if total_size is not None:
        index = {"metadata": {"total_size": total_size}, "weight_map": {}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder if total_size is not None else folder / "config.json"


@pytest.mark.parametrize("packing", [{"quant_method": "gptq", "bits": 4}, {"quant_method": "gptq"}])
@pytest.mark.parametrize("total", [24_000_000_000, 1])
def test_a_step_reads_no_more_and_no_less_than_the_parts_stored(
    packing: dict[str, Any], total: int, tmp_path: Path
) -> None:
    folder = write(tmp_path, {**MIXTRAL, "quantization_config": packing}, total)
    steps = [planned(folder, batch=batch).walls.weight_bytes_per_step for batch in (1, 2, 8, 100_000)]
    assert 0 <= steps[0] <= total and steps == sorted(steps)
    assert steps[-1] == pytest.approx(total)


def test_the_parts_share_what_is_stored_as_they_share_what_is_counted(tmp_path: Path) -> None:
    folder = write(tmp_path, {**MIXTRAL, "quantization_config": {"quant_method": "gptq", "bits": 4}}, 24 * 10**9)
    plan = planned(folder)
    read = IN_4_BITS - EXPERTS // 2 * 6 // 8 - (TABLE - 4096) * 2
    assert plan.weight_bytes == 24 * 10**9
    assert plan.walls.weight_bytes_per_step == pytest.approx(read * 24e9 / IN_4_BITS, rel=1e-8)
    assert plan.warnings == (), "nothing is assumed of a sum that is known"
    own, *fewer = (variant.plan.weight_bytes for variant in compare(plan, "attention") if "MHA" not in variant.name)
    assert own == 24 * 10**9
    shrunk = [IN_4_BITS - 32 * 2 * 4096 * 128 * (8 - heads) // 2 for heads in (4, 1)]
    assert fewer == pytest.approx([nbytes * 24e9 / IN_4_BITS for nbytes in shrunk], rel=1e-8)


def test_bits_that_the_config_names_are_counted_and_what_is_assumed_is_said(tmp_path: Path) -> None:
    plan = planned(write(tmp_path, {**LLAMA, "quantization_config": AWQ}))
    assert plan.subject.weights.parameters == 8_030_261_248
    assert plan.weight_bytes == LLAMA_MATRICES // 2 + (8_030_261_248 - LLAMA_MATRICES) * 2
    assert f"{LLAMA_MATRICES:,} of them at 4 bits" in plan.subject.weights.source
    [warning] = plan.warnings
    assert "assumed that awq packs the matrices of all layers in 4 bits and leaves the rest in bf16" in warning
    unpacked = planned(tmp_path / "config.json", dtype="fp16")
    assert unpacked.weight_bytes == 2 * 8_030_261_248 and unpacked.warnings == ()
    mixture = planned(write(tmp_path, {**MIXTRAL, "quantization_config": AWQ}))
    assert mixture.weight_bytes == IN_4_BITS and mixture.subject.weights.expert_bytes == EXPERTS // 2


@pytest.mark.parametrize(
    ("packing", "bits"),
    [
        ({"quant_method": "fp8"}, 8),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, 8),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False}, 4),
        ({"quant_method": "exl2", "bits": 4.5}, 4.5),
        ({"quant_method": "quip"}, 16),
        ({}, 16),
    ],
)
def test_other_ways_to_pack(packing: dict[str, Any], bits: float, tmp_path: Path) -> None:
    plan = planned(write(tmp_path, {**LLAMA, "quantization_config": packing}))
    assert plan.weight_bytes == LLAMA_MATRICES * bits / 8 + (8_030_261_248 - LLAMA_MATRICES) * 2
    [warning] = plan.warnings
    assert ("does not say in how many bits" in warning) == (bits == 16)


def test_a_number_of_parameters_is_packed_too(tmp_path: Path) -> None:
    plan = planned(write(tmp_path, {**LLAMA, "model_type": "novelty", "quantization_config": AWQ}), params=10**9)
    assert plan.weight_bytes == 5 * 10**8
    assert "All parameters are assumed to be in 4 bits" in plan.warnings[0]


@pytest.mark.parametrize("bits", [0, -4, 32, "four", True, 10**400])
def test_bits_that_none_can_be(bits: object, tmp_path: Path) -> None:
    values = {**LLAMA, "quantization_config": {"quant_method": "gptq", "bits": bits}}
    with pytest.raises(ModelLoadError, match=r"'quantization_config\.bits' must be"):
        planned(write(tmp_path, values))


def test_what_stands_outside_of_the_text_config_counts(tmp_path: Path) -> None:
    inner = {key: value for key, value in MIXTRAL.items() if key not in ("architectures", "torch_dtype")}
    outer = {"architectures": ["Seeing"], "text_config": inner, "torch_dtype": "float32", "tie_word_embeddings": True}
    plan = planned(write(tmp_path, outer))
    assert plan.subject.dtype == "fp32"
    assert plan.weight_bytes == 4 * (EXPERTS + ATTENTION + REST - TABLE)
    packed = planned(write(tmp_path, {**outer, "quantization_config": AWQ}))
    assert packed.weight_bytes == (EXPERTS + ATTENTION) // 2 + 4 * (REST - TABLE)
    inner["dtype"] = "float16"
    assert planned(write(tmp_path, outer)).subject.dtype == "fp16", "what is said inside comes first"
