"""What goes to a store and comes back, at the level of a manager: contents are followed by what each block holds."""

import tempfile
from pathlib import Path

import pytest
from driving import FULL, SIZE, WINDOWED, grow, hit, manager_of, state
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from stored_blocks import content

from kvine.cache.costs import Costs
from kvine.cache.disk import DiskStore
from kvine.cache.manager import MISSING, CacheManager
from kvine.cache.spec import CacheSpec
from kvine.cache.store import chain
from kvine.cache.tier import StoreTier

SIZES = (24, 40)
PACKED = CacheSpec(layers=(0,), num_kv_heads=1, head_dim=2, block_size=SIZE, key_codec="int8", value_codec="int8")
SPACE = b"space"


class Contents:
    """What each block holds: the parts that belong to its name. Written by `fill`, checked by `check`."""

    def __init__(self) -> None:
        self.held: dict = {}
        self.fails = False

    def sizes(self, shelf):
        return SIZES

    def save(self, shelf, block):
        return self.held[shelf, block]

    def load(self, shelf, block, parts):
        if self.fails:
            raise MemoryError("no memory")
        self.held[shelf, block] = tuple(map(bytes, parts))

    def each(self, manager, sequence):
        """(shelf, block, what it must hold) of the full blocks that a sequence holds."""
        for group in range(len(manager.specs)):
            names = chain(sequence.path[0].key, sequence.tokens, SIZE, group)
            for name, block in zip(names, sequence.tables[group], strict=False):
                if block != MISSING:
                    yield group, block, content(name, SIZES)

    def serve(self, manager: CacheManager, tokens, namespace=SPACE, chunk=100) -> int:
        """Serves one text to its end; what came from the cache must be what belongs there."""
        sequence = manager.open(tokens, namespace)
        manager.check()
        found = sequence.num_tokens
        for shelf, block, expected in self.each(manager, sequence):
            assert self.held[shelf, block] == expected, "a wrong block was restored"
        for start in range(found, len(tokens), chunk):
            part = tokens[start : start + chunk]
            assert manager.reserve(sequence, len(part))
            for copy in manager.take_copies():
                self.held[copy.shelf, copy.target] = self.held.get((copy.shelf, copy.source), ())
            tables = [list(table) for table in sequence.tables]
            for group in range(len(manager.specs)):  # as the step writes them, before they are published
                for name, block in zip(
                    chain(namespace, tokens[: start + len(part)], SIZE, group), tables[group], strict=False
                ):
                    if block != MISSING:
                        self.held[group, block] = content(name, SIZES)
            manager.commit(sequence, part)
            manager.check()
        manager.release(sequence)
        manager.check()
        return found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "blocks"


def begun(folder: Path, blocks: int, *specs: CacheSpec) -> tuple[CacheManager, Contents, StoreTier]:
    manager, contents = manager_of(blocks, *specs), Contents()
    tier = StoreTier(manager, contents, DiskStore(folder, 4 << 20), "test")
    manager.tier = tier
    return manager, contents, tier


GROUPS = {
    "full": (FULL,),
    "windowed": (WINDOWED,),
    "both": (WINDOWED, FULL),
    "packed": (PACKED,),
    "mixed": (PACKED, WINDOWED),
}
# 23 tokens are 5 full blocks; what is packed or windowed comes back in whole blocks
TEXT = list(range(23))


@pytest.mark.parametrize("specs", GROUPS.values(), ids=GROUPS)
@pytest.mark.parametrize("length", [20, 21, 23, 24])
def test_a_text_is_found_again_by_another_manager(folder, specs, length):
    tokens = list(range(length))
    manager, contents, tier = begun(folder, 40, *specs)
    assert contents.serve(manager, tokens) == 0
    tier.close()
    assert contents.serve(manager, [7, *tokens]) == 0, "the cache goes on without its store"
    manager, contents, tier = begun(folder, 40, *specs)
    packed = any(spec.packs for spec in specs)
    whole = (length - 1) // SIZE * SIZE
    expected = whole if packed or length % SIZE else length - 1  # inside a block only where blocks can be cut
    assert contents.serve(manager, tokens) == expected
    # The beginning of a block is found in memory only, where a window of the text before may have left it behind.
    left_behind = length == 24 and WINDOWED in specs
    assert contents.serve(manager, [*tokens[:14], 99, 98]) == (12 if packed or left_behind else 14)
    assert contents.serve(manager, tokens, b"other") == 0
    assert tier.store.stats().damaged == 0
    tier.close()


