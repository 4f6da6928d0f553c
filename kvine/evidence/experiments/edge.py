"""Where a window ends, to the key: the classic place to be off by one.

A query at position q is the (q + 1)th token. A window of W lets it see W keys, its own among them: q - W + 1 … q.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kvine.cache.spec import CacheSpec
from kvine.engine.stepped import SteppedCache


@dataclass(frozen=True)
class Edge:
    """What one query sees of a window that is just full or has just begun to lose.

    Attributes:
        window, sink_tokens: of the cache.
        query: its position, from 0.
        seen: how many keys it sees.
        first, last: of the keys that it sees past the sinks.
        lost: keys that the query before it saw and it does not.
        block_freed_at: tokens after which the lost key's block holds nothing visible and is given back; None if
            nothing is lost, or if the block holds sinks and stays.
    """

    window: int
    sink_tokens: int
    query: int
    seen: int
    first: int
    last: int
    lost: tuple[int, ...]
    block_freed_at: int | None


def edges(window: int, sink_tokens: int, block_size: int) -> tuple[Edge, ...]:
    """The two queries around a window's first loss, as `CacheSpec` has it.

    Without sinks these are the Wth token, which sees all, and the (W + 1)th, which loses key 0; S sinks beside the
    window move the loss S tokens on, to key S.
    """
    spec = CacheSpec((0,), 1, 1, block_size, window=window, sink_tokens=sink_tokens)
    full = window + sink_tokens - 1
    return tuple(_edge(spec, query) for query in (full, full + 1))


def _edge(spec: CacheSpec, query: int) -> Edge:
    assert spec.window is not None
    keys = np.arange(query + 1)
    seen = keys[spec.visible(query, keys)]
    before = keys[:-1][spec.visible(query - 1, keys[:-1])]
    lost = np.setdiff1d(before, seen)
    freed = None
    if len(lost):
        block = int(lost[-1]) // spec.block_size
        times = range(query, query + 2 * spec.block_size)
        freed = next((n for n in times if block in spec.dead_blocks(n)), None)
    past_sinks = seen[seen >= spec.sink_tokens]
    return Edge(
        spec.window,
        spec.sink_tokens,
        query,
        len(seen),
        int(past_sinks[0]),
        int(past_sinks[-1]),
        tuple(int(key) for key in lost),
        freed,
    )


@dataclass(frozen=True)
class SeenFirst:
    """How much layer 0's attention changes when the text's first token does, for a window's last two queries.

    Attributes:
        window: of layer 0.
        last_to_see: largest change at position window - 1, which still sees key 0.
        first_to_miss: the same at position window, which does not; exactly 0 in a right engine.
    """

    window: int
    last_to_see: float
    first_to_miss: float


def first_key_seen(cache: SteppedCache, token_ids: Sequence[int]) -> SeenFirst:
    """Reads a text twice through a windowed cache, with two different first tokens, and compares layer 0.

    In layer 0 a row of queries, keys and values knows its own token only; so a change of the first token reaches
    another row through the first key and value alone. Deeper layers hear of it from rows that saw it.

    Args:
        cache: an empty one whose layer 0 has a window; it is closed.
        token_ids: at least one token more than that window.
    """
    runner = cache.runner
    place = runner.attention.layers[0]
    window = runner.attention.pools[place.group].spec.window
    assert window is not None and len(token_ids) > window
    rows: list[Tensor] = []

    def observe(name: str, layer: int, tensor: Tensor) -> None:
        if name == "attn_out" and layer == 0:
            rows.append(tensor.float())

    runner.observer = observe
    results = []
    for first in (token_ids[0], token_ids[0] + 1 if token_ids[0] == 0 else token_ids[0] - 1):
        rows.clear()
        cache.extend([first, *token_ids[1 : window + 1]], last=True)
        results.append(torch.cat(rows))  # [window + 1, hidden]
        cache.crop(0)
    runner.observer = None
    cache.close()
    change = (results[0] - results[1]).abs().amax(-1)
    return SeenFirst(window, float(change[window - 1]), float(change[window]))
