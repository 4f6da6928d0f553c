"""StreamingLLM's comparison (arXiv:2309.17453, figure 3): texts far longer than a window, and longer than the context.

Dense attention past the model's context, a window that drops the first tokens, one that keeps a few of them as sinks,
and the window computed anew for every token, which is what the others try to be.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean
from typing import TYPE_CHECKING

import torch

from kvine.config import CacheConfig
from kvine.errors import RequestError
from kvine.evidence.progress import Progress, silent
from kvine.evidence.quality.policies import EXACT, Policy
from kvine.evidence.quality.reader import CHUNK, Reader, read_all
from kvine.evidence.quality.scores import losses
from kvine.evidence.quality.texts import beginning

if TYPE_CHECKING:
    from kvine.llm import LLM

SINK_COUNTS = (1, 2, 4, 8)
SEGMENTS = 8
SAMPLED = 128
LEAST_WINDOWS = 4  # a text must be as many times longer than the window


@dataclass(frozen=True)
class Stream:
    """One way of reading on and on.

    Attributes:
        name: of the way.
        perplexity: of all tokens past the window; None where only a sample was computed.
        sampled: perplexity of a sample of these tokens, the same for every way.
        segments: perplexity of equal parts of the text in their order; empty where only a sample was computed.
        bytes: of K and V held at the end.
    """

    name: str
    perplexity: float | None
    sampled: float
    segments: tuple[float, ...]
    bytes: int


@dataclass(frozen=True)
class Streaming:
    """The comparison: `tokens` were read, with a window of `window`; `context` is what the model was trained for."""

    tokens: int
    window: int
    context: int
    sampled_tokens: int
    streams: tuple[Stream, ...]


def stream_policies(window: int) -> list[Policy]:
    """The ways that a cache can do, dense first; sinks come out of the window, so that all hold as many tokens."""
    kept = [Policy(EXACT, CacheConfig()), Policy(f"window={window}", CacheConfig(window=window))]
    for sinks in SINK_COUNTS:
        if sinks < window:
            cache = CacheConfig(window=window - sinks, sink_tokens=sinks, sink_rule="in_cache")
            kept.append(Policy(f"window={window - sinks},sinks={sinks},sink-rule=in_cache", cache))
    return kept


def compare_streaming(
    llm: "LLM",
    ids: Sequence[int],
    *,
    window: int = 256,
    sampled: int = SAMPLED,
    progress: Progress = silent,
) -> Streaming:
    """Reads a text in one go by each way, past the model's context too.

    Args:
        llm: the model.
        ids: of the text, without what the model's texts begin with.
        window: tokens that a query sees at most, sinks included.
        sampled: tokens for which the window is computed anew.
        progress: told of every chunk.

    Raises:
        RequestError: if the text is not far longer than the window.
    """
    check_streaming(window, sampled, tokens=len(ids))
    text = [*beginning(llm.tokenizer), *ids]
    past = range(window, len(text))
    every = max(1, len(past) // sampled)
    sample = list(past)[every - 1 :: every][:sampled]
    streams = []
    for policy in stream_policies(window):
        found, held = _read(llm, policy, text, progress)  # found[i] is the loss of token i + 1
        streams.append(
            Stream(
                name="dense" if policy.name == EXACT else policy.name,
                perplexity=_perplexity([found[i - 1] for i in past]),
                sampled=_perplexity([found[i - 1] for i in sample]),
                segments=tuple(_perplexity(part) for part in _segments(found)),
                bytes=held,
            )
        )
    anew = [_anew(llm, text, window, sample, progress)]
    return Streaming(len(text), window, llm.model.config.max_context, len(sample), (*streams, *anew))


def check_streaming(window: int, sampled: int = SAMPLED, *, tokens: int | None = None) -> None:
    """Says what can be said before anything is read. Raises RequestError."""
    if window < 2:
        raise RequestError(f"--streaming-window is {window}: give 2 or more.")
    if sampled < 1:
        raise RequestError(f"{sampled} sampled tokens are too few: give 1 or more.")
    if tokens is not None and tokens < LEAST_WINDOWS * window:
        raise RequestError(
            f"A text of {tokens:,} tokens is not far longer than a window of {window:,}: read "
            f"{LEAST_WINDOWS * window:,} or more by --tokens, or lower --streaming-window."
        )


@torch.inference_mode()
def _read(llm: "LLM", policy: Policy, text: Sequence[int], progress: Progress) -> tuple[list[float], int]:
    found: list[float] = []
    with Reader(llm, policy.cache, len(text), endless=True) as reader:
        for start in range(0, len(text) - 1, CHUNK):
            progress(f"streaming: {policy.name}", start, len(text) - 1)
            fed = text[start : min(start + CHUNK, len(text) - 1)]
            found += losses(reader.read(fed), text[start + 1 : start + 1 + len(fed)])
        return found, reader.end_bytes


@torch.inference_mode()
def _anew(llm: "LLM", text: Sequence[int], window: int, sample: Sequence[int], progress: Progress) -> Stream:
    """The last `window` tokens before each token of the sample, read from empty."""
    found: list[float] = []
    with Reader(llm, CacheConfig(), window) as reader:
        for number, at in enumerate(sample):
            progress("streaming: window computed anew", number, len(sample))
            reader.begin()
            logits = read_all(reader, text[at - window : at])
            found += losses(logits[None], text[at : at + 1])
        return Stream("window computed anew", None, _perplexity(found), (), reader.end_bytes)


def _segments(found: Sequence[float]) -> list[Sequence[float]]:
    edges = [len(found) * part // SEGMENTS for part in range(SEGMENTS + 1)]
    return [found[start:stop] for start, stop in pairwise(edges)]


def _perplexity(found: Sequence[float]) -> float:
    mean = fmean(found)
    return math.exp(mean) if mean < 700 else math.inf
