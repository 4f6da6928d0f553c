"""A store that is killed, damaged, shared or out of room gives what was put, or nothing."""

import os
import random
import resource
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from stored_blocks import SIZES, blocks, content, text

from kvine.cache.disk import DiskStore
from kvine.errors import ConfigError, KvineWarning

LIMIT = 4 << 20
WRITER = [sys.executable, str(Path(__file__).with_name("stored_blocks.py"))]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "blocks"


def num_served(store: DiskStore, numbers) -> int:
    """How many blocks of these texts are there; each must be what was put."""
    count = 0
    for number in numbers:
        for name in text(number):
            parts = store.get(name, SIZES)
            assert parts is None or tuple(map(bytes, parts)) == content(name), "a wrong block was served"
            count += parts is not None
    return count


def writer(folder: Path, limit: int, first: int) -> subprocess.Popen[str]:
    return subprocess.Popen([*WRITER, str(folder), str(limit), str(first)], stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize("times", [4, pytest.param(50, marks=pytest.mark.slow)])
def test_killed_while_writing(folder, times):
    """What was put before the kill is there, whatever the moment; the limit makes it forget meanwhile too."""
    rng, first = random.Random(5), 0
    for _ in range(times):
        with writer(folder, LIMIT, first) as process:
            assert process.stdout is not None
            done = [int(process.stdout.readline()) for _ in range(rng.randint(1, 8))]
            if rng.random() < 0.5:
                done += [int(process.stdout.readline())]
            else:
                process.stdout.read(rng.randint(1, 2))
            process.send_signal(signal.SIGKILL)
            rest = process.stdout.read().split()
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # nothing is set aside
            store = DiskStore(folder, LIMIT)
        assert num_served(store, [done[-1]]) == 8
        last = max([done[-1], *map(int, rest)])
        num_served(store, range(max(0, last - 60), last + 3))
        assert sum(file.stat().st_size for file in folder.iterdir()) <= LIMIT
        store.close()
        first = last + 3
    assert times < 50 or first > 150, "it never came to forgetting"


def filled(folder: Path) -> bytes:
    store = DiskStore(folder, LIMIT)
    for number in range(75):  # more than the limit, so that pages are free and have been used again
        store.put(blocks(text(number)))
    assert store.stats().evictions
    store.close()
    return (folder / "blocks.mdb").read_bytes()


def use(folder: Path) -> int:
    """Opens the store, asks for everything, writes, forgets and asks again; how many blocks were there."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", KvineWarning)
        store = DiskStore(folder, LIMIT)
        found = num_served(store, range(75))
        for number in range(100, 104):
            store.put(blocks(text(number)))
        num_served(store, [*range(75), *range(100, 104)])
        store.stats()
        store.close()
    return found


def test_flipped_bytes_anywhere_are_misses_at_most(folder):
    whole = filled(folder)
    rng = random.Random(7)
    size, all_there = len(whole), use(folder)
    assert all_there > 300
    trees = [at for at in range(0, size, 4096) if int.from_bytes(whole[at + 10 : at + 12], "little") & 3]
    outcomes = set()
    for attempt in range(60):
        data = bytearray(whole)
        for _ in range(rng.choice([1, 1, 8, 200])):
            page = rng.choice(trees) if attempt % 2 else rng.randrange(0, size, 4096)
            data[page + rng.randrange(4096)] ^= rng.randint(1, 255)
        (folder / "blocks.mdb").write_bytes(data)
        (folder / "damaged.mdb").unlink(missing_ok=True)
        found = use(folder)
        outcomes.add("set aside" if (folder / "damaged.mdb").exists() else "missed" if found < all_there else "whole")
        if (folder / "damaged.mdb").exists():
            assert (folder / "damaged.mdb").read_bytes() == data and found == 0
    assert outcomes == {"set aside", "missed", "whole"}


def test_truncated_files_are_set_aside(folder):
    whole = filled(folder)
    rng = random.Random(3)
    for size in [0, 1, 100, 4096, 8192, 12288, len(whole) // 2, *(rng.randrange(len(whole)) for _ in range(20))]:
        (folder / "blocks.mdb").write_bytes(whole[:size])
        (folder / "damaged.mdb").unlink(missing_ok=True)
        use(folder)
        if size < len(whole) // 2:
            assert (folder / "damaged.mdb").exists()


@pytest.mark.parametrize("garbage", [b"", b"x" * 100, bytes(8192), b"\xff" * 40960])
def test_any_file_in_its_place_is_set_aside_with_a_word(folder, garbage):
    DiskStore(folder, LIMIT).close()
    (folder / "blocks.mdb").write_bytes(garbage)
    with pytest.warns(KvineWarning, match=r"is damaged .* set aside as damaged\.mdb"):
        store = DiskStore(folder, LIMIT)
    assert store.put(blocks(text(1))) == 8 and num_served(store, [1]) == 8
    store.close()
    assert (folder / "damaged.mdb").read_bytes() == garbage


def test_damage_under_an_open_store_is_a_miss_and_is_mended_by_the_next_put(folder):
    store = DiskStore(folder, LIMIT)
    store.put(blocks(text(1)))
    part = content(text(1)[3])[0]
    database = folder / "blocks.mdb"
    at = database.read_bytes().index(part[:64])
    with database.open("r+b") as file:
        file.seek(at + 10)
        file.write(bytes([part[10] ^ 255]))
    assert num_served(store, [1]) == 7 and store.stats().damaged == 1
    assert [block.reason for block in store.scan() if block.name is None] == ["its checksum is another"]
    assert store.contains(text(1)).count(False) == 1
    assert store.put(blocks(text(1))) == 8 and num_served(store, [1]) == 8
    store.close()


# -- two processes ----------------------------------------------------------------------------------------------------


def test_one_process_reads_while_another_writes(folder):
    store, there = DiskStore(folder, LIMIT), 0
    with writer(folder, LIMIT, 0) as process:
        assert process.stdout is not None
        for _ in range(50):
            number = int(process.stdout.readline())
            there += num_served(store, range(max(0, number - 10), number + 50))  # it may be far ahead
        process.kill()
    assert there > 1000
    store.close()


def test_two_processes_write_at_once(folder):
    with writer(folder, LIMIT, 0) as one, writer(folder, LIMIT, 5000) as other:
        for process in (one, other):
            assert process.stdout is not None
            for _ in range(100):
                process.stdout.readline()
        one.kill()
        other.kill()
    store = DiskStore(folder, LIMIT)
    assert num_served(store, range(400)) and num_served(store, range(5000, 5400))
    assert sum(file.stat().st_size for file in folder.iterdir()) <= LIMIT
    store.close()


def test_another_process_may_have_a_higher_limit(folder):
    store = DiskStore(folder, 1 << 20)
    with writer(folder, LIMIT, 0) as process:
        assert process.stdout is not None
        numbers = [int(process.stdout.readline()) for _ in range(40)]
        process.kill()
    assert num_served(store, numbers) > 8 * 20, "what lies beyond its own limit is read too"
    assert store.put(blocks(text(9000))) == 8 and num_served(store, [9000]) == 8
    store.close()


def test_whoever_clears_it_leaves_the_other_a_working_store(folder):
    store = DiskStore(folder, LIMIT)
    with writer(folder, LIMIT, 0) as process:
        assert process.stdout is not None
        process.stdout.readline()
        store.clear()
        numbers = [int(process.stdout.readline()) for _ in range(20)]
        assert numbers and store.contains(text(1)) is not None
        process.kill()
    store.close()


# -- a full disk ------------------------------------------------------------------------------------------------------


def test_a_full_disk_loses_nothing_else_and_is_said_once(folder):
    store = DiskStore(folder, LIMIT)
    store.put(blocks(text(1)))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, ((folder / "blocks.mdb").stat().st_size + 4096, hard))
    try:
        with pytest.warns(KvineWarning, match="what it cannot keep is computed again"):
            assert store.put(blocks(text(2))) == 0
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert store.put(blocks(text(3))) == 0
            assert num_served(store, [1, 2, 3]) == 8
            store.remark(b"a", b"b" * 100_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert store.stats().refused == 16
    assert store.put(blocks(text(2))) == 8 and num_served(store, [1, 2]) == 16, "it goes on where there is room again"
    store.close()
    store = DiskStore(folder, LIMIT)
    assert num_served(store, [1, 2]) == 16
    store.close()


def test_a_folder_that_cannot_be_written_is_a_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot be used|something else"):
        DiskStore(tmp_path / "file" / "below", LIMIT)
    if os.geteuid():
        tmp_path.chmod(0o500)
        with pytest.raises(ConfigError, match="cannot be used"):
            DiskStore(tmp_path / "below", LIMIT)
