"""Model configs from config.json and GGUF metadata: what they become, and what is refused."""

import json
import re
from typing import Any

import pytest
from checkpoints import tiny_model

from kvine.errors import ModelLoadError
from kvine.models.config import ModelConfig
from kvine.models.config_gguf import config_from_gguf
from kvine.models.config_hf import config_from_hf

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 131,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# google/gemma-3-4b-it as published: an image tower around a text config that leaves out most sizes.
GEMMA_4B: dict[str, Any] = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "eos_token_id": [1, 106],
    "model_type": "gemma3",
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "vision_config": {"hidden_size": 1152},
}


def hf(values: dict[str, Any], **changes: Any) -> ModelConfig:
    merged = {**values, **changes}
    return config_from_hf({key: value for key, value in merged.items() if value != "absent"}, "config.json")


def gguf(arch: str = "llama", shapes: dict[str, tuple[int, ...]] | None = None, **changes: Any) -> ModelConfig:
    own = {
        "block_count": 12,
        "context_length": 512,
        "embedding_length": 64,
        "feed_forward_length": 96,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "vocab_size": 131,
        **({"attention.sliding_window": 8} if arch == "gemma3" else {}),
        **{key.replace("__", "."): value for key, value in changes.items()},
    }
    metadata = {f"{arch}.{key}": value for key, value in own.items() if value != "absent"}
    return config_from_gguf({"general.architecture": arch, **metadata}, shapes or {}, "m.gguf")


def test_llama():
    config = hf(LLAMA)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (4, 2, 16)
    assert config.attention_scale == 0.25 and config.max_context == 512 and config.norm_eps == 1e-5
    assert config.layers[0].window is None and config.layers[0].rope.theta == 500_000.0
    assert not (config.tie_embeddings or config.qkv_bias or config.output_bias or config.mlp_bias or config.qk_norm)
    assert (config.eos_token_ids, config.bos_token_id) == ((2,), 1)


def test_defaults_are_those_of_transformers():
    config = hf(LLAMA, num_key_value_heads="absent", rope_theta="absent", rms_norm_eps="absent", eos_token_id=[2, 7])
    assert config.num_kv_heads == 4 and config.layers[0].rope.theta == 10_000.0 and config.norm_eps == 1e-6
    assert config.eos_token_ids == (2, 7)
    assert hf(LLAMA, architectures="absent").architecture == "LlamaForCausalLM"
    assert hf(LLAMA, architectures=["Qwen3ForCausalLM"]).head_dim == 128


def test_head_dim_is_independent_of_the_hidden_size():
    config = hf(LLAMA, head_dim=40)
    assert config.head_dim == 40 and config.layers[0].rope.rotary_dim == 40 and config.attention_scale == 40**-0.5


def test_mistral_slides_on_every_layer():
    assert [layer.window for layer in hf(LLAMA, architectures=["MistralForCausalLM"], sliding_window=8).layers] == [
        8
    ] * 3
    assert hf(LLAMA, architectures=["MistralForCausalLM"], sliding_window=None).layers[0].window is None
    assert hf(LLAMA, sliding_window=8).layers[0].window is None  # Llama has no such thing


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"sliding_window": 8}, [None, None, None]),  # use_sliding_window is off by default
        ({"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1}, [None, 8, 8]),
        ({"sliding_window": 8, "use_sliding_window": True}, [None, None, None]),  # max_window_layers is 28
        (
            {
                "sliding_window": 8,
                "use_sliding_window": True,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            },
            [8, None, 8],
        ),
    ],
)
@pytest.mark.parametrize("architecture", ["Qwen2ForCausalLM", "Qwen3ForCausalLM"])
def test_qwen_windows(architecture: str, changes: dict[str, Any], windows: list[int | None]):
    config = hf(LLAMA, architectures=[architecture], **changes)
    assert [layer.window for layer in config.layers] == windows
    assert config.qkv_bias == (architecture == "Qwen2ForCausalLM") and not config.output_bias
    assert config.qk_norm == (architecture == "Qwen3ForCausalLM")


