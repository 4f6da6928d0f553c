"""Attention by compiled kernels, which read blocks where they lie: one query reads each row of K and V once for all of
its heads. Longer stretches of a prompt are left to torch, whose kernels multiply matrices.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvine import kernels
from kvine.attention.base import Batch
from kvine.attention.sdpa import SdpaBackend
from kvine.cache.pool import LayerKV
from kvine.cache.spec import CacheSpec


@dataclass(frozen=True)
class _Plan:
    decode: Tensor  # see `Kernels.decode`
    num_decodes: int
    sinks: int
    prefill: Any  # of the requests that compute more than one token


class NativeBackend:
    """Single queries by the kernels, and the others by `SdpaBackend`: what computes a request depends on the number of
    its own queries alone.
    """

    name = "native"

    def __init__(self) -> None:
        self._kernels = kernels.chosen()
        self._prefill = SdpaBackend()

    def unsupported(self, spec: CacheSpec, device: torch.device) -> str | None:
        """Serves every spec on a CPU that the kernels are compiled for."""
        if device.type != "cpu":
            return f"the compiled kernels run on the CPU, and the model is on {device.type}."
        if self._kernels is None:
            return "there are no compiled kernels, or KVINE_KERNELS is off."
        return None

    def plan(self, batch: Batch, group: int, spec: CacheSpec) -> _Plan:
        """Where the single queries find their keys, and the other backend's plan of the rest."""
        starts, tables = batch.query_start, batch.groups[group].block_tables
        single = [r for r in range(batch.num_requests) if starts[r + 1] - starts[r] == 1]
        longer = [r for r in range(batch.num_requests) if starts[r + 1] - starts[r] > 1]
        places = [(starts[r], batch.context_len[r]) for r in single]
        decode = torch.tensor(single_queries(places, [tables[r] for r in single], spec), dtype=torch.long)
        prefill = self._prefill.plan_requests(batch, group, spec, longer)
        return _Plan(decode, len(single), spec.sink_tokens, prefill)

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
        if not plan.num_decodes:
            return self._prefill.attend(q, kv, plan.prefill, scale=scale, q_sink=q_sink, softcap=softcap)
        assert self._kernels is not None
        q = q.contiguous()
        out = torch.empty_like(q)
        self._kernels.decode(
            q,
            kv.k,
            kv.v,
            plan.decode,
            out,
            num_requests=plan.num_decodes,
            sinks=plan.sinks,
            scale=scale,
            q_sink=None if q_sink is None else q_sink.contiguous(),
            softcap=softcap,
        )
        if plan.prefill:
            self._prefill.attend(q, kv, plan.prefill, scale=scale, q_sink=q_sink, softcap=softcap, out=out)
        return out


def single_queries(places: Sequence[tuple[int, int]], tables: Sequence[list[int]], spec: CacheSpec) -> list[int]:
    """The plan of `Kernels.decode`: `places` are each request's row of q and the number of its keys."""
    requests: list[int] = []
    blocks: list[int] = []
    for (row, length), table in zip(places, tables, strict=True):
        requests += (row, length, spec.window_start(length - 1), len(blocks))
        blocks += table[: spec.num_blocks(length)]
    return requests + blocks
