"""The life of blocks: forks and copies on write, crops, tails, evictions."""

import pytest
from driving import SIZE, WINDOWED, grow, hit, manager_of, run

from kvine.cache.manager import MISSING, BlockCopy
from kvine.cache.spec import CacheSpec

# -- forks and copies on write ----------------------------------------------------------------------------------------


def test_a_fork_shares_its_blocks_until_one_of_the_two_writes() -> None:
    manager = manager_of(100)
    first = manager.open(())
    grow(manager, first, list(range(6)))
    before = manager.bytes_referenced
    twin = manager.fork(first)
    assert manager.bytes_referenced == before
    shared = first.tables[0][1]
    assert manager.reserve(twin, 1)
    assert manager.copies == [BlockCopy(0, shared, twin.tables[0][1], 2)]
    assert twin.tables[0][0] == first.tables[0][0] and first.tables[0][1] == shared
    manager.take_copies()
    assert manager.reserve(first, 1)  # alone with it now, so it writes in place
    assert not manager.copies and first.tables[0][1] == shared
    manager.check()


def test_a_fork_at_a_block_boundary_copies_nothing() -> None:
    manager = manager_of(100)
    first = manager.open(())
    grow(manager, first, list(range(8)))
    twin = manager.fork(first)
    assert manager.reserve(first, 1) and manager.reserve(twin, 1)
    assert not manager.copies
    assert first.tables[0][2] != twin.tables[0][2]


def test_a_fork_does_not_share_room_that_was_only_reserved() -> None:
    manager = manager_of(100)
    first = manager.open(())
    assert manager.reserve(first, 10)
    manager.commit(first, [0, 1, 2])
    twin = manager.fork(first)
    assert len(twin.tables[0]) == 1
    assert manager.reserve(first, 7) and manager.reserve(twin, 7)
    assert not set(first.tables[0]) & set(twin.tables[0])
    manager.check()


def test_the_source_of_a_copy_is_held_until_the_copy_is_taken() -> None:
    manager = manager_of(3)
    first = manager.open(())
    grow(manager, first, [0, 1])
    twin = manager.fork(first)
    assert manager.reserve(twin, 1)
    source = manager.copies[0].source
    manager.release(first, keep_tail=False)
    assert manager.pools[0].references[source] == 1
    assert manager.take_freed(0) == []
    manager.take_copies()
    assert source not in manager.pools[0].references
    assert manager.take_freed(0) == [source]
    manager.check()


def test_a_full_cache_writes_a_published_block_in_place_if_nobody_else_holds_it() -> None:
    manager = manager_of(2)
    sequence = manager.open(())
    grow(manager, sequence, list(range(8)))
    assert manager.crop(sequence, 6) == 6
    table = list(sequence.tables[0])
    grow(manager, sequence, [66, 67])
    assert sequence.tables[0] == table
    manager.release(sequence)
    assert hit(manager, [0, 1, 2, 3, 4, 5, 66, 67, 0]) == 8
    assert hit(manager, list(range(9))) == 6


def test_a_full_cache_does_not_write_in_place_what_others_hold() -> None:
    manager = manager_of(2)
    sequence = manager.open(())
    grow(manager, sequence, list(range(6)))
    manager.fork(sequence)
    assert not manager.reserve(sequence, 1)
    assert not manager.copies
    manager.check()


# -- crop -------------------------------------------------------------------------------------------------------------


def test_crop_gives_up_tokens_blocks_and_reserved_room() -> None:
    manager = manager_of(100)
    sequence = manager.open(())
    grow(manager, sequence, list(range(10)))
    assert manager.reserve(sequence, 20)
    assert manager.crop(sequence, 50) == 10
    assert len(sequence.tables[0]) == 3
    assert manager.crop(sequence, 5) == 5
    assert sequence.tokens == [0, 1, 2, 3, 4] and len(sequence.tables[0]) == 2
    assert manager.crop(sequence, -1) == 0
    assert sequence.tables == [[]]
    manager.check()
    grow(manager, sequence, [9, 8, 7, 6, 5])
    manager.release(sequence)
    assert hit(manager, [9, 8, 7, 6, 5, 4]) == 5


def test_crop_brings_back_what_the_window_had_let_go() -> None:
    manager = manager_of(100, WINDOWED)
    sequence = manager.open(())
    grow(manager, sequence, list(range(24)), chunk=3)
    before = list(sequence.tables[0])
    assert before[1:4] == [MISSING] * 3
    assert manager.crop(sequence, 13) == 13
    # A query at 13 sees 6 … 13 and the sinks: every block up to its own.
    assert MISSING not in sequence.tables[0] and len(sequence.tables[0]) == 4
    manager.check()


