"""Which tensors a decoder needs, their shapes, and what each checkpoint format calls them.

A *role* is Kvine's own name of a tensor: `embedding.weight`, `layers.3.q.weight`, `final_norm.weight`, ...
"""

import math
import re
from collections.abc import Collection, Mapping

from kvine.cache.layout import ITEM_BYTES
from kvine.errors import ModelLoadError
from kvine.models.config import ModelConfig
from kvine.models.packing import packed_bytes

_HF_PARTS: Mapping[str, str] = {
    "attn_norm": "input_layernorm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
    "mlp_norm": "post_attention_layernorm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
_HF_POST_NORM_PARTS: Mapping[str, str] = {  # Gemma: the same name means another norm
    **_HF_PARTS,
    "post_attn_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "post_mlp_norm": "post_feedforward_layernorm",
}
_GGUF_PARTS: Mapping[str, str] = {
    "attn_norm": "attn_norm",
    "q": "attn_q",
    "k": "attn_k",
    "v": "attn_v",
    "o": "attn_output",
    "q_norm": "attn_q_norm",
    "k_norm": "attn_k_norm",
    "post_attn_norm": "post_attention_norm",
    "mlp_norm": "ffn_norm",
    "gate": "ffn_gate",
    "up": "ffn_up",
    "down": "ffn_down",
    "post_mlp_norm": "post_ffw_norm",
}
# Where the decoder's tensors begin, and the head's name: bare, plain, and two generations of multimodal checkpoints.
_HF_PREFIXES: Mapping[str, str] = {
    "model.": "lm_head.weight",
    "language_model.model.": "language_model.lm_head.weight",
    "model.language_model.": "lm_head.weight",
    "": "lm_head.weight",
}
# Tables that follow from the config, stored by older converters; the decoder computes them.
_HARMLESS = re.compile(r"\.(rotary_emb\.inv_freq|attn_rot_embd(\.weight)?)$")


def required_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every role of the model and the shape its tensor must have, rows first."""
    hidden, head_dim = config.hidden_size, config.head_dim
    q_size, kv_size = config.num_heads * head_dim, config.num_kv_heads * head_dim
    linears = {  # part: (out, in, bias)
        "q": (q_size, hidden, config.qkv_bias),
        "k": (kv_size, hidden, config.qkv_bias),
        "v": (kv_size, hidden, config.qkv_bias),
        "o": (hidden, q_size, config.output_bias),
        "gate": (config.intermediate_size, hidden, config.mlp_bias),
        "up": (config.intermediate_size, hidden, config.mlp_bias),
        "down": (hidden, config.intermediate_size, config.mlp_bias),
    }
    norms = {"attn_norm": hidden, "mlp_norm": hidden}
    if config.qk_norm:
        norms |= {"q_norm": head_dim, "k_norm": head_dim}
    if config.post_norms:
        norms |= {"post_attn_norm": hidden, "post_mlp_norm": hidden}
    shapes: dict[str, tuple[int, ...]] = {"embedding.weight": (config.vocab_size, hidden)}
    for index in range(config.num_layers):
        for part, (rows, columns, has_bias) in linears.items():
            shapes[f"layers.{index}.{part}.weight"] = (rows, columns)
            if has_bias:
                shapes[f"layers.{index}.{part}.bias"] = (rows,)
        for part, size in norms.items():
            shapes[f"layers.{index}.{part}.weight"] = (size,)
    shapes["final_norm.weight"] = (hidden,)
    if not config.tie_embeddings:
        shapes["head.weight"] = (config.vocab_size, hidden)
    return shapes


def is_norm(role: str) -> bool:
    """Whether a role is a norm's weight, which is held in fp32 whatever the compute dtype."""
    return "norm." in role


def held_bytes(config: ModelConfig, dtype: str, packings: Mapping[str, str]) -> dict[str, int]:
    """Bytes of each role as the decoder holds it: packed, or else in fp32 (norms) or the compute dtype.

    `packings` names the type of each packed role, see `choose_packings`. A tied head is the embedding and counts once.
    All together are `LoadedModel.weight_bytes`, whatever the checkpoint's format.
    """
    return {
        role: packed_bytes(packings[role], shape)
        if role in packings
        else math.prod(shape) * ITEM_BYTES["fp32" if is_norm(role) else dtype]
        for role, shape in required_shapes(config).items()
    }


def hf_names(config: ModelConfig, stored: Collection[str]) -> dict[str, str]:
    """Role to tensor name in a transformers checkpoint that holds the tensors `stored`."""
    prefix = next((prefix for prefix in _HF_PREFIXES if f"{prefix}embed_tokens.weight" in stored), "model.")
    fixed = {
        "embedding.weight": f"{prefix}embed_tokens.weight",
        "final_norm.weight": f"{prefix}norm.weight",
        "head.weight": _HF_PREFIXES[prefix],
    }
    parts = _HF_POST_NORM_PARTS if config.post_norms else _HF_PARTS
    return _names(config, fixed, f"{prefix}layers.", parts)


def gguf_names(config: ModelConfig) -> dict[str, str]:
    """Role to tensor name in a GGUF file."""
    fixed = {
        "embedding.weight": "token_embd.weight",
        "final_norm.weight": "output_norm.weight",
        "head.weight": "output.weight",
    }
    return _names(config, fixed, "blk.", _GGUF_PARTS)


def _names(config: ModelConfig, fixed: Mapping[str, str], layers: str, parts: Mapping[str, str]) -> dict[str, str]:
    names = {}
    for role in required_shapes(config):
        if role in fixed:
            names[role] = fixed[role]
        else:
            _, index, part, kind = role.split(".")
            names[role] = f"{layers}{index}.{parts[part]}.{kind}"
    return names


def check_tensors(
    config: ModelConfig, names: Mapping[str, str], stored: Mapping[str, tuple[int, ...]], file: str
) -> tuple[str, ...]:
    """The stored tensors that the decoder does not use, having checked that it can use the others.

    `names` maps roles to stored names, `stored` these to shapes. Raises ModelLoadError, naming `file` and the tensor,
    for one that is missing or has another shape than the config gives it, and for one within the layers that the
    config does not provide for (a bias, a norm, one layer more): dropping it would change the model.
    """
    for role, shape in required_shapes(config).items():
        name = names[role]
        if name not in stored:
            raise ModelLoadError(f"{file}: tensor {name} is missing. The checkpoint is incomplete: fetch it again.")
        if tuple(stored[name]) != shape:
            raise ModelLoadError(
                f"{file}: tensor {name} has the shape {list(stored[name])}, but the config makes it {list(shape)}."
            )
    unused = tuple(name for name in stored if name not in set(names.values()))
    layers = names["layers.0.attn_norm.weight"].partition("0.")[0]
    for name in unused:
        if name.startswith(layers) and not _HARMLESS.search(name):
            raise ModelLoadError(f"{file}: tensor {name} has no place in the model that its config describes.")
    return unused
