"""What forks of one sequence take, as beams use them: no more than is planned, and not a copy too many."""

import random

import pytest

from kvine.cache.manager import CachedSequence, CacheManager
from kvine.cache.spec import CacheSpec

SPECS = (
    CacheSpec((0,), 1, 2, 4),
    CacheSpec((0,), 1, 2, 1),
    CacheSpec((0,), 1, 2, 8, window=5),
    CacheSpec((0,), 1, 2, 2, window=7, sink_tokens=3),
    CacheSpec((0,), 1, 2, 4, window=3, sink_tokens=1),
)


def write(manager: CacheManager, sequence: CachedSequence, *tokens: int) -> int:
    assert manager.reserve(sequence, len(tokens))
    manager.check()
    copies = len(manager.copies)
    manager.take_copies()
    manager.commit(sequence, tokens)
    return copies


def search(spec: CacheSpec, prompt: int, length: int, beams: int, choose: random.Random) -> tuple[int, int]:
    """Random beams up to `length` tokens; the most blocks held at once, and the bound."""
    manager = CacheManager([spec], 10_000 * spec.bytes_per_block("fp32"), prefix_caching=False)
    first = manager.open(())
    held = [0]
    for token in range(prompt):
        write(manager, first, token)
    lines = [first, *(manager.fork(first) for _ in range(beams - 1))]
    while lines[0].num_tokens < length:
        for line in lines:  # as a step does: room for all, then the copies, then the writing
            assert manager.reserve(line, 1)
        held.append(len(manager.pools[0].references))
        manager.take_copies()
        for line in lines:
            manager.commit(line, [choose.randrange(9)])
        manager.check()
        held.append(len(manager.pools[0].references))
        parents = [choose.choice(lines) for _ in range(beams)]
        heirs = [manager.fork(parent) for parent in parents]
        for line in lines:
            manager.release(line, keep_tail=False)
        lines = heirs
    return max(held), spec.max_forked_blocks(length, 1, beams, prompt)


@pytest.mark.parametrize("spec", SPECS)
def test_random_beams_never_hold_more_than_planned(spec: CacheSpec) -> None:
    choose = random.Random(0)
    for prompt in (1, 3, 4, 9, 16):
        for beams in (1, 2, 3, 5):
            most, bound = search(spec, prompt, prompt + choose.randrange(1, 20), beams, choose)
            assert most <= bound, (prompt, beams)


@pytest.mark.parametrize("block_size", [1, 4, 8])
def test_without_a_window_the_plan_is_exact(block_size: int) -> None:
    """Samples, which never take each other's places, hold all that is planned in the end."""
    spec = CacheSpec((0,), 1, 2, block_size)
    manager = CacheManager([spec], 10_000 * spec.bytes_per_block("fp32"))
    first = manager.open(())
    write(manager, first, *range(9))
    lines = [first, *(manager.fork(first) for _ in range(3))]
    for step in range(6):
        for number, line in enumerate(lines):
            write(manager, line, 100 * number + step)
    assert len(manager.pools[0].references) == spec.max_forked_blocks(15, 1, 4, 9)


def test_forks_of_one_sequence_take_no_more_than_so_many_strangers() -> None:
    for spec in SPECS:
        for length in range(1, 30):
            for shared in range(length + 1):
                bound = spec.max_forked_blocks(length, 1, 3, shared)
                assert spec.max_live_blocks(length, 1) <= bound <= spec.max_live_blocks(length, 3, 3)
        assert spec.max_forked_blocks(29, 8, 1, 0) == spec.max_live_blocks(29, 8)


def test_of_several_heirs_the_last_one_writes_where_it_is() -> None:
    """Copies are made before anything is written, so the block that they are made of need not be left alone."""
    spec = CacheSpec((0,), 1, 2, 4)
    manager = CacheManager([spec], 4 * spec.bytes_per_block("fp32"))
    first = manager.open(())
    write(manager, first, 1, 2)
    lines = [first, *(manager.fork(first) for _ in range(3))]
    for line in lines:
        assert manager.reserve(line, 1), "four heirs of one block take four blocks"
        manager.check()
    copies = manager.take_copies()
    assert [(copy.source, copy.num_tokens) for copy in copies] == [(0, 2)] * 3
    assert sorted(line.tables[0][0] for line in lines) == [0, 1, 2, 3] and lines[3].tables[0] == [0]
    manager.check()
