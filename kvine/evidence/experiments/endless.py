"""`experiment endless`: one text far past the window and the model's context, what is written there and what is held.

A window with sinks inside the cache (StreamingLLM, arXiv:2309.17453) writes beside one without sinks, with the same
noise. Passages are read and written on in turns, as in a conversation without end; or all is written in one go. Parts
of both texts are then read by the model itself, exactly and each from an empty cache: how likely it finds what was
written there (perplexity), and how much of it has been written before.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean

import torch

from kvine.config import CacheConfig
from kvine.engine.build import DTYPE_NAMES, build_engine, standard_parts
from kvine.engine.held import HeldText
from kvine.errors import RequestError
from kvine.evidence.progress import Progress, silent
from kvine.evidence.quality.reader import CHUNK, Reader
from kvine.evidence.quality.scores import losses
from kvine.evidence.quality.texts import beginning, first_tokens, prose
from kvine.llm import LLM
from kvine.models.cache_specs import cache_specs
from kvine.models.packing import count_packings
from kvine.sampling.params import SamplingParams

PROMPT = "Once upon a time, in a small village by the sea, there lived"
PIECE = 512  # tokens that are judged at a place
PLACES = 12
PASSAGE = 128  # tokens that are read before each turn, and written in it
TEMPERATURE, TOP_P = 1.0, 0.9  # keeps no text from circles for ever: see `Piece.repeated`
CIRCLES = 0.5  # share repeated from which a part's perplexity says nothing of how well it reads
GRAM = 4  # tokens in a row that count as said before
TOLD = 64  # tokens between two words of progress


@dataclass(frozen=True)
class Piece:
    """Part of what was written.

    Attributes:
        start: its first token, counted from the first one behind the prompt.
        perplexity: of its written tokens by the exact cache, from an empty one, behind the passages before them.
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
        ids: the tokens behind the prompt, read and written.
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
    passage: int
    seed: int
    written: tuple[Written, ...]
    packings: Mapping[str, int] = field(default_factory=dict)


def check_endless(
    tokens: int, window: int, sinks: int, places: int, piece: int = PIECE, passage: int = PASSAGE
) -> None:
    """Says what can be said before a model is loaded. Raises RequestError, naming the command's option."""
    if window < 2:
        raise RequestError(f"--window is {window:,}: give 2 or more.")
    if sinks < 1:
        raise RequestError(f"--sinks is {sinks:,}: give 1 or more, a window without any is written by beside them.")
    if places < 2:
        raise RequestError(f"--places is {places:,}: give 2 or more, the beginning and the end.")
    if piece < 2 * GRAM:
        raise RequestError(f"--piece is {piece:,}: give {2 * GRAM} or more.")
    if passage and passage < 2 * GRAM:
        raise RequestError(f"--passage is {passage:,}: give {2 * GRAM} or more, or 0 to read none.")
    if passage and piece % passage:
        raise RequestError(f"--piece is {piece:,}, and a turn writes {passage:,} tokens: give a multiple of these.")
    needed = places * piece * (2 if passage else 1)
    if tokens < needed:
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
    passage: int = PASSAGE,
    prompt: str = PROMPT,
    seed: int = 0,
    progress: Progress = silent,
) -> Endless:
    """Writes a text by a window with sinks and by one without, and judges parts of both.

    Args:
        llm: the model; how its own cache is kept does not matter here.
        tokens: to read and write, whatever ends a text; the model's context is no limit.
        window: tokens that a query sees, beside the sinks; without sinks it sees as many more.
        sinks: first tokens that stay visible.
        places: parts that are judged, evenly from the first token to the last.
        piece: tokens written of each.
        passage: tokens of prose that are read in each turn, and then written; 0: nothing is read, all is one turn.
        prompt: what the text begins with.
        seed: of the noise, the same for both.
        progress: told now and then.

    Raises:
        RequestError: for a number out of range, or a part that the model cannot read in one go.
    """
    check_endless(tokens, window, sinks, places, piece, passage)
    most = passage + (passage or piece)
    if most > llm.model.config.max_context - 1:
        raise RequestError(
            f"A part of {most:,} tokens does not fit the model's context of {llm.model.config.max_context:,}, in "
            f"which it is judged: lower {'--passage' if passage else '--piece'}."
        )
    turns = _turns(llm, tokens, passage)
    params = SamplingParams(temperature=TEMPERATURE, top_p=TOP_P, seed=seed, ignore_eos=True)
    ways = {
        f"window={window},sinks={sinks},sink-rule=in_cache": CacheConfig(
            window=window, sink_tokens=sinks, sink_rule="in_cache"
        ),
        f"window={window + sinks}": CacheConfig(window=window + sinks),
    }
    parts = _parts(turns, tokens, places, piece)
    written = tuple(_written(llm, name, cache, prompt, turns, parts, params, progress) for name, cache in ways.items())
    return Endless(
        llm.source.name,
        DTYPE_NAMES[llm.model.dtype],
        str(llm.model.device),
        llm.model.config.max_context,
        tokens,
        window,
        sinks,
        piece,
        passage,
        seed,
        written,
        count_packings(llm.model.packings),
    )


