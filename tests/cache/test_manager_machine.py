"""Random operations on a cache manager, with a model on the side that knows what every slot of memory holds."""

import copy
from collections import Counter
from dataclasses import dataclass, replace
from typing import ClassVar

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvine.cache.hashing import digest
from kvine.cache.manager import MISSING, CachedSequence, CacheManager
from kvine.cache.spec import CacheSpec

SIZE = 4
WINDOWED = CacheSpec(layers=(0, 2), num_kv_heads=1, head_dim=2, block_size=SIZE, window=8, sink_tokens=2)
FULL = CacheSpec(layers=(1,), num_kv_heads=2, head_dim=2, block_size=SIZE)
SPECS = (WINDOWED, FULL)
PACKED = tuple(replace(spec, key_codec="int4", value_codec="int8") for spec in SPECS)
LONGEST = 26  # tokens of a sequence
MOST_SEQUENCES = 4

# A few texts that begin alike, so that sequences often share a past, and part from it anywhere.
TEXTS = tuple([k * (p >= begin) % 3 for p in range(LONGEST)] for k, begin in ((0, 0), (1, 6), (2, 6), (1, 12), (1, 17)))
texts = st.sampled_from(TEXTS)
lengths = st.integers(0, LONGEST)
Content = tuple[bytes, tuple[int, ...]]  # namespace and all tokens up to and including the slot's own


PINNED = {b"a": (), b"b": (), b"p": ((5, 6), (9, 11))}  # by namespace: what stays in sight whatever the window


def seen(spec: CacheSpec, namespace: bytes, query: int, key: int) -> bool:
    """Visibility, written anew from the definition of windows and sinks, and of what is pinned."""
    kept = key < spec.sink_tokens or any(first <= key < end for first, end in PINNED[namespace])
    return key <= query and (spec.window is None or query - key < spec.window or kept)


STILL_SEEN = {
    (spec, name, length): [k for k in range(length) if any(seen(spec, name, q, k) for q in range(length, LONGEST + 20))]
    for spec in (*SPECS, *PACKED)
    for name in PINNED
    for length in range(LONGEST + 1)
}  # positions that some query after a sequence of `length` tokens sees


@dataclass
class Live:
    sequence: CachedSequence
    namespace: bytes