def test_yarn_extends_the_context_of_a_config_that_states_the_original_one():
    rope = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    assert hf(LLAMA, rope_scaling=rope).max_context == 2048
    assert hf(LLAMA, rope_scaling=rope, max_position_embeddings=4096).max_context == 4096


def test_gemma_4b_as_published():
    config = hf(GEMMA_4B)
    assert (config.num_heads, config.num_kv_heads, config.head_dim, config.vocab_size) == (8, 4, 256, 262_208)
    assert config.max_context == 131_072 and config.eos_token_ids == (1, 106) and config.tie_embeddings
    assert config.activation == "gelu_tanh" and config.embedding_scale == 2560**0.5 and config.norm_offset == 1.0
    assert config.attention_scale == 1 / 16 and config.qk_norm and config.post_norms
    windows = [layer.window for layer in config.layers]
    assert windows[:7] == [1024] * 5 + [None, 1024] and windows.count(None) == 5
    local, full = config.layers[0].rope, config.layers[5].rope
    assert (local.kind, local.theta) == ("default", 10_000.0)
    assert (full.kind, full.theta, full.factor) == ("linear", 1e6, 8.0)


def test_gemma_saved_by_transformers_5_is_the_same():
    _, folder = tiny_model("gemma3", num_hidden_layers=7, layer_types=None, head_dim=32)
    config = hf(json.loads((folder / "config.json").read_text()))
    assert [layer.window for layer in config.layers] == [8] * 5 + [None, 8]
    assert config.layers[0].rope.theta == 10_000.0 and config.layers[5].rope.theta == 1e6
    assert config.attention_scale == 24**-0.5


def test_gguf_gemma_defaults():
    """As in llama.cpp: every sixth layer full, 10,000 as the local base, the scale of head_dim but for 27B."""
    config = gguf("gemma3", attention__key_length=32, attention__value_length=32, rope__freq_base=1e6)
    assert [layer.window for layer in config.layers] == ([8] * 5 + [None]) * 2
    assert config.layers[0].rope.theta == 10_000.0 and config.layers[5].rope.theta == 1e6
    assert config.norm_offset == 0.0 and config.embedding_scale == 8.0 and config.attention_scale == 32**-0.5
    assert gguf("gemma3", attention__key_length=32, attention__value_length=32, block_count=62).attention_scale == 0.25
    assert gguf("gemma3", rope__freq_base_swa=500.0).layers[0].rope.theta == 500.0


def test_gguf_properties_that_only_tensors_show():
    bare = gguf()
    assert bare.tie_embeddings and not (bare.qkv_bias or bare.output_bias or bare.mlp_bias)
    names = ("output.weight", "blk.0.attn_q.bias", "blk.0.attn_output.bias", "blk.0.ffn_gate.bias")
    full = gguf(shapes=dict.fromkeys(names, (1,)))
    assert not full.tie_embeddings and full.qkv_bias and full.output_bias and full.mlp_bias
    assert gguf(vocab_size="absent", shapes={"token_embd.weight": (77, 64)}).vocab_size == 77


def test_gguf_sliding_window_pattern():
    assert [layer.window for layer in gguf(attention__sliding_window=8).layers] == [8] * 12
    listed = gguf(block_count=3, attention__sliding_window=8, attention__sliding_window_pattern=[True, False, True])
    assert [layer.window for layer in listed.layers] == [8, None, 8]
    every_third = gguf(attention__sliding_window=8, attention__sliding_window_pattern=3)
    assert [layer.window for layer in every_third.layers] == [8, 8, None] * 4


