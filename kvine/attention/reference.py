"""Attention as the textbook writes it, in fp32, one request at a time: the oracle of every other backend."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kvine.attention.base import Batch
from kvine.cache.pool import LayerKV
from kvine.cache.sequence import MISSING
from kvine.cache.spec import CacheSpec


@dataclass(frozen=True)
class _Plan:
    batch: Batch
    group: int
    spec: CacheSpec


class ReferenceBackend:
    """Gathers all of a request's keys and masks what is invisible. Slow and plain on purpose."""

    name = "reference"

    def unsupported(self, spec: CacheSpec, device: torch.device) -> str | None:
        """Serves everything."""
        return None

    def plan(self, batch: Batch, group: int, spec: CacheSpec) -> _Plan:
        """Keeps the step as it is."""
        return _Plan(batch, group, spec)

    def attend(
        self,
        q: Tensor,
        kv: LayerKV,
        plan: _Plan,
        *,
        scale: float,
        q_sink: Tensor | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        """See `Backend.attend`."""
        out = torch.empty_like(q)
        batch = plan.batch
        for r, length in enumerate(batch.context_len):
            spec = batch.spec_of(r, plan.spec)
            rows = slice(batch.query_start[r], batch.query_start[r + 1])
            table = batch.groups[plan.group].block_tables[r][: spec.num_blocks(length)]
            blocks = torch.tensor([max(block, 0) for block in table], device=q.device)
            held = torch.tensor([block != MISSING for block in table], device=q.device)
            k, v = (
                stored[blocks].float().transpose(0, 1).flatten(1, 2)[:, :length] for stored in (kv.k, kv.v)
            )  # [Hkv, L, D]
            k_pos = torch.arange(length, device=q.device)
            visible = spec.visible(batch.positions[rows, None], k_pos)  # [n, L]
            assert not (visible & ~held[k_pos // spec.block_size]).any(), "a visible block was let go"
            v = v.masked_fill(~visible.any(0)[:, None], 0)  # of another request perhaps, and 0 × NaN is NaN

            grouped = (-1, spec.num_kv_heads, q.shape[1] // spec.num_kv_heads, spec.head_dim)  # [n, Hkv, g, D]
            queries = q[rows].float().reshape(grouped)
            scores = torch.einsum("nhgd,hld->hgnl", queries, k) * scale
            if q_sink is not None:
                sinks = torch.einsum("nhgd,hld->hgnl", q_sink[rows].float().reshape(grouped), k) * scale
                scores = torch.where(k_pos < spec.sink_tokens, sinks, scores)
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
            out[rows] = torch.einsum("hgnl,hld->nhgd", weights, v).flatten(1, 2).to(q.dtype)
        return out
