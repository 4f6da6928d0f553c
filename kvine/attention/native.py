"""Attention by compiled kernels, which read blocks where they lie: single queries are shared out over the context, a
prompt's over tiles of queries. Either computes a query in the same order of sums, and so to the same bits.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvine import kernels
from kvine.attention.base import Batch
from kvine.cache.pool import LayerKV
from kvine.cache.sequence import MISSING
from kvine.cache.spec import CacheSpec
from kvine.kernels import NEVER, PREFILL_FIELDS, PackedBlocks


@dataclass(frozen=True)
class _Plan:
    decode: Tensor  # see `Kernels.decode`
    num_decodes: int
    prefill: Tensor  # see `Kernels.prefill`
    num_prefills: int
    window: int | None


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
        starts, tables = batch.query_start, batch.groups[group].block_tables
        counts = [starts[r + 1] - starts[r] for r in range(batch.num_requests)]
        single = [r for r, count in enumerate(counts) if count == 1]
        places = [(starts[r], batch.context_len[r]) for r in single]
        longer: list[int] = []
        blocks: list[int] = []
        for r, count in enumerate(counts):
            if count > 1:
                own, length = batch.spec_of(r, spec), batch.context_len[r]
                longer += (starts[r], count, length, len(blocks), own.sink_tokens)
                blocks += tables[r][: spec.num_blocks(length)]
                longer += (len(own.kept), len(blocks))
                blocks += itertools.chain.from_iterable(own.kept)
        decode = single_queries(places, [tables[r] for r in single], [batch.spec_of(r, spec) for r in single])
        return _Plan(
            torch.tensor(decode, dtype=torch.long),
            len(single),
            torch.tensor(longer + blocks, dtype=torch.long),
            len(longer) // PREFILL_FIELDS,
            spec.window,
        )

    def plan_packed(self, batch: Batch, group: int, spec: CacheSpec) -> _Plan:
        """The same where full blocks are packed: a query reads its own block exactly."""
        starts, size = batch.query_start, spec.block_size
        tables, opened = batch.groups[group].block_tables, batch.groups[group].open_tables
        places: list[tuple[int, int]] = []
        single: list[list[int]] = []
        longer: list[int] = []
        blocks: list[int] = []
        seen: list[CacheSpec] = []
        for r, end in enumerate(batch.context_len):
            count, sees = starts[r + 1] - starts[r], batch.spec_of(r, spec)
            own, begun = divmod(end - count, size)
            if count == 1 and size > 1:
                places.append((starts[r], end))
                single.append([*tables[r][:own], opened[r][own]])
                seen.append(sees)
            else:
                longer += (starts[r], count, end, len(blocks), sees.sink_tokens)
                blocks += tables[r][: spec.num_blocks(end)]
                blocks.append(opened[r][own] if begun else MISSING)
                longer += (len(sees.kept), len(blocks))
                blocks += itertools.chain.from_iterable(sees.kept)
        return _Plan(
            torch.tensor(single_queries(places, single, seen), dtype=torch.long),
            len(single),
            torch.tensor(longer + blocks, dtype=torch.long),
            len(longer) // PREFILL_FIELDS,
            spec.window,
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
        packed: PackedBlocks | None = None,
    ) -> Tensor:
        """See `Backend.attend`; with a plan of `plan_packed` also the packed blocks, and kv are the open ones."""
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
                scale=scale,
                q_sink=q_sink,
                softcap=softcap,
                packed=packed,
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
                scale=scale,
                q_sink=q_sink,
                softcap=softcap,
                packed=packed,
            )
        return out


def single_queries(
    places: Sequence[tuple[int, int]], tables: Sequence[list[int]], specs: Sequence[CacheSpec]
) -> list[int]:
    """The plan of `Kernels.decode`.

    Args:
        places: each request's row of q and the number of its keys.
        tables: its blocks.
        specs: what it sees.
    """
    requests: list[int] = []
    blocks: list[int] = []
    for (row, length), table, spec in zip(places, tables, specs, strict=True):
        moves = spec.sinks_move_from
        requests += (row, length, spec.window_start(length - 1), len(blocks), spec.sink_tokens)
        blocks += table[: spec.num_blocks(length)]
        requests += (NEVER if moves is None else moves, len(spec.kept), len(blocks))
        if spec.kept:
            blocks += itertools.chain.from_iterable(spec.kept)
    return requests + blocks