@pytest.mark.parametrize(
    "key", ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "max_position_embeddings"]
)
@pytest.mark.parametrize("value", ["absent", 0, -3, 2.5, "many", True])
def test_sizes_that_are_missing_or_wrong(key: str, value: Any):
    with pytest.raises(ModelLoadError, match=rf"config\.json: key '{key}'"):
        hf(LLAMA, **{key: value})


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"architectures": ["PhiForCausalLM"]}, "key 'architectures' names 'PhiForCausalLM'; Kvine supports Llama"),
        ({"architectures": [], "model_type": "phi"}, "names 'phi'"),
        ({"architectures": "absent", "model_type": "absent"}, "key 'model_type' is missing"),
        ({"num_attention_heads": 5, "num_key_value_heads": 5}, "'num_attention_heads' (5) does not divide hidden_size"),
        ({"num_key_value_heads": 3}, "4 attention heads cannot share 3 key/value heads"),
        ({"head_dim": 15}, "even number of rotated dimensions, not 15"),
        ({"hidden_act": "relu"}, "key 'hidden_act' is 'relu'"),
        ({"rms_norm_eps": 0}, "key 'rms_norm_eps'"),
        ({"rope_theta": "big"}, "key 'rope_theta'"),
        ({"rope_theta": 0.5}, "base above 1"),
        ({"rope_scaling": [1]}, "key 'rope_scaling' must be a mapping"),
        ({"rope_scaling": {"type": "linear"}}, "key 'rope_scaling.factor' is missing"),
        ({"rope_scaling": {"type": "llama3", "factor": 8.0}}, "key 'rope_scaling.low_freq_factor' is missing"),
        ({"quantization_config": {"quant_method": "awq"}}, "key 'quantization_config'"),
        ({"eos_token_id": "two"}, "key 'eos_token_id'"),
        ({"eos_token_id": 131}, "token id 131"),
        ({"tie_word_embeddings": 1}, "key 'tie_word_embeddings'"),
        ({"architectures": ["Qwen2ForCausalLM"], "layer_types": ["full_attention"]}, "must name 3 layers"),
        ({"architectures": ["Qwen2ForCausalLM"], "layer_types": ["chunked_attention"] * 3}, "key 'layer_types'"),
        ({"architectures": ["Qwen2ForCausalLM"], "layer_types": ["sliding_attention"] * 3}, "key 'sliding_window'"),
        ({"architectures": ["Gemma3ForConditionalGeneration"]}, "key 'text_config' is missing"),
        ({"architectures": ["Gemma3ForCausalLM"], "use_bidirectional_attention": True}, "an encoder"),
        ({"architectures": ["Gemma3ForCausalLM"], "rope_parameters": {"rope_theta": 1e4}}, "key 'rope_parameters'"),
    ],
)
def test_configs_that_cannot_be_run(changes: dict[str, Any], complaint: str):
    with pytest.raises(ModelLoadError, match=re.escape(complaint)) as error:
        hf(LLAMA, **changes)
    assert str(error.value).startswith("config.json: ")


@pytest.mark.parametrize(
    ("arch", "changes", "complaint"),
    [
        ("mamba", {}, "key 'general.architecture' is 'mamba'"),
        ("llama", {"attention__head_count": "absent"}, "key 'llama.attention.head_count' is missing"),
        ("llama", {"attention__head_count": 5}, "'llama.attention.head_count' (5) does not divide"),
        ("llama", {"attention__head_count_kv": 3}, "cannot share 3"),
        ("llama", {"attention__head_count_kv": [2, 2]}, "key 'llama.attention.head_count_kv'"),
        ("llama", {"attention__value_length": 8}, "key 'llama.attention.value_length'"),
        ("llama", {"vocab_size": "absent"}, "tensor token_embd.weight is missing"),
        ("llama", {"context_length": -1}, "key 'llama.context_length'"),
        ("llama", {"attention__sliding_window": 8, "attention__sliding_window_pattern": [1]}, "sliding_window_pattern"),
        ("gemma3", {"attention__sliding_window": "absent"}, "key 'gemma3.attention.sliding_window' is missing"),
    ],
)
def test_gguf_metadata_that_cannot_be_run(arch: str, changes: dict[str, Any], complaint: str):
    with pytest.raises(ModelLoadError, match=re.escape(complaint)) as error:
        gguf(arch, **changes)
    assert str(error.value).startswith("m.gguf: ")
