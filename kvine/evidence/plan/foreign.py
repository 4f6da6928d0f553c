"""Models that Kvine does not run, read from their config.json far enough to plan them.

Only what is written there is believed: a key that is missing, or one that says that K and V are kept in another way
than by token, KV head and layer, is refused with its name.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from kvine.cache.layout import ITEM_BYTES
from kvine.evidence.plan.packing import Packing, packing_of
from kvine.evidence.plan.subject import PlannedLayer, Subject
from kvine.evidence.plan.weights import Weights
from kvine.models.config import MOST_LAYERS
from kvine.models.fields import Fields

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
    fields = _text_fields(Fields(values, file))
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
    if heads % kv_heads:
        raise fields.error("num_key_value_heads", f"({kv_heads}) does not divide num_attention_heads ({heads})")
    layers = tuple(map(PlannedLayer, _windows(fields, family)))
    head_dim = fields.integer("head_dim", hidden // heads)
    packing = packing_of(fields) if dtype == "auto" else None
    stored_bytes = stored_bytes if dtype == "auto" and params is None else None
    count = None
    if family is not None and params is None:
        count = partial(_count, fields, family, packing, ITEM_BYTES[compute], heads, head_dim, len(layers))
    weights = _by_number(params, packing, compute) if params is not None else count(kv_heads) if count else None
    notes: tuple[str, ...] = ()
    if stored_bytes is not None:
        weights = _as_stored(weights, stored_bytes)
    elif packing is not None and weights is not None:
        notes = packing.assumptions(compute, of_all=params is not None)
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
        notes=notes,
        recount=None if count is None else partial(_recount, count, kv_heads, stored_bytes),
    )


def _text_fields(fields: Fields) -> Fields:
    """The part that describes the decoder, with what may stand outside of it and is not said inside."""
    text = fields.nested("text_config")
    if text is None:
        return fields
    values = dict(text.values)
    for same in (("quantization_config",), ("torch_dtype", "dtype"), ("tie_word_embeddings",)):
        if all(values.get(key) is None for key in same):
            values |= {key: fields.get(key) for key in same}
    return Fields(values, text.file, text.prefix)


def _dtype(fields: Fields, asked: str) -> str:
    """What K, V and unpacked weights are in: 2 bytes where the config does not say, as all large models are stored."""
    if asked != "auto":
        return asked
    named = str(fields.get("torch_dtype") or fields.get("dtype") or "bfloat16")
    known = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
    if named not in known:
        raise fields.error("torch_dtype", f"is {named!r}; known are {', '.join(known)}")
    return known[named]


def _windows(fields: Fields, family: _Family | None) -> list[int | None]:
    number = fields.integer("num_hidden_layers", maximum=MOST_LAYERS)
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
    fields: Fields,
    family: _Family,
    packing: Packing | None,
    item: int,
    heads: int,
    head_dim: int,
    layers: int,
    kv_heads: int,
) -> Weights:
    """Every parameter of a model of a known family; those that are not packed take `item` bytes each."""
    hidden, vocab = fields.integer("hidden_size"), fields.integer("vocab_size")
    q, kv = heads * head_dim, kv_heads * head_dim
    matrices = 2 * hidden * q + 2 * hidden * kv
    layer = family.norms * hidden
    layer += 2 * head_dim * family.head_norms + heads * family.sink_logits
    if family.attention_bias or (fields.get("model_type") == "qwen2"):
        layer += q + 2 * kv + hidden * family.attention_bias
    num_experts = experts_per_token = 1
    experts = 0
    if family.experts is None:
        matrices += 3 * hidden * fields.integer("intermediate_size")
    else:
        size, num_experts = fields.integer(family.expert_size), fields.integer(family.experts)
        experts_per_token = fields.integer("num_experts_per_tok")
        if experts_per_token > num_experts:
            raise fields.error("num_experts_per_tok", f"is {experts_per_token}, of {num_experts} experts")
        experts = 3 * hidden * size * num_experts * layers
        layer += hidden * num_experts  # the router
        if family.expert_bias:
            layer += num_experts + num_experts * (2 * size + hidden)
    tied = fields.flag("tie_word_embeddings", default=family.tied)
    matrices *= layers
    dense = layer * layers + hidden + vocab * hidden * (1 if tied else 2)
    full = 8 * item
    expert_bits = full if packing is None or packing.bits is None else packing.bits
    matrix_bits = full if packing is None or packing.experts_only else expert_bits
    expert_bytes = int(experts * expert_bits) // 8
    source = f"{dense + matrices + experts:,} parameters counted from the config"
    if matrix_bits != full:
        source += f", {matrices + experts:,} of them at {matrix_bits:g} bits"
    elif experts:
        source += f", {experts:,} of them in experts at {expert_bits:g} bits"
    return Weights(
        dense * item + int(matrices * matrix_bits) // 8 + expert_bytes,
        dense + matrices + experts,
        source,
        lookup_bytes=0 if tied else vocab * hidden * item,
        row_bytes=0 if tied else hidden * item,
        expert_bytes=expert_bytes,
        num_experts=num_experts,
        experts_per_token=experts_per_token,
    )


def _by_number(params: int, packing: Packing | None, dtype: str) -> Weights:
    if packing is None or packing.bits is None:
        return Weights(params * ITEM_BYTES[dtype], params, f"{params:,} parameters in {dtype}")
    return Weights(max(1, int(params * packing.bits) // 8), params, f"{params:,} parameters in {packing.bits:g} bits")


def _as_stored(counted: Weights | None, stored_bytes: int) -> Weights:
    source = "what the checkpoint stores"
    if counted is None:
        return Weights(stored_bytes, None, source, stored_bytes=stored_bytes)
    return replace(counted.scaled(stored_bytes, source), stored_bytes=stored_bytes)


def _recount(count: Callable[[int], Weights], own: int, stored_bytes: int | None, num_kv_heads: int) -> Weights:
    """The weights with another number of KV heads; where all are known by what is stored, in the same proportion."""
    counted = count(num_kv_heads)
    if stored_bytes is None:
        return counted
    return counted.scaled(max(1, stored_bytes * counted.nbytes // count(own).nbytes), counted.source)