def test_what_memory_evicts_comes_back(folder):
    manager, contents, tier = begun(folder, 6, FULL)
    contents.serve(manager, TEXT)
    contents.serve(manager, list(range(100, 123)))
    assert manager.num_evictions >= 5
    tier.wait()
    assert contents.serve(manager, TEXT) == 20
    tier.close()


def test_an_open_tail_and_a_private_namespace_are_never_stored(folder):
    manager, contents, tier = begun(folder, 40, FULL)
    contents.serve(manager, TEXT, b"")
    contents.serve(manager, TEXT[:3])
    manager.clear()
    tier.wait()
    assert tier.store.stats().num_blocks == 0
    tier.close()


def test_a_failed_restore_changes_nothing(folder):
    manager, contents, tier = begun(folder, 40, FULL)
    contents.serve(manager, TEXT)
    tier.close()
    manager, contents, tier = begun(folder, 40, FULL)
    other = manager.open([50, 51], SPACE)
    grow(manager, other, [50, 51])
    before = state(manager, other)
    contents.fails = True
    with pytest.raises(MemoryError):
        tier.recall(manager.index.root(SPACE), TEXT, manager.shelves)
    manager.check()
    after = state(manager, other)
    assert [pool[0:2] + pool[3:] for pool in before[0]] == [pool[0:2] + pool[3:] for pool in after[0]]
    assert before[1:] == after[1:]
    contents.fails = False
    assert contents.serve(manager, TEXT) == 20
    tier.close()


def test_a_damaged_block_costs_what_lies_behind_it(folder):
    manager, contents, tier = begun(folder, 40, FULL)
    contents.serve(manager, TEXT)
    tier.close()
    manager, contents, tier = begun(folder, 40, FULL)
    name = chain(SPACE, TEXT, SIZE)[2]
    with tier.store._env.begin(write=True) as txn:
        data = bytearray(txn.get(b"b" + name.address))
        data[-30] ^= 1
        txn.put(b"b" + name.address, bytes(data))
    assert contents.serve(manager, TEXT) == 8
    assert tier.store.stats().damaged == 1
    tier.wait()
    tier.close()
    manager, contents, tier = begun(folder, 40, FULL)
    assert contents.serve(manager, TEXT) == 20, "what was computed anew has mended it"
    tier.close()


def test_a_window_brings_back_only_what_a_later_query_sees(folder):
    manager, contents, tier = begun(folder, 40, WINDOWED)
    long = list(range(41))
    contents.serve(manager, long, chunk=SIZE)
    tier.close()
    manager, contents, tier = begun(folder, 40, WINDOWED)
    assert contents.serve(manager, long) == 40
    live = len(WINDOWED.live_blocks(40))
    assert tier.store.stats().hits == live < 10
    tier.close()


def test_one_group_that_lacks_a_block_shortens_the_hit(folder):
    manager, contents, tier = begun(folder, 40, WINDOWED, FULL)
    contents.serve(manager, TEXT)
    tier.wait()
    tier.store.discard([chain(SPACE, TEXT, SIZE, 1)[3].address])  # of the full group
    manager.tier = None
    manager.clear()
    manager.tier = tier
    assert contents.serve(manager, TEXT) == 12
    tier.close()


