"""Attention over a group whose full blocks are packed, by backends that know nothing of it.

A query reads its own block exactly and every earlier one as the codec has kept it, whatever the chunk it is computed
in. So a step is cut where blocks begin: the queries of one block are a request of their own to the backend, which sees
what the codec kept of the blocks before and the exact one at the end.
"""

from typing import Any

import torch
from torch import Tensor

from kvine.attention.base import Backend, Batch, GroupBatch
from kvine.cache.codec import encode
from kvine.cache.packed_pool import PackedPool
from kvine.cache.pool import KVPool, LayerKV
from kvine.cache.sequence import MISSING
from kvine.spans import Spans


class PackedStep:
    """What one step reads and writes of one group, worked out once for all of its layers.

    Args:
        batch: the step.
        group: of the layers.
        sealed: the packed blocks.
        opened: the open ones, exact.
        backend: attends.
    """

    def __init__(self, batch: Batch, group: int, sealed: PackedPool, opened: KVPool, backend: Backend) -> None:
        self._sealed, self._opened, self._backend = sealed, opened, backend
        device = batch.positions.device
        spec, size = sealed.spec, sealed.spec.block_size
        tables, open_tables = batch.groups[group].block_tables, batch.groups[group].open_tables
        begun: list[int] = []  # slots of what lies in open blocks that the step goes on filling
        begun_to: list[int] = []
        touched = 0  # blocks that the step writes to, over all requests; each has a place
        slots: list[int] = []  # of each token among the touched blocks
        seal_places: list[int] = []
        seal_blocks: list[int] = []
        open_rows: list[int] = []
        open_slots: list[int] = []
        places: dict[int, int] = {}  # of the packed blocks that are read
        starts, lengths = [0], []
        pinned: list[Spans] = []
        views: list[list[int]] = []
        for r, end in enumerate(batch.context_len):
            row = batch.query_start[r]
            start = end - (batch.query_start[r + 1] - row)
            first, full = start // size, end // size
            slots += ((touched - first) * size + position for position in range(start, end))
            begun += (open_tables[r][first] * size + offset for offset in range(start % size))
            begun_to += range(touched * size, touched * size + start % size)
            seal_places += range(touched, touched + full - first)
            seal_blocks += tables[r][first:full]
            for position in range(max(start, full * size), end):
                open_rows.append(row + position - start)
                open_slots.append(open_tables[r][full] * size + position % size)
            seen = [
                MISSING if block == MISSING else places.setdefault(block, len(places))
                for block in tables[r][: spec.num_blocks(end) - 1]
            ]
            for block in range(first, spec.num_blocks(end)):
                lengths.append(min(end, (block + 1) * size))
                starts.append(starts[-1] + lengths[-1] - max(start, block * size))
                views.append([*seen[:block], ~(touched + block - first)])
                pinned += batch.pinned[r : r + 1]
            touched += spec.num_blocks(end) - first
        # Touched blocks come after the packed ones that are read.
        views = [[*view[:-1], len(places) + ~view[-1]] for view in views]

        def tensor(values: list[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.long, device=device)

        self._num_touched = touched
        self._begun, self._begun_to = opened.row_index(tensor(begun)), opened.row_index(tensor(begun_to))
        self._slots = opened.row_index(tensor(slots))
        self._seal_places, self._seal_blocks = tensor(seal_places), tensor(seal_blocks)
        self._open_rows, self._open_index = tensor(open_rows), opened.row_index(tensor(open_slots))
        self._read = tensor(list(places))
        seen_batch = Batch(
            batch.input_ids,
            batch.positions,
            starts,
            lengths,
            (GroupBatch(views, batch.groups[group].slot_mapping),),
            batch.logits_index,
            pinned,
        )
        self._plan: Any = backend.plan(seen_batch, 0, spec)

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float,
        q_sink: Tensor | None,
        softcap: float | None,
    ) -> Tensor:
        """Writes k and v `[N, Hkv, D]` of the group's layer number `layer`, and attends; see `Backend.attend`."""
        keys, values = (self._exact(part, stored[layer]) for part, stored in ((k, self._opened.k), (v, self._opened.v)))
        if len(self._seal_places):  # before anything is read: later blocks read what the codec keeps of these
            self._sealed.seal(layer, self._seal_blocks, keys[self._seal_places], values[self._seal_places])
        if len(self._open_rows):
            self._opened.write(layer, self._open_index, k[self._open_rows], v[self._open_rows])
        kept = self._sealed.unsealed(layer, self._read)
        return self._backend.attend(
            q,
            LayerKV(torch.cat((kept.k, keys.float())), torch.cat((kept.v, values.float()))),
            self._plan,
            scale=scale,
            q_sink=q_sink,
            softcap=softcap,
        )

    def _exact(self, new: Tensor, opened: Tensor) -> Tensor:
        """The touched blocks, exact: [touched, Hkv, T, D]; zeros behind the last token."""
        blocks = opened.new_zeros((self._num_touched, *opened.shape[1:]))
        width = opened.shape[-1]
        rows = blocks.view(-1, width)
        rows.index_copy_(0, self._begun_to, opened.view(-1, width).index_select(0, self._begun))
        rows.index_copy_(0, self._slots, encode(new.reshape(-1, width), opened.dtype))
        return blocks
