"""The formulas of `CacheSpec` that planning goes by, against counting one token and one block at a time."""

import random

import pytest

from kvine.cache.spec import CacheSpec


def seen(window: int | None, sinks: int, q: int, k: int) -> bool:
    return k <= q and (window is None or q - k < window or k < sinks)


def needed_blocks(window: int | None, sinks: int, size: int, length: int) -> int:
    """Blocks of `length` tokens that hold a key which some query from `length` on sees."""
    last = length + 200  # by then every window has passed
    needed = {
        k // size for k in range(length) if any(seen(window, sinks, q, k) for q in (*range(length, length + 9), last))
    }
    return len(needed)


SHAPES = [(None, 0), (1, 0), (2, 0), (5, 0), (5, 3), (8, 1), (8, 9), (16, 4)]


@pytest.mark.parametrize(("window", "sinks"), SHAPES)
@pytest.mark.parametrize("size", [1, 3, 4, 8])
def test_tokens_read_and_blocks_held(window: int | None, sinks: int, size: int) -> None:
    spec = CacheSpec((0,), 1, 2, size, window=window, sink_tokens=sinks)
    pairs = 0
    for length in range(1, 70):
        visible = sum(seen(window, sinks, length - 1, k) for k in range(length))
        pairs += visible
        assert spec.num_visible(length) == visible
        assert spec.num_visible_pairs(length) == pairs
        assert spec.num_live_blocks(length) == len(spec.live_blocks(length))
        assert spec.num_live_blocks(length) <= needed_blocks(window, sinks, size, length) + 1
        assert spec.num_live_blocks(length) >= needed_blocks(window, sinks, size, length)


@pytest.mark.parametrize(("window", "sinks"), SHAPES)
def test_no_split_of_a_step_holds_more_than_is_planned(window: int | None, sinks: int) -> None:
    draw = random.Random(f"{window} {sinks}")
    slack = []
    for _ in range(150):
        spec = CacheSpec((0,), 1, 2, draw.choice([1, 3, 4, 8]), window=window, sink_tokens=sinks)
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
