"""Runs of positions, `(first, end)` with the end outside, that a window keeps in sight: global tokens, pinned texts."""

import operator
import re
from collections.abc import Iterable

Span = tuple[int, int]
Spans = tuple[Span, ...]


def merged(spans: Iterable[Span]) -> Spans:
    """The same positions as runs in ascending order that neither overlap nor touch."""
    runs: list[Span] = []
    for first, end in sorted(span for span in spans if span[0] < span[1]):
        if runs and first <= runs[-1][1]:
            runs[-1] = runs[-1][0], max(runs[-1][1], end)
        else:
            runs.append((first, end))
    return tuple(runs)


def clipped(spans: Iterable[Span], first: int, end: int) -> Spans:
    """What of them lies in `first` … `end` - 1."""
    inside = ((max(first, a), min(end, b)) for a, b in spans)
    return tuple((a, b) for a, b in inside if a < b)


def num_positions(spans: Iterable[Span]) -> int:
    """How many positions merged runs cover."""
    return sum(end - first for first, end in spans)


def blocks_of(spans: Iterable[Span], block_size: int) -> Spans:
    """The blocks that they touch, as runs of block numbers."""
    return merged((first // block_size, -(-end // block_size)) for first, end in spans)


def checked_spans(spans: object) -> Spans:
    """Runs of positions as a caller gave them, as a tuple of pairs of integers; ValueError if they are not."""
    if not isinstance(spans, Iterable) or isinstance(spans, str | bytes):
        raise ValueError(spans)
    runs: list[Span] = []
    for span in spans:
        try:
            first, end = map(operator.index, span)
        except TypeError:
            raise ValueError(span) from None
        if not 0 <= first < end:
            raise ValueError(span)
        runs.append((first, end))
    return tuple(runs)


def parse_spans(text: str) -> Spans:
    """Reads `0:4,100:108`, or with plus signs between, ends outside; ValueError for anything else."""
    if not text.strip():
        return ()
    found = [re.fullmatch(r"([0-9]+):([0-9]+)", part.strip()) for part in re.split("[,+]", text)]
    if not all(found):
        raise ValueError(text)
    return checked_spans([(int(run[1]), int(run[2])) for run in found if run])


def beyond_beginning(spans: Iterable[Span], beginning: int) -> Spans:
    """What of them is left apart once those that touch the first `beginning` tokens have made that longer."""
    runs = merged((*spans, (0, beginning)))
    return runs[1:] if runs and runs[0][0] == 0 else runs
