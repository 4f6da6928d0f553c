"""`experiment meaning`: the same word in two sentences, and how far its keys and values part from layer to layer.

K and V are what the cache keeps of a word. In layer 0 they are made from the word's token alone and must be equal; from
layer 1 on they are made from what the word has read around it.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvine.engine.build import DTYPE_NAMES
from kvine.engine.runner import Runner
from kvine.errors import ContextLengthError, RequestError
from kvine.llm import LLM
from kvine.models.packing import count_packings
from kvine.rope import rotate
from kvine.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Distance:
    """Between two vectors a and b, all KV heads of a layer side by side.

    Attributes:
        cosine: 1 - cos(a, b): 0 for the same direction, 1 for a right angle, 2 for opposite ones.
        relative: ‖a - b‖ / √((‖a‖² + ‖b‖²) / 2): 0 for equal vectors, √2 for a right angle at equal length, 2 for
            opposite vectors.
    """

    cosine: float
    relative: float


@dataclass(frozen=True)
class LayerDistance:
    """One token's distance in one layer.

    Attributes:
        layer: its number.
        key, value: as they are made, keys before rotation.
        rotated_key: as the cache keeps it, rotated to the token's position; like `key` where both positions are equal.
        others_key, others_value: a scale to read the two by: the median distance between this token and the other
            tokens of the first sentence.
    """

    layer: int
    key: Distance
    value: Distance
    rotated_key: Distance
    others_key: Distance
    others_value: Distance


@dataclass(frozen=True)
class TokenMeaning:
    """One token of the word: its id and text, its position in each sentence, and its distance in each layer."""

    token_id: int
    piece: str
    positions: tuple[int, int]
    layers: tuple[LayerDistance, ...]


@dataclass(frozen=True)
class Meaning:
    """What came of it.

    `tokens` are the word's; only the last of them has read the whole word. `packings` says how many weights were
    packed, by type.
    """

    model: str
    dtype: str
    device: str
    sentences: tuple[str, str]
    word: str
    pieces: tuple[tuple[str, ...], tuple[str, ...]]
    tokens: tuple[TokenMeaning, ...]
    packings: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class _Seen:
    """K, V and rotated K of a sentence: [layers, N, Hkv × D] each, fp32."""

    key: Tensor
    value: Tensor
    rotated: Tensor


def compare_meaning(llm: LLM, sentences: tuple[str, str], word: str) -> Meaning:
    """Reads both sentences through the cache and compares the word's keys and values.

    Args:
        llm: the model.
        sentences: both hold the word; where one holds it more than once, the last counts.
        word: one token or several, the same ones in both sentences.

    Raises:
        RequestError: if a sentence lacks the word, or if the tokenizer cuts it differently in the two.
        ContextLengthError: if a sentence does not fit.
    """
    ids = tuple(llm.encode(sentence) for sentence in sentences)
    spans = tuple(
        _token_span(llm.tokenizer, token_ids, sentence, word)
        for token_ids, sentence in zip(ids, sentences, strict=True)
    )
    cut = [token_ids[span.start : span.stop] for token_ids, span in zip(ids, spans, strict=True)]
    if cut[0] != cut[1]:
        shown = " and ".join(repr(llm.tokenizer.pieces(tokens)) for tokens in cut)
        raise RequestError(
            f"The tokenizer cuts {word!r} into {shown}: choose sentences in which the same token stands, for example "
            "with a space before the word in both."
        )
    one, two = (_read(llm, token_ids) for token_ids in ids)
    tokens = tuple(
        TokenMeaning(token_id, llm.tokenizer.pieces([token_id])[0], (first, second), _layers(one, two, first, second))
        for token_id, first, second in zip(cut[0], *spans, strict=True)
    )
    pieces = tuple(tuple(llm.tokenizer.pieces(token_ids)) for token_ids in ids)
    return Meaning(
        llm.source.name,
        DTYPE_NAMES[llm.model.dtype],
        str(llm.model.device),
        sentences,
        word,
        (pieces[0], pieces[1]),
        tokens,
        count_packings(llm.model.packings),
    )


def _token_span(tokenizer: Tokenizer, token_ids: Sequence[int], sentence: str, word: str) -> range:
    """Positions of the tokens that hold the last occurrence of a word; by bytes, for a token may be half a letter."""
    if not word:
        raise RequestError("The word is empty: give one that both sentences hold.")
    data = b"".join(tokenizer.token_bytes(token) for token in token_ids)
    start = data.rfind(word.encode())
    if start < 0:
        raise RequestError(f"{sentence!r} does not hold {word!r}: give a word that both sentences hold.")
    end = start + len(word.encode())
    at, covering = 0, []
    for position, token in enumerate(token_ids):
        length = len(tokenizer.token_bytes(token))
        if length and at < end and at + length > start:
            covering.append(position)
        at += length
    return range(covering[0], covering[-1] + 1)


def _read(llm: LLM, token_ids: list[int]) -> _Seen:
    """Reads a sentence and keeps what every layer makes of it; as one call, so that no row is missing."""
    most = min(llm.engine_config.max_step_tokens, llm.model.config.max_context)
    if len(token_ids) > most:
        raise ContextLengthError(f"A sentence has {len(token_ids)} tokens, and {most} are read at once: shorten it.")
    runner = llm.parts.runner
    assert isinstance(runner, Runner)
    seen: dict[str, list[Tensor]] = {"k": [], "v": []}

    def observe(name: str, layer: int, tensor: Tensor) -> None:
        if name in seen:
            seen[name].append(tensor.clone())  # [N, Hkv, D]; observed in the order of the layers

    runner.observer = observe
    try:
        _, cache = llm.forward(token_ids, last=True)
        cache.close()
    finally:
        runner.observer = None
    positions = torch.arange(len(token_ids), device=llm.model.device)
    rotated = [
        rotate(k, *place.rope.cos_sin(positions)) for k, place in zip(seen["k"], runner.attention.layers, strict=True)
    ]
    key, value, turned = (torch.stack(x).flatten(2).float().cpu() for x in (seen["k"], seen["v"], rotated))
    return _Seen(key, value, turned)


def _layers(one: _Seen, two: _Seen, first: int, second: int) -> tuple[LayerDistance, ...]:
    """Distances of the token at `first` of one sentence and `second` of the other."""
    others = [position for position in range(one.key.shape[1]) if position != first]
    layers = []
    for layer in range(one.key.shape[0]):
        k, v = one.key[layer], one.value[layer]
        layers.append(
            LayerDistance(
                layer,
                distance(k[first], two.key[layer, second]),
                distance(v[first], two.value[layer, second]),
                distance(one.rotated[layer, first], two.rotated[layer, second]),
                _median([distance(k[first], k[other]) for other in others]),
                _median([distance(v[first], v[other]) for other in others]),
            )
        )
    return tuple(layers)


def distance(a: Tensor, b: Tensor) -> Distance:
    """See `Distance`; of two vectors of one length, in float64."""
    a, b = a.double(), b.double()
    size_a, size_b = float(a.norm()), float(b.norm())
    apart = float((a - b).norm())
    if not apart:
        return Distance(0.0, 0.0)
    # 1 - cos from the difference: near 0 the dot product would leave nothing but rounding.
    cosine = (apart**2 - (size_a - size_b) ** 2) / (2 * size_a * size_b) if size_a and size_b else 1.0
    return Distance(max(0.0, cosine), apart / math.sqrt((size_a**2 + size_b**2) / 2))


def _median(distances: Sequence[Distance]) -> Distance:
    """Of each measure by itself; nothing to compare with is no distance."""
    if not distances:
        return Distance(0.0, 0.0)
    middle = len(distances) // 2
    return Distance(sorted(d.cosine for d in distances)[middle], sorted(d.relative for d in distances)[middle])
