"""What the attention tests share: the formula written out in float64, and batches over a shuffled, poisoned cache."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from kvine.attention.base import Batch, GroupBatch
from kvine.attention.cached import AttentionLayer, CachedAttention
from kvine.attention.native import NativeBackend
from kvine.attention.reference import ReferenceBackend
from kvine.attention.sdpa import SdpaBackend
from kvine.cache.manager import CachedSequence, CacheManager
from kvine.cache.pool import KVPool
from kvine.cache.spec import CacheSpec
from kvine.rope import RopeConfig, RotaryEmbedding

CPU = torch.device("cpu")
DIM = 8
BACKENDS = (ReferenceBackend, SdpaBackend, NativeBackend)
HEADS = ((4, 4), (4, 2), (4, 1), (6, 2), (6, 3), (8, 2))  # query heads, KV heads
NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


def attention_formula(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    start: int,
    *,
    scale: float,
    window: int | None = None,
    sinks: int = 0,
    kept: Sequence[tuple[int, int]] = (),
    q_sink: Tensor | None = None,
    softcap: float | None = None,
) -> np.ndarray:
    """Softmax attention in float64, one query and one head at a time.

    q, q_sink [n, Hq, D] stand at start … start + n - 1; k and v [L, Hkv, D] at 0 … L - 1.
    """
    queries, keys, values = (x.double().numpy() for x in (q, k, v))
    to_sinks = queries if q_sink is None else q_sink.double().numpy()
    out = np.empty_like(queries)
    for i in range(len(queries)):
        p = start + i
        always = {*range(sinks), *(j for run in kept for j in range(*run))}
        seen = np.array([j for j in range(p + 1) if window is None or j > p - window or j in always])
        for head in range(queries.shape[1]):
            kv_head = head // (queries.shape[1] // keys.shape[1])
            near, far = keys[seen, kv_head] @ queries[i, head], keys[seen, kv_head] @ to_sinks[i, head]
            scores = np.where(seen < sinks, far, near) * scale
            if softcap is not None:
                scores = softcap * np.tanh(scores / softcap)
            weights = np.exp(scores - scores.max())
            out[i, head] = (weights / weights.sum()) @ values[seen, kv_head]
    return out


def batch_of(tables: Sequence[Sequence[Sequence[int]]], spans: Sequence[tuple[int, int]], block_size: int) -> Batch:
    """A batch in which request r computes positions spans[r]; tables[group][r] are its blocks."""
    positions = torch.tensor([p for start, end in spans for p in range(start, end)])
    starts = [0]
    for start, end in spans:
        starts.append(starts[-1] + end - start)
    groups = []
    for group in tables:
        slots = [
            group[r][p // block_size] * block_size + p % block_size
            for r, (start, end) in enumerate(spans)
            for p in range(start, end)
        ]
        groups.append(GroupBatch([list(table) for table in group], torch.tensor(slots)))
    nothing = torch.empty(0, dtype=torch.long)
    return Batch(torch.zeros_like(positions), positions, starts, [end for _, end in spans], tuple(groups), nothing)


class Text:
    """Random q, k and v of one request in every layer, unrotated: [layers, N, heads, D]."""

    def __init__(
        self, length: int, heads: tuple[int, int], *, layers: int = 1, dtype: torch.dtype = torch.float32, seed: int = 0
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.q, self.k, self.v = (
            torch.randn(layers, length, n, DIM, generator=generator).to(dtype) for n in (heads[0], heads[1], heads[1])
        )


class Cache:
    """A manager, its pools (poisoned with NaN) and `CachedAttention` over them: an engine without a model."""

    def __init__(
        self,
        specs: Sequence[CacheSpec],
        backend: type[ReferenceBackend] | type[SdpaBackend] | type[NativeBackend],
        rope: RopeConfig,
        dtype: torch.dtype = torch.float32,
        *,
        scale: float = 0.3,
        softcap: float | None = None,
        blocks: int = 60,
    ) -> None:
        budget = blocks * sum(spec.bytes_per_block(NAMES[dtype]) for spec in specs)
        self.manager = CacheManager(specs, budget, dtype=NAMES[dtype], capacities=[blocks] * len(specs))
        self.pools = [KVPool(spec, blocks, dtype, CPU) for spec in specs]
        for pool in self.pools:
            pool.k.fill_(torch.nan)
            pool.v.fill_(torch.nan)
        rotation = RotaryEmbedding(rope, CPU)
        group_of = {layer: (g, i) for g, spec in enumerate(specs) for i, layer in enumerate(spec.layers)}
        self.attention = CachedAttention(
            [AttentionLayer(*group_of[n], rotation) for n in range(len(group_of))],
            self.pools,
            [backend() for _ in specs],
            scale=scale,
            softcap=softcap,
        )
        self._texts: list[tuple[Text, CachedSequence, list[Tensor]]] = []

    def add(self, text: Text) -> None:
        """Begins a request."""
        self._texts.append((text, self.manager.open(()), []))

    def step(self, counts: Sequence[int]) -> None:
        """Computes the next counts[r] tokens of every request r, side by side."""
        chosen = [(item, count) for item, count in zip(self._texts, counts, strict=True) if count]
        for (_, sequence, _), count in chosen:
            assert self.manager.reserve(sequence, count)
        for copy in self.manager.take_copies():
            self.pools[copy.shelf].copy([copy])
        spans = [(s.num_tokens, s.num_tokens + count) for (_, s, _), count in chosen]
        tables = [[s.tables[g] for (_, s, _), _ in chosen] for g in range(len(self.pools))]
        attend = self.attention.step(batch_of(tables, spans, self.manager.block_size))
        layers = []
        for layer in range(len(self.attention.layers)):
            parts = [
                (text.q[layer, a:b], text.k[layer, a:b], text.v[layer, a:b])
                for ((text, _, _), _), (a, b) in zip(chosen, spans, strict=True)
            ]
            layers.append(attend(layer, *map(torch.cat, zip(*parts, strict=True))))
        out = torch.stack(layers)  # [layers, N, Hq, D]
        for (_, sequence, outs), count in chosen:
            outs.append(out[:, :count])
            out = out[:, count:]
            self.manager.commit(sequence, [0] * count)
        self.manager.check()

    def sequence(self, r: int) -> CachedSequence:
        """The manager's sequence of request r."""
        return self._texts[r][1]

    def out(self, r: int) -> Tensor:
        """All outputs of request r so far, [layers, N, Hq, D]."""
        return torch.cat(self._texts[r][2], dim=1)
