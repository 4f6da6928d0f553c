"""`experiment bits`: what fewer bits do to a model's own keys and values, grouped by channel and by token.

KIVI's comparison (arXiv:2402.02750): outliers of keys sit in a few channels, so that keys by token spoil attention;
a query mixes the values of few tokens, so that values by channel spoil what it brings. Keys and values are quantized as
the cache packs them, and read as it reads them: a query's own block is exact, and so is one that is not full.
"""

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from statistics import fmean
from typing import Literal

import torch
from torch import Tensor

from kvine.cache.codec import pack, unpack
from kvine.cache.layout import PackedLayout, Part
from kvine.config import CacheConfig, EngineConfig
from kvine.engine.build import DTYPE_NAMES, standard_parts
from kvine.engine.runner import Runner
from kvine.engine.stepped import SteppedCache
from kvine.errors import ContextLengthError, RequestError
from kvine.evidence.progress import Progress, silent
from kvine.evidence.quality.texts import beginning
from kvine.llm import LLM
from kvine.models.packing import count_packings
from kvine.rope import rotate

PARTS: tuple[Part, ...] = ("key", "value")
GROUPINGS: "tuple[Grouping, ...]" = ("channel", "token")
WIDTHS = (8, 4, 2)
PAIRS = 1 << 22  # scores held at once, over all heads
NAMES = ("scores", "weights", "outputs")

Grouping = Literal["channel", "token"]


@dataclass(frozen=True)
class Errors:
    """Relative errors ‖exact − kept‖ / ‖exact‖ (Frobenius), means over heads.

    Attributes:
        numbers: of the keys or values that are kept in fewer bits.
        scores: of the queries' scores before softmax, over what each query sees; None for values.
        weights: of the attention weights; None for values.
        outputs: of what attention brings, before it is projected.
    """

    numbers: float
    scores: float | None
    weights: float | None
    outputs: float


@dataclass(frozen=True)
class Quantized:
    """Keys or values in so many bits, grouped one way: means over layers, and each layer's. The rest is exact."""

    part: Part
    grouping: Grouping
    bits: int
    errors: Errors
    layers: tuple[Errors, ...]


@dataclass(frozen=True)
class Causes:
    """What makes one grouping better: means over heads.

    Attributes:
        key_outlier: mean size of the numbers of the largest channel of the keys, over that of the median channel.
        value_outlier: the same of the values.
        first_weight: attention weight that the first token has from queries of other blocks.
        first_value: length of the first token's values, over that of the median token.
    """

    key_outlier: float
    value_outlier: float
    first_weight: float
    first_value: float


@dataclass(frozen=True)
class Bits:
    """What came of it; `causes` are means over layers. `packings` says how many weights were packed, by type."""

    model: str
    dtype: str
    device: str
    tokens: int
    block_size: int
    rows: tuple[Quantized, ...]
    causes: Causes
    packings: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Attended:
    """What one layer's attention is made of, over one text.

    Attributes:
        queries: [Hq, N, D], rotated and scaled.
        keys: [Hkv, N, D], rotated.
        values: [Hkv, N, D].
        seen: [N, N], true where a query (row) sees a key.
        softcap: of the scores, if the model has one.
    """

    queries: Tensor
    keys: Tensor
    values: Tensor
    seen: Tensor
    softcap: float | None = None


def check_bits(tokens: int, block_size: int, widths: Sequence[int]) -> None:
    """Says what can be said before a model is loaded. Raises RequestError, naming the command's option."""
    if block_size < 1 or block_size % 4:
        raise RequestError(f"--block-size is {block_size}: give a multiple of 4, whose 2-bit keys fill bytes.")
    if tokens < 2 * block_size:
        raise RequestError(f"--tokens is {tokens:,}: give {2 * block_size} or more, two blocks of {block_size}.")
    if not widths or any(bits not in WIDTHS for bits in widths):
        raise RequestError(f"--bits takes {', '.join(map(str, WIDTHS))}, with commas between.")


