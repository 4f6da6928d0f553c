"""Attention of single queries in each instruction set against the formula in float64."""

import itertools

import pytest
import torch
from attention_scene import DTYPES, Scene

from kvine import kernels

every_path = pytest.mark.parametrize("path", kernels.available())
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16", "fp16"])


@every_path
@every_dtype
def test_every_shape(path: str, dtype: torch.dtype) -> None:
    native = kernels.load(path)
    for heads, width in itertools.product(
        ((1, 1), (4, 4), (9, 3), (8, 2), (10, 2), (5, 1)), (8, 20, 64, 80)
    ):  # 80: whole steps and a rest, be a step 16 or 32
        scene = Scene([1, 5, 63, 64, 65, 300], heads=heads, width=width, dtype=dtype)
        scene.check(scene.decode(native))
    for block_size in (1, 3, 32, 256):
        scene = Scene([1, 5, 257, 600], block_size=block_size, dtype=dtype)
        scene.check(scene.decode(native))


@every_path
@every_dtype
def test_windows_sinks_and_caps(path: str, dtype: torch.dtype) -> None:
    native = kernels.load(path)
    for window, sinks, moved, softcap in itertools.product((1, 7, 300), (0, 4, 70), (False, True), (None, 3.0)):
        lengths = [1, 6, 80, 700]
        scene = Scene(lengths, dtype=dtype, window=window, sinks=sinks, moved=moved and sinks > 0, softcap=softcap)
        scene.check(scene.decode(native))
    for window, sinks, kept in itertools.product((1, 7, 300), (0, 4), ([(10, 11)], [(5, 30), (70, 71), (300, 520)])):
        scene = Scene([1, 6, 80, 700], dtype=dtype, window=window, sinks=sinks, moved=sinks > 0, kept=kept)
        scene.check(scene.decode(native))


@every_path
def test_every_mixture_of_formats(path: str) -> None:
    native = kernels.load(path)
    for dtype, k_dtype, v_dtype in itertools.product(DTYPES, repeat=3):
        scene = Scene([40, 3], dtype=dtype, kv_dtypes=(k_dtype, v_dtype))
        scene.check(scene.decode(native))


@every_path
@every_dtype
def test_a_result_depends_on_its_own_request_alone(path: str, dtype: torch.dtype) -> None:
    """Not on batch mates, nor on the number of threads."""
    native, before = kernels.load(path), torch.get_num_threads()
    scene = Scene([900, 3, 2_000, 64], dtype=dtype)
    whole = scene.decode(native)
    try:
        for threads in (1, 2, 3, 7):
            torch.set_num_threads(threads)
            assert torch.equal(scene.decode(native), whole)
    finally:
        torch.set_num_threads(before)
    for rows in ([2], [3, 0], [1]):
        part = scene.decode(native, rows)
        assert torch.equal(part[rows], whole[rows])
        rest = [r for r in range(4) if r not in rows]
        assert bool((part[rest] == 7).all()), "rows of other requests are not touched"


@every_path
@pytest.mark.parametrize("moved", [False, True])
def test_a_result_does_not_depend_on_the_size_of_blocks(path: str, moved: bool) -> None:
    native = kernels.load(path)
    scene = Scene([600, 70], window=300, sinks=5, moved=moved)
    whole = scene.decode(native)
    for block_size in (1, 7, 32, 1_000):
        other = Scene([600, 70], window=300, sinks=5, moved=moved, block_size=block_size)
        other.q, other.q_sink = scene.q, scene.q_sink
        for r, length in enumerate(scene.lengths):
            for position in range(length):
                to = other.tables[r][position // block_size], slice(None), position % block_size
                at = scene.tables[r][position // 16], slice(None), position % 16
                other.k[to], other.v[to] = scene.k[at], scene.v[at]
        assert torch.equal(other.decode(native), whole)


@every_path
def test_a_long_context_is_cut_into_longer_stretches(path: str) -> None:
    """From 64 stretches of 256 keys on, that their number stays bounded."""
    native = kernels.load(path)
    scene = Scene([16_384, 16_385, 40_000], heads=(2, 1), width=8)
    scene.check(scene.decode(native))


@every_path
@every_dtype
def test_far_scores_neither_overflow_nor_vanish(path: str, dtype: torch.dtype) -> None:
    native = kernels.load(path)
    scene = Scene([500], dtype=dtype, spread=200.0)
    out = scene.decode(native)
    assert out.isfinite().all()
    scene.check(out)
    scene.q.zero_()  # all weights are equal
    scene.check(scene.decode(native))


@every_path
def test_keys_that_are_infinitely_far_weigh_nothing(path: str) -> None:
    """A whole tile of them too, and the tile of the sinks."""
    native = kernels.load(path)
    for sinks, hidden in ((0, range(64)), (1, range(1)), (0, range(300))):
        scene = Scene([310], sinks=sinks, heads=(2, 1))
        scene.q[0, :, 0] = -1
        for position in hidden:
            scene.k[scene.tables[0][position // 16], 0, position % 16, 0] = torch.inf
        seen = [position for position in range(310) if position not in hidden]
        place = torch.tensor([scene.tables[0][p // 16] for p in seen]), torch.tensor(seen) % 16
        keys, values = scene.k[place[0], 0, place[1]], scene.v[place[0], 0, place[1]]
        expected = (scene.q[0] @ keys.T * scene.scale).softmax(-1) @ values
        torch.testing.assert_close(scene.decode(native)[0], expected, rtol=1e-5, atol=1e-5)


@every_path
def test_nan_in_what_is_seen_is_not_hidden(path: str) -> None:
    native, scene = kernels.load(path), Scene([70, 70])
    scene.k[scene.tables[0][2], 1, 3] = torch.nan
    out = scene.decode(native)
    assert out[0, 3:].isnan().all() and out[0, :3].isfinite().all() and out[1].isfinite().all()


@every_path
def test_a_block_that_there_is_not_is_refused_where_it_is_seen(path: str) -> None:
    native = kernels.load(path)
    scene = Scene([70], window=20, sinks=4)
    scene.tables[0][1] = scene.tables[0][2] = -1  # let go: neither sinks nor window reach them
    scene.check(scene.decode(native))
    for table in (0, 2, 3):
        for block in (-1, scene.k.shape[0]):
            broken = Scene([70], window=20, sinks=4, kept=[(40, 45)])
            broken.tables[0][table] = block
            with pytest.raises(IndexError, match="no such block"):
                broken.decode(native)
