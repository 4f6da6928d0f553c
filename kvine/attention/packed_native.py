"""Attention over a group whose full blocks are packed, by kernels that read these where they lie."""

import torch
from torch import Tensor

from kvine.attention.base import Batch
from kvine.attention.native import NativeBackend
from kvine.cache.codec import encode
from kvine.cache.layout import Part, is_packed, packed_layout
from kvine.cache.packed_pool import PackedPool
from kvine.cache.pool import KVPool
from kvine.kernels import PackedBlocks, PackedKind


class NativePackedStep:
    """What one step reads and writes of one group, worked out once for all of its layers; see `PackedStep`.

    Args:
        batch: the step.
        group: of the layers.
        sealed: the packed blocks.
        opened: the open ones, exact.
        backend: attends.
    """

    def __init__(self, batch: Batch, group: int, sealed: PackedPool, opened: KVPool, backend: NativeBackend) -> None:
        self._sealed, self._opened, self._backend = sealed, opened, backend
        size = sealed.spec.block_size
        tables, open_tables = batch.groups[group].block_tables, batch.groups[group].open_tables
        rows: list[int] = []  # of the step, that open blocks take, and where
        slots: list[int] = []
        begun: list[int] = []  # open blocks that become full
        whole: list[int] = []  # rows of blocks that the step fills from their start
        begun_to: list[int] = []
        whole_to: list[int] = []
        for r, end in enumerate(batch.context_len):
            row = batch.query_start[r]
            start = end - (batch.query_start[r + 1] - row)
            first, full = start // size, end // size
            here = row - start  # a position's row, less the position
            if start % size:
                rows += range(row, here + min(end, (first + 1) * size))
                slots += (open_tables[r][first] * size + p % size for p in range(start, min(end, (first + 1) * size)))
                if first < full:
                    begun.append(open_tables[r][first])
                    begun_to.append(tables[r][first])
                first += 1
            whole += range(here + first * size, here + full * size)
            whole_to += tables[r][first:full]
            for position in range(max(first, full) * size, end):
                rows.append(here + position)
                slots.append(open_tables[r][full] * size + position % size)
        self._rows, self._slots = (
            torch.tensor(rows, dtype=torch.long),
            opened.row_index(torch.tensor(slots, dtype=torch.long)),
        )
        self._begun, self._whole = torch.tensor(begun, dtype=torch.long), torch.tensor(whole, dtype=torch.long)
        self._sealed_to = torch.tensor(begun_to + whole_to, dtype=torch.long)
        self._kind = packed_kind(sealed)
        self._plan = backend.plan_packed(batch, group, sealed.spec)

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
        opened, sealed = self._opened.layers[layer], self._sealed.layers[layer]
        new_k, new_v = encode(k, opened.k.dtype).contiguous(), encode(v, opened.v.dtype).contiguous()
        if len(self._rows):
            self._opened.write(layer, self._slots, k[self._rows], v[self._rows])
        if len(self._sealed_to):  # before anything is read: later blocks read what the codec keeps of these
            self._sealed.seal(layer, self._sealed_to, self._filled(new_k, opened.k), self._filled(new_v, opened.v))
        return self._backend.attend(
            q,
            opened,
            self._plan,
            scale=scale,
            q_sink=q_sink,
            softcap=softcap,
            packed=PackedBlocks(self._kind, sealed.k, sealed.v, new_k, new_v),
        )

    def _filled(self, new: Tensor, opened: Tensor) -> Tensor:
        """The blocks that become full, exact: [n, Hkv, T, D]."""
        size, heads, width = opened.shape[2], new.shape[1], new.shape[2]
        whole = new[self._whole].view(-1, size, heads, width).transpose(1, 2)
        return torch.cat((opened[self._begun], whole)) if len(self._begun) else whole


def packed_kind(pool: PackedPool) -> PackedKind:
    """How a pool's blocks are packed, to the kernels."""

    def part(name: Part, codec: str, num_bytes: int) -> tuple[int, int, int, int]:
        if not is_packed(codec):
            return 0, 0, 1, num_bytes
        layout = packed_layout(name, codec, pool.spec.block_size, pool.spec.head_dim)
        return layout.bits, int(layout.by_channel), layout.group, num_bytes

    return PackedKind(
        pool.num_blocks,
        part("key", pool.spec.key_codec, pool.k.shape[-1]),
        part("value", pool.spec.value_codec, pool.v.shape[-1]),
    )
