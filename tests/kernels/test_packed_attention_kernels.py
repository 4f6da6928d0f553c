"""Attention over packed blocks: bit for bit that over what they hold, unpacked beforehand."""

import itertools
import random
from collections.abc import Sequence

import pytest
import torch
from attention_scene import DTYPES
from torch import Tensor

from kvine import kernels
from kvine.cache.codec import DTYPES as STORED
from kvine.cache.codec import pack, unpack
from kvine.cache.layout import Part, is_packed, packed_layout, unpackable
from kvine.kernels import Kernels, PackedBlocks, PackedKind

every_path = pytest.mark.parametrize("path", kernels.available())
CODECS = ("int8", "int4", "int2", "int8-token", "int4-token", "int2-token", "fp16")


class _Part:
    """Keys or values of all blocks: exact, packed, and unpacked; [blocks, heads, size, width]."""

    def __init__(self, name: Part, codec: str, exact: Tensor) -> None:
        size, width = exact.shape[2:]
        if is_packed(codec):
            layout = packed_layout(name, codec, size, width)
            self.exact, self.packed = exact, pack(exact, layout)
            self.unpacked = unpack(self.packed, layout)
            self.kind = (layout.bits, int(layout.by_channel), layout.group, layout.num_bytes)
        else:
            self.exact = exact.to(STORED[codec])
            self.packed = self.exact.flatten(-2).view(torch.uint8)
            self.unpacked = self.exact.float()
            self.kind = (0, 0, 1, self.packed.shape[-1])