class CacheMachine(RuleBasedStateMachine):
    """Every operation of the manager, as a scheduler may mix them; memory is simulated slot by slot."""

    totals: ClassVar[Counter[str]] = Counter()
    specs: ClassVar[tuple[CacheSpec, ...]] = SPECS
    most_spare: ClassVar[int] = 6  # tokens that room is reserved for beyond those that are written
    most_rejected: ClassVar[int] = 3

    @initialize(
        blocks=st.integers(0, 12),
        fixed=st.booleans(),
        prefix_caching=st.sampled_from((True, True, True, False)),
        bits=st.sampled_from((None, 1, 3)),
    )
    def start(self, blocks: int, fixed: bool, prefix_caching: bool, bits: int | None) -> None:
        sizes = self.block_bytes()
        # From one request and one block in each group up to room for a few requests.
        needs = self.needs()
        if fixed:
            capacities = [need + blocks for need in needs]
            budget = sum(count * size for count, size in zip(capacities, sizes, strict=True))
        else:
            capacities = None
            budget = sum(need * size for need, size in zip(needs, sizes, strict=True)) + blocks * max(sizes)
        self.manager = CacheManager(
            self.specs,
            budget,
            prefix_caching=prefix_caching,
            capacities=capacities,
            hash_function=digest if bits is None else lambda data: bytes([digest(data)[0] % (1 << bits)]),
        )
        self.memory: dict[tuple[int, int, int], Content] = {}  # (shelf, block, offset) → what was last written there
        self.live: list[Live] = []

    # -- operations ---------------------------------------------------------------------------------------------------

    @precondition(lambda self: len(self.live) < MOST_SEQUENCES)
    @rule(text=texts, length=lengths, namespace=st.sampled_from((b"a", b"a", b"p", b"b")))
    def open(self, text: list[int], length: int, namespace: bytes) -> None:
        tokens = text[:length]
        longest = self.longest_hit(tokens, namespace)
        sequence = self.manager.open(tokens, namespace, PINNED[namespace])
        assert sequence.tokens == tokens[: sequence.num_tokens]
        assert sequence.num_tokens == longest
        self.totals["hits"] += longest > 0
        self.live.append(Live(sequence, namespace))

    @precondition(lambda self: self.live)
    @rule(data=st.data(), text=texts, end=lengths, spare=st.integers(0, 6), rejected=st.integers(0, 3))
    def extend(self, data: st.DataObject, text: list[int], end: int, spare: int, rejected: int) -> None:
        """Reserves room, makes the copies, writes, and accepts most of what was written, as of a draft."""
        which = data.draw(st.sampled_from(self.live))
        sequence = which.sequence
        written = text[sequence.num_tokens : end]
        room = min(len(written) + min(spare, self.most_spare), LONGEST - sequence.num_tokens)
        if not room or not self.reserve(sequence, room) or not written:
            return
        self.make_copies()
        whole = [*sequence.tokens, *written]
        for shelf, position in self.written(sequence.num_tokens, len(whole)):
            block, pool = sequence.tables[shelf][position // SIZE], self.manager.pools[shelf]
            assert pool.references[block] == 1, "a block is written that others hold"
            assert block not in pool.node_of, "a block is written that others can find"
            self.memory[shelf, block, position % SIZE] = (which.namespace, tuple(whole[: position + 1]))
        accepted = max(0, len(written) - min(rejected, self.most_rejected))
        self.manager.commit(sequence, written[:accepted])
        self.totals["committed"] += accepted

    @precondition(lambda self: 0 < len(self.live) < MOST_SEQUENCES)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        which = data.draw(st.sampled_from(self.live))
        twin = self.manager.fork(which.sequence)
        assert twin.tokens == which.sequence.tokens
        self.live.append(Live(twin, which.namespace))
        self.totals["forks"] += 1

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def crop(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(self.live)).sequence
        wanted = data.draw(st.integers(0, sequence.num_tokens))
        before, evictions = list(sequence.tokens), self.manager.num_evictions
        left = self.manager.crop(sequence, wanted)
        assert left <= wanted and sequence.tokens == before[:left]
        assert self.manager.num_evictions == evictions, "to crop needs no memory"
        self.totals["crops that lost more" if left < wanted else "exact crops"] += 1

    @precondition(lambda self: self.live)
    @rule(data=st.data(), keep_tail=st.booleans())
    def release(self, data: st.DataObject, keep_tail: bool) -> None:
        which = data.draw(st.sampled_from(self.live))
        self.live.remove(which)
        self.manager.release(which.sequence, keep_tail=keep_tail)

    @rule(what=st.sampled_from(("copies", "copies", "freed", "freed", "clear")))
    def tidy_up(self, what: str) -> None:
        if what == "copies":
            self.make_copies()
        elif what == "freed":
            self.give_back()
        else:
            self.manager.clear()
            assert self.manager.bytes_cached == 0

    # -- what must hold after each ------------------------------------------------------------------------------------

    @invariant()
    def consistent(self) -> None:
        if not hasattr(self, "manager"):
            return
        self.totals["operations"] += 1
        self.manager.check()
        pending = {(c.shelf, c.target): c for c in self.manager.copies}
        for which in self.live:
            sequence = which.sequence
            for group, spec in enumerate(self.specs):
                for key in STILL_SEEN[spec, which.namespace, sequence.num_tokens]:
                    shelf = self.shelf_of(group, key, sequence.num_tokens)
                    block, offset = sequence.tables[shelf][key // SIZE], key % SIZE
                    while (shelf, block) in pending and offset < pending[shelf, block].num_tokens:
                        block = pending[shelf, block].source
                    expected = (which.namespace, tuple(sequence.tokens[: key + 1]))
                    assert self.memory.get((shelf, block, offset)) == expected, "a query would read another's past"

    def teardown(self) -> None:
        if hasattr(self, "manager"):
            self.totals["evictions"] += self.manager.num_evictions
            self.make_copies()
            for which in self.live:
                self.manager.release(which.sequence)
            self.manager.check()
            assert not any(pool.references for pool in self.manager.pools)
            self.manager.clear()
            self.manager.check()
            assert all(pool.num_free == pool.capacity for pool in self.manager.pools)
            assert not self.manager.index.nodes()

    # -- the memory ----------------------------------------------------------------------------------------------------

    def make_copies(self) -> None:
        for c in self.manager.take_copies():
            for offset in range(SIZE):
                self.memory.pop((c.shelf, c.target, offset), None)
            for offset in range(c.num_tokens):
                self.memory[c.shelf, c.target, offset] = self.memory[c.shelf, c.source, offset]
            self.totals["copies"] += 1

    def give_back(self) -> None:
        for shelf in range(len(self.manager.pools)):
            for block in self.manager.take_freed(shelf):
                for offset in range(SIZE):
                    self.memory.pop((shelf, block, offset), None)

    # -- where things lie: all of a group on one shelf ----------------------------------------------------------------

    def block_bytes(self) -> list[int]:
        return [spec.bytes_per_block("fp32") for spec in self.specs]

    def needs(self) -> list[int]:
        return [spec.max_live_blocks(LONGEST, LONGEST) + 1 for spec in self.specs]

    def shelf_of(self, group: int, key: int, length: int) -> int:
        """Where the key at position `key` of a sequence of `length` tokens lies."""
        return group

    def written(self, start: int, end: int) -> list[tuple[int, int]]:
        """Shelves and positions that are written when `start` tokens become `end`."""
        return [(group, position) for group in range(len(self.specs)) for position in range(start, end)]

    def new_blocks(self, table: list[int], shelf: int, start: int, end: int) -> int:
        """Blocks that must be taken on a shelf for that."""
        return max(0, -(-end // SIZE) - len(table))

    # -- the model ----------------------------------------------------------------------------------------------------

    def reserve(self, sequence: CachedSequence, count: int) -> bool:
        """Reserves, and checks the answer: true exactly when it fits, and nothing has changed when it is false."""
        pools, manager = self.manager.pools, self.manager
        start, end = sequence.num_tokens, sequence.num_tokens + count
        last = start // SIZE
        needs = []
        for shelf, (pool, table) in enumerate(zip(pools, sequence.tables, strict=True)):
            goes_on = any(s == shelf and position // SIZE == last for s, position in self.written(start, end))
            begun = goes_on and last < len(table) and table[last] != MISSING
            needs.append(self.new_blocks(table, shelf, start, end) + (begun and pool.references[table[last]] > 1))
        fits = (
            all(need <= pool.capacity - len(pool.references) for need, pool in zip(needs, pools, strict=True))
            and manager.bytes_referenced
            + sum(need * pool.bytes_per_block for need, pool in zip(needs, pools, strict=True))
            <= manager.budget
        )
        before = self.snapshot()
        hits = [dict(pool.references) for pool in pools]
        done = manager.reserve(sequence, count)
        assert done == fits
        if not done:
            assert self.snapshot() == before, "a reservation that failed has changed something"
            self.totals["refusals"] += 1
        for pool, held in zip(pools, hits, strict=True):
            assert held.keys() <= pool.references.keys(), "a block in use was taken"
        return done

    def snapshot(self) -> object:
        manager = self.manager
        pools = [
            (pool.references, list(pool.cached.items()), pool.num_free, sorted(pool.node_of)) for pool in manager.pools
        ]
        held = [(which.sequence.tokens, which.sequence.tables, len(which.sequence.path)) for which in self.live]
        return copy.deepcopy((pools, manager.copies, manager.num_evictions, held))

    def longest_hit(self, tokens: list[int], namespace: bytes) -> int:
        """The most tokens that published blocks can give, found by trying every length from the longest down."""
        if not self.manager.prefix_caching:
            return 0
        root = self.manager.index.root(namespace)
        nodes = [(text_of(node), node.blocks) for node in self.manager.index.nodes() if root_of(node) is root]
        for length in range(len(tokens) - 1, 0, -1):
            if self.obtainable(tokens[:length], namespace, nodes):
                return length
        return 0

    def obtainable(self, tokens: list[int], namespace: bytes, nodes: list[tuple[list[int], list[int | None]]]) -> bool:
        length = len(tokens)
        for start in range(0, length, SIZE):
            shelves = {
                self.shelf_of(group, key, length)
                for group, spec in enumerate(self.specs)
                for key in STILL_SEEN[spec, namespace, length]
                if start <= key < start + SIZE
            }
            here = tokens[start : start + SIZE]
            found = (
                blocks
                for text, blocks in nodes
                if text[: start + len(here)] == tokens[: start + len(here)] and start < len(text) <= start + SIZE
            )
            if not any(all(blocks[shelf] is not None for shelf in shelves) for blocks in found):
                return False
        return True


def text_of(node: object) -> list[int]:
    return [] if node.parent is None else [*text_of(node.parent), *node.tokens]  # type: ignore[attr-defined]


def root_of(node: object) -> object:
    return node if node.parent is None else root_of(node.parent)  # type: ignore[attr-defined]


class PackedMachine(CacheMachine):
    """The same where full blocks are packed: a group's full blocks lie on one shelf, its begun ones on another."""

    specs = PACKED
    most_spare = 0  # what fills a block is packed at once
    most_rejected = 0  # and cannot be taken back in part

    def block_bytes(self) -> list[int]:
        opened = [spec.num_layers * spec.num_kv_heads * SIZE * spec.head_dim * 8 for spec in PACKED]
        return [*super().block_bytes(), *opened]

    def needs(self) -> list[int]:
        return [*(need - 2 for need in super().needs()), *(2 for _ in PACKED)]

    def shelf_of(self, group: int, key: int, length: int) -> int:
        return group if key // SIZE < length // SIZE else len(PACKED) + group

    def written(self, start: int, end: int) -> list[tuple[int, int]]:
        sealed = range(start // SIZE * SIZE, end // SIZE * SIZE)
        begun = [
            position
            for position in range(start, end)
            if position // SIZE == end // SIZE or (start % SIZE and position // SIZE == start // SIZE)
        ]
        return [
            (shelf, position)
            for group in range(len(PACKED))
            for shelf, positions in ((group, sealed), (len(PACKED) + group, begun))
            for position in positions
        ]

    def new_blocks(self, table: list[int], shelf: int, start: int, end: int) -> int:
        blocks = {position // SIZE for s, position in self.written(start, end) if s == shelf}
        return sum(block >= len(table) or table[block] == MISSING for block in blocks)


@pytest.mark.parametrize("machine", [CacheMachine, PackedMachine])
def test_random_operations_never_show_a_query_another_past(machine: type[CacheMachine]) -> None:
    CacheMachine.totals.clear()
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        machine,
        settings=settings(
            max_examples=220,
            stateful_step_count=40,
            derandomize=True,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
    totals = CacheMachine.totals
    assert totals["operations"] >= 2000, totals
    for event in ("hits", "copies", "forks", "evictions", "refusals", "exact crops", "crops that lost more"):
        assert totals[event], f"the operations do not reach: {event}, {totals}"
