"""What lies in the database of a disk store, and in which order blocks are forgotten.

One keyspace, by first byte: `b` address → frame, `a` address → age and size, `u` age address → nothing (blocks in the
order of their last use), `m` subject → remark, `c` → the clock, `l` → the limit in bytes. Ages are times of a clock
that only goes forward.
"""

from collections.abc import Iterator, Sequence

import lmdb

PAGE = 4096  # of the accounting; LMDB's own is never smaller where Kvine runs
FRAME, RECORD, USE, REMARK, _CLOCK, _LIMIT = b"b", b"a", b"u", b"m", b"c", b"l"


def copied(found: bytes | memoryview | None) -> bytes | None:
    """A value that outlives its transaction."""
    return None if found is None else bytes(found)


def size_in(record: bytes | memoryview) -> int:
    """Bytes of a block's frame, by its record."""
    return int.from_bytes(record[8:16], "big")


def pages_of(num_bytes: int) -> int:
    """Pages that a frame takes at most, with its records."""
    return -(-(num_bytes + 256) // PAGE)


def pages_used(txn: lmdb.Transaction) -> int:
    """Pages of everything in the database."""
    stat = txn.stat()
    return int(stat["branch_pages"] + stat["leaf_pages"] + stat["overflow_pages"])


def entries(txn: lmdb.Transaction, prefix: bytes) -> Iterator[tuple[bytes | memoryview, bytes | memoryview]]:
    """Keys and values of one kind, in order of their keys."""
    with txn.cursor() as cursor:
        if not cursor.set_range(prefix):
            return
        for key, value in cursor:
            if key[:1] != prefix:
                return
            yield key, value


def put_blocks(txn: lmdb.Transaction, batch: Sequence[tuple[bytes, bytes]]) -> int:
    """Writes frames under addresses, the first the most recently used; returns how many were not there.

    One that is there is only noted as used.
    """
    clock = _advance(txn, len(batch))
    written = 0
    for i, (address, data) in enumerate(batch):
        record = txn.get(RECORD + address)
        if record is None:
            txn.put(FRAME + address, data)
            written += 1
        _date(txn, address, record, clock - i, len(data))
    return written


def note_uses(txn: lmdb.Transaction, addresses: Sequence[bytes]) -> None:
    """Makes blocks the most recently used, the first of them above all."""
    if not addresses:
        return
    clock = _advance(txn, len(addresses))
    for i, address in enumerate(addresses):
        record = txn.get(RECORD + address)
        if record is not None:
            _date(txn, address, record, clock - i, size_in(record))


def forget(txn: lmdb.Transaction, address: bytes) -> bool:
    """Removes a block; false if there is none."""
    record = txn.get(RECORD + address)
    if record is None:
        return False
    txn.delete(USE + bytes(record[:8]) + address)
    txn.delete(RECORD + address)
    txn.delete(FRAME + address)
    return True


def make_room(txn: lmdb.Transaction, room: int, most: int | None = None) -> int:
    """Forgets the least recently used until all takes at most `room` pages, or `most` have been freed; how many."""
    gone = freed = 0
    while pages_used(txn) > max(room, 0) and (most is None or freed < most):
        with txn.cursor() as cursor:
            if not cursor.set_range(USE) or cursor.key()[:1] != USE:
                break
            use = bytes(cursor.key())
        address = use[9:]
        freed += pages_of(size_in(txn.get(RECORD + address) or bytes(16)))
        if not forget(txn, address):
            txn.delete(use)
        gone += 1
    return gone


def kept_limit(env: lmdb.Environment) -> int | None:
    """The limit that the store was last opened with."""
    with env.begin() as txn:
        kept = txn.get(_LIMIT)
        return None if kept is None else int.from_bytes(kept, "big")


def keep_limit(env: lmdb.Environment, limit: int) -> None:
    """Notes the limit, if it is another than before."""
    if kept_limit(env) != limit:
        with env.begin(write=True) as txn:
            txn.put(_LIMIT, limit.to_bytes(8, "big"))


def _date(txn: lmdb.Transaction, address: bytes, record: bytes | memoryview | None, time: int, size: int) -> None:
    if record is not None:
        txn.delete(USE + bytes(record[:8]) + address)
    age = time.to_bytes(8, "big")
    txn.put(RECORD + address, age + size.to_bytes(8, "big"))
    txn.put(USE + age + address, b"")


def _advance(txn: lmdb.Transaction, count: int) -> int:
    """Moves the clock on and returns its time."""
    clock = int.from_bytes(txn.get(_CLOCK) or b"", "big") + count
    txn.put(_CLOCK, clock.to_bytes(8, "big"))
    return clock
