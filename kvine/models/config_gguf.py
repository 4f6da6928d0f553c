"""`ModelConfig` from GGUF metadata, with llama.cpp's rules where a key is absent."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from kvine.errors import ModelLoadError
from kvine.models.config import MOST_LAYERS, LayerConfig, ModelConfig
from kvine.models.config_hf import max_context
from kvine.models.fields import Fields
from kvine.rope_scaling import RopeConfig, RopeKind

ARCHITECTURES: Mapping[str, str] = {  # Mistral files call themselves llama
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
}
_GEMMA_27B_LAYERS = 62  # the one Gemma 3 whose attention scale is not that of its head_dim; no key says so


def config_from_gguf(
    metadata: Mapping[str, Any],
    shapes: Mapping[str, Sequence[int]],
    file: str,
    *,
    rope_divisors: tuple[float, ...] = (),
) -> ModelConfig:
    """The model that a GGUF file's metadata describes.

    `shapes` are the file's tensors by name, rows first: some properties (biases, a tied head) show only in which
    tensors there are. `rope_divisors` is the content of `rope_freqs.weight`. Raises ModelLoadError, naming file and
    key, for an unknown architecture or a missing, wrong or contradictory value.
    """
    general = Fields(metadata, file)
    arch = general.text("general.architecture")
    if arch not in ARCHITECTURES:
        raise general.error("general.architecture", f"is {arch!r}; Kvine supports {', '.join(ARCHITECTURES)}")
    prefix = f"{arch}."
    own = {key.removeprefix(prefix): _plain(value) for key, value in metadata.items() if key.startswith(prefix)}
    fields = Fields(own, file, prefix)
    is_gemma = arch == "gemma3"
    hidden_size, num_heads = fields.integer("embedding_length"), fields.integer("attention.head_count")
    head_dim = _head_dim(fields, hidden_size, num_heads)
    num_layers = fields.integer("block_count", maximum=MOST_LAYERS)
    layers = _layers(fields, is_gemma, num_layers, head_dim, rope_divisors)
    scale_dim = hidden_size // num_heads if is_gemma and num_layers == _GEMMA_27B_LAYERS else head_dim
    bos = general.token_ids("tokenizer.ggml.bos_token_id")
    return ModelConfig(
        architecture=ARCHITECTURES[arch],
        vocab_size=_vocab_size(general, fields, shapes),
        hidden_size=hidden_size,
        intermediate_size=fields.integer("feed_forward_length"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=fields.integer("attention.head_count_kv", num_heads),
        head_dim=head_dim,
        norm_eps=fields.number("attention.layer_norm_rms_epsilon"),
        max_context=max_context(fields.integer("context_length"), layers),
        layers=layers,
        attention_scale=fields.number("attention.scale", scale_dim**-0.5),
        activation="gelu_tanh" if is_gemma else "silu",
        tie_embeddings="output.weight" not in shapes,
        qkv_bias="blk.0.attn_q.bias" in shapes or arch == "qwen2",
        output_bias="blk.0.attn_output.bias" in shapes,
        mlp_bias="blk.0.ffn_gate.bias" in shapes,
        qk_norm=arch in ("qwen3", "gemma3"),
        post_norms=is_gemma,
        norm_offset=0.0,  # the converter has added Gemma's 1
        embedding_scale=hidden_size**0.5 if is_gemma else 1.0,
        attention_softcap=fields.optional_number("attn_logit_softcapping"),
        logit_softcap=fields.optional_number("final_logit_softcapping"),
        eos_token_ids=_eos_token_ids(general),
        bos_token_id=bos[0] if bos else None,
    ).check(file)


def _plain(value: Any) -> Any:
    """Arrays of numbers come as numpy arrays."""
    return value.tolist() if hasattr(value, "tolist") else value


def _eos_token_ids(general: Fields) -> tuple[int, ...]:
    """End of text and, where the file tells them apart, of a turn and of a message."""
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    return tuple(dict.fromkeys(i for key in keys for i in general.token_ids(f"tokenizer.ggml.{key}")))


def _head_dim(fields: Fields, hidden_size: int, num_heads: int) -> int:
    if fields.get("attention.key_length") is None and hidden_size % num_heads:
        raise fields.error("attention.head_count", f"({num_heads}) does not divide embedding_length ({hidden_size})")
    head_dim = fields.integer("attention.key_length", hidden_size // num_heads)
    if fields.integer("attention.value_length", head_dim) != head_dim:
        raise fields.error("attention.value_length", f"differs from key_length ({head_dim}), which Kvine cannot run")
    return head_dim


def _vocab_size(general: Fields, fields: Fields, shapes: Mapping[str, Sequence[int]]) -> int:
    if fields.get("vocab_size") is not None:
        return fields.integer("vocab_size")
    tokens = general.get("tokenizer.ggml.tokens")
    if tokens is not None:
        return len(tokens)
    if "token_embd.weight" not in shapes:
        raise ModelLoadError(f"{fields.file}: tensor token_embd.weight is missing.")
    return shapes["token_embd.weight"][0]


def _layers(
    fields: Fields, is_gemma: bool, num_layers: int, head_dim: int, divisors: tuple[float, ...]
) -> tuple[LayerConfig, ...]:
    window = fields.integer("attention.sliding_window", 0, minimum=0) or None
    if is_gemma and window is None:
        raise fields.error("attention.sliding_window", "is missing")
    sliding = _sliding_layers(fields, is_gemma, num_layers) if window else [False] * num_layers
    full_rope = _rope(fields, head_dim, divisors)
    local_rope = full_rope
    if is_gemma:
        local_rope = RopeConfig(fields.number("rope.freq_base_swa", 10_000.0), head_dim)
    return tuple(LayerConfig(window, local_rope) if local else LayerConfig(None, full_rope) for local in sliding)


def _sliding_layers(fields: Fields, is_gemma: bool, num_layers: int) -> list[bool]:
    """Which layers slide: a list in the file, or a period of which the last layer is full."""
    pattern = fields.get("attention.sliding_window_pattern")
    if isinstance(pattern, list):
        if len(pattern) != num_layers or any(item not in (0, 1) for item in pattern):
            raise fields.error("attention.sliding_window_pattern", f"must have a true or false for {num_layers} layers")
        return [bool(item) for item in pattern]
    if pattern is None and not is_gemma:
        return [True] * num_layers
    period = fields.integer("attention.sliding_window_pattern", 6)
    return [(index + 1) % period != 0 for index in range(num_layers)]


def _rope(fields: Fields, head_dim: int, divisors: tuple[float, ...]) -> RopeConfig:
    """The full layers' rotation. A factor without a type means linear, as in llama.cpp."""
    file, prefix = fields.file, fields.prefix
    rotary_dim = fields.integer("rope.dimension_count", head_dim)
    if prefix == "llama." and rotary_dim != head_dim:
        # Its rows are interleaved over the whole head, so that a partial rotation would pair other dimensions.
        raise fields.error("rope.dimension_count", f"({rotary_dim}) differs from the head's size ({head_dim})")
    factor = fields.number("rope.scaling.factor", fields.optional_number("rope.scale_linear") or 1.0)
    named = fields.text("rope.scaling.type", "none" if factor == 1 else "linear")
    kinds: dict[str, RopeKind] = {"none": "default", "linear": "linear", "yarn": "yarn", "longrope": "longrope"}
    if named not in kinds:
        raise fields.error("rope.scaling.type", f"is {named!r}; known are {', '.join(kinds)}")
    if named == "longrope":
        raise fields.error("rope.scaling.type", "is 'longrope', which Kvine does not support yet")
    trained = fields.integer("context_length")
    try:
        return RopeConfig(
            theta=fields.number("rope.freq_base", 10_000.0),
            rotary_dim=rotary_dim,
            kind=kinds[named],
            factor=1.0 if named == "none" else factor,
            max_context=trained,
            original_context=fields.integer("rope.scaling.original_context_length", trained),
            beta_fast=fields.number("rope.scaling.yarn_beta_fast", 32.0),
            beta_slow=fields.number("rope.scaling.yarn_beta_slow", 1.0),
            attention_factor=_yarn_attention_factor(fields, factor) if named == "yarn" else None,
            divisors=divisors,
        )
    except ValueError as error:
        raise ModelLoadError(f"{file}: keys {prefix}rope.*: {error}") from error


def _yarn_attention_factor(fields: Fields, factor: float) -> float:
    """llama.cpp's keys multiply yarn's own rule, where transformers' `attention_factor` replaces it."""
    for key, expected in (("yarn_ext_factor", 1.0), ("yarn_log_multiplier", 0.0)):
        if fields.get(f"rope.scaling.{key}") not in (None, expected):
            raise fields.error(f"rope.scaling.{key}", "asks for a variant of yarn that Kvine does not support")
    own = fields.number("rope.scaling.attn_factor", 1.0) * fields.number("rope.scaling.yarn_attn_factor", 1.0)
    return own * (1.0 + 0.1 * math.log(factor)) if factor > 1 else own
