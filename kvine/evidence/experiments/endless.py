"""`experiment endless`: one request that writes far past the window, and past the model's context, and what it holds.

A window with sinks inside the cache (StreamingLLM, arXiv:2309.17453) writes beside one without sinks, with the same
noise. Parts of both texts are then read by the model itself, exactly and each from an empty cache: how likely it finds
what was written there (perplexity), and how much of it has been written before.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean

import torch

from kvine.config import CacheConfig
from kvine.engine.build import DTYPE_NAMES, build_engine, standard_parts
from kvine.engine.engine import ModelCall
from kvine.errors import RequestError
from kvine.evidence.progress import Progress, silent
from kvine.evidence.quality.reader import CHUNK, Reader
from kvine.evidence.quality.scores import losses
from kvine.evidence.quality.texts import beginning
from kvine.llm import LLM
from kvine.models.cache_specs import cache_specs
from kvine.models.packing import count_packings
from kvine.sampling.params import SamplingParams

PROMPT = "Once upon a time, in a small village by the sea, there lived"
PIECE = 512  # tokens that are judged at a place
PLACES = 12
TEMPERATURE, TOP_P = 1.0, 0.9  # keeps no text from circles for ever: see `Piece.repeated`
CIRCLES = 0.5  # share repeated from which a part's perplexity says nothing of how well it reads
GRAM = 4  # tokens in a row that count as said before
TOLD = 64  # tokens between two words of progress


@dataclass(frozen=True)
class Piece:
    """Part of what was written.

    Attributes:
        start: its first token, counted from the first one written.
        perplexity: of its tokens by the exact cache, from an empty one.
        repeated: share of its runs of 4 tokens that it held before; near 1 it goes round in circles, which a low
            perplexity alone would not tell.
        held: the most bytes of K and V held while this part and all up to the next was written.
    """

    start: int
    perplexity: float
    repeated: float
    held: int


@dataclass(frozen=True)
class Written:
    """What one way of keeping the past has written.

    Attributes:
        name: of the way.
        pieces: in their order.
        planned: bytes of K and V that it can hold at most, however long it goes on, by the planner's formula.
        ids: the tokens.
        text: the last words, for people.
    """

    name: str
    pieces: tuple[Piece, ...]
    planned: int
    ids: tuple[int, ...]
    text: str

    @property
    def perplexity(self) -> float:
        """Of all pieces but the first, which the window may hold in whole: their geometric mean."""
        return math.exp(fmean(math.log(piece.perplexity) for piece in self.pieces[1:]))

    @property
    def circles(self) -> int | None:
        """The start of the first piece that goes round in circles; None if none does."""
        return next((piece.start for piece in self.pieces if piece.repeated > CIRCLES), None)


@dataclass(frozen=True)
class Endless:
    """What came of it. `packings` says how many weights were packed, by type."""

    model: str
    dtype: str
    device: str
    context: int
    tokens: int
    window: int
    sinks: int
    piece_tokens: int
    seed: int
    written: tuple[Written, ...]
    packings: Mapping[str, int] = field(default_factory=dict)


def check_endless(tokens: int, window: int, sinks: int, places: int, piece: int = PIECE) -> None:
    """Says what can be said before a model is loaded. Raises RequestError, naming the command's option."""
    if window < 2:
        raise RequestError(f"--window is {window:,}: give 2 or more.")
    if sinks < 1:
        raise RequestError(f"--sinks is {sinks:,}: give 1 or more, a window without any is written by beside them.")
    if places < 2:
        raise RequestError(f"--places is {places:,}: give 2 or more, the beginning and the end.")
    if piece < 2 * GRAM:
        raise RequestError(f"--piece is {piece:,}: give {2 * GRAM} or more.")
    if tokens < places * piece:
        raise RequestError(
            f"{tokens:,} tokens have no room for {places:,} parts of {piece:,}: raise --tokens, or lower --places."
        )


