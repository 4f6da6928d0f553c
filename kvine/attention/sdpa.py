"""Attention through torch's fused kernels: gathers the blocks a request sees, then calls SDPA once for each part.

A boolean mask costs SDPA twice the time, so queries are cut into parts whose visible keys are a plain slice, or a
causal triangle, wherever that is possible.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kvine.attention.base import Batch
from kvine.cache.pool import LayerKV
from kvine.cache.spec import CacheSpec
from kvine.spans import Span, Spans, blocks_of, clipped, merged

TILE = 256  # queries in a part that needs a mask: bounds the mask, and the keys outside the window that it wastes


@dataclass(frozen=True)
class _Part:
    """Queries that are computed in one call.

    Attributes:
        rows: their rows in the batch.
        spans: slices of the gathered keys that they read: the window, and what is kept apart from it.
        causal: whether queries and keys form a full causal triangle.
        mask: [n, L], where neither a slice nor a triangle says what is visible.
        num_sinks: how many of the L keys must be read with the sinks' own rotation.
    """

    rows: slice
    spans: tuple[slice, ...]
    causal: bool
    mask: Tensor | None
    num_sinks: int


@dataclass(frozen=True)
class _Request:
    index: Tensor  # [Hkv × blocks] rows of the storage seen as [blocks × Hkv, block_size × D]
    parts: tuple[_Part, ...]


class SdpaBackend:
    """`torch.nn.functional.scaled_dot_product_attention` over gathered blocks; soft caps and moved sinks by hand."""

    name = "sdpa"

    def unsupported(self, spec: CacheSpec, device: torch.device) -> str | None:
        """Serves everything."""
        return None

    def plan(self, batch: Batch, group: int, spec: CacheSpec) -> list[_Request]:
        """Which blocks each request reads, and in which parts."""
        return self.plan_requests(batch, group, spec, range(batch.num_requests))

    def plan_requests(self, batch: Batch, group: int, spec: CacheSpec, requests: Sequence[int]) -> list[_Request]:
        """The same of some of a batch's requests."""
        tables = batch.groups[group].block_tables
        return [self._plan_request(batch, r, tables[r], batch.spec_of(r, spec)) for r in requests]

    def attend(
        self,
        q: Tensor,
        kv: LayerKV,
        plan: list[_Request],
        *,
        scale: float,
        q_sink: Tensor | None = None,
        softcap: float | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """See `Backend.attend`. With `out`, like q, only the planned requests' rows of it are written."""
        heads, dim = kv.k.shape[1], kv.k.shape[3]
        if out is None and (len(plan) != 1 or len(plan[0].parts) != 1):
            out = torch.empty_like(q)
        for request in plan:
            k, v = (
                stored.view(stored.shape[0] * heads, -1).index_select(0, request.index).view(heads, -1, dim).to(q.dtype)
                for stored in (kv.k, kv.v)
            )  # [Hkv, blocks × block_size, D]
            for part in request.parts:
                keys, values = (_select(x, part.spans) for x in (k, v))  # [Hkv, L, D]
                queries = q[part.rows]
                if softcap is not None or (part.num_sinks and q_sink is not None):
                    sink_queries = None if q_sink is None else q_sink[part.rows]
                    result = _by_hand(queries, keys, values, part, scale, sink_queries, softcap)
                else:
                    result = _fused(queries, keys, values, part, scale)
                if out is None:
                    return result
                out[part.rows] = result
        assert out is not None
        return out

    def _plan_request(self, batch: Batch, r: int, table: list[int], spec: CacheSpec) -> _Request:
        first, end = batch.query_start[r], batch.query_start[r + 1]
        length = batch.context_len[r]
        start = length - (end - first)  # position of the first query
        size, sinks = spec.block_size, spec.sink_tokens
        kept = ((0, sinks), *spec.kept)
        low = spec.window_start(start)
        runs = merged((*blocks_of(clipped(kept, 0, low), size), (low // size, spec.num_blocks(length))))
        blocks = [block for run in runs for block in table[slice(*run)]]
        device = batch.positions.device
        index = torch.tensor(blocks, device=device) * spec.num_kv_heads
        index = (index + torch.arange(spec.num_kv_heads, device=device)[:, None]).view(-1)
        causal = start == 0 and end - first > 1 and (spec.window is None or length <= spec.window)
        step = end - first if causal else TILE
        parts = []
        for row in range(first, end, step):
            rows = slice(row, min(row + step, end))
            q_low, q_high = start + rows.start - first, start + rows.stop - first
            seen = spec.window_start(q_low)
            visible = merged((*clipped(kept, 0, seen), (seen, q_high)))
            spans = tuple(_gathered(runs, size, run) for run in visible)
            mask = None
            if not causal and q_high - q_low > 1:
                k_pos = torch.cat([torch.arange(*run, device=device) for run in visible])
                mask = spec.visible(batch.positions[rows, None], k_pos)
            moved = spec.sinks_move_from is not None and q_high > spec.sinks_move_from
            parts.append(_Part(rows, spans, causal, mask, min(sinks, q_high) if moved else 0))
        return _Request(index, tuple(parts))


def _gathered(runs: Spans, size: int, positions: Span) -> slice:
    """Where positions that lie in one run of blocks are among the tokens of all runs."""
    before = 0
    for first, end in runs:
        if positions[0] < end * size:
            break
        before += end - first
    place = (before - first) * size + positions[0]
    return slice(place, place + positions[1] - positions[0])


def _select(x: Tensor, spans: tuple[slice, ...]) -> Tensor:
    return x[:, spans[0]] if len(spans) == 1 else torch.cat([x[:, span] for span in spans], dim=1)


def _fused(q: Tensor, k: Tensor, v: Tensor, part: _Part, scale: float) -> Tensor:
    """[n, Hq, D] queries over [Hkv, L, D] keys. No head is copied: a stride of 0, or the rows of one call, share it."""
    n, _, dim = q.shape
    heads = k.shape[0]
    if n == 1:  # the g query heads of a KV head are g rows that see the same keys
        out = F.scaled_dot_product_attention(q.reshape(1, heads, -1, dim), k[None], v[None], scale=scale)
        return out.view(1, -1, dim)
    grouped = q.reshape(n, heads, -1, dim).permute(2, 1, 0, 3)  # [g, Hkv, n, D]
    shared = (grouped.shape[0], -1, -1, -1)
    out = F.scaled_dot_product_attention(
        grouped, k.expand(shared), v.expand(shared), attn_mask=part.mask, is_causal=part.causal, scale=scale
    )
    return out.permute(2, 1, 0, 3).flatten(1, 2)


def _by_hand(
    q: Tensor, k: Tensor, v: Tensor, part: _Part, scale: float, q_sink: Tensor | None, softcap: float | None
) -> Tensor:
    """What SDPA cannot do, in fp32, a tile of queries at a time so that scores stay small."""
    heads, _, dim = k.shape
    k, v = k.float(), v.float()
    group = q.shape[1] // heads
    out = torch.empty_like(q)
    for row in range(0, q.shape[0], TILE):
        tile = slice(row, row + TILE)
        grouped = q[tile].float().reshape(-1, heads, group, dim).permute(1, 2, 0, 3)  # [Hkv, g, n, D]
        scores = grouped @ k.transpose(1, 2)[:, None] * scale  # [Hkv, g, n, L]
        if part.num_sinks and q_sink is not None:
            to_sinks = q_sink[tile].float().reshape(-1, heads, group, dim).permute(1, 2, 0, 3)
            scores[..., : part.num_sinks] = to_sinks @ k[:, : part.num_sinks].transpose(1, 2)[:, None] * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        if part.mask is not None:
            scores = scores.masked_fill(~part.mask[tile], -torch.inf)
        elif part.causal:
            ahead = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(row + 1)
            scores = scores.masked_fill(ahead, -torch.inf)
        out[tile] = (scores.softmax(-1) @ v[:, None]).permute(2, 0, 1, 3).flatten(1, 2).to(q.dtype)
    return out