def run_bits(
    llm: LLM,
    ids: Sequence[int],
    *,
    widths: Sequence[int] = WIDTHS,
    block_size: int = CacheConfig.block_size,
    progress: Progress = silent,
) -> Bits:
    """Reads a text in one model call, and quantizes each layer's keys and values as it comes by.

    Args:
        llm: the model; how its own cache is kept does not matter here.
        ids: of the text, without what the model's texts begin with.
        widths: bits of a number, of 8, 4 and 2.
        block_size: tokens of a block.
        progress: told of every layer.

    Raises:
        RequestError: for a number out of range.
        ContextLengthError: if the text does not fit the model's context.
    """
    text = [*beginning(llm.tokenizer), *ids]
    check_bits(len(text), block_size, widths)
    if len(text) > llm.model.config.max_context:
        raise ContextLengthError(
            f"{len(text):,} tokens do not fit the model's context of {llm.model.config.max_context:,}: lower --tokens."
        )
    if llm.model.config.head_dim % 4:
        raise RequestError(f"Heads of this model have {llm.model.config.head_dim} channels, which 2 bits cannot pack.")
    layouts = [
        PackedLayout(part, bits, grouping == "channel", block_size, llm.model.config.head_dim)
        for part in PARTS
        for bits in widths
        for grouping in GROUPINGS
    ]
    by_layer, causes = _read(llm, text, layouts, progress)  # of each layer, the errors of each layout
    rows = []
    for number, layout in enumerate(layouts):
        layers = tuple(errors[number] for errors in by_layer)
        grouping: Grouping = "channel" if layout.by_channel else "token"
        rows.append(Quantized(layout.part, grouping, layout.bits, _mean(layers), layers))
    return Bits(
        llm.source.name,
        DTYPE_NAMES[llm.model.dtype],
        str(llm.model.device),
        len(text),
        block_size,
        tuple(rows),
        Causes(*(fmean(values) for values in zip(*map(astuple, causes), strict=True))),
        count_packings(llm.model.packings),
    )


@torch.inference_mode()
def _read(
    llm: LLM, text: Sequence[int], layouts: Sequence[PackedLayout], progress: Progress
) -> tuple[list[list[Errors]], list[Causes]]:
    engine = EngineConfig(max_step_tokens=len(text))
    parts = standard_parts(
        llm.model,
        CacheConfig(prefix_caching=False),
        replace(engine, backend=llm.engine_config.backend),
        vocab_size=llm.tokenizer.vocab_size,
        eos_ids=(),
    )
    runner = parts.runner
    assert isinstance(runner, Runner)
    attention = runner.attention
    positions = torch.arange(len(text), device=llm.model.device)
    found: list[list[Errors]] = []
    causes: list[Causes] = []
    seen: dict[str, Tensor] = {}

    def observe(name: str, layer: int, tensor: Tensor) -> None:
        if name in ("q", "k", "v"):
            seen[name] = tensor
        if name != "v":
            return
        place = attention.layers[layer]
        rotation = place.rope.cos_sin(positions)
        q, k = (rotate(seen[part], *rotation).float().transpose(0, 1) for part in ("q", "k"))  # [H, N, D]
        visible = attention.pools[place.group].spec.visible(positions[:, None], positions)
        one = Attended(q * attention.scale, k, tensor.float().transpose(0, 1), visible, attention.softcap)
        found.append(layer_errors(one, layouts))
        causes.append(layer_causes(one, layouts[0].block_size))
        progress("layers", len(found), len(attention.layers))

    runner.observer = observe
    cache = SteppedCache(runner, engine, parts.max_context)
    try:
        cache.extend(text, last=True)
    finally:
        runner.observer = None
        cache.close()
    return found, causes


