"""Tiny random checkpoints, saved by transformers and written as GGUF, for tests of everything above the formats."""

import itertools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from gguf_blocks import rounded_blocks
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

_SIZES: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,  # wide enough that logits differ by whole units
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_ALTERNATING = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
_GEMMA = {"query_pre_attn_scalar": 24, "sliding_window": 8, "layer_types": [*_ALTERNATING[:3]]}
_ARCHITECTURES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", {}),
    "mistral": ("MistralConfig", "MistralForCausalLM", {"sliding_window": 8}),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", {}),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {}),
    "gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM", _GEMMA),
    # TL: the plain one. TH: sliding (window 8) and full layers by turns.
    "TL": ("LlamaConfig", "LlamaForCausalLM", {}),
    "TH": (
        "Qwen2Config",
        "Qwen2ForCausalLM",
        {"num_hidden_layers": 4, "layer_types": _ALTERNATING, "use_sliding_window": True, "sliding_window": 8},
    ),
}
_FOLDERS = tempfile.TemporaryDirectory(prefix="kvine-tiny-")
_NUMBERS = itertools.count()


def tiny_model(
    arch: str, *, seed: int = 0, dtype: torch.dtype = torch.float32, max_shard_size: str = "1GB", **overrides: Any
) -> tuple[Any, Path]:
    """A random transformers model (fp32, eval mode) and the folder it is saved in, as `dtype`.

    `arch` is a key of the table above; `overrides` are config values. Norm weights and biases are random too: ones and
    zeros would hide a norm or a bias that is never applied.
    """
    config_class, model_class, own = _ARCHITECTURES[arch]
    config = getattr(transformers, config_class)(**{**_SIZES, **own, **overrides}, attn_implementation="eager")
    torch.manual_seed(seed)
    model = getattr(transformers, model_class)(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    folder = Path(_FOLDERS.name) / f"{arch}-{next(_NUMBERS)}"
    model.to(dtype).save_pretrained(folder, max_shard_size=max_shard_size)
    if dtype != torch.float32:  # what was stored, exactly; `to` has rounded buffers that are not stored too
        model = type(model).from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    return model, folder


def interleave_heads(rows: torch.Tensor, num_heads: int) -> torch.Tensor:
    """llama.cpp's order of q and k rows, row by row: the halves of a head, which transformers pairs, alternate."""
    head_dim = rows.shape[0] // num_heads
    order = [
        head * head_dim + half * (head_dim // 2) + pair
        for head in range(num_heads)
        for pair in range(head_dim // 2)
        for half in range(2)
    ]
    return rows[order]


_GGUF_ARCH = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma3_text": "gemma3"}
_GGUF_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_GEMMA_NAMES = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def write_gguf(
    model: Any, folder: Path, quant: str | None = None, *, extra: Callable[[gguf.GGUFWriter], None] | None = None
) -> Path:
    """The model as a GGUF file in `folder`, matrices as `quant` ("F32", "F16", "BF16", "Q8_0", "Q4_1", ...); of the K
    types, which the gguf package cannot make, they are any numbers.

    `extra` may add keys, such as a tokenizer. Rows that are no whole blocks stay F32. Gemma's norms get their 1,
    llama's heads their order.
    """
    path = folder / f"model-{quant or 'F32'}.gguf"
    config = model.config
    arch = _GGUF_ARCH[config.model_type]
    writer = gguf.GGUFWriter(path, arch)
    _write_metadata(writer, config, arch)
    if extra is not None:
        extra(writer)
    state = model.state_dict()
    if config.tie_word_embeddings:
        state.pop("lm_head.weight", None)
    for name, tensor in state.items():
        data = tensor.detach().float()
        if arch == "gemma3" and name.endswith("norm.weight"):
            data = data + 1
        if arch == "llama" and "self_attn.q_proj" in name:
            data = interleave_heads(data, config.num_attention_heads)
        if arch == "llama" and "self_attn.k_proj" in name:
            data = interleave_heads(data, config.num_key_value_heads)
        whole = (
            data.ndim == 2 and data.shape[1] % gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[quant or "F32"]][0] == 0
        )
        _add_tensor(writer, _gguf_name(name, arch), data, (quant or "F32") if whole else "F32")
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "llama3":
        scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
        plain = rope["rope_theta"] ** -(torch.arange(0, config.head_dim, 2).double() / config.head_dim)
        _add_tensor(writer, "rope_freqs.weight", (plain / scaled).float(), "F32")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _gguf_name(name: str, arch: str) -> str:
    fixed = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    part, _, kind = name.rpartition(".")
    if part in fixed:
        return f"{fixed[part]}.{kind}"
    index, _, part = part.removeprefix("model.layers.").partition(".")
    names = {**_GGUF_NAMES, **(_GEMMA_NAMES if arch == "gemma3" else {})}
    return f"blk.{index}.{names[part]}.{kind}"


def _add_tensor(writer: gguf.GGUFWriter, name: str, data: torch.Tensor, type_name: str) -> None:
    kind = gguf.GGMLQuantizationType[type_name]
    if type_name.startswith("Q"):
        array = rounded_blocks(data, type_name)[0].numpy()
    else:
        array = gguf.quants.quantize(np.ascontiguousarray(data.numpy()), kind)
    writer.add_tensor(name, array, raw_dtype=kind)


def _write_metadata(writer: gguf.GGUFWriter, config: Any, arch: str) -> None:
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    rope = config.rope_parameters
    if arch == "gemma3":
        rope = rope["full_attention"]
        writer.add_float32("gemma3.attention.scale", config.query_pre_attn_scalar**-0.5)
        if config.final_logit_softcapping:
            writer.add_final_logit_softcapping(config.final_logit_softcapping)
    else:
        writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    layer_types = getattr(config, "layer_types", None)
    if getattr(config, "sliding_window", None):
        writer.add_sliding_window(config.sliding_window)
        if layer_types is not None:
            writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in layer_types])
    writer.add_bos_token_id(config.bos_token_id)
    writer.add_eos_token_id(config.eos_token_id)
