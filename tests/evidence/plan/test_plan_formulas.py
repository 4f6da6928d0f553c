"""The formulas of `CacheSpec` that planning goes by, against counting one token and one block at a time."""

import random

import pytest
from planned import public

from kvine.cache.spec import CacheSpec
from kvine.config import CacheConfig
from kvine.evidence.plan import workspace as formula
from kvine.models import matmul

Kept = tuple[tuple[int, int], ...]


def seen(window: int | None, sinks: int, q: int, k: int, kept: Kept = ()) -> bool:
    always = k < sinks or any(first <= k < end for first, end in kept)
    return k <= q and (window is None or q - k < window or always)


def needed_blocks(window: int | None, sinks: int, size: int, length: int, kept: Kept = ()) -> int:
    """Blocks of `length` tokens that hold a key which some query from `length` on sees."""
    last = length + 200  # by then every window has passed
    later = (*range(length, length + 9), last)
    needed = {k // size for k in range(length) if any(seen(window, sinks, q, k, kept) for q in later)}
    return len(needed)


SHAPES = [(None, 0), (1, 0), (2, 0), (5, 0), (5, 3), (8, 1), (8, 9), (16, 4)]


@pytest.mark.parametrize(("window", "sinks"), SHAPES)
@pytest.mark.parametrize("size", [1, 3, 4, 8])
@pytest.mark.parametrize("kept", [(), ((10, 17),), ((11, 12), (13, 14), (30, 41))])
def test_tokens_read_and_blocks_held(window: int | None, sinks: int, size: int, kept: Kept) -> None:
    spec = CacheSpec((0,), 1, 2, size, window=window, sink_tokens=sinks).keeping(kept)
    pairs = 0
    for length in range(1, 70):
        visible = sum(seen(window, sinks, length - 1, k, kept) for k in range(length))
        pairs += visible
        assert spec.num_visible(length) == visible
        assert spec.num_visible_pairs(length) == pairs
        assert spec.num_live_blocks(length) == len(spec.live_blocks(length))
        assert spec.num_live_blocks(length) <= needed_blocks(window, sinks, size, length, kept) + 1
        assert spec.num_live_blocks(length) >= needed_blocks(window, sinks, size, length, kept)


@pytest.mark.parametrize(("window", "sinks"), SHAPES)
def test_no_split_of_a_step_holds_more_than_is_planned(window: int | None, sinks: int) -> None:
    draw = random.Random(f"{window} {sinks}")
    slack = []
    for _ in range(150):
        spec = CacheSpec((0,), 1, 2, draw.choice([1, 3, 4, 8]), window=window, sink_tokens=sinks)
        spec = spec.keeping(draw.choice([(), ((10, 17),), ((11, 12), (30, 41))]))
        batch, chunk, length = draw.randint(1, 5), draw.randint(1, 40), draw.randint(1, 90)
        planned = spec.max_live_blocks(length, chunk, batch)
        done, most = [0] * batch, 0
        while min(done) < length:
            left, held = chunk, 0
            for n in draw.sample(range(batch), batch):
                step = min(left, length - done[n], draw.randint(0, chunk))
                dead = len(spec.dead_blocks(done[n]))
                done[n] += step
                left -= step
                held += spec.num_blocks(done[n]) - dead
            most = max(most, held)
        assert most <= planned
        slack.append(planned - most)
    assert min(slack) == 0, "and some split needs all of it"


def test_one_sequence_is_planned_as_the_scheduler_admits_it() -> None:
    for window, sinks in SHAPES:
        spec = CacheSpec((0,), 1, 2, 4, window=window, sink_tokens=sinks)
        for length in range(1, 60):
            assert spec.max_live_blocks(length, 16) == spec.max_live_blocks(length, 16, 1)
            assert spec.max_live_blocks(length, 16, 3) <= 3 * spec.max_live_blocks(length, 16)


def test_the_workspace_goes_by_the_code_that_takes_it() -> None:
    assert formula.LOW_PRECISION_ROWS == matmul._MAX_LOW_PRECISION_ROWS
    assert formula.CONVERTED_WEIGHTS == matmul._MAX_CONVERTED_WEIGHTS


def test_the_workspace_of_a_long_prompt() -> None:
    rows, d, q, kv, f, vocab, length = 2048, 2560, 32 * 128, 8 * 128, 9728, 151_936, 40_000
    fp32 = public("qwen3-4b", dtype="fp32", context=length).workspace
    assert fp32.mlp == 4 * rows * (3 * d + 3 * f)
    assert fp32.attention == 4 * rows * (2 * d + q + 2 * kv) + 2 * 4 * rows * q + length * 2 * kv * 4
    assert fp32.logits == 4 * rows * d + vocab * 8
    assert fp32.nbytes == fp32.attention + 96 * 2**20
    bf16 = public("qwen3-4b", context=length, batch=5).workspace
    assert bf16.mlp == 2 * rows * (3 * d + 3 * f) + 4 * rows * (d + 2 * f) + 12 * 2**23
    assert bf16.logits == 2 * rows * d + 5 * vocab * (6 + 8) + 12 * 2**23
    short = public("qwen3-4b", context=1).workspace
    assert short.mlp == 2 * (3 * d + 3 * f) and short.logits == 2 * d + vocab * 6, "a single row is not converted"
    kept_as_fp32 = public("qwen3-4b", context=length, cache=CacheConfig(kv_dtype="fp32")).workspace
    assert kept_as_fp32.attention - bf16.attention == length * 2 * kv * 4, "gathered as stored, then converted"