def layer_causes(one: Attended, block_size: int) -> Causes:
    """What is large in one layer's keys and values, and what the first token is to later blocks."""
    num_kv_heads, _, width = one.keys.shape
    later = one.queries[:, block_size:].reshape(num_kv_heads, -1, width)  # [Hkv, g × n, D]
    seen = one.seen[block_size:].repeat(one.queries.shape[0] // num_kv_heads, 1)
    first = 0.0
    for start in range(0, later.shape[1], step := max(1, PAIRS // (num_kv_heads * one.keys.shape[1]))):
        rows = slice(start, start + step)
        _, weights = _weights(later[:, rows] @ one.keys.transpose(-1, -2), seen[rows], one.softcap)
        first += float(weights[..., 0].sum())

    def outlier(numbers: Tensor) -> float:
        sizes = numbers.abs().mean(1)  # [Hkv, D]
        return float((sizes.amax(-1) / sizes.median(-1).values).mean())

    lengths = one.values.norm(dim=-1)  # [Hkv, N]
    return Causes(
        outlier(one.keys),
        outlier(one.values),
        first / (num_kv_heads * later.shape[1]),
        float((lengths[:, 0] / lengths.median(-1).values).mean()),
    )


def layer_errors(one: Attended, layouts: Sequence[PackedLayout]) -> list[Errors]:
    """The errors of each layout in one layer: of the keys or values that it is for, all else exact.

    A query reads its own block exactly, and earlier ones as they are kept.
    """
    num_kv_heads, n, width = one.keys.shape
    queries = one.queries.view(num_kv_heads, -1, n, width)  # [Hkv, g, N, D]
    kept = [_kept(one.keys if layout.part == "key" else one.values, layout) for layout in layouts]
    sums = {name: torch.zeros(len(layouts) + 1, num_kv_heads, queries.shape[1], dtype=torch.float64) for name in NAMES}
    step = max(1, PAIRS // (one.queries.shape[0] * n))
    positions = torch.arange(n, device=one.keys.device)
    for start in range(0, n, step):
        rows = slice(start, start + step)
        mine, visible = queries[:, :, rows], one.seen[rows]
        raw = mine @ one.keys[:, None].transpose(-1, -2)  # [Hkv, g, n, N]
        scores, weights = _weights(raw, visible, one.softcap)
        exact = {"scores": scores, "weights": weights, "outputs": weights @ one.values[:, None]}
        for name, tensor in exact.items():
            sums[name][-1] += _squares(tensor)
        for number, (layout, lossy) in enumerate(zip(layouts, kept, strict=True)):
            own = positions[rows, None] // layout.block_size == positions // layout.block_size
            if layout.part == "value":
                brought = (weights * own) @ one.values[:, None] + (weights * ~own) @ lossy[:, None]
                read = {"outputs": brought}
            else:
                mixed = torch.where(own, raw, mine @ lossy[:, None].transpose(-1, -2))
                lossy_scores, lossy_weights = _weights(mixed, visible, one.softcap)
                brought = lossy_weights @ one.values[:, None]
                read = {"scores": lossy_scores, "weights": lossy_weights, "outputs": brought}
            for name, tensor in read.items():
                sums[name][number] += _squares(tensor - exact[name])
    relative = {name: _share(total[:-1], total[-1]).mean((1, 2)).tolist() for name, total in sums.items()}
    return [
        Errors(
            _relative(one.keys if layout.part == "key" else one.values, lossy, layout),
            relative["scores"][number] if layout.part == "key" else None,
            relative["weights"][number] if layout.part == "key" else None,
            relative["outputs"][number],
        )
        for number, (layout, lossy) in enumerate(zip(layouts, kept, strict=True))
    ]


def _weights(raw: Tensor, visible: Tensor, softcap: float | None) -> tuple[Tensor, Tensor]:
    """Scores, 0 where nothing is seen, and weights, of products of queries and keys [Hkv, g, n, N]."""
    scores = raw if softcap is None else softcap * torch.tanh(raw / softcap)
    return scores * visible, scores.masked_fill(~visible, -torch.inf).softmax(-1)


def _kept(numbers: Tensor, layout: PackedLayout) -> Tensor:
    """[Hkv, N, D] as the codec keeps their full blocks; the tokens of one that is not full are exact."""
    heads, n, width = numbers.shape
    full = n // layout.block_size * layout.block_size
    blocks = numbers[:, :full].reshape(heads, -1, layout.block_size, width)
    return torch.cat((unpack(pack(blocks, layout), layout).reshape(heads, full, width), numbers[:, full:]), 1)


def _relative(exact: Tensor, lossy: Tensor, layout: PackedLayout) -> float:
    """Of the tokens in full blocks, mean over heads."""
    full = exact.shape[1] // layout.block_size * layout.block_size
    lost, whole = (x[:, :full].double().square().sum((1, 2)) for x in (lossy - exact, exact))
    return float(_share(lost, whole).mean())


def _share(lost: Tensor, whole: Tensor) -> Tensor:
    """Of squares, the root; 0 where there is nothing to lose."""
    return (lost / whole.clamp(min=torch.finfo(torch.float64).tiny)).sqrt()


def _squares(tensor: Tensor) -> Tensor:
    """[Hkv, g, n, …] → [Hkv, g]."""
    return tensor.square().sum((-1, -2), dtype=torch.float64).cpu()


def _mean(layers: Sequence[Errors]) -> Errors:
    def of(values: Sequence[float | None]) -> float | None:
        numbers = [value for value in values if value is not None]
        return fmean(numbers) if numbers else None

    return Errors(
        fmean(layer.numbers for layer in layers),
        of([layer.scores for layer in layers]),
        of([layer.weights for layer in layers]),
        fmean(layer.outputs for layer in layers),
    )
