"""Each backend against attention written out in float64, over everything a batch and a spec may be."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from unittest.mock import patch

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from scenes import BACKENDS, CPU, DIM, HEADS, attention_formula, batch_of

from kvine.attention import sdpa
from kvine.attention.base import Backend, Batch
from kvine.attention.sdpa import SdpaBackend
from kvine.cache.pool import KVPool
from kvine.cache.sequence import MISSING
from kvine.cache.spec import CacheSpec
from kvine.spans import Spans

SCALE = 0.4


@dataclass
class Scene:
    """A step's inputs, as a backend gets them, and what every request's past is."""

    spec: CacheSpec
    spans: list[tuple[int, int]]
    batch: Batch
    pool: KVPool
    q: torch.Tensor
    q_sink: torch.Tensor | None
    softcap: float | None
    pasts: list[tuple[torch.Tensor, torch.Tensor]]

    def attend(self, backend: Backend) -> torch.Tensor:
        plan = backend.plan(self.batch, 0, self.spec)
        return backend.attend(self.q, self.pool.layers[0], plan, scale=SCALE, q_sink=self.q_sink, softcap=self.softcap)

    def expected(self) -> torch.Tensor:
        outs = []
        for r, (start, _) in enumerate(self.spans):
            rows = slice(self.batch.query_start[r], self.batch.query_start[r + 1])
            spec = self.batch.spec_of(r, self.spec)
            outs.append(
                attention_formula(
                    self.q[rows],
                    *self.pasts[r],
                    start,
                    scale=SCALE,
                    window=spec.window,
                    sinks=spec.sink_tokens,
                    kept=spec.kept,
                    q_sink=None if self.q_sink is None else self.q_sink[rows],
                    softcap=self.softcap,
                )
            )
        return torch.cat([torch.from_numpy(out) for out in outs])


def scene_of(
    spec: CacheSpec,
    query_heads: int,
    spans: list[tuple[int, int]],
    *,
    dtype: torch.dtype = torch.float32,
    softcap: float | None = None,
    seed: int = 0,
    pinned: Sequence[Spans] = (),
) -> Scene:
    """Blocks have shuffled ids; whatever the requests must not read, dead and unwritten slots alike, is NaN."""
    generator = torch.Generator().manual_seed(seed)
    size = spec.block_size
    total = sum(spec.num_blocks(end) for _, end in spans) + 3
    free = (torch.randperm(total - 1, generator=generator) + 1).tolist()  # nobody holds block 0
    pool = KVPool(spec, total, dtype, CPU)
    pool.k.fill_(torch.nan)
    pool.v.fill_(torch.nan)
    tables, pasts = [], []
    for r, (start, end) in enumerate(spans):
        table = [free.pop() for _ in range(spec.num_blocks(end))]
        for block in spec.keeping(pinned[r] if pinned else ()).dead_blocks(start):
            table[block] = MISSING
        k, v = (torch.randn(end, spec.num_kv_heads, DIM, generator=generator).to(dtype) for _ in range(2))
        held = torch.tensor([p for p in range(end) if table[p // size] != MISSING])
        slots = torch.tensor([table[p // size] * size + p % size for p in held.tolist()])
        pool.write(0, pool.row_index(slots), k[held], v[held])
        tables.append(table)
        pasts.append((k, v))
    batch = replace(batch_of([tables], spans, size), pinned=pinned)
    n = len(batch.positions)
    q = torch.randn(n, query_heads, DIM, generator=generator).to(dtype)
    q_sink = None
    limits = [batch.spec_of(r, spec).sinks_move_from for r in range(len(spans))]
    if any(limit is not None and end > limit for limit, (_, end) in zip(limits, spans, strict=True)):
        # Queries that have not gone so far read the sinks as they read the rest.
        q_sink = torch.randn(n, query_heads, DIM, generator=generator).to(dtype)
        for r, limit in enumerate(limits):
            rows = torch.arange(batch.query_start[r], batch.query_start[r + 1])
            near = rows[batch.positions[rows] < (n + 1000 if limit is None else limit)]
            q_sink[near] = q[near]
    return Scene(spec, spans, batch, pool, q, q_sink, softcap, pasts)


@st.composite
def scenes(draw: st.DrawFn, dtype: torch.dtype = torch.float32) -> Scene:
    query_heads, kv_heads = draw(st.sampled_from(HEADS))
    window = draw(st.none() | st.integers(1, 12))
    spec = CacheSpec(
        layers=(0,),
        num_kv_heads=kv_heads,
        head_dim=DIM,
        block_size=draw(st.sampled_from((1, 3, 4, 32))),
        window=window,
        sink_tokens=0 if window is None else draw(st.integers(0, 6)),
        sink_rule=draw(st.sampled_from(("absolute", "in_cache"))),
    )
    spans = []
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.just(0) | st.integers(0, 40))
        spans.append((start, start + draw(st.just(1) | st.integers(1, 20))))
    softcap = draw(st.sampled_from((None, None, 2.0)))
    runs = st.tuples(st.integers(0, 30), st.integers(1, 9)).map(lambda run: (run[0], run[0] + run[1]))
    if spec.sink_rule == "in_cache":  # only the beginning has a place among sinks in the cache
        kept = st.just(()) | st.integers(1, 12).map(lambda end: ((0, end),))
    else:
        kept = st.just(()) | st.lists(runs, max_size=2).map(tuple)
    pinned = draw(st.just(()) | st.lists(kept, min_size=len(spans), max_size=len(spans)))
    seed = draw(st.integers(0, 1000))
    return scene_of(
        spec.keeping(draw(kept)), query_heads, spans, dtype=dtype, softcap=softcap, seed=seed, pinned=pinned
    )


matrix = settings(max_examples=120, derandomize=True, deadline=None)


@matrix
@given(scene=scenes(), tile=st.sampled_from((2, 5, 256)))
def test_every_backend_is_the_formula(scene: Scene, tile: int) -> None:
    expected = scene.expected()
    for backend in BACKENDS:
        with patch.object(sdpa, "TILE", tile):
            out = scene.attend(backend())
        assert out.dtype == torch.float32 and out.shape == scene.q.shape
        torch.testing.assert_close(out.double(), expected, rtol=0, atol=1e-5)


# Measured over 150 scenes: 8.2e-3 and 9.8e-4 at most, half a unit in the last place of values up to 4.
TOLERANCE = {torch.bfloat16: 16e-3, torch.float16: 2e-3}


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_a02_low_precision_stays_close_and_never_turns_to_nan(dtype: torch.dtype) -> None:
    @settings(matrix, max_examples=40)
    @given(scene=scenes(dtype))
    def close(scene: Scene) -> None:
        for backend in BACKENDS:
            out = scene.attend(backend())
            assert out.dtype == dtype
            torch.testing.assert_close(out.double(), scene.expected(), rtol=0, atol=TOLERANCE[dtype])

    close()


def test_prompts_longer_than_a_tile_are_the_formula_too() -> None:
    """At its real size a tile is passed by the causal, the masked and the soft-capped path."""
    for window, sinks, softcap in ((None, 0, None), (None, 0, 2.0), (100, 3, None)):
        spec = CacheSpec((0,), 1, DIM, window=window, sink_tokens=sinks, sink_rule="in_cache")
        for spans in ([(0, 530)], [(70, 600), (40, 41)]):
            scene = scene_of(spec, 2, spans, softcap=softcap)
            torch.testing.assert_close(scene.attend(SdpaBackend()).double(), scene.expected(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a02_a_request_is_the_same_to_the_bit_alone_and_in_any_batch(
    backend: type[Backend], dtype: torch.dtype
) -> None:
    spans = [(0, 33), (0, 1), (31, 32), (5, 40), (60, 61), (0, 12)]
    for window, sinks, softcap in ((None, 0, None), (8, 0, None), (8, 3, None), (None, 0, 2.0)):
        spec = CacheSpec((0,), 2, DIM, block_size=4, window=window, sink_tokens=sinks)
        scene = scene_of(spec, 4, spans, dtype=dtype, softcap=softcap)
        together = scene.attend(backend())
        assert torch.isfinite(together).all()
        for r, span in enumerate(spans):
            rows = slice(scene.batch.query_start[r], scene.batch.query_start[r + 1])
            alone = Scene(
                spec,
                [span],
                batch_of([[scene.batch.groups[0].block_tables[r]]], [span], 4),
                scene.pool,
                scene.q[rows],
                None,
                softcap,
                [scene.pasts[r]],
            )
            assert torch.equal(alone.attend(backend()), together[rows]), span


@pytest.mark.parametrize(("query_heads", "kv_heads"), HEADS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a18_each_query_head_reads_its_own_kv_head(backend: type[Backend], query_heads: int, kv_heads: int) -> None:
    group = query_heads // kv_heads
    constants = torch.arange(1, kv_heads + 1, dtype=torch.float32) * 10
    for window, softcap in ((None, None), (5, None), (None, 2.0)):
        for span in ((0, 9), (20, 21), (4, 23)):  # prefill, decode, and a chunk of a prompt
            spec = CacheSpec((0,), kv_heads, DIM, block_size=4, window=window)
            scene = scene_of(spec, query_heads, [span], softcap=softcap)
            scene.pool.v[:] = constants[:, None, None]
            out = scene.attend(backend())
            for head in range(query_heads):
                expected = torch.full_like(out[:, head], (head // group + 1) * 10.0)
                torch.testing.assert_close(out[:, head], expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_backends_serve_every_spec(backend: type[Backend]) -> None:
    spec = CacheSpec((0,), 1, DIM, window=4, sink_tokens=2, sink_rule="in_cache", key_codec="fp16")
    assert backend().unsupported(spec, CPU) is None