def test_it_is_restored_only_where_that_is_faster(folder):
    manager, contents, tier = begun(folder, 40, FULL)
    contents.serve(manager, TEXT)
    tier.close()
    manager, contents, tier = begun(folder, 40, FULL)
    tier.costs = Costs(compute_s_per_token=1e-6, restore_s_per_byte=1e-6)  # 64 bytes for 4 tokens
    assert contents.serve(manager, TEXT) == 0 and tier.store.stats().hits == 0
    manager.tier = None
    manager.clear()
    manager.tier = tier
    tier.costs = Costs(compute_s_per_token=1e-4, restore_s_per_byte=1e-6)
    assert contents.serve(manager, TEXT) == 20
    assert tier.costs.restore_s_per_byte != 1e-6, "it goes on measuring"
    tier.close()


def test_costs_are_running_estimates_and_no_refusal_is_for_ever():
    costs = Costs()
    assert costs.worth_restoring(10**9, 1)
    costs.computed(10, 99.0)
    assert costs.compute_s_per_token is None, "a small step says nothing of a long prompt"
    costs.computed(100, 1.0)
    costs.restored(1000, 1.0)
    assert (costs.compute_s_per_token, costs.restore_s_per_byte) == (0.01, 0.001)
    costs.computed(100, 2.0)
    assert costs.compute_s_per_token == pytest.approx(0.013)
    assert costs.worth_restoring(100, 10) and not costs.worth_restoring(1000, 10)
    assert [costs.worth_restoring(1000, 10) for _ in range(15)] == [False] * 14 + [True]
    later = Costs()
    later.take_over(costs.to_json("model"))
    assert (later.compute_s_per_token, later.restore_s_per_byte) == (costs.compute_s_per_token, 0.001)
    for nonsense in (b"", b"[]", b"{}", b'{"compute_s_per_token": "x", "restore_s_per_byte": -1}', b"\xff"):
        empty = Costs()
        empty.take_over(nonsense)
        assert empty == Costs()


def test_estimates_outlive_the_process(folder):
    manager, contents, tier = begun(folder, 40, FULL)
    tier.computed(100, 3.0)
    contents.serve(manager, TEXT)
    tier.close()
    manager, contents, tier = begun(folder, 40, FULL)
    hit(manager, TEXT, SPACE)
    assert tier.costs.compute_s_per_token == 0.03 and tier.costs.restore_s_per_byte is not None
    tier.close()


def test_what_finds_no_place_among_the_waiting_is_written_at_the_end(folder, monkeypatch):
    monkeypatch.setattr("kvine.cache.tier._MOST_WAITING", 100)
    manager, contents, tier = begun(folder, 40, FULL)
    contents.serve(manager, TEXT)
    tier.wait()
    assert tier.store.stats().num_blocks == 1
    tier.close()
    store = DiskStore(folder)
    assert store.contains(chain(SPACE, TEXT, SIZE)) == [True] * 5
    store.close()


def test_heads_outlive_tails(folder, monkeypatch):
    monkeypatch.setattr("kvine.cache.tier._AT_ONCE", 100)  # one or two blocks at a time
    manager, contents, tier = begun(folder, 40, FULL)
    contents.serve(manager, TEXT)
    tier.close()
    store = DiskStore(folder)
    from kvine.cache.disk_records import USE, entries

    with store._env.begin() as txn:
        oldest_first = [bytes(key[9:]) for key, _ in entries(txn, USE)]
    assert oldest_first == [name.address for name in reversed(chain(SPACE, TEXT, SIZE))]
    store.close()


texts = st.lists(st.integers(0, 1), min_size=1, max_size=24)


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.lists(st.tuples(texts, st.sampled_from([b"a", b"b", b""]), st.integers(1, 9)), max_size=12),
    st.sampled_from(list(GROUPS)),
    st.data(),
)
def test_any_texts_in_a_small_memory_are_served_what_belongs_to_them(served, specs, data):
    with tempfile.TemporaryDirectory() as place:
        for part in (served[:6], served[6:]):
            manager, contents, tier = begun(Path(place) / "s", 16, *GROUPS[specs])
            for tokens, namespace, chunk in part:
                if manager.fits_ever(len(tokens), chunk):
                    contents.serve(manager, tokens, namespace, chunk)
                if data.draw(st.booleans()):
                    tier.wait()
            tier.close()
