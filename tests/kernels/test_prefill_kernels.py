"""Attention of many queries: the formula in float64, and bit for bit what the kernel of single queries computes."""

import itertools
import random

import pytest
import torch
from attention_scene import DTYPES, Scene

from kvine import kernels
from kvine.kernels import Kernels

every_path = pytest.mark.parametrize("path", kernels.available())
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16", "fp16"])


def both(native: Kernels, scene: Scene, every: int = 7) -> None:
    """Many queries are as many single ones, and some of them are the formula."""
    out = scene.prefill(native)
    assert torch.equal(out, scene.decode(native))
    scene.check(out, every)


@every_path
@every_dtype
def test_every_shape(path: str, dtype: torch.dtype) -> None:
    native = kernels.load(path)
    for heads, width in itertools.product(
        ((1, 1), (4, 4), (9, 3), (8, 2), (10, 2), (7, 1)), (8, 20, 32, 64, 80, 96, 100, 256)
    ):
        both(native, Scene([66, 3, 130], [66, 2, 9], heads=heads, width=width, dtype=dtype), 31)
    for block_size in (1, 3, 32, 256):
        both(native, Scene([1, 5, 257, 600], [1, 5, 200, 11], block_size=block_size, dtype=dtype), 31)


@every_path
@every_dtype
def test_windows_sinks_and_caps(path: str, dtype: torch.dtype) -> None:
    native = kernels.load(path)
    for window, sinks, moved, softcap in itertools.product((1, 7, 64, 300), (0, 4, 70), (False, True), (None, 3.0)):
        scene = Scene(
            [6, 80, 640],
            [6, 75, 90],
            heads=(3, 1),
            width=32,
            dtype=dtype,
            window=window,
            sinks=sinks,
            moved=moved and sinks > 0,
            softcap=softcap,
        )
        both(native, scene, 11)
    for window, sinks in itertools.product((1, 7, 64, 300), (0, 4)):
        kept = [(5, 30), (64, 65), (100, 300)]
        scene = Scene(
            [6, 80, 640], [6, 75, 90], heads=(3, 1), width=32, window=window, sinks=sinks, kept=kept, dtype=dtype
        )
        both(native, scene, 11)


@every_path
def test_scenes_drawn_at_random(path: str) -> None:
    native, chance = kernels.load(path), random.Random(path)
    for seed in range(60):
        lengths = [chance.randint(1, chance.choice((9, 90, 500))) for _ in range(chance.randint(1, 4))]
        kv_heads, sinks = chance.randint(1, 3), chance.choice((0, 0, 1, 5, 65))
        scene = Scene(
            lengths,
            [chance.randint(1, length) for length in lengths],
            heads=(kv_heads * chance.randint(1, 7), kv_heads),
            width=chance.randint(1, 20) * chance.choice((1, 2, 8)),
            block_size=chance.choice((1, 2, 5, 16, 64, 256)),
            dtype=chance.choice(DTYPES),
            kv_dtypes=(chance.choice(DTYPES), chance.choice(DTYPES)),
            window=chance.choice((None, chance.randint(1, 200))),
            sinks=sinks,
            kept=sorted(
                (a, a + chance.randint(1, 90)) for a in chance.sample(range(66, 500, 95), chance.choice((0, 0, 1, 3)))
            ),
            moved=bool(sinks) and chance.random() < 0.5,
            softcap=chance.choice((None, 2.0, 30.0)),
            seed=seed,
        )
        both(native, scene, 29)


@every_path
def test_every_mixture_of_formats(path: str) -> None:
    native = kernels.load(path)
    for dtype, k_dtype, v_dtype in itertools.product(DTYPES, repeat=3):
        both(native, Scene([70, 3], [40, 3], dtype=dtype, kv_dtypes=(k_dtype, v_dtype)))


@every_path
@every_dtype
@pytest.mark.parametrize(("window", "sinks"), [(None, 0), (20, 5)])
def test_every_split_into_chunks_gives_the_same_bits(
    path: str, dtype: torch.dtype, window: int | None, sinks: int
) -> None:
    native = kernels.load(path)
    scene = Scene([150], [150], heads=(6, 2), width=32, dtype=dtype, window=window, sinks=sinks, moved=sinks > 0)
    whole = scene.prefill(native)
    for cut in range(1, 150):
        assert torch.equal(scene.prefill(native, [(0, 0, cut)])[:cut], whole[:cut])
        assert torch.equal(scene.prefill(native, [(0, cut, 150)])[cut:], whole[cut:])
    for chunk in (1, 2, 7, 33, 64):
        for begin in range(0, 150, chunk):
            end = min(begin + chunk, 150)
            assert torch.equal(scene.prefill(native, [(0, begin, end)])[begin:end], whole[begin:end])


