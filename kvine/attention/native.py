"""Attention by compiled kernels, which read blocks where they lie: single queries are shared out over the context, a
prompt's over tiles of queries. Either computes a query in the same order of sums, and so to the same bits.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kvine import kernels
from kvine.attention.base import Batch
from kvine.cache.pool import LayerKV
from kvine.cache.spec import CacheSpec


@dataclass(frozen=True)
class _Plan:
    decode: Tensor  # see `Kernels.decode`
    num_decodes: int
    prefill: Tensor  # see `Kernels.prefill`
    num_prefills: int
    window: int | None
    sinks: int


class NativeBackend:
    """Requests with one query by `Kernels.decode`, and longer ones by `Kernels.prefill`."""

    name = "native"

    def __init__(self) -> None:
        self._kernels = kernels.chosen()

    def unsupported(self, spec: CacheSpec, device: torch.device) -> str | None:
        """Serves every spec on a CPU that the kernels are compiled for."""
        if device.type != "cpu":
            return f"the compiled kernels run on the CPU, and the model is on {device.type}."
        if self._kernels is None:
            return "there are no compiled kernels, or KVINE_KERNELS is off."
        return None

    def plan(self, batch: Batch, group: int, spec: CacheSpec) -> _Plan:
        """Where queries find their keys."""
        singles: list[int] = []
        longer: list[int] = []
        tables: dict[bool, list[int]] = {True: [], False: []}
        for r, length in enumerate(batch.context_len):
            row = batch.query_start[r]
            count = batch.query_start[r + 1] - row
            single = count == 1
            place = len(tables[single])
            tables[single] += batch.groups[group].block_tables[r][: spec.num_blocks(length)]
            if single:
                singles += (row, length, spec.window_start(length - 1), place)
            else:
                longer += (row, count, length, place)
        return _Plan(
            torch.tensor(singles + tables[True], dtype=torch.long),
            len(singles) // 4,
            torch.tensor(longer + tables[False], dtype=torch.long),
            len(longer) // 4,
            spec.window,
            spec.sink_tokens,
        )

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
        assert self._kernels is not None
        q = q.contiguous()
        q_sink = None if q_sink is None else q_sink.contiguous()
        out = torch.empty_like(q)
        if plan.num_decodes:
            self._kernels.decode(
                q,
                kv.k,
                kv.v,
                plan.decode,
                out,
                num_requests=plan.num_decodes,
                sinks=plan.sinks,
                scale=scale,
                q_sink=q_sink,
                softcap=softcap,
            )
        if plan.num_prefills:
            self._kernels.prefill(
                q,
                kv.k,
                kv.v,
                plan.prefill,
                out,
                num_requests=plan.num_prefills,
                window=plan.window,
                sinks=plan.sinks,
                scale=scale,
                q_sink=q_sink,
                softcap=softcap,
            )
        return out
