"""Faults of attention: wrong positions, wrong places, wrong masks, wrong heads. Each part is one classic mistake."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kvine.attention.base import Backend, Batch
from kvine.attention.cached import CachedAttention, StepAttention
from kvine.cache.pool import LayerKV
from kvine.cache.spec import CacheSpec
from kvine.evidence.traps.seams import OpenBackend, decoded

RECTANGLE = 512  # the width to which batches are padded


class StuckAt0(StepAttention):
    """A decode step forgets to say where it is, and every new token is rotated as the first one."""

    def __init__(self, attention: CachedAttention, batch: Batch) -> None:
        super().__init__(attention, batch)
        self._positions = torch.where(decoded(batch), torch.zeros_like(batch.positions), batch.positions)


class StuckAt1(StepAttention):
    """The position is the length of what is fed, 1, instead of the length of what is there."""

    def __init__(self, attention: CachedAttention, batch: Batch) -> None:
        super().__init__(attention, batch)
        self._positions = torch.where(decoded(batch), torch.ones_like(batch.positions), batch.positions)


class LateInDecode(StepAttention):
    """The position is taken after the token was counted."""

    def __init__(self, attention: CachedAttention, batch: Batch) -> None:
        super().__init__(attention, batch)
        self._positions = torch.where(decoded(batch), batch.positions + 1, batch.positions)


class LateEverywhere(StepAttention):
    """Positions are counted from 1."""

    def __init__(self, attention: CachedAttention, batch: Batch) -> None:
        super().__init__(attention, batch)
        self._positions = batch.positions + 1


class InterleavedPairs(StepAttention):
    """Rotates dimensions 2i and 2i + 1 as a pair, for weights that pair i with i + D / 2."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See `StepAttention`."""
        width = self._rotation(self._attention.layers[layer], moved=False)[0].shape[-1]
        order = torch.cat((torch.arange(0, width, 2), torch.arange(1, width, 2), torch.arange(width, q.shape[-1])))
        return super().__call__(layer, q[..., order], k[..., order], v)


class SinksOneFurther(StepAttention):
    """The place behind the cache's last: sinks and window are counted, and the query's own token is not among them."""

    def __init__(self, attention: CachedAttention, batch: Batch) -> None:
        super().__init__(attention, batch)
        self._moved = [None if moved is None else batch.positions.clamp(max=moved.max() + 1) for moved in self._moved]


def next_slot(attention: CachedAttention, batch: Batch) -> Batch:
    """The length was raised before the token was written: it lands one place after its own."""
    groups = []
    for group, pool in zip(batch.groups, attention.pools, strict=True):
        last = pool.num_blocks * pool.spec.block_size - 1
        slots = torch.where(decoded(batch), group.slot_mapping + 1, group.slot_mapping)
        groups.append(replace(group, slot_mapping=slots.clamp(max=last)))
    return replace(batch, groups=tuple(groups))


