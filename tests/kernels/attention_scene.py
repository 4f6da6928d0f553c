"""What the tests of the attention kernels share: requests over shuffled blocks, and the formula in float64."""

from collections.abc import Sequence

import torch
from torch import Tensor

from kvine.kernels import Kernels

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
EPS32 = torch.finfo(torch.float32).eps


class Scene:
    """Requests of given lengths, each computing its last `queries` tokens; what no query may read is NaN.

    Row by row of q, `rows` says which request's query at which position it is.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        queries: Sequence[int] | None = None,
        *,
        heads: tuple[int, int] = (6, 2),
        width: int = 64,
        block_size: int = 16,
        dtype: torch.dtype = torch.float32,
        kv_dtypes: tuple[torch.dtype, torch.dtype] | None = None,
        window: int | None = None,
        sinks: int = 0,
        kept: Sequence[tuple[int, int]] = (),
        moved: bool = False,
        softcap: float | None = None,
        spread: float = 1.0,
        seed: int = 0,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.lengths, self.window, self.sinks, self.softcap = list(lengths), window, sinks, softcap
        self.kept = list(kept)
        self.queries = [1] * len(lengths) if queries is None else list(queries)
        self.block_size, self.width, self.scale = block_size, width, width**-0.5
        self.rows = [
            (r, position)
            for r, (length, count) in enumerate(zip(self.lengths, self.queries, strict=True))
            for position in range(length - count, length)
        ]
        needed = [-(-length // block_size) for length in lengths]
        order = torch.randperm(sum(needed) + 3, generator=generator).tolist()
        self.tables = [[order.pop() for _ in range(count)] for count in needed]
        shape = (sum(needed) + 3, heads[1], block_size, width)
        self.k, self.v = (torch.full(shape, torch.nan, dtype=stored) for stored in kv_dtypes or (dtype, dtype))
        for r, (length, count) in enumerate(zip(self.lengths, self.queries, strict=True)):
            start = self.start(length - count)
            seen = torch.tensor([p for p in range(length) if self.is_kept(p) or p >= start])
            for stored in (self.k, self.v):
                values = torch.randn(len(seen), heads[1], width, generator=generator).to(stored.dtype)
                stored[self.places(r, seen)] = values
        self.q = (torch.randn(len(self.rows), heads[0], width, generator=generator) * spread).to(dtype)
        self.q_sink = torch.randn(self.q.shape, generator=generator).to(dtype) if moved else None

    def start(self, position: int) -> int:
        """The first key that the window of a query at a position reaches."""
        return 0 if self.window is None else max(0, position + 1 - self.window)

    def is_kept(self, position: int) -> bool:
        """Whether a key is read whatever the window."""
        return position < self.sinks or any(first <= position < end for first, end in self.kept)

    def places(self, r: int, positions: Tensor) -> tuple[Tensor, slice, Tensor]:
        """Where in k and v a request's positions are: [n, heads, width]."""
        return torch.tensor(self.tables[r])[positions // self.block_size], slice(None), positions % self.block_size

    def decode(self, native: Kernels, rows: Sequence[int] | None = None) -> Tensor:
        """These rows (all of them) one by one; 7 in the others."""
        requests: list[int] = []
        tables: list[int] = []
        rows = range(len(self.rows)) if rows is None else rows
        for row in rows:
            r, position = self.rows[row]
            requests += (row, position + 1, self.start(position), len(tables), self.sinks, 0, len(self.kept))
            tables += self.tables[r][: position // self.block_size + 1]
            requests.append(len(tables))
            tables += [bound for run in self.kept for bound in run]
        out = torch.full_like(self.q, 7)
        native.decode(
            self.q,
            self.k,
            self.v,
            torch.tensor(requests + tables, dtype=torch.long),
            out,
            num_requests=len(rows),
            scale=self.scale,
            q_sink=self.q_sink,
            softcap=self.softcap,
        )
        return out

    def prefill(self, native: Kernels, spans: Sequence[tuple[int, int, int]] | None = None) -> Tensor:
        """Requests' queries begin to end, as (request, begin, end) by position (all of them); 7 in the others."""
        if spans is None:
            counts = enumerate(zip(self.lengths, self.queries, strict=True))
            spans = [(r, length - count, length) for r, (length, count) in counts]
        requests: list[int] = []
        tables: list[int] = []
        for r, begin, end in spans:
            requests += (self.rows.index((r, begin)), end - begin, end, len(tables), self.sinks, len(self.kept))
            tables += self.tables[r][: -(-end // self.block_size)]
            requests.append(len(tables))
            tables += [bound for run in self.kept for bound in run]
        out = torch.full_like(self.q, 7)
        native.prefill(
            self.q,
            self.k,
            self.v,
            torch.tensor(requests + tables, dtype=torch.long),
            out,
            num_requests=len(spans),
            window=self.window,
            scale=self.scale,
            q_sink=self.q_sink,
            softcap=self.softcap,
        )
        return out

    def check(self, out: Tensor, every: int = 1) -> None:
        """The scores' error, of fp32 sums over the width, is one of the weights; the result is rounded once."""
        group, limits = self.q.shape[1] // self.k.shape[1], torch.finfo(out.dtype)
        for row, (r, position) in list(enumerate(self.rows))[::every]:
            seen = torch.arange(position + 1)
            always = torch.tensor([self.is_kept(int(key)) for key in seen])
            seen = seen[(seen >= self.start(position)) | always]
            place, sink = self.places(r, seen), (seen < self.sinks)[:, None]
            keys, values = (x[place].double().repeat_interleave(group, 1) for x in (self.k, self.v))  # [n, Hq, D]
            query = self.q[row].double()
            query = query.where(~sink[..., None], query if self.q_sink is None else self.q_sink[row].double())
            scores = (keys * query).sum(-1) * self.scale  # [n, Hq]
            magnitude = (keys * query).abs().sum(-1) * self.scale
            if self.softcap is not None:
                scores = self.softcap * torch.tanh(scores / self.softcap)
            weights = scores.softmax(0)[..., None]
            exact = (weights * values).sum(0)  # [Hq, D]
            error = EPS32 * (
                (self.width + 4) * magnitude.amax(0) + 4 * scores.abs().amax(0) + 4 + len(seen) / 8
            )  # [Hq]
            bound = 2 * error[:, None] * (weights * values.abs()).sum(0) + exact.abs() * limits.eps / 2
            assert bool(((out[row].double() - exact).abs() <= bound + limits.smallest_normal).all()), (r, position)
