"""A09: attention sinks under scaled rotations. What is stored, and what is read, against raw K and V kept aside."""

import math

import numpy as np
import pytest
from scenes import BACKENDS, DIM, Cache, Text

from kvine.attention.base import Backend
from kvine.cache.sequence import MISSING
from kvine.cache.spec import CacheSpec
from kvine.rope import RopeConfig

SCALE = 0.35
WINDOW = 8
ROPES = {
    "default": RopeConfig(theta=10_000.0, rotary_dim=DIM),
    "partial": RopeConfig(theta=10_000.0, rotary_dim=DIM // 2),
    "llama3": RopeConfig(
        theta=500_000.0, rotary_dim=DIM, kind="llama3", factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0,
        original_context=16,
    ),
    "yarn": RopeConfig(theta=10_000.0, rotary_dim=DIM, kind="yarn", factor=4.0, original_context=32),
}  # fmt: skip


def frequencies(kind: str) -> tuple[np.ndarray, float]:
    """Radians per position of each pair, and the factor on cosine and sine, worked out apart from kvine.rope."""
    rope = ROPES[kind]
    base = rope.theta ** (-np.arange(0, rope.rotary_dim, 2, dtype=np.float64) / rope.rotary_dim)
    if kind == "llama3":
        wavelength = 2 * math.pi / base
        smooth = (16 / wavelength - 1.0) / (4.0 - 1.0)
        blended = (1 - smooth) * base / 32 + smooth * base
        return np.where(wavelength > 16 / 1.0, base / 32, np.where(wavelength < 16 / 4.0, base, blended)), 1.0
    if kind == "yarn":

        def dimension(turns: float) -> float:
            return DIM * math.log(32 / (turns * 2 * math.pi)) / (2 * math.log(10_000.0))

        low, high = max(math.floor(dimension(32.0)), 0), min(math.ceil(dimension(1.0)), DIM - 1)
        ramp = np.clip((np.arange(DIM // 2) - low) / (high - low), 0, 1)
        return base / 4 * ramp + base * (1 - ramp), 0.1 * math.log(4.0) + 1
    return base, 1.0


def rotated(x: np.ndarray, position: int, kind: str) -> np.ndarray:
    """[..., D] at one position: pairs (i, i + R/2) as complex numbers, turned."""
    table, factor = frequencies(kind)
    half = len(table)
    turned = (x[..., :half] + 1j * x[..., half : 2 * half]) * np.exp(1j * position * table) * factor
    return np.concatenate([turned.real, turned.imag, x[..., 2 * half :]], axis=-1)


def streamed(text: Text, kind: str, sinks: int) -> np.ndarray:
    """For each query the cache that StreamingLLM holds, rotated at positions inside it, from raw K and V."""
    q, k, v = (x[0].double().numpy() for x in (text.q, text.k, text.v))
    out = np.empty_like(q)
    for p in range(len(q)):
        kept = [j for j in range(p + 1) if j < sinks or j > p - WINDOW]
        for head in range(q.shape[1]):
            kv_head = head // (q.shape[1] // k.shape[1])
            query = rotated(q[p, head], len(kept) - 1, kind)
            scores = np.array([rotated(k[j, kv_head], i, kind) @ query * SCALE for i, j in enumerate(kept)])
            weights = np.exp(scores - scores.max())
            out[p, head] = (weights / weights.sum()) @ v[kept, kv_head]
    return out


@pytest.mark.parametrize("sinks", [1, 2, 3, 5])
@pytest.mark.parametrize("kind", ROPES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a09_sinks_in_cache_are_read_as_if_all_had_been_rotated_anew(
    backend: type[Backend], kind: str, sinks: int
) -> None:
    spec = CacheSpec((0,), 2, DIM, block_size=4, window=WINDOW, sink_tokens=sinks, sink_rule="in_cache")
    text = Text(44, (4, 2), seed=sinks)
    cache = Cache([spec], backend, ROPES[kind], scale=SCALE)
    cache.add(text)
    for count in (11, 1, 1, 13, 1, 1, 1, 15):
        cache.step([count])
    table = cache.sequence(0).tables[0]
    assert table.count(MISSING) >= 3, "blocks were evicted"
    np.testing.assert_allclose(cache.out(0)[0].numpy(), streamed(text, kind, sinks), rtol=0, atol=1e-4)


@pytest.mark.parametrize("rule", ["absolute", "in_cache"])
@pytest.mark.parametrize("kind", ROPES)
def test_a09_stored_keys_stand_at_their_absolute_positions(kind: str, rule: str) -> None:
    spec = CacheSpec((0,), 2, DIM, block_size=4, window=WINDOW, sink_tokens=3, sink_rule=rule)  # type: ignore[arg-type]
    text = Text(44, (4, 2))
    cache = Cache([spec], BACKENDS[1], ROPES[kind], scale=SCALE)
    cache.add(text)
    for count in (11, 1, 1, 13, 1, 1, 1, 15):
        cache.step([count])
        sequence = cache.sequence(0)
        for position in range(sequence.num_tokens):
            block = sequence.tables[0][position // 4]
            if block == MISSING:
                continue
            key = cache.pools[0].k[0, block, :, position % 4].numpy()
            expected = rotated(text.k[0, position].double().numpy(), position, kind)
            np.testing.assert_allclose(key, expected, rtol=0, atol=1e-5)
            np.testing.assert_array_equal(cache.pools[0].v[0, block, :, position % 4], text.v[0, position])