def first_rows_table(attention: CachedAttention, batch: Batch) -> Batch:
    """Every row of the batch gets the block table of the first one, as far as that goes."""
    groups = []
    counts = torch.tensor(batch.query_start).diff()
    row_of = torch.arange(batch.num_requests).repeat_interleave(counts)  # [N]
    for group, pool in zip(batch.groups, attention.pools, strict=True):
        size = pool.spec.block_size
        first = group.block_tables[0]
        tables = [[*first[: len(table)], *table[len(first) :]] for table in group.block_tables]
        slots = [
            tables[r][p // size] * size + p % size
            for r, p in zip(row_of.tolist(), batch.positions.tolist(), strict=True)
        ]
        groups.append(replace(group, block_tables=tables, slot_mapping=torch.tensor(slots)))
    return replace(batch, groups=tuple(groups))


class StaleTables:
    """Block tables stay with the places of the batch when beams change theirs, until the batch changes its size."""

    def __init__(self) -> None:
        self._tables: list[list[list[int]]] = []  # for each group that of each place

    def __call__(self, attention: CachedAttention, batch: Batch) -> Batch:
        """Hands each place the table that it had."""
        now = [group.block_tables for group in batch.groups]
        if [len(tables) for tables in self._tables] != [len(tables) for tables in now]:
            self._tables = now
        groups = tuple(
            replace(
                group,
                block_tables=[
                    old if len(old) >= len(own) else own for old, own in zip(tables, own_tables, strict=True)
                ],
            )
            for group, tables, own_tables in zip(batch.groups, self._tables, now, strict=True)
        )
        return replace(batch, groups=groups)


class LastLayerStale(StepAttention):
    """When beams change places, the loop over the layers' block tables leaves out the last layer."""

    def __init__(self, attention: CachedAttention, batch: Batch, stale: StaleTables) -> None:
        super().__init__(attention, batch)
        self._last = len(attention.layers) - 1
        group = attention.layers[-1].group
        self._reordered = self._plans[group]
        self._stale = attention.backends[group].plan(stale(attention, batch), group, attention.pools[group].spec)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See `StepAttention`."""
        group = self._attention.layers[-1].group
        self._plans[group] = self._reordered if layer < self._last else self._stale
        return super().__call__(layer, q, k, v)


class OwnStepOnly(OpenBackend):
    """The mask is made for the tokens that are fed, and the cache's are forgotten."""

    def visible(self, spec: CacheSpec, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        """See `OpenBackend`."""
        return super().visible(spec, q_pos, k_pos) & (k_pos >= q_pos[0])


class OwnTokenHidden(OpenBackend):
    """`<` instead of `<=`: a query does not see its own token (the first token, which has no other, excepted)."""

    def visible(self, spec: CacheSpec, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        """See `OpenBackend`."""
        return super().visible(spec, q_pos, k_pos) & ((k_pos < q_pos[:, None]) | (q_pos[:, None] == 0))


class NotCausal(OpenBackend):
    """No causal mask inside a chunk."""

    def visible(self, spec: CacheSpec, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        """See `OpenBackend`."""
        return super().visible(spec, q_pos, k_pos) | (k_pos > q_pos[:, None])


class Tiled(OpenBackend):
    """`repeat` where `repeat_interleave` is needed."""

    def spread(self, x: Tensor, num_heads: int) -> Tensor:
        """See `OpenBackend`."""
        return x.repeat(num_heads // x.shape[0], 1, 1)


class RightPadded(OpenBackend):
    """A rectangle filled with zeros after each text, and a mask that is only causal."""

    def gather(
        self, kv: LayerKV, table: Sequence[int], length: int, batch: Batch, spec: CacheSpec
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `OpenBackend`."""
        k, v, k_pos = super().gather(kv, table, length, batch, spec)
        padding = -max(batch.context_len) % RECTANGLE + max(batch.context_len) - length
        zeros = k.new_zeros(k.shape[0], padding, k.shape[2])
        return torch.cat((k, zeros), 1), torch.cat((v, zeros), 1), torch.cat((k_pos, k_pos.new_full((padding,), -1)))

    def visible(self, spec: CacheSpec, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        """See `OpenBackend`."""
        return super().visible(spec, q_pos, k_pos) | (k_pos < 0)


class LeftPadded(RightPadded):
    """A rectangle filled before each text with its first token."""

    def gather(
        self, kv: LayerKV, table: Sequence[int], length: int, batch: Batch, spec: CacheSpec
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `OpenBackend`."""
        k, v, k_pos = super().gather(kv, table, length, batch, spec)
        padding = int((k_pos < 0).sum())
        first_k, first_v = (x[:, :1].expand(-1, padding, -1) for x in (k, v))
        text = slice(0, len(k_pos) - padding)
        return (
            torch.cat((first_k, k[:, text]), 1),
            torch.cat((first_v, v[:, text]), 1),
            torch.cat((k_pos[text.stop :], k_pos[text])),
        )


class LongestEver(OpenBackend):
    """The mask goes by the longest length that a sequence ever had: what was rolled back stays visible."""

    def __init__(self, own: Backend) -> None:
        super().__init__(own)
        self._longest: dict[int, tuple[Sequence[int], int]] = {}  # a table is kept, so that its id stays its own

    def gather(
        self, kv: LayerKV, table: Sequence[int], length: int, batch: Batch, spec: CacheSpec
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `OpenBackend`."""
        before = self._longest.get(id(table), (table, 0))[1]
        self._longest[id(table)] = table, max(before, length)
        there = max(length, min(before, spec.num_blocks(length) * spec.block_size))
        k, v, k_pos = super().gather(kv, table, there, batch, spec)
        return k, v, torch.where(k_pos >= length, -1, k_pos)

    def visible(self, spec: CacheSpec, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        """See `OpenBackend`."""
        return super().visible(spec, q_pos, k_pos) | (k_pos < 0)


class SinksInPlace(OpenBackend):
    """Reads the sinks with the rotation that the window is read with."""

    def attend(self, q: Tensor, kv: LayerKV, plan: Any, **options: Any) -> Tensor:
        """See `Backend.attend`."""
        return super().attend(q, kv, plan, **{**options, "q_sink": None})


class SinksForgotten(OpenBackend):
    """Sees the window only."""

    def plan(self, batch: Batch, group: int, spec: CacheSpec) -> tuple[Batch, int, CacheSpec]:
        """See `Backend.plan`."""
        return super().plan(batch, group, replace(spec, sink_tokens=0))


class Unscaled(OpenBackend):
    """Scores that nobody divides by the root of the head's width."""

    def attend(self, q: Tensor, kv: LayerKV, plan: Any, **options: Any) -> Tensor:
        """See `Backend.attend`."""
        return super().attend(q, kv, plan, **{**options, "scale": 1.0})
