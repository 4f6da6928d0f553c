"""`ModelConfig` from a transformers `config.json`, with transformers' own defaults where a key is absent."""

from collections.abc import Mapping
from typing import Any, Literal, cast, get_args

from kvine.config import MOST_TOKENS
from kvine.errors import ModelLoadError
from kvine.models.config import MOST_LAYERS, Activation, LayerConfig, ModelConfig
from kvine.models.fields import Fields
from kvine.rope_scaling import ROPE_KINDS, RopeConfig, RopeKind

ARCHITECTURES: Mapping[str, str] = {  # by model_type, for configs that name no architecture
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "gemma3": "Gemma3ForConditionalGeneration",
}
_ACTIVATIONS: Mapping[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}
_GEMMA_DEFAULTS: Mapping[str, Any] = {  # Gemma 3's published configs leave out what equals these
    "vocab_size": 262_208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131_072,
    "sliding_window": 4096,
    "query_pre_attn_scalar": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "bos_token_id": 2,
    "eos_token_id": 1,
}
LayerType = Literal["full_attention", "sliding_attention"]


def config_from_hf(values: Mapping[str, Any], file: str) -> ModelConfig:
    """The model that the contents of a `config.json` describe; `file` is its name for complaints.

    Supports Llama, Mistral, Qwen2, Qwen3, Gemma3 and the text part of Gemma3ForConditionalGeneration. Raises
    ModelLoadError, naming file and key, for an unknown architecture or a missing, wrong or contradictory value.
    """
    fields = Fields(values, file)
    architecture = _architecture(fields)
    if fields.get("quantization_config") is not None:
        raise fields.error("quantization_config", "describes packed weights, which Kvine reads from GGUF files only")
    if architecture == "Gemma3ForConditionalGeneration":
        text = fields.nested("text_config")
        if text is None:
            raise fields.error("text_config", "is missing")
        outer = {key: values[key] for key in ("tie_word_embeddings", "eos_token_id", "bos_token_id") if key in values}
        fields = Fields({**_GEMMA_DEFAULTS, **outer, **_present(text.values)}, file, text.prefix)
    elif architecture == "Gemma3ForCausalLM":
        fields = Fields({**_GEMMA_DEFAULTS, **_present(values)}, file)
    return _decoder_config(fields, architecture)


def _present(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None or key == "sliding_window"}


def _architecture(fields: Fields) -> str:
    named = fields.get("architectures")
    if isinstance(named, list) and named:
        architecture = named[0]
    else:
        architecture = ARCHITECTURES.get(fields.text("model_type"), fields.get("model_type"))
    if architecture not in ARCHITECTURES.values():
        supported = ", ".join(ARCHITECTURES.values())
        raise fields.error("architectures", f"names {architecture!r}; Kvine supports {supported}")
    return str(architecture)


def _decoder_config(fields: Fields, architecture: str) -> ModelConfig:
    is_gemma = architecture.startswith("Gemma3")
    hidden_size, num_heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    head_dim = _head_dim(fields, architecture, hidden_size, num_heads)
    attention_bias = fields.flag("attention_bias", default=False)
    activation = fields.text("hidden_activation" if is_gemma else "hidden_act", "silu")
    if activation not in _ACTIVATIONS:
        key = "hidden_activation" if is_gemma else "hidden_act"
        raise fields.error(key, f"is {activation!r}; Kvine supports {', '.join(_ACTIVATIONS)}")
    if is_gemma and fields.flag("use_bidirectional_attention", default=False):
        raise fields.error("use_bidirectional_attention", "is true: this is an encoder, not a language model")
    bos = fields.token_ids("bos_token_id")
    layers = _layers(fields, architecture, head_dim)
    return ModelConfig(
        architecture=architecture,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=len(layers),
        num_heads=num_heads,
        num_kv_heads=fields.integer("num_key_value_heads", 8 if architecture == "MistralForCausalLM" else num_heads),
        head_dim=head_dim,
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        max_context=max_context(fields.integer("max_position_embeddings"), layers),
        layers=layers,
        attention_scale=(fields.number("query_pre_attn_scalar") if is_gemma else head_dim) ** -0.5,
        activation=_ACTIVATIONS[activation],
        tie_embeddings=fields.flag("tie_word_embeddings", default=False),
        qkv_bias=attention_bias or architecture == "Qwen2ForCausalLM",
        output_bias=attention_bias and architecture != "Qwen2ForCausalLM",
        mlp_bias=fields.flag("mlp_bias", default=False),
        qk_norm=is_gemma or architecture == "Qwen3ForCausalLM",
        post_norms=is_gemma,
        norm_offset=1.0 if is_gemma else 0.0,
        embedding_scale=hidden_size**0.5 if is_gemma else 1.0,
        attention_softcap=fields.optional_number("attn_logit_softcapping"),
        logit_softcap=fields.optional_number("final_logit_softcapping"),
        eos_token_ids=fields.token_ids("eos_token_id"),
        bos_token_id=bos[0] if bos else None,
    ).check(fields.file)