class PackedScene:
    """Requests over shuffled blocks, of which each computes its last `queries` tokens."""

    def __init__(
        self,
        lengths: Sequence[int],
        queries: Sequence[int],
        codecs: tuple[str, str],
        *,
        heads: tuple[int, int] = (6, 2),
        width: int = 64,
        block_size: int = 32,
        dtype: torch.dtype = torch.float32,
        window: int | None = None,
        sinks: int = 0,
        kept: Sequence[tuple[int, int]] = (),
        softcap: float | None = None,
        seed: int = 0,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.lengths, self.queries, self.size = list(lengths), list(queries), block_size
        self.window, self.sinks, self.kept, self.softcap = window, sinks, kept, softcap
        counts = [-(-length // block_size) for length in lengths]
        order = torch.randperm(sum(counts), generator=generator).tolist()
        self.tables = [[order.pop() for _ in range(count)] for count in counts]
        shape = (sum(counts), heads[1], block_size, width)
        exact = [torch.randn(shape, generator=generator).to(dtype) for _ in range(2)]
        self.parts = [_Part("key", codecs[0], exact[0]), _Part("value", codecs[1], exact[1])]
        self.q = torch.randn((sum(queries), heads[0], width), generator=generator).to(dtype)
        self.q_sink = torch.randn(self.q.shape, generator=generator).to(dtype) if sinks else None
        self.rows = [(r, p) for r, end in enumerate(lengths) for p in range(end - queries[r], end)]

    def _blocks(self, new: Sequence[Tensor]) -> PackedBlocks:
        keys, values = self.parts
        return PackedBlocks(
            PackedKind(len(keys.packed), keys.kind, values.kind), keys.packed, values.packed, new[0], new[1]
        )

    def _single(self, number: int) -> tuple[Tensor, Tensor]:
        """The plan of every query by itself, whose own block is `number` blocks further on; and where it goes."""
        requests: list[int] = []
        tables: list[int] = []
        for row, (r, position) in enumerate(self.rows):
            start = 0 if self.window is None else max(0, position + 1 - self.window)
            requests += (row, position + 1, start, len(tables), self.sinks, kernels.NEVER, len(self.kept))
            own = position // self.size
            tables += [*self.tables[r][:own], self.tables[r][own] + number]
            requests.append(len(tables))
            tables += [bound for run in self.kept for bound in run]
        return torch.tensor(requests + tables), torch.full_like(self.q, 7)

    def decode(self, native: Kernels, *, packed: bool) -> Tensor:
        """Every query by itself: over packed blocks, or over the same unpacked."""
        if packed:
            plan, out = self._single(0)
            k, v = (part.exact for part in self.parts)
        else:
            plan, out = self._single(len(self.parts[0].exact))
            k, v = (torch.cat((part.unpacked, part.exact.float())) for part in self.parts)
        native.decode(
            self.q,
            k,
            v,
            plan,
            out,
            num_requests=len(self.rows),
            scale=self.q.shape[-1] ** -0.5,
            q_sink=self.q_sink,
            softcap=self.softcap,
            packed=self._blocks((k, v)) if packed else None,
        )
        return out

    def prefill(self, native: Kernels, wrong: dict[int, int] | None = None) -> Tensor:
        """All queries of a request at once. Of open blocks only the tokens before them are there.

        `wrong` blocks take the place of those in the tables.
        """
        requests: list[int] = []
        tables: list[int] = []
        opened = [torch.full_like(part.exact, torch.nan) for part in self.parts]
        new = [torch.empty((len(self.rows), *part.exact.shape[1::2]), dtype=part.exact.dtype) for part in self.parts]
        for row, (r, position) in enumerate(self.rows):
            for rows, part in zip(new, self.parts, strict=True):
                rows[row] = part.exact[self.tables[r][position // self.size], :, position % self.size]
        row = 0
        for r, (length, count) in enumerate(zip(self.lengths, self.queries, strict=True)):
            block, begun = divmod(length - count, self.size)
            requests += (row, count, length, len(tables), self.sinks, len(self.kept))
            tables += [*self.tables[r], self.tables[r][block] if begun else -1]
            requests.append(len(tables))
            tables += [bound for run in self.kept for bound in run]
            for blocks, part in zip(opened, self.parts, strict=True):
                blocks[self.tables[r][block], :, :begun] = part.exact[self.tables[r][block], :, :begun]
            row += count
        for place, block in (wrong or {}).items():
            tables[place] = block
        out = torch.full_like(self.q, 7)
        native.prefill(
            self.q,
            opened[0],
            opened[1],
            torch.tensor(requests + tables),
            out,
            num_requests=len(self.lengths),
            window=self.window,
            scale=self.q.shape[-1] ** -0.5,
            q_sink=self.q_sink,
            softcap=self.softcap,
            packed=self._blocks(new),
        )
        return out


def all_alike(native: Kernels, scene: PackedScene) -> None:
    expected = scene.decode(native, packed=False)
    assert expected.isfinite().all()
    assert torch.equal(scene.decode(native, packed=True), expected)
    assert torch.equal(scene.prefill(native), expected)


@every_path
@pytest.mark.parametrize("codec", CODECS)
def test_every_shape(path: str, codec: str) -> None:
    """Those that are read as they lie, and those that are not."""
    native, checked = kernels.load(path), 0
    for block_size, width in itertools.product((4, 16, 24, 32, 64, 128), (32, 64, 80, 96, 128, 256)):
        if any(unpackable(part, codec, block_size, width) for part in ("key", "value")):
            continue
        heads = ((3, 1), (2, 2), (7, 1), (9, 3))[checked % 4]
        scene = PackedScene([150, 40], [9, 40], (codec, codec), heads=heads, width=width, block_size=block_size)
        all_alike(native, scene)
        checked += 1
    assert checked >= 25


@every_path
def test_scenes_drawn_at_random(path: str) -> None:
    native, chance = kernels.load(path), random.Random(path)
    for seed in range(40):
        block_size, width = chance.choice((8, 16, 32, 64)), chance.choice((8, 32, 64, 128))
        lengths = [chance.randint(1, chance.choice((9, 90, 400))) for _ in range(chance.randint(1, 4))]
        kv_heads = chance.randint(1, 3)
        scene = PackedScene(
            lengths,
            [chance.randint(1, min(length, 140)) for length in lengths],
            (chance.choice(CODECS), chance.choice(CODECS)),
            heads=(kv_heads * chance.randint(1, 8), kv_heads),
            width=width,
            block_size=block_size,
            dtype=chance.choice(DTYPES),
            window=chance.choice((None, chance.randint(1, 200))),
            sinks=chance.choice((0, 0, 1, 5, 65)),
            kept=sorted(
                (a, a + chance.randint(1, 50)) for a in chance.sample(range(66, 400, 55), chance.choice((0, 2)))
            ),
            softcap=chance.choice((None, 2.0)),
            seed=seed,
        )
        all_alike(native, scene)


@every_path
def test_a_nan_is_seen_by_those_who_may_see_it(path: str) -> None:
    """Later blocks see a NaN in all of its group, which token 37 is in, and its own block from that token on."""
    native = kernels.load(path)
    for codec, number in itertools.product(("int8", "int4", "int2"), (0, 1)):
        scene = PackedScene([120], [120], (codec, codec))
        part = scene.parts[number]
        part.exact[scene.tables[0][1], 1, 5, 3] = torch.nan
        part.packed.copy_(pack(part.exact, packed_layout("value" if number else "key", codec, 32, 64)))
        for out in (scene.decode(native, packed=True), scene.prefill(native)):
            finite = out.isfinite().all(-1)  # [N, Hq]
            assert finite[:37].all() and finite[:, :3].all() and not finite[37:, 3:].any(), (codec, number)


@every_path
def test_a_block_that_there_is_not_is_refused_where_it_is_seen(path: str) -> None:
    native = kernels.load(path)
    for window, table, bad in itertools.product((None, 20), range(3), (-1, 99)):
        scene = PackedScene([90], [10], ("int8", "int8"), window=window)  # queries from 80 on, in block 2
        scene.tables[0][table] = bad
        if window and table == 0:
            assert scene.decode(native, packed=True).isfinite().all()
            continue
        with pytest.raises(IndexError, match="no such block"):
            scene.decode(native, packed=True)
    for window, table, bad in itertools.product((None, 20), range(4), (-1, 99)):
        scene = PackedScene([90], [10], ("int8", "int8"), window=window)
        if table == 2 or (window and table == 0):  # none of them reads its own block as packed
            assert scene.prefill(native, {table: bad}).isfinite().all()
            continue
        with pytest.raises(IndexError, match="no such block"):
            scene.prefill(native, {table: bad})
