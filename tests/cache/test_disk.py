"""A disk store does what a dictionary does, within its limit, whatever was there before."""

import os
import stat
import warnings
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from stored_blocks import SIZES, blocks, content, text

from kvine.cache.archive import ArchiveError, export_blocks, import_blocks
from kvine.cache.disk import DiskStore
from kvine.cache.store import chain
from kvine.errors import ConfigError, KvineWarning

LIMIT = 4 << 20


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "blocks"


def served(store: DiskStore, names) -> list[bool]:
    """Which blocks the store gives; each must be what was put."""
    found = [store.get(name, SIZES) for name in names]
    for name, parts in zip(names, found, strict=True):
        assert parts is None or tuple(map(bytes, parts)) == content(name)
    return [parts is not None for parts in found]


def test_what_was_put_is_there_after_it_was_closed(folder):
    store = DiskStore(folder, LIMIT)
    names = text(1)
    assert store.contains(names) == [False] * 8 and served(store, names) == [False] * 8
    assert store.put(blocks(names)) == 8
    store.close()
    store.close()
    store = DiskStore(folder)
    assert store.limit == LIMIT, "who says none keeps the limit"
    assert store.contains([*names, *text(2)]) == [True] * 8 + [False] * 8
    assert served(store, names) == [True] * 8
    counted = store.stats()
    assert (counted.num_blocks, counted.hits, counted.misses, counted.puts) == (8, 8, 0, 0)
    assert counted.bytes_on_disk == sum(file.stat().st_size for file in folder.iterdir())
    store.clear()
    assert store.stats().num_blocks == 0 and served(store, names) == [False] * 8
    assert store.put(blocks(names)) == 8 and served(store, names) == [True] * 8
    store.close()


def test_another_size_or_group_or_namespace_is_a_miss(folder):
    store = DiskStore(folder, LIMIT)
    name = text(1)[0]
    store.put([(name, content(name))])
    assert store.get(name, (SIZES[0], SIZES[1] + 1)) is None
    assert store.get(chain(b"namespace", name.tokens, 4, group=1)[0], SIZES) is None
    assert store.get(chain(b"other", name.tokens, 4)[0], SIZES) is None
    store.close()


