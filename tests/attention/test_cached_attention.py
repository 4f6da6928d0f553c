"""The engine's attention through its cache, blocks dying and coming back, against attention that has no cache."""

from collections.abc import Sequence

import pytest
import torch
from scenes import BACKENDS, CPU, DIM, HEADS, NAMES, Cache, Text

from kvine.attention.base import Backend
from kvine.attention.dense import DenseAttention, DenseLayer
from kvine.cache.spec import CacheSpec
from kvine.rope import RopeConfig, RotaryEmbedding, rotate

ROPE = RopeConfig(theta=100.0, rotary_dim=DIM)
SCALE = 0.3


def dense(text: Text, specs: Sequence[CacheSpec], *, softcap: float | None = None) -> torch.Tensor:
    """All of a text's outputs, computed anew without a cache: [layers, N, Hq, D]."""
    rope = RotaryEmbedding(ROPE, CPU)
    by_layer = {
        layer: DenseLayer(rope, spec.window, spec.sink_tokens, spec.sink_rule == "in_cache")
        for spec in specs
        for layer in spec.layers
    }
    attend = DenseAttention([by_layer[n] for n in range(len(by_layer))], scale=SCALE, softcap=softcap)
    return torch.stack([attend(n, text.q[n], text.k[n], text.v[n]) for n in range(len(by_layer))])