@every_path
@every_dtype
def test_a_result_depends_on_its_own_request_alone(path: str, dtype: torch.dtype) -> None:
    """Not on batch mates, nor on the number of threads, which decides how queries are cut into tiles."""
    native, before = kernels.load(path), torch.get_num_threads()
    scene = Scene([700, 3, 400, 64], [300, 2, 400, 1], dtype=dtype)
    whole = scene.prefill(native)
    try:
        for threads in (1, 2, 3, 7):
            torch.set_num_threads(threads)
            assert torch.equal(scene.prefill(native), whole)
    finally:
        torch.set_num_threads(before)
    for r in (2, 0, 1):
        part = scene.prefill(native, [(r, scene.lengths[r] - scene.queries[r], scene.lengths[r])])
        mine = torch.tensor([row for row, (owner, _) in enumerate(scene.rows) if owner == r])
        assert torch.equal(part[mine], whole[mine])
        part[mine] = 7
        assert bool((part == 7).all()), "rows of other requests are not touched"


@every_path
def test_longer_stretches_begin_within_a_chunk(path: str) -> None:
    """Where a context grows past 64 stretches of 256 keys, its queries change to longer ones."""
    native = kernels.load(path)
    both(native, Scene([16_390, 16_384, 33_000], [12, 3, 2], heads=(2, 1), width=8), 3)


@every_path
@every_dtype
def test_far_scores_neither_overflow_nor_vanish(path: str, dtype: torch.dtype) -> None:
    native = kernels.load(path)
    scene = Scene([300], [70], dtype=dtype, spread=200.0)
    assert scene.prefill(native).isfinite().all()
    both(native, scene)
    scene.q.zero_()  # all weights are equal
    both(native, scene)


@every_path
@every_dtype
def test_the_least_numbers(path: str, dtype: torch.dtype) -> None:
    """Denormal queries, keys and values."""
    native = kernels.load(path)
    for name in ("q", "k", "v"):
        scene = Scene([90], [80], dtype=dtype)
        scaled = getattr(scene, name)
        scaled *= torch.finfo(dtype).smallest_normal / 4
        both(native, scene)


@every_path
def test_keys_that_are_infinitely_far_weigh_nothing(path: str) -> None:
    """A whole tile of them too, a whole stretch, and the tile of the sinks."""
    native = kernels.load(path)
    for sinks, hidden in ((0, range(64)), (1, range(1)), (0, range(300)), (0, range(256, 300))):
        scene = Scene([340], [20], sinks=sinks, heads=(2, 1))
        scene.q[:, :, 0] = -1
        places = scene.places(0, torch.tensor(hidden))
        keys = scene.k[places]
        keys[..., 0] = torch.inf
        scene.k[places] = keys
        out = scene.prefill(native)
        assert torch.equal(out, scene.decode(native)) and out.isfinite().all()
        scene.k[places] = 0
        scene.v[places] = torch.randn(len(hidden), 1, 64)
        assert not torch.equal(scene.prefill(native), out)


@every_path
def test_nan_is_seen_by_those_who_may_see_it(path: str) -> None:
    """A later token of the same tile is nobody's past: in neither keys nor values."""
    native = kernels.load(path)
    for of_keys, bad in itertools.product((True, False), (torch.nan, torch.inf)):
        scene = Scene([200], [150], window=40)
        stored = scene.k if of_keys else scene.v
        block, _, offset = scene.places(0, torch.tensor([120]))
        stored[block, 1, offset] = bad
        out = scene.prefill(native)
        finite = out.isfinite().all(-1)  # [N, Hq]
        for row, (_, position) in enumerate(scene.rows):
            sees = 120 <= position < 160
            assert finite[row, :3].all() and bool(finite[row, 3:].any()) is not sees, position


@every_path
def test_a_block_that_there_is_not_is_refused_where_it_is_seen(path: str) -> None:
    native = kernels.load(path)
    scene = Scene([70], [12], window=10, sinks=4)
    scene.tables[0][1] = scene.tables[0][2] = -1  # let go: neither sinks nor window reach them
    scene.check(scene.prefill(native))
    for table in (0, 2, 3, 4):
        for block in (-1, scene.k.shape[0]):
            broken = Scene([70], [12], window=10, sinks=4, kept=[(40, 45)])
            broken.tables[0][table] = block
            with pytest.raises(IndexError, match="no such block"):
                broken.prefill(native)