@dataclass(frozen=True)
class _Turn:
    """Tokens `start` … `first` - 1 are read, and those up to `end` - 1 written; counted behind the prompt."""

    start: int
    first: int
    end: int
    read: tuple[int, ...] = ()


def _turns(llm: LLM, tokens: int, passage: int) -> list[_Turn]:
    if not passage:
        return [_Turn(0, 0, tokens)]
    text = first_tokens(llm.tokenizer, prose(tokens), tokens)
    turns = []
    for start in range(0, tokens, 2 * passage):
        number = start // 2 % max(1, len(text) - passage)
        read = tuple(text[number : number + passage])[: tokens - start]
        if end := min(passage, tokens - start - len(read)):
            turns.append(_Turn(start, start + len(read), start + len(read) + end, read))
    return turns


def _parts(turns: Sequence[_Turn], tokens: int, places: int, piece: int) -> list[list[_Turn]]:
    """What is judged at each place: whole turns, or where there is but one of it so many tokens."""
    if len(turns) == 1:
        starts = [(tokens - piece) * place // (places - 1) for place in range(places)]
        return [[_Turn(start, start, start + piece)] for start in starts]
    whole = [turn for turn in turns if turn.end - turn.first == turns[0].end - turns[0].first]
    count = piece // (turns[0].end - turns[0].first)
    firsts = [(len(whole) - count) * place // (places - 1) for place in range(places)]
    return [whole[first : first + count] for first in firsts]


def _written(
    llm: LLM,
    name: str,
    cache: CacheConfig,
    prompt: str,
    turns: Sequence[_Turn],
    parts: Sequence[Sequence[_Turn]],
    params: SamplingParams,
    progress: Progress,
) -> Written:
    """What one way writes, with its parts judged."""
    tokens, begin = turns[-1].end, llm.encode(prompt)
    planned = _most_bytes(llm, cache, len(begin) + tokens)
    ids, held = _write(llm, cache, planned, begin, turns, params, name, progress)
    ends = [*(part[0].start for part in parts[1:]), tokens + 1]
    pieces = tuple(
        Piece(
            part[0].start,
            math.exp(min(fmean(_loss(llm, ids, turn) for turn in part), 700)),
            _repeated([token for turn in part for token in ids[turn.first : turn.end]]),
            max(bytes_held for at, bytes_held in held if part[0].first <= at < end),
        )
        for part, end in zip(parts, ends, strict=True)
    )
    return Written(name, pieces, planned, tuple(ids), llm.tokenizer.decode(ids[-64:]))


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
    turns: Sequence[_Turn],
    params: SamplingParams,
    name: str,
    progress: Progress,
) -> tuple[list[int], list[tuple[int, int]]]:
    """The tokens behind the prompt; and of each written one how many there are before it, and bytes held after it."""
    config = replace(llm.engine_config, max_step_tokens=CHUNK)
    parts = standard_parts(
        llm.model,
        replace(cache, prefix_caching=False, kv_memory=budget),
        config,
        vocab_size=llm.tokenizer.vocab_size,
        eos_ids=llm.tokenizer.eos_ids,
    )
    engine = build_engine(config, replace(parts, max_context=None))  # a window without sinks is to go on too
    text, held, last = HeldText(prompt_ids), [], [0]
    engine.on_call = lambda call: last.__setitem__(0, call.kv_bytes)
    for turn in turns:
        ids, at = [*text.tokens, *turn.read], turn.first
        text.begin(ids, grows=True)
        engine.add(ids, replace(params, max_tokens=turn.end - turn.first), held=text)
        while engine.busy:
            for event in engine.step():
                if event.error is not None:
                    raise event.error
                if event.sample is not None:
                    held.append((at, last[0]))
                    at += 1
                    if at % TOLD == 1:
                        progress(name, at, turns[-1].end)
    progress(name, turns[-1].end, turns[-1].end)
    return text.tokens[len(prompt_ids) :], held


@torch.inference_mode()
def _loss(llm: LLM, ids: Sequence[int], turn: _Turn) -> float:
    """Mean negative log-likelihood of what a turn has written, behind what it has read, by the exact cache."""
    begin = beginning(llm.tokenizer)
    text = [*begin, *ids[turn.start : turn.end]]
    found: list[float] = []
    with Reader(llm, CacheConfig(), len(text)) as reader:
        for start in range(0, len(text) - 1, CHUNK):
            fed = text[start : min(start + CHUNK, len(text) - 1)]
            found += losses(reader.read(fed), text[start + 1 : start + 1 + len(fed)])
    return fmean(found[max(len(begin) + turn.first - turn.start - 1, 0) :])


def _repeated(ids: Sequence[int]) -> float:
    grams = [tuple(ids[i : i + GRAM]) for i in range(len(ids) - GRAM + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0
