"""The memory of one step beside weights and cache: activations, gathered K and V, logits. An upper bound, by formula.

It follows what `models/decoder.py`, `models/matmul.py`, `attention/sdpa.py` and the sampler hold at once, in bytes.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from kvine.cache.layout import ITEM_BYTES
from kvine.cache.spec import CacheSpec
from kvine.models.config import ModelConfig
from kvine.models.names import required_shapes

# `models/matmul.py` multiplies more rows than this in fp32, converting a weight in pieces of at most so many numbers.
LOW_PRECISION_ROWS = 4
CONVERTED_WEIGHTS = 1 << 23
# A converted piece is there up to three times: itself, what the product packs of it, and one before, freed and kept.
CONVERTED_COPIES = 3
# Pieces that glibc keeps when they are freed (up to 64 MiB: twice its largest mmap threshold), scratch of torch's
# kernels, and what loading leaves behind. Measured; it does not grow with the model.
FIXED = 96 << 20


@dataclass(frozen=True)
class Workspace:
    """A step's memory at its three heaviest moments, which do not coincide.

    Attributes:
        attention: hidden states, q, k, v, their rotation, and one request's K and V gathered for one layer.
        mlp: hidden states, gate and up, and what a CPU without bf16 instructions converts to fp32.
        logits: of the sampled rows, fp32.
    """

    attention: int
    mlp: int
    logits: int

    @property
    def nbytes(self) -> int:
        """The heaviest of the three, and a fixed part."""
        return max(self.attention, self.mlp, self.logits) + FIXED


def workspace(
    model: ModelConfig,
    specs: tuple[CacheSpec, ...],
    *,
    dtype: str,
    on_cpu: bool,
    packings: Mapping[str, str],
    context: int,
    batch: int,
    max_step_tokens: int,
) -> Workspace:
    """What a step takes at most.

    Args:
        model: the model.
        specs: of its cache.
        dtype: compute dtype; e below is its size.
        on_cpu: a CPU may have to convert bf16 and fp16 to fp32.
        packings: type of each packed weight, by role.
        context: tokens of each request.
        batch: requests.
        max_step_tokens: tokens that a step computes at most.

    With N rows a step, M = batch sampled rows, hidden size d, q = Hq·D, kv = Hkv·D, intermediate size f, vocabulary V
    and L gathered tokens (whole blocks of the widest group):

    * attention: e·N·(2d + q + 2kv) + max(16·N·q + e·N·q, 2e·N·q + L·2kv·(stored, and e where that differs))
    * mlp: e·N·(3d + 3f) + conversion of N rows and one weight: 4·N·(d + 2f) + 3 · 4·min(2²³, d·f)
    * logits: e·N·d + M·V·(4 + e), twice 4·M·V more with a soft cap, and conversion: 8·M·V + 3 · 4·min(2²³, d·V)

    Packed weights are not converted. What they are multiplied with is rounded to 8 bits, with a scale and a sum for
    each 32; room for that is kept from call to call, 1.25·N·max(d, q, f), and copied when it grows.
    """
    e = ITEM_BYTES[dtype]
    rows = min(max_step_tokens, context * batch)
    d, f = model.hidden_size, model.intermediate_size
    q, kv = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    gathered = max(_gathered_bytes(spec, context, min(rows, context), dtype) for spec in specs)
    attention = e * rows * (2 * d + q + 2 * kv) + max((16 + e) * rows * q, 2 * e * rows * q + gathered)
    mlp = e * rows * (3 * d + 3 * f)
    logits = e * rows * d + batch * model.vocab_size * (4 + e + (8 if model.logit_softcap else 0))
    if packings:
        rounded = 5 * rows * max(d, q, f) // 4
        attention, mlp, logits = attention + rounded, mlp + rounded + 5 * rows * d // 4, logits + rounded
    if on_cpu and dtype != "fp32":
        if rows > LOW_PRECISION_ROWS and _has_exact(model, packings, "layers."):
            mlp += 4 * rows * (d + 2 * f) + _converted(d * f)
        head = "embedding." if model.tie_embeddings else "head."
        if batch > LOW_PRECISION_ROWS and _has_exact(model, packings, head):
            logits += 8 * batch * model.vocab_size + _converted(d * model.vocab_size)
    return Workspace(attention, mlp, logits)


def _has_exact(model: ModelConfig, packings: Mapping[str, str], prefix: str) -> bool:
    """Whether a matrix is not packed, of those whose roles begin so."""
    shapes = required_shapes(model).items()
    return any(role.startswith(prefix) and len(shape) == 2 and role not in packings for role, shape in shapes)


def _converted(weights: int) -> int:
    return CONVERTED_COPIES * 4 * min(CONVERTED_WEIGHTS, weights)


def _gathered_bytes(spec: CacheSpec, context: int, chunk: int, dtype: str) -> int:
    """K and V of one request in one layer, as stored and, if that differs, in the compute dtype."""
    tokens = spec.max_live_blocks(context, chunk) * spec.block_size
    stored = spec.bytes_per_block(dtype) // (spec.num_layers * spec.block_size)
    both = 2 * spec.num_kv_heads * spec.head_dim * ITEM_BYTES[dtype]
    return tokens * (stored + (both if stored != both else 0))