def test_crop_falls_back_to_the_last_length_that_the_cache_can_restore() -> None:
    manager = manager_of(100, WINDOWED)
    sequence = manager.open(())
    grow(manager, sequence, list(range(24)), chunk=3)
    manager.clear()  # blocks 1 to 3 are gone for good
    assert manager.crop(sequence, 23) == 23
    assert manager.crop(sequence, 22) == 4
    manager.check()
    grow(manager, sequence, list(range(4, 24)))


def test_crop_without_prefix_caching_loses_what_the_window_let_go() -> None:
    manager = manager_of(100, WINDOWED, prefix_caching=False)
    sequence = manager.open(())
    grow(manager, sequence, list(range(24)), chunk=3)
    assert manager.crop(sequence, 20) == 4
    manager.check()


# -- release and tails ------------------------------------------------------------------------------------------------


def test_an_unfinished_last_block_serves_later_requests_only_if_it_is_kept() -> None:
    manager = manager_of(100)
    run(manager, list(range(6)), keep_tail=False)
    assert hit(manager, list(range(7))) == 4
    run(manager, list(range(6)), keep_tail=True)
    assert hit(manager, list(range(7))) == 6


def test_a_tail_gives_only_the_tokens_that_were_accepted() -> None:
    manager = manager_of(100)
    sequence = manager.open(())
    assert manager.reserve(sequence, 8)
    manager.commit(sequence, [0, 1, 2, 3, 4])  # of 8 written, three were rejected
    manager.release(sequence)
    assert hit(manager, [0, 1, 2, 3, 4, 5, 6, 7]) == 5


def test_a_longer_tail_takes_the_place_of_a_shorter_one() -> None:
    manager = manager_of(100)
    for length in (5, 6, 7):
        run(manager, list(range(length)))
        assert len(manager.pools[0].cached) == 2
    run(manager, list(range(5)))  # shorter than what is kept
    assert len(manager.pools[0].cached) == 2
    run(manager, list(range(8)))
    assert len(manager.pools[0].cached) == 2
    assert hit(manager, list(range(9))) == 8


def test_a_sequences_equal_block_stands_in_for_one_that_was_evicted() -> None:
    manager = manager_of(100)
    first, twin = manager.open(()), manager.open(())
    grow(manager, first, list(range(8)))
    grow(manager, twin, list(range(8)))  # computed side by side: its own copy of both blocks
    manager.release(first)
    manager.clear()
    assert hit(manager, list(range(9))) == 0
    manager.release(twin)
    assert hit(manager, list(range(9))) == 8


# -- eviction ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("groups", [1, 2])
def test_tails_are_evicted_before_heads_in_every_group_alike(groups: int) -> None:
    specs = [CacheSpec((layer,), 1, 2, block_size=SIZE) for layer in range(groups)]
    for wanted in range(1, 6):
        manager = manager_of(6 * groups, *specs)
        run(manager, list(range(24)))  # fills the budget
        run(manager, [100] * (4 * wanted))
        assert manager.num_evictions == wanted * groups
        assert hit(manager, list(range(25))) == 24 - 4 * wanted


def test_the_least_recently_used_text_is_evicted_first() -> None:
    manager = manager_of(6)
    old, new = [1] * 8, [2] * 8
    run(manager, old)
    run(manager, new)
    run(manager, [*old, 1])  # used again
    run(manager, [3] * 12)
    assert hit(manager, [*new, 0]) == 0
    assert hit(manager, [*old, 1, 0]) == 9


def test_a_request_never_evicts_what_it_has_hit() -> None:
    manager = manager_of(4)
    run(manager, list(range(12)))
    sequence = manager.open([*range(12), 99])
    assert sequence.num_tokens == 12
    evictions = manager.num_evictions
    assert not manager.reserve(sequence, 5)
    assert manager.num_evictions == evictions and sequence.num_tokens == 12
    assert manager.reserve(sequence, 4)
    assert manager.num_evictions == evictions
    manager.check()


def test_freed_blocks_are_named_once_and_not_while_in_use() -> None:
    manager = manager_of(4)
    run(manager, list(range(8)))
    assert manager.take_freed(0) == []
    manager.clear()
    assert manager.take_freed(0) == [0, 1]
    assert manager.take_freed(0) == []
    run(manager, [5])
    manager.clear()
    assert manager.take_freed(0) == [0]  # low ids are used first