def groups(heads: int, *, block_size: int = 4, sink_rule: str = "absolute", sinks: int = 3) -> tuple[CacheSpec, ...]:
    """Two layers that see all, and one between them with a window and sinks."""
    return (
        CacheSpec((0, 2), heads, DIM, block_size=block_size),
        CacheSpec((1,), heads, DIM, block_size=block_size, window=9, sink_tokens=sinks, sink_rule=sink_rule),  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("sink_rule", ["absolute", "in_cache"])
@pytest.mark.parametrize("block_size", [1, 3, 4, 32])
@pytest.mark.parametrize("backend", BACKENDS)
def test_ragged_steps_are_what_a_whole_text_without_a_cache_is(
    backend: type[Backend], block_size: int, sink_rule: str, softcap: float | None
) -> None:
    specs = groups(2, block_size=block_size, sink_rule=sink_rule)
    cache = Cache(specs, backend, ROPE, scale=SCALE, softcap=softcap, blocks=100)
    texts = [Text(length, (4, 2), layers=3, seed=seed) for seed, length in enumerate((40, 23, 31))]
    for text in texts:
        cache.add(text)
    # Uneven chunks, decode beside prefill, a request that joins late and one that ends early.
    for counts in ((7, 0, 1), (1, 5, 1), (20, 1, 13), (1, 17, 1), (1, 0, 14), (10, 0, 1)):
        cache.step(counts)
    for r, text in enumerate(texts):
        torch.testing.assert_close(cache.out(r), dense(text, specs, softcap=softcap), rtol=0, atol=1e-5)


@pytest.mark.parametrize(("query_heads", "kv_heads"), HEADS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a18_each_query_head_reads_its_own_kv_head(backend: type[Backend], query_heads: int, kv_heads: int) -> None:
    specs = groups(kv_heads)
    cache = Cache(specs, backend, ROPE, scale=SCALE)
    text = Text(30, (query_heads, kv_heads), layers=3)
    text.v[:] = torch.arange(1, kv_heads + 1)[:, None] * 10.0
    cache.add(text)
    for count in (17, 1, 1, 11):
        cache.step([count])
    expected = (torch.arange(query_heads) // (query_heads // kv_heads) + 1)[:, None] * 10.0
    for out in (cache.out(0), dense(text, specs)):
        torch.testing.assert_close(out, expected.expand_as(out))
    assert all(pool.k.shape[2] == pool.v.shape[2] == kv_heads for pool in cache.pools)


@pytest.mark.parametrize("codec", ["exact", "fp32", "fp16", "bf16"])
@pytest.mark.parametrize("dtype", NAMES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a14_attention_reads_values_as_their_codec_keeps_them(
    backend: type[Backend], dtype: torch.dtype, codec: str
) -> None:
    spec = CacheSpec((0,), 2, DIM, block_size=4, key_codec=codec, value_codec=codec)
    text = Text(19, (4, 2), dtype=dtype)
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)  # must not matter
    try:
        cache = Cache([spec], backend, ROPE, dtype, scale=SCALE)
        cache.add(text)
        for count in (12, 1, 6):
            cache.step([count])
    finally:
        torch.set_default_dtype(default)
    stored = {"exact": dtype, "fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[codec]
    assert cache.pools[0].k.dtype == cache.pools[0].v.dtype == stored
    assert cache.out(0).dtype == dtype

    cos, sin = RotaryEmbedding(ROPE, CPU).cos_sin(torch.arange(19))
    q, k = rotate(text.q[0], cos, sin).double(), rotate(text.k[0], cos, sin).to(stored).to(dtype).double()
    v = text.v[0].to(stored).to(dtype).double()
    k, v = k.repeat_interleave(2, dim=1), v.repeat_interleave(2, dim=1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * SCALE
    scores = scores.masked_fill(torch.ones(19, 19, dtype=torch.bool).triu(1), -torch.inf)
    expected = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)
    tolerance = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 16e-3}[dtype]
    torch.testing.assert_close(cache.out(0)[0].double(), expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a14_fp16_storage_of_huge_values_stays_finite(backend: type[Backend], dtype: torch.dtype) -> None:
    spec = CacheSpec((0,), 1, DIM, block_size=4, key_codec="fp16", value_codec="fp16")
    cache = Cache([spec], backend, ROPE, dtype, scale=1e-6)
    text = Text(9, (2, 1), dtype=dtype)
    text.k *= 1e6
    text.v[:] = 1e6
    cache.add(text)
    cache.step([8])
    cache.step([1])
    out = cache.out(0).double()
    torch.testing.assert_close(out, torch.full_like(out, 65504.0), rtol=4e-3, atol=0)


@pytest.mark.parametrize("dtype", NAMES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a02_batch_mates_change_no_bit_and_nothing_is_nan(backend: type[Backend], dtype: torch.dtype) -> None:
    specs = groups(2, sink_rule="in_cache")
    texts = [Text(length, (4, 2), layers=3, dtype=dtype, seed=length) for length in (33, 1, 2, 17)]
    steps = ((30, 1, 2, 1), (1, 0, 0, 15), (1, 0, 0, 1), (1, 0, 0, 0))
    together = Cache(specs, backend, ROPE, dtype, scale=SCALE)
    for text in texts:
        together.add(text)
    for counts in steps:
        together.step(counts)
    for r, text in enumerate(texts):
        alone = Cache(specs, backend, ROPE, dtype, scale=SCALE)
        alone.add(text)
        for count in (counts[r] for counts in steps if counts[r]):
            alone.step([count])
        assert torch.isfinite(together.out(r)).all()
        assert torch.equal(together.out(r), alone.out(0))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a02_a_batch_mate_full_of_nan_spoils_nobody_else(backend: type[Backend]) -> None:
    specs = groups(2)
    sound, spoilt = (Text(30, (4, 2), layers=3, seed=seed) for seed in (0, 1))
    spoilt.k[:], spoilt.v[:] = torch.inf, torch.nan
    cache = Cache(specs, backend, ROPE, scale=SCALE)
    cache.add(spoilt)  # takes block 0 first
    cache.add(sound)
    for _ in range(6):
        cache.step([5, 5])
    torch.testing.assert_close(cache.out(1), dense(sound, specs), rtol=0, atol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_two_windows_with_sinks_may_share_a_rotation(backend: type[Backend]) -> None:
    specs = [
        CacheSpec((0,), 2, DIM, block_size=4, window=6, sink_tokens=3, sink_rule="in_cache"),
        CacheSpec((1,), 2, DIM, block_size=4, window=10, sink_tokens=1, sink_rule="in_cache"),
    ]
    text = Text(30, (4, 2), layers=2)
    cache = Cache(specs, backend, ROPE, scale=SCALE)
    cache.add(text)
    for _ in range(6):
        cache.step([5])
    torch.testing.assert_close(cache.out(0), dense(text, specs), rtol=0, atol=1e-5)
