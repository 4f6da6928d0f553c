"""Reservations under tight budgets, and the sequences of requests that have broken other engines."""

import random

import pytest
from driving import BLOCK, FULL, WINDOWED, grow, hit, manager_of, run, state

from kvine.cache.manager import CachedSequence

# -- reservations and budgets -----------------------------------------------------------------------------------------


def test_a_reservation_that_one_group_cannot_serve_changes_nothing_in_the_other() -> None:
    for capacities in ([10, 1], [1, 10]):
        manager = manager_of(100, FULL, WINDOWED, capacities=capacities)
        sequence = manager.open(())
        before = state(manager, sequence)
        assert not manager.reserve(sequence, 5)
        assert state(manager, sequence) == before
        assert manager.reserve(sequence, 4)
        manager.check()


def test_a_reservation_that_the_common_budget_cannot_serve_changes_nothing() -> None:
    manager = manager_of(5, FULL, WINDOWED)
    run(manager, [1] * 8)  # four blocks, cached
    sequence = manager.open([2] * 12)
    before = state(manager, sequence)
    assert not manager.reserve(sequence, 12)  # six blocks
    assert state(manager, sequence) == before
    assert manager.reserve(sequence, 8)
    manager.check()


def test_one_budget_serves_the_groups_as_they_need_it() -> None:
    """A window leaves its group's share to the other: 2 blocks of sinks and tail, or as many as the budget has."""
    manager = manager_of(14, FULL, WINDOWED)
    sequence = manager.open(())
    grow(manager, sequence, list(range(40)), chunk=1)
    assert [len(sequence.held(group)) for group in range(2)] == [10, 3]
    assert manager.bytes_held(sequence) == manager.bytes_referenced == 13 * BLOCK


def test_fixed_capacities_hold_each_group_to_its_own_share() -> None:
    manager = manager_of(100, FULL, WINDOWED, capacities=[3, 20])
    sequence = manager.open(())
    grow(manager, sequence, list(range(12)))
    assert not manager.reserve(sequence, 1)
    manager.release(sequence)
    other = manager.open(())
    grow(manager, other, [7] * 12)  # evicts in the first group only
    assert len(manager.pools[1].cached) == 3
    manager.check()


def test_fits_ever_is_the_line_between_what_can_and_what_cannot_be_served() -> None:
    for specs in ((FULL,), (WINDOWED,), (FULL, WINDOWED)):
        for chunk in (1, 3, 4, 100):
            manager = manager_of(9, *specs, prefix_caching=False)
            for length in range(1, 50):
                sequence = manager.open(())
                served = all(
                    manager.reserve(sequence, len(part)) and manager.commit(sequence, part) is None
                    for part in ([0] * min(chunk, length - start) for start in range(0, length, chunk))
                )
                assert served or not manager.fits_ever(length, chunk)
                if specs == (FULL,) or chunk == 1:
                    assert served == manager.fits_ever(length, chunk), (specs, length, chunk)
                manager.release(sequence)


def test_fits_now_counts_what_the_sequence_holds_and_what_may_be_evicted() -> None:
    manager = manager_of(6)
    run(manager, [1] * 12)
    mine, other = manager.open([1] * 12), manager.open(())
    assert manager.fits_now(mine, 24, 100)
    grow(manager, other, [2] * 4)
    assert not manager.fits_now(mine, 24, 100)
    assert manager.fits_now(mine, 20, 100)


# -- sequences of requests --------------------------------------------------------------------------------------------


def test_b09_a_block_serves_twins_only_after_the_step_that_filled_it() -> None:
    manager = manager_of(100)
    prompt = list(range(14))
    first = manager.open(prompt)
    assert manager.reserve(first, 6)
    assert hit(manager, prompt) == 0  # reserved, perhaps being written
    manager.commit(first, prompt[:6])
    twin = manager.open(prompt)
    assert twin.num_tokens == 4  # the block that spans two steps is not there yet
    for start in (6, 12):
        grow(manager, first, prompt[start : start + 6])
        grow(manager, twin, prompt[twin.num_tokens : twin.num_tokens + 6])
    assert first.tokens == twin.tokens == prompt
    assert hit(manager, prompt) == 12
    manager.release(first)
    manager.release(twin)
    assert hit(manager, prompt) == 13


def test_b09_a_pool_full_of_cached_blocks_admits_in_whole_or_not_at_all() -> None:
    for length in range(1, 30):
        manager = manager_of(6)
        run(manager, list(range(24)))
        assert manager.pools[0].num_free == 0
        for prefix in range(0, 24, 3):
            tokens = [*range(min(prefix, length)), *([99] * (length - prefix))]
            sequence = manager.open(tokens)
            before = state(manager, sequence)
            if manager.reserve(sequence, length - sequence.num_tokens):
                manager.take_copies()
                manager.commit(sequence, tokens[sequence.num_tokens :])
            else:
                assert state(manager, sequence) == before
            manager.check()
            manager.release(sequence)
            manager.check()


@pytest.mark.parametrize("drafts", [0, 3])
def test_b10_twins_in_one_step_leave_each_page_in_the_tree_once(drafts: int) -> None:
    manager = manager_of(100, FULL, WINDOWED)
    prompt = list(range(11))
    twins = [manager.open(prompt) for _ in range(8)]
    for twin in twins:
        assert manager.reserve(twin, len(prompt) + drafts)
    manager.take_copies()
    for twin in twins:
        manager.commit(twin, prompt)
        manager.check()
    for twin in twins:
        manager.release(twin)
        manager.check()
    nodes = manager.index.nodes()
    assert sorted(node.tokens for node in nodes) == [(0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10)]
    for group, pool in enumerate(manager.pools):
        assert set(pool.cached) == {node.blocks[group] for node in nodes}
        assert not pool.references
    manager.clear()
    assert all(pool.num_free == pool.capacity for pool in manager.pools)
    assert not manager.index.nodes()


def test_b11_finished_requests_drop_every_reference_however_they_end() -> None:
    rng = random.Random(11)
    manager = manager_of(40, FULL, WINDOWED)
    served = hits = 0
    live: list[tuple[CachedSequence, list[int]]] = []
    while served < 120:
        most = 1 if served < 100 else 20
        if len(live) < most:
            text = [rng.randrange(3) for _ in range(rng.randrange(1, 40))]
            live.append((manager.open(text), text))
            hits += live[-1][0].num_tokens > 0
        sequence, text = rng.choice(live)
        rest = text[sequence.num_tokens : sequence.num_tokens + rng.randrange(1, 9)]
        fits = manager.reserve(sequence, len(rest)) if rest else True
        if fits:
            manager.take_copies()
            manager.commit(sequence, rest)
        if not fits or not rest or rng.random() < 0.05:  # preempted, at its end, or aborted
            live.remove((sequence, text))
            manager.release(sequence, keep_tail=rng.random() < 0.8)
            served += 1
        manager.check()
    for sequence, _ in live:
        manager.release(sequence)
    manager.check()
    assert manager.bytes_referenced == 0
    assert manager.num_evictions > 0 and hits > 0