def run_endless(
    llm: LLM,
    *,
    tokens: int = 50_000,
    window: int = 512,
    sinks: int = 4,
    places: int = PLACES,
    piece: int = PIECE,
    prompt: str = PROMPT,
    seed: int = 0,
    progress: Progress = silent,
) -> Endless:
    """Writes a text by a window with sinks and by one without, and judges parts of both.

    Args:
        llm: the model; how its own cache is kept does not matter here.
        tokens: to write, whatever ends a text; the model's context is no limit.
        window: tokens that a query sees, beside the sinks; without sinks it sees as many more.
        sinks: first tokens that stay visible.
        places: parts that are judged, evenly from the first token to the last.
        piece: tokens of each.
        prompt: what the text begins with.
        seed: of the noise, the same for both.
        progress: told now and then.

    Raises:
        RequestError: for a number out of range, or a part that the model cannot read in one go.
    """
    check_endless(tokens, window, sinks, places, piece)
    params = SamplingParams(max_tokens=tokens, temperature=TEMPERATURE, top_p=TOP_P, seed=seed, ignore_eos=True)
    if piece > llm.model.config.max_context - 1:
        raise RequestError(
            f"A part of {piece:,} tokens does not fit the model's context of {llm.model.config.max_context:,}, in "
            "which it is judged: lower --piece."
        )
    ways = {
        f"window={window},sinks={sinks},sink-rule=in_cache": CacheConfig(
            window=window, sink_tokens=sinks, sink_rule="in_cache"
        ),
        f"window={window + sinks}": CacheConfig(window=window + sinks),
    }
    starts = [(tokens - piece) * place // (places - 1) for place in range(places)]
    written = []
    for name, cache in ways.items():
        planned = _most_bytes(llm, cache, len(llm.encode(prompt)) + tokens)
        ids, held = _write(llm, cache, planned, llm.encode(prompt), params, name, progress)
        pieces = tuple(
            Piece(
                start,
                _perplexity(llm, ids[start : start + piece]),
                _repeated(ids[start : start + piece]),
                max(held[start:end]),
            )
            for start, end in zip(starts, [*starts[1:], tokens], strict=True)
        )
        written.append(Written(name, pieces, planned, tuple(ids), llm.tokenizer.decode(ids[-64:])))
    return Endless(
        llm.source.name,
        DTYPE_NAMES[llm.model.dtype],
        str(llm.model.device),
        llm.model.config.max_context,
        tokens,
        window,
        sinks,
        piece,
        seed,
        tuple(written),
        count_packings(llm.model.packings),
    )


def _most_bytes(llm: LLM, cache: CacheConfig, length: int) -> int:
    """Bytes of K and V that one text of that length holds at most, read in chunks and written token by token."""
    dtype = DTYPE_NAMES[llm.model.dtype]
    specs = cache_specs(llm.model.config, cache)
    return sum(spec.max_live_blocks(length, CHUNK) * spec.bytes_per_block(dtype) for spec in specs)


def _write(
    llm: LLM,
    cache: CacheConfig,
    budget: int,
    prompt_ids: Sequence[int],
    params: SamplingParams,
    name: str,
    progress: Progress,
) -> tuple[list[int], list[int]]:
    """The tokens that one request writes, and bytes of K and V held after each of them."""
    config = replace(llm.engine_config, max_step_tokens=CHUNK)
    parts = standard_parts(
        llm.model,
        replace(cache, prefix_caching=False, kv_memory=budget),
        config,
        vocab_size=llm.tokenizer.vocab_size,
        eos_ids=llm.tokenizer.eos_ids,
    )
    engine = build_engine(config, replace(parts, max_context=None))  # a window without sinks is to go on too
    written: list[int] = []
    held: list[int] = []
    last: list[int] = []
    total = params.max_tokens or 0

    def watch(call: ModelCall) -> None:
        last[:] = [call.kv_bytes]

    engine.on_call = watch
    engine.add(prompt_ids, params)
    while engine.busy:
        for event in engine.step():
            if event.error is not None:
                raise event.error
            if event.sample is not None:
                written.append(event.sample.token_id)
                held += last
                if len(written) % TOLD == 1:
                    progress(name, len(written) - 1, total)
    progress(name, total, total)
    return written, held


@torch.inference_mode()
def _perplexity(llm: LLM, ids: Sequence[int]) -> float:
    """Of a text by itself: behind the model's own beginning of one, by the exact cache."""
    text = [*beginning(llm.tokenizer), *ids]
    found: list[float] = []
    with Reader(llm, CacheConfig(), len(text)) as reader:
        for start in range(0, len(text) - 1, CHUNK):
            fed = text[start : min(start + CHUNK, len(text) - 1)]
            found += losses(reader.read(fed), text[start + 1 : start + 1 + len(fed)])
    return math.exp(min(fmean(found), 700))


def _repeated(ids: Sequence[int]) -> float:
    grams = [tuple(ids[i : i + GRAM]) for i in range(len(ids) - GRAM + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0