@pytest.mark.parametrize("size", [100, 5_000, 90_000])
def test_files_never_grow_beyond_the_limit(folder, size):
    limit = 1 << 20
    store = DiskStore(folder, limit)
    names = chain(b"n", range(4 * min(3 * limit // size, 2500)), 4)
    for start in range(0, len(names), 10):
        assert store.put([(name, content(name, (size,))) for name in names[start : start + 10]]) == len(
            names[start : start + 10]
        )
        assert sum(file.stat().st_size for file in folder.iterdir()) <= limit
    counted = store.stats()
    assert counted.evictions and counted.num_blocks == len(names) - counted.evictions
    newest = names[(len(names) - 1) // 10 * 10]
    assert store.get(newest, (size,)) is not None and store.get(names[0], (size,)) is None
    store.close()


def test_a_lower_limit_shrinks_the_files_and_keeps_the_newest(folder):
    store = DiskStore(folder, LIMIT)
    for number in range(100):
        store.put(blocks(text(number)))
    store.close()
    limit = 1 << 20
    store = DiskStore(folder, limit)
    assert sum(file.stat().st_size for file in folder.iterdir()) <= limit
    assert served(store, text(99)) == [True] * 8 and not any(served(store, text(40)))
    store.put(blocks(text(200)))
    assert served(store, text(200)) == [True] * 8
    store.close()


def test_what_was_used_stays_and_heads_outlive_tails(folder):
    store = DiskStore(folder, 1 << 20)
    store.put(blocks(text(0)))
    number = 1
    while store.stats().evictions == 0:
        served(store, text(0)[:6])
        store.put(blocks(text(number)))
        number += 1
    for more in range(number, number + 10):
        served(store, text(0)[:6])
        store.put(blocks(text(more)))
    store.put(blocks(text(number + 10)[:3]))
    assert served(store, text(0)) == [True] * 6 + [False] * 2
    there = [store.contains(text(n)) for n in range(1, number + 10)]
    assert all(sorted(each, reverse=True) == each for each in there), "a tail outlived its head"
    assert any(0 < sum(each) < 8 for each in there), "the test saw no text that is partly gone"
    store.close()


def test_a_block_that_can_never_fit_is_refused_and_said_once(folder):
    store = DiskStore(folder, 1 << 20)
    large, small = text(1)[0], text(2)[0]
    with pytest.warns(KvineWarning, match="too large for a cache of 1,048,576"):
        assert store.put([(large, (bytes(400_000),)), (small, content(small))]) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert store.put([(large, (bytes(400_000),))]) == 0
    assert served(store, [small]) == [True] and store.stats().refused == 2
    store.close()


def test_only_the_owner_can_read_it(folder):
    previous = os.umask(0)
    try:
        store = DiskStore(folder, LIMIT)
        store.put(blocks(text(1)))
        export_blocks(store, folder.parent / "file")
        store.clear()
    finally:
        os.umask(previous)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    files = [*folder.iterdir(), folder.parent / "file"]
    assert len(files) > 3 and {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}
    store.close()


def test_a_folder_that_is_something_else_is_refused(folder, tmp_path):
    folder.mkdir()
    (folder / "thesis.txt").write_text("mine")
    with pytest.raises(ConfigError, match="something else than a cache"):
        DiskStore(folder)
    assert [file.name for file in folder.iterdir()] == ["thesis.txt"]
    with pytest.raises(ConfigError, match="something else than a cache"):
        DiskStore(folder / "thesis.txt")
    with pytest.raises(ConfigError, match="There is no cache in"):
        DiskStore(tmp_path / "none", create=False)
    with pytest.raises(ConfigError, match="at least 1MiB"):
        DiskStore(tmp_path / "none", 1000)
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("mark", [b"kvine-blocks 2\n", b"", b"\xff\xfe\0", b"kvine-blocks 1 more\n"])
def test_a_folder_of_another_format_is_refused_as_it_is(folder, mark):
    DiskStore(folder, LIMIT).close()
    (folder / "format").write_bytes(mark)
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    with pytest.raises(ConfigError, match="this version of Kvine reads 'kvine-blocks 1'"):
        DiskStore(folder)
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before


def test_one_process_opens_it_once(folder):
    store = DiskStore(folder, LIMIT)
    with pytest.raises(ConfigError, match="close what else uses it"):
        DiskStore(folder, LIMIT)
    store.put(blocks(text(1)))
    assert served(store, text(1)) == [True] * 8
    store.close()
    DiskStore(folder, LIMIT).close()


def test_remarks_are_kept_and_no_blocks(folder):
    store = DiskStore(folder, LIMIT)
    store.remark(b"s", b"one")
    store.remark(b"s", b"two")
    assert store.remarks() == {b"s": b"two"} and store.stats().num_blocks == 0
    store.close()


# -- files of blocks --------------------------------------------------------------------------------------------------


def test_an_exported_file_brings_all_blocks_elsewhere(folder, tmp_path):
    store, other = DiskStore(folder, LIMIT), DiskStore(tmp_path / "other", LIMIT)
    store.put(blocks(text(1)) + blocks(text(2)))
    other.put(blocks(text(2)))
    done: list[int] = []
    moved = export_blocks(store, tmp_path / "file", done.append)
    assert (moved.num_blocks, moved.left_out, moved.num_bytes) == (16, 0, (tmp_path / "file").stat().st_size)
    assert sum(done) == store.stats().bytes_stored
    moved = import_blocks(other, tmp_path / "file")
    assert (moved.num_blocks, moved.left_out) == (16, 8)
    assert served(other, text(1) + text(2)) == [True] * 16
    store.close()
    other.close()


def test_a_file_that_is_not_whole_changes_nothing(folder, tmp_path):
    store, file = DiskStore(folder, LIMIT), tmp_path / "file"
    store.put(blocks(text(1)))
    export_blocks(store, file)
    store.clear()
    store.put(blocks(text(2)))
    whole = file.read_bytes()
    broken = [whole[:n] for n in (0, 10, 25, 4000, len(whole) - 40, len(whole) - 1)]
    broken += [whole + b"\0", whole[:5000] + bytes([whole[5000] ^ 1]) + whole[5001:]]
    broken += [whole[:-1] + bytes([whole[-1] ^ 1])]
    for data in broken:
        file.write_bytes(data)
        with pytest.raises(ArchiveError, match=r"no file of blocks|cut off|damaged"):
            import_blocks(store, file)
        assert store.stats().num_blocks == 8 and served(store, text(2)) == [True] * 8
    file.write_bytes(whole)
    assert import_blocks(store, file).num_blocks == 8
    store.close()


def test_ctrl_c_in_an_import_or_an_export_leaves_everything_as_it_was(folder, tmp_path, monkeypatch):
    monkeypatch.setattr("kvine.cache.archive._BATCH_BYTES", 10_000)
    store, file = DiskStore(folder, LIMIT), tmp_path / "file"
    store.put(blocks(text(1)))
    told = 0

    def interrupt(_: int) -> None:
        nonlocal told
        told += 1
        if told == 14:  # of the second reading: some blocks have been put
            raise KeyboardInterrupt

    export_blocks(store, file)
    store.clear()
    with pytest.raises(KeyboardInterrupt):
        import_blocks(store, file, interrupt)
    assert store.stats().puts > 8 and store.stats().num_blocks == 0
    assert import_blocks(store, file).num_blocks == 8
    told = 13
    with pytest.raises(KeyboardInterrupt):
        export_blocks(store, tmp_path / "second", interrupt)
    assert {path.name for path in tmp_path.iterdir()} == {"blocks", "file"}
    store.close()


def test_a_file_that_is_too_large_is_refused_before_anything_is_forgotten(folder, tmp_path):
    store = DiskStore(folder, LIMIT)
    for number in range(20):
        store.put(blocks(text(number)))
    export_blocks(store, tmp_path / "file")
    small = DiskStore(tmp_path / "small", 1 << 20)
    small.put(blocks(text(50)))
    with pytest.raises(ArchiveError, match="do not fit"):
        import_blocks(small, tmp_path / "file")
    assert served(small, text(50)) == [True] * 8 and small.stats().evictions == 0
    with pytest.raises(ArchiveError, match="cannot be read"):
        import_blocks(small, tmp_path / "none")
    with pytest.raises(ArchiveError, match="cannot be written"):
        export_blocks(small, tmp_path / "no" / "folder")
    store.close()
    small.close()


# -- against a dictionary ---------------------------------------------------------------------------------------------


class StoreMachine(RuleBasedStateMachine):
    """Puts, gets, closing, clearing and damaging in any order. Nothing is large enough here to be forgotten."""

    @initialize()
    def begin(self) -> None:
        import tempfile

        self.place = tempfile.TemporaryDirectory()
        self.store = DiskStore(Path(self.place.name) / "s", LIMIT)
        self.model: dict = {}

    @rule(number=st.integers(0, 3), start=st.integers(0, 7), count=st.integers(1, 8), version=st.integers(0, 1))
    def put(self, number: int, start: int, count: int, version: int) -> None:
        names = text(number)[start : start + count]
        new = [(name, tuple(part[version:] for part in content(name))) for name in names]
        assert self.store.put(new) == len(names)
        for name, parts in new:  # what is there stays: equal names mean equal content
            self.model.setdefault(name, parts)

    @rule(number=st.integers(0, 3))
    def get(self, number: int) -> None:
        for name in text(number):
            expected = self.model.get(name)
            found = self.store.get(name, [len(part) for part in expected or (b"", b"")])
            assert (None if found is None else tuple(map(bytes, found))) == expected

    @rule()
    def reopen(self) -> None:
        self.store.close()
        self.store = DiskStore(Path(self.place.name) / "s", LIMIT)

    @rule()
    def clear(self) -> None:
        self.store.clear()
        self.model.clear()

    @rule(number=st.integers(0, 3), block=st.integers(0, 7))
    def damage(self, number: int, block: int) -> None:
        name = text(number)[block]
        if name not in self.model:
            return
        with self.store._env.begin(write=True) as txn:
            data = bytearray(txn.get(b"b" + name.address))
            data[len(data) // 2] ^= 4
            txn.put(b"b" + name.address, bytes(data))
        assert self.store.get(name, [len(part) for part in self.model[name]]) is None
        del self.model[name]  # and may be put again

    @invariant()
    def names_agree(self) -> None:
        if hasattr(self, "store"):
            names = [name for number in range(4) for name in text(number)]
            assert self.store.contains(names) == [name in self.model for name in names]

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.store.close()
            self.place.cleanup()


TestStoreMachine = StoreMachine.TestCase
TestStoreMachine.settings = settings(
    max_examples=30, stateful_step_count=20, deadline=None, suppress_health_check=list(HealthCheck)
)
