"""What an explanation consists of: plain numbers, one shape of JSON for the command line, notebooks and pages."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import Tensor

from kvine.errors import RequestError
from kvine.spans import Spans

NOT_CACHED = {
    "queries": "The query of a position is used once, by that position itself; every later token asks with a query "
    "of its own and looks only at the keys and values of those before it. Nobody would read it again.",
    "attention weights": "They belong to one query. The next token's query weighs the same keys anew.",
    "hidden states": "A later token meets an earlier one only through its keys and values, which are kept.",
}


@dataclass(frozen=True)
class Token:
    """A token of the text. `text` is what it adds, bytes that are no character as <0xE2>; `special` marks controls."""

    position: int
    token_id: int
    text: str
    special: bool


@dataclass(frozen=True)
class LayerGroup:
    """Layers that cache alike, and what they held for the text of the prompt.

    Attributes:
        layers: their numbers.
        query_heads, kv_heads, head_dim: `query_heads / kv_heads` query heads read the same K and V.
        window, sink_tokens, kept: what a query sees: its last tokens, the first, and runs of others that are kept in
            sight; a window of None is everything before it.
        k_shape, v_shape: of one layer, [1, kv_heads, length, head_dim].
        stored_as: dtype of K and V, or the codecs that pack full blocks.
        num_bytes: of K and V over all layers of the group.
    """

    layers: tuple[int, ...]
    query_heads: int
    kv_heads: int
    head_dim: int
    window: int | None
    sink_tokens: int
    kept: Spans
    k_shape: tuple[int, ...]
    v_shape: tuple[int, ...]
    stored_as: str
    num_bytes: int


@dataclass(frozen=True)
class Candidate:
    """A possible next token, with the softmax of all logits of ids that the tokenizer knows."""

    token_id: int
    text: str
    logit: float
    probability: float


@dataclass(frozen=True)
class Attention:
    """Where a query looks.

    Attributes:
        position: the query's.
        layer, head: whose it is; None is the mean over all.
        kv_head: whose K and V this head reads; None for a mean.
        weights: one for each position up to the query's; they add up to 1.
        visible: whether a window or its sinks let the query see the position (in any layer, for a mean).
    """

    position: int
    layer: int | None
    head: int | None
    kv_head: int | None
    weights: tuple[float, ...]
    visible: tuple[bool, ...]


@dataclass(frozen=True)
class Amount:
    """Numbers of a tensor over all layers: how many, their bytes, and the floating-point operations to make them."""

    numbers: int
    num_bytes: int
    flops: int


@dataclass(frozen=True)
class Work:
    """What one model call computes, over all layers.

    Attributes:
        tokens: rows that go through the layers.
        q, k, v: the projections, in the compute dtype.
        scores: dot products of queries with the keys that they see, over all query heads.
        attention_flops: of the scores, and of adding the values up by them.
        other_flops: of the output projections and feed-forward layers.
        flops: of all these; embedding, norms, rotation and the logits of one row are left out.
    """

    tokens: int
    q: Amount
    k: Amount
    v: Amount
    scores: int
    attention_flops: int
    other_flops: int
    flops: int


@dataclass(frozen=True)
class Read:
    """What attention reads from the cache in one model call, over all layers: as many numbers of V as of K."""

    numbers: int
    k_bytes: int
    v_bytes: int


@dataclass(frozen=True)
class DecodeStep:
    """One token through the cache.

    Attributes:
        token: what was fed.
        computed: what this took.
        read: K and V of everything that the token sees, its own included: written first, then read.
        cache_free: what the same step takes where all tokens are computed anew.
        next: the most likely next token.
    """

    token: Token
    computed: Work
    read: Read
    cache_free: Work
    next: Candidate


@dataclass(frozen=True, eq=False, repr=False)
class Explanation:
    """A prompt and the decode steps after it. Shown as tables in a notebook, as text by `print`.

    Attributes:
        model, dtype, device: what ran.
        tokens: of the prompt.
        groups: what the cache held for the prompt, by group of layers.
        block_bytes: the same in whole blocks, the unit in which memory is taken.
        weights: [layers, query_heads, positions] fp32, attention of the prompt's last position.
        visible: [layers, positions], what that position may see.
        layer, head: the view that is shown; None: the mean.
        candidates: the most likely tokens after the prompt.
        steps: greedy decode steps.
        ended: whether the text ended before all steps were taken.
        packings: how many weights were packed, by type.
    """

    model: str
    dtype: str
    device: str
    tokens: tuple[Token, ...]
    groups: tuple[LayerGroup, ...]
    block_bytes: int
    weights: Tensor
    visible: Tensor
    layer: int | None
    head: int | None
    candidates: tuple[Candidate, ...]
    steps: tuple[DecodeStep, ...]
    ended: bool
    packings: Mapping[str, int] = field(default_factory=dict)

    def attention(self, layer: int | None = None, head: int | None = None) -> Attention:
        """The last position's weights in one layer and head, or their mean over all layers, all heads, or both.

        Raises:
            RequestError: if the model has no such layer or head.
        """
        num_layers, num_heads, length = self.weights.shape
        check_view(layer, head, num_layers, num_heads)
        layers = slice(None) if layer is None else slice(layer, layer + 1)
        heads = slice(None) if head is None else slice(head, head + 1)
        weights = self.weights[layers, heads].double().mean((0, 1))
        shared = num_heads // self.groups[0].kv_heads
        return Attention(
            position=length - 1,
            layer=layer,
            head=head,
            kv_head=None if head is None else head // shared,
            weights=tuple(weights.tolist()),
            visible=tuple(self.visible[layers].any(0).tolist()),
        )

    def to_json(self) -> dict[str, Any]:
        """Everything but the weights of the views that are not shown, as JSON has it."""
        return {
            "model": self.model,
            "dtype": self.dtype,
            "packings": self.packings,
            "device": self.device,
            "tokens": [asdict(token) for token in self.tokens],
            "groups": [asdict(group) for group in self.groups],
            "block_bytes": self.block_bytes,
            "attention": asdict(self.attention(self.layer, self.head)),
            "candidates": [asdict(candidate) for candidate in self.candidates],
            "steps": [asdict(step) for step in self.steps],
            "ended": self.ended,
            "not_cached": NOT_CACHED,
        }

    def __repr__(self) -> str:
        return f"Explanation({self.model}: {len(self.tokens)} tokens of prompt, {len(self.steps)} decode steps)"

    def __str__(self) -> str:
        from kvine.explain.text import as_text

        return as_text(self)

    def _repr_html_(self) -> str:
        from kvine.explain.html import as_html

        return as_html(self)


def check_view(layer: int | None, head: int | None, num_layers: int, num_heads: int) -> None:
    """Refuses a layer or head that the model does not have, with RequestError."""
    for what, number, count in (("layer", layer, num_layers), ("query head", head, num_heads)):
        if number is not None and (isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < count):
            raise RequestError(f"The model has {what}s 0 to {count - 1}, and no {what} {number}.")
