"""Models that Kvine does not run, read from their config.json far enough to plan them.

Only what is written there is believed: a key that is missing, or one that says that K and V are kept in another way
than by token, KV head and layer, is refused with its name.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvine.cache.spec import ITEM_BYTES
from kvine.evidence.plan.subject import PlannedLayer, Subject
from kvine.evidence.plan.weights import Weights
from kvine.models.fields import Fields

MXFP4_BITS = 4.25  # 4-bit floats in groups of 32 that share an 8-bit exponent (OCP Microscaling Formats 1.0)
_ELSEWHERE: Mapping[str, str] = {
    "kv_lora_rank": "keeps one compressed latent a token instead of K and V",
    "num_kv_shared_layers": "has layers that keep no K and V of their own",
    "cross_attention_layers": "attends to images too",
    "attention_chunk_size": "attends in chunks, not in a window",
    "layers_block_type": "has layers that are no attention",
    "hybrid_override_pattern": "has layers that are no attention",
    "attn_layer_period": "has layers that are no attention",
    "full_attention_interval": "has layers that are no attention",
    "block_configs": "has layers of different shapes",
    "d_conv": "is a state-space model",
    "is_encoder_decoder": "is no decoder alone",
}


@dataclass(frozen=True)
class _Family:
    """What the parameters of a model type are, beyond projections, two norms a layer, and a gated MLP."""

    norms: int = 2
    head_norms: bool = False  # a norm over each head of q, and one of k
    attention_bias: bool = False
    sink_logits: bool = False  # one learned number for each query head
    experts: str | None = None  # the key that says how many
    expert_size: str = "intermediate_size"
    expert_bias: bool = False
    tied: bool = False  # what tie_word_embeddings means where it is absent
    window: str = "none"  # which layers slide where layer_types is absent: none, all, even


_FAMILIES: Mapping[str, _Family] = {
    "llama": _Family(),
    "mistral": _Family(window="all"),
    "qwen2": _Family(),
    "qwen3": _Family(head_norms=True),
    "mixtral": _Family(experts="num_local_experts", window="all"),
    "qwen3_moe": _Family(head_norms=True, experts="num_experts", expert_size="moe_intermediate_size"),
    "gpt_oss": _Family(
        attention_bias=True, sink_logits=True, experts="num_local_experts", expert_bias=True, window="even"
    ),
    "gemma2": _Family(norms=4, tied=True, window="even"),
    "phi3": _Family(window="all"),
}


def foreign_subject(
    values: Mapping[str, Any],
    file: str,
    *,
    name: str,
    dtype: str,
    reason: str,
    stored_bytes: int | None = None,
    params: int | None = None,
) -> Subject:
    """The subject that a config.json describes.

    Args:
        values: its contents; `file` names it in complaints.
        file: see there.
        name: what the user calls the model.
        dtype: `auto` keeps what the config says, packed experts included.
        reason: why Kvine does not run it.
        stored_bytes: what the checkpoint's tensors take, if its headers or index say so.
        params: how many parameters it has, if the user says so.

    Raises:
        ModelLoadError: naming file and key, for what is missing or cannot be planned.
    """
    fields = Fields(values, file)
    text = fields.nested("text_config")
    fields = text if text is not None else fields
    for key, what in _ELSEWHERE.items():
        if fields.get(key) not in (None, 0, False, []):
            raise fields.error(key, f"says that this model {what}, which Kvine cannot plan")
    kind = fields.text("model_type")
    family = _FAMILIES.get(kind)
    compute = _dtype(fields, dtype)
    heads, hidden = fields.integer("num_attention_heads"), fields.integer("hidden_size")
    if fields.get("head_dim") is None and hidden % heads:
        raise fields.error("num_attention_heads", f"({heads}) does not divide hidden_size ({hidden})")
    kv_heads = fields.integer("num_key_value_heads")
    layers = tuple(map(PlannedLayer, _windows(fields, family)))
    head_dim = fields.integer("head_dim", hidden // heads)
    bits = {"auto": _packed_bits(fields)}.get(dtype) or ITEM_BYTES[compute] * 8

    def count(num_kv_heads: int) -> Weights:
        assert family is not None
        return _count(fields, family, heads, num_kv_heads, head_dim, len(layers), bits, ITEM_BYTES[compute])

    weights = None
    if params is not None:
        weights = Weights(params * ITEM_BYTES[compute], params, f"{params:,} parameters in {compute}")
    elif family is not None:
        weights = count(kv_heads)
    if stored_bytes is not None and dtype == "auto" and params is None:
        weights = _as_stored(weights, stored_bytes)
    return Subject(
        name=name,
        architecture=kind,
        layers=layers,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        dtype=compute,
        weights=weights,
        num_heads=heads,
        max_context=fields.integer("max_position_embeddings"),
        not_run=reason,
        recount=count if family is not None and params is None else None,
    )


def _dtype(fields: Fields, asked: str) -> str:
    """What K, V and unpacked weights are in: 2 bytes where the config does not say, as all large models are stored."""
    if asked != "auto":
        return asked
    named = str(fields.get("torch_dtype") or fields.get("dtype") or "bfloat16")
    known = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
    if named not in known:
        raise fields.error("torch_dtype", f"is {named!r}; known are {', '.join(known)}")
    return known[named]


def _packed_bits(fields: Fields) -> float | None:
    packing = fields.nested("quantization_config")
    return MXFP4_BITS if packing is not None and packing.get("quant_method") == "mxfp4" else None


def _windows(fields: Fields, family: _Family | None) -> list[int | None]:
    number = fields.integer("num_hidden_layers")
    window = None if fields.get("sliding_window") is None else fields.integer("sliding_window")
    named = fields.get("layer_types")
    if named is not None:
        known = ("full_attention", "sliding_attention")
        if not isinstance(named, list) or len(named) != number or any(kind not in known for kind in named):
            raise fields.error("layer_types", f"must name {number} layers, each one of {', '.join(known)}")
        if "sliding_attention" in named and window is None:
            raise fields.error("sliding_window", "is missing, but layer_types names sliding layers")
        return [window if kind == "sliding_attention" else None for kind in named]
    if window is None or fields.get("use_sliding_window") is False:
        return [None] * number
    rule = family.window if family is not None else "none"
    if rule == "none":
        raise fields.error("layer_types", "is missing: with a sliding_window alone it is not known which layers slide")
    return [window if rule == "all" or index % 2 == 0 else None for index in range(number)]


def _count(
    fields: Fields, family: _Family, heads: int, kv_heads: int, head_dim: int, layers: int, bits: float, item: int
) -> Weights:
    """Every parameter of a model of a known family; its experts' matrices take `bits` each, all others `item` bytes."""
    hidden, vocab = fields.integer("hidden_size"), fields.integer("vocab_size")
    q, kv = heads * head_dim, kv_heads * head_dim
    layer = 2 * hidden * q + 2 * hidden * kv + family.norms * hidden
    layer += 2 * head_dim * family.head_norms + heads * family.sink_logits
    if family.attention_bias or (fields.get("model_type") == "qwen2"):
        layer += q + 2 * kv + hidden * family.attention_bias
    num_experts = experts_per_token = 1
    experts = 0
    if family.experts is None:
        layer += 3 * hidden * fields.integer("intermediate_size")
    else:
        size, num_experts = fields.integer(family.expert_size), fields.integer(family.experts)
        experts_per_token = fields.integer("num_experts_per_tok")
        experts = 3 * hidden * size * num_experts * layers
        layer += hidden * num_experts  # the router
        if family.expert_bias:
            layer += num_experts + num_experts * (2 * size + hidden)
    tied = fields.flag("tie_word_embeddings", default=family.tied)
    dense = layer * layers + hidden + vocab * hidden * (1 if tied else 2)
    expert_bytes = int(experts * bits) // 8
    source = f"{dense + experts:,} parameters counted from the config"
    return Weights(
        dense * item + expert_bytes,
        dense + experts,
        source + (f", {experts:,} of them in experts at {bits:g} bits" if experts else ""),
        lookup_bytes=0 if tied else vocab * hidden * item,
        row_bytes=0 if tied else hidden * item,
        expert_bytes=expert_bytes,
        num_experts=num_experts,
        experts_per_token=experts_per_token,
    )


def _as_stored(counted: Weights | None, stored_bytes: int) -> Weights:
    if counted is None:
        return Weights(stored_bytes, None, "what the checkpoint stores", stored_bytes=stored_bytes)
    return Weights(
        stored_bytes,
        counted.parameters,
        "what the checkpoint stores",
        stored_bytes=stored_bytes,
        lookup_bytes=counted.lookup_bytes,
        row_bytes=counted.row_bytes,
        expert_bytes=counted.expert_bytes,
        num_experts=counted.num_experts,
        experts_per_token=counted.experts_per_token,
    )