def _head_dim(fields: Fields, architecture: str, hidden_size: int, num_heads: int) -> int:
    if fields.get("head_dim") is None and architecture == "Qwen3ForCausalLM":
        return 128
    if fields.get("head_dim") is None and hidden_size % num_heads:
        raise fields.error("num_attention_heads", f"({num_heads}) does not divide hidden_size ({hidden_size})")
    return fields.integer("head_dim", hidden_size // num_heads)


def max_context(trained: int, layers: tuple[LayerConfig, ...]) -> int:
    """The longest sequence in tokens: the trained context, or what yarn extends the original one to."""
    extended = [layer.rope.original_context * layer.rope.factor for layer in layers if layer.rope.kind == "yarn"]
    return int(min(MOST_TOKENS, max(trained, *extended))) if extended else trained


def _layers(fields: Fields, architecture: str, head_dim: int) -> tuple[LayerConfig, ...]:
    types = _layer_types(fields, architecture)
    window = _window(fields, architecture)
    if "sliding_attention" in types and window is None:
        raise fields.error("sliding_window", "is missing, but layer_types names sliding layers")
    ropes = {kind: _rope(fields, architecture, kind, head_dim) for kind in dict.fromkeys(types)}
    return tuple(LayerConfig(window if kind == "sliding_attention" else None, ropes[kind]) for kind in types)


def _window(fields: Fields, architecture: str) -> int | None:
    if architecture.startswith("Qwen") and not fields.flag("use_sliding_window", default=False):
        return None
    if fields.get("sliding_window") is None:
        return None
    return fields.integer("sliding_window")


def _layer_types(fields: Fields, architecture: str) -> list[LayerType]:
    num_layers = fields.integer("num_hidden_layers", maximum=MOST_LAYERS)
    if architecture == "LlamaForCausalLM":
        return ["full_attention"] * num_layers
    if architecture == "MistralForCausalLM":  # one window, all layers; transformers ignores layer_types here too
        return ["full_attention" if fields.get("sliding_window") is None else "sliding_attention"] * num_layers
    named = fields.get("layer_types")
    if named is not None:
        known = ("full_attention", "sliding_attention")
        if not isinstance(named, list) or len(named) != num_layers or any(kind not in known for kind in named):
            raise fields.error("layer_types", f"must name {num_layers} layers, each one of {', '.join(known)}")
        return cast(list[LayerType], named)
    if architecture.startswith("Gemma3"):
        period = fields.integer("sliding_window_pattern", 6)
        return ["sliding_attention" if (index + 1) % period else "full_attention" for index in range(num_layers)]
    if _window(fields, architecture) is None:
        return ["full_attention"] * num_layers
    first_sliding = fields.integer("max_window_layers", 28, minimum=0)
    return ["sliding_attention" if index >= first_sliding else "full_attention" for index in range(num_layers)]


def _rope(fields: Fields, architecture: str, layer_type: LayerType, head_dim: int) -> RopeConfig:
    """The rotation of one kind of layer, from `rope_scaling` (older) or `rope_parameters` (transformers 5)."""
    parameters = fields.nested("rope_parameters")
    older = fields.nested("rope_scaling")
    is_nested = parameters is not None and any(key in parameters.values for key in get_args(LayerType))
    if architecture.startswith("Gemma3"):
        if parameters is not None and not is_nested:
            raise fields.error("rope_parameters", "must have an entry for full_attention and for sliding_attention")
        is_local = layer_type == "sliding_attention"
        theta = fields.number("rope_local_base_freq", 10_000.0) if is_local else fields.number("rope_theta", 1e6)
        chosen = parameters.nested(layer_type) if parameters is not None else None
        if older is not None and not is_local:
            chosen = older
    else:
        theta = fields.number("rope_theta", 10_000.0)
        chosen = older or (parameters.nested(layer_type) if parameters is not None and is_nested else parameters)
    return rope_from_hf(chosen or Fields({}, fields.file), fields, theta, head_dim)


def rope_from_hf(rope: Fields, model: Fields, theta: float, head_dim: int) -> RopeConfig:
    """One RoPE mapping of a config, its kind under `rope_type` or `type`.

    `model` gives what may stand outside of it: context lengths and the partial rotary factor. `theta` is the base
    where the mapping has none. Raises ModelLoadError for an unknown kind or a missing or wrong parameter.
    """
    kind = _rope_kind(rope)
    trained = model.integer("max_position_embeddings")
    original = trained
    if rope.get("original_max_position_embeddings") is not None:
        original = rope.integer("original_max_position_embeddings")
    if model.get("original_max_position_embeddings") is not None:  # outside wins, as in transformers
        original = model.integer("original_max_position_embeddings")
    if kind in ("yarn", "longrope"):
        factor = rope.number("factor", trained / original)
    else:
        factor = 1.0 if kind == "default" else rope.number("factor")
    partial = rope.number("partial_rotary_factor", model.optional_number("partial_rotary_factor") or 1.0)
    is_llama3, is_longrope, is_yarn = kind == "llama3", kind == "longrope", kind == "yarn"
    try:
        return RopeConfig(
            theta=rope.number("rope_theta", theta),
            rotary_dim=int(head_dim * partial),
            kind=kind,
            factor=factor,
            max_context=trained,
            original_context=original,
            low_freq_factor=rope.number("low_freq_factor") if is_llama3 else 1.0,
            high_freq_factor=rope.number("high_freq_factor") if is_llama3 else 4.0,
            beta_fast=rope.number("beta_fast", 32.0) if is_yarn else 32.0,
            beta_slow=rope.number("beta_slow", 1.0) if is_yarn else 1.0,
            attention_factor=rope.optional_number("attention_factor") if is_yarn or is_longrope else None,
            mscale=rope.optional_number("mscale"),
            mscale_all_dim=rope.optional_number("mscale_all_dim"),
            truncate=rope.flag("truncate", default=True),
            short_factor=rope.numbers("short_factor") if is_longrope else (),
            long_factor=rope.numbers("long_factor") if is_longrope else (),
        )
    except ValueError as error:
        raise ModelLoadError(f"{rope.file}: key {rope.prefix.rstrip('.') or 'rope_theta'!r}: {error}") from error


def _rope_kind(rope: Fields) -> RopeKind:
    kinds = {rope.text(key) for key in ("rope_type", "type") if rope.get(key) is not None}
    if len(kinds) > 1:
        raise rope.error("type", f"and 'rope_type' contradict each other: {', '.join(sorted(kinds))}")
    kind = kinds.pop() if kinds else "default"
    if kind not in ROPE_KINDS:
        raise rope.error("rope_type", f"is {kind!r}; known are {', '.join(ROPE_KINDS)}")
    return kind
