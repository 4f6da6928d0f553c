"""Sealed blocks on this machine's disk, in LMDB: crash-safe, size-capped, shared by processes, checked at each read."""

import contextlib
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import lmdb

from kvine.cache.disk_folder import StoreFolder, damage
from kvine.cache.disk_records import (
    FRAME,
    PAGE,
    RECORD,
    REMARK,
    copied,
    entries,
    forget,
    keep_limit,
    kept_limit,
    make_room,
    note_uses,
    pages_of,
    pages_used,
    put_blocks,
    size_in,
)
from kvine.cache.store import BlockName, DamagedBlockError, Parts, StoreStats, checked_parts, frame, unframe
from kvine.config import LEAST_CACHE_SIZE
from kvine.errors import ConfigError, KvineWarning

DEFAULT_LIMIT = 2 << 30
_REWRITTEN = 8  # pages of the tree that LMDB writes anew for one block that comes and one that goes
_FILES_BESIDE = 64 << 10  # lock and format files, with room to spare
_T = TypeVar("_T")


@dataclass(frozen=True)
class StoredBlock:
    """A block that `DiskStore.scan` has come upon; `name` is None where it is damaged, and `reason` says why."""

    address: bytes
    num_bytes: int
    name: BlockName | None
    reason: str | None = None


@dataclass
class _Counts:
    hits: int = 0
    misses: int = 0
    damaged: int = 0
    puts: int = 0
    refused: int = 0
    evictions: int = 0


class DiskStore:
    """A `BlockStore` in a folder. Processes may share one; a process opens it once.

    Args:
        folder: made if need be, for its owner's eyes only: keys and values tell what users have written.
        limit: most bytes that its files take, at least 1 MiB; None: what it had before, or 2 GiB.
        create: whether to begin one where there is none.

    Raises:
        ConfigError: if the folder cannot be used, or is of another format, or this process has it open already.
    """

    def __init__(self, folder: Path | str, limit: int | None = None, *, create: bool = True) -> None:
        if limit is not None and limit < LEAST_CACHE_SIZE:
            raise ConfigError(f"A cache on disk of {limit:,} bytes is too small to be of use: give at least 1MiB.")
        self.folder = StoreFolder(Path(folder), create=create)
        self._counts = _Counts()
        self._touched: dict[bytes, None] = {}  # addresses in the order in which they were read
        self._unsound: set[bytes] = set()  # addresses whose frames were found damaged: forgotten with the next write
        self._writing = threading.RLock()
        self._reading = threading.Lock()  # held for a read, so that nobody maps the file anew meanwhile
        self._complained = False
        self._closed = False
        self.limit = self._pages = 0
        try:
            with self.folder.opening() as alone:
                self._env = self._open(limit, alone)
        except (lmdb.Error, OSError) as error:
            self.folder.leave()
            raise ConfigError(
                f"The cache in {self.folder.path} cannot be opened ({error}): close what else uses it in this "
                "process (LLM.close), or give another cache_dir."
            ) from None

    # -- the protocol -------------------------------------------------------------------------------------------------

    def contains(self, names: Sequence[BlockName]) -> list[bool]:
        """See `BlockStore`."""
        addresses = [name.address for name in names]

        def look(txn: lmdb.Transaction) -> list[bool]:
            return [a not in self._unsound and txn.get(RECORD + a) is not None for a in addresses]

        found = self._read(look)
        return [False] * len(names) if found is None else found

    def get(self, name: BlockName, sizes: Sequence[int]) -> Parts | None:
        """See `BlockStore`."""
        address = name.address
        data = None if address in self._unsound else self._read(lambda txn: copied(txn.get(FRAME + address)))
        if data is None:
            self._counts.misses += 1
            return None
        try:
            parts = checked_parts(data, name, sizes)
        except DamagedBlockError:
            self._unsound.add(address)
            self._counts.misses += 1
            self._counts.damaged += 1
            return None
        self._counts.hits += 1
        self._touched[address] = None
        return parts

    def put(self, blocks: Sequence[tuple[BlockName, Parts]]) -> int:
        """See `BlockStore`."""
        kept = pages = 0
        batch: list[tuple[bytes, bytes]] = []
        with self._writing:
            for name, parts in reversed(blocks):  # so that the first are the last to be forgotten
                data = frame(name, parts)
                need = pages_of(len(data)) + _REWRITTEN
                if need > self._pages // 4:
                    self._refuse(1, f"a block of {len(data):,} bytes is too large for a cache of {self.limit:,}")
                    continue
                if batch and pages + need > self._pages // 16:
                    kept += self._put_batch(batch[::-1], pages)
                    batch, pages = [], 0
                batch.append((name.address, data))
                pages += need
            if batch:
                kept += self._put_batch(batch[::-1], pages)
        return kept

    def remark(self, subject: bytes, text: bytes) -> None:
        """See `BlockStore`."""
        self._write(lambda txn: txn.put(REMARK + subject, text))

    def remarks(self) -> dict[bytes, bytes]:
        """See `BlockStore`."""
        return self._read(lambda txn: {bytes(key[1:]): bytes(text) for key, text in entries(txn, REMARK)}) or {}

    def stats(self) -> StoreStats:
        """See `BlockStore`."""
        sizes = self._read(lambda txn: [size_in(record) for _, record in entries(txn, RECORD)]) or []
        c = self._counts
        return StoreStats(
            len(sizes), sum(sizes), self.folder.bytes_on_disk, self.limit,
            c.hits, c.misses, c.damaged, c.puts, c.refused, c.evictions,
        )  # fmt: skip

    def clear(self) -> None:
        """See `BlockStore`. Where no other process has it open, its disk space is given back too."""
        with self._writing:
            self._touched.clear()
            self._unsound.clear()
            self._write(lambda txn: txn.drop(self._env.open_db(None, txn=txn), delete=False))
            self._give_back()

    def close(self) -> None:
        """See `BlockStore`."""
        with self._writing:
            if self._closed:
                return
            if self._touched or self._unsound:
                self._write(lambda txn: None)
            with self._reading:
                self._closed = True
                self._env.close()
            self.folder.leave()

    # -- for people and tools -----------------------------------------------------------------------------------------

    def scan(self) -> Iterator[StoredBlock]:
        """Reads and checks every block. One that goes meanwhile is left out."""
        addresses = self._read(lambda txn: [bytes(key[1:]) for key, _ in entries(txn, RECORD)]) or []
        for address in addresses:
            data = self.frame_at(address)
            if data is None:
                continue
            try:
                name, _ = unframe(data)
                if name.address != address:
                    raise DamagedBlockError("it is another block")
                yield StoredBlock(address, len(data), name)
            except DamagedBlockError as error:
                yield StoredBlock(address, len(data), None, str(error))

    def frame_at(self, address: bytes) -> bytes | None:
        """A frame as it lies there, unchecked."""
        return self._read(lambda txn: copied(txn.get(FRAME + address)))

    def discard(self, addresses: Sequence[bytes]) -> int:
        """Forgets blocks, damaged ones among them; returns how many there were."""
        self._unsound.difference_update(addresses)
        return self._write(lambda txn: sum(forget(txn, address) for address in addresses)) or 0

    def room_for(self, frame_sizes: Sequence[int]) -> bool:
        """Whether frames of these sizes fit without anything being forgotten."""
        need = sum(map(pages_of, frame_sizes))
        return (self._read(pages_used) or 0) + need <= self._limit_pages

    # -- inside -------------------------------------------------------------------------------------------------------

    @property
    def _limit_pages(self) -> int:
        """Pages that blocks may take: what a transaction frees can be written again only after the one that follows."""
        return self._pages - self._pages // 8 - 32

    def _open(self, limit: int | None, alone: bool) -> lmdb.Environment:
        file = self.folder.database
        if alone and file.exists():
            reason = damage(file)
            if reason is not None:
                self.folder.put_aside(reason)
        size = file.stat().st_size if file.exists() else 0
        if limit is None:
            limit = self._limit_kept() if size else DEFAULT_LIMIT
        self.limit, self._pages = limit, (limit - _FILES_BESIDE) // PAGE
        if alone and size > self._pages * PAGE:
            self._shrink_to_limit(size)
        env = self._environment(self._pages * PAGE)
        env.reader_check()  # readers that were killed would keep pages from being used again
        with contextlib.suppress(lmdb.Error):  # of use to those who give no limit, and to nobody else
            keep_limit(env, limit)
        return env

    def _environment(self, size: int) -> lmdb.Environment:
        return lmdb.open(
            str(self.folder.database), map_size=size, subdir=False, mode=0o600, metasync=False, max_readers=512
        )

    def _limit_kept(self) -> int:
        with self._environment(0) as env:
            return kept_limit(env) or DEFAULT_LIMIT

    def _shrink_to_limit(self, size: int) -> None:
        """Brings a file of `size` bytes, which nobody has open, under the limit, without what goes beyond it."""
        with self._environment(size + size // 8 + (1 << 20)) as env:
            while True:
                with env.begin(write=True) as txn:
                    gone = make_room(txn, self._limit_pages, most=max(1, self._pages // 16))
                if not gone:
                    break
            self.folder.replace_database(lambda descriptor: env.copyfd(descriptor, compact=True))

    def _give_back(self) -> None:
        """Gives the disk space of what was cleared back, if nobody else has the store open."""
        with self._reading:
            self._env.close()
            self.folder.leave()
            with self.folder.opening() as alone:
                if alone:
                    self._shrink_to_limit(self.folder.database.stat().st_size)
                self._env = self._environment(self._pages * PAGE)

    def _read(self, look: Callable[[lmdb.Transaction], _T]) -> _T | None:
        """What a read transaction finds; None where the store cannot be read."""
        for _ in range(2):
            try:
                with self._reading:
                    if self._closed:
                        return None
                    with self._env.begin(buffers=True) as txn:
                        return look(txn)
            except lmdb.MapResizedError:  # another process has opened it with a higher limit
                self._map_anew()
            except lmdb.Error as error:
                self._complain(f"cannot be read ({error})")
                break
        return None

    def _write(self, change: Callable[[lmdb.Transaction], _T]) -> _T | None:
        """What a write transaction does, in whole or not at all; None where it could not be done."""
        try:
            return self._transact(change)
        except lmdb.Error as error:
            self._complain(f"cannot be written ({error})")
            return None

    def _transact(self, change: Callable[[lmdb.Transaction], _T]) -> _T | None:
        """Like `_write`, but raises what LMDB raises."""
        with self._writing:
            if self._closed:
                return None
            for attempt in range(2):
                try:
                    used, unsound = list(self._touched), list(self._unsound)
                    with self._env.begin(write=True) as txn:
                        for address in unsound:
                            forget(txn, address)
                        note_uses(txn, used)
                        result = change(txn)
                    for address in used:
                        self._touched.pop(address, None)
                    self._unsound.difference_update(unsound)
                    return result
                except lmdb.MapResizedError:
                    if attempt:
                        raise
                    self._map_anew()
            return None

    def _map_anew(self) -> None:
        with self._writing, self._reading:
            self._env.set_mapsize(0)

    def _put_batch(self, batch: Sequence[tuple[bytes, bytes]], pages: int) -> int:
        """Writes blocks in one transaction; room that LMDB cannot use, being in pieces, is made up for by more room."""

        def change(txn: lmdb.Transaction) -> tuple[int, int]:
            evicted = make_room(txn, self._limit_pages - pages, most=pages)
            return put_blocks(txn, batch), evicted

        try:
            for attempt in range(8):
                try:
                    done = self._transact(change)
                except lmdb.MapFullError:
                    self._free(self._limit_pages - pages - (attempt + 1) * self._pages // 8)
                    continue
                if done is None:
                    break
                self._counts.puts += done[0]
                self._counts.evictions += done[1]
                return len(batch)
            self._refuse(len(batch), "its file has no room")
        except lmdb.Error as error:  # a full disk, for one: the transaction has left everything as it was
            self._refuse(len(batch), str(error))
        return 0

    def _free(self, room: int) -> None:
        """Forgets blocks in transactions of their own: what one frees can be written after the next.

        It begins with small ones, for where nothing else is free these live on what the ones before have freed.
        """
        for most in (1, 1, 1, *[self._pages // 128] * 8, 1, 1):
            with contextlib.suppress(lmdb.MapFullError):
                self._counts.evictions += self._transact(lambda txn, most=most: make_room(txn, room, most)) or 0  # type: ignore[misc]

    def _refuse(self, count: int, reason: str) -> None:
        self._counts.refused += count
        self._complain(f"takes no more ({reason})")

    def _complain(self, what: str) -> None:
        """Says once what is wrong; everything goes on without the store."""
        if not self._complained:
            self._complained = True
            warnings.warn(
                f"The cache in {self.folder.path} {what}: what it cannot keep is computed again.",
                KvineWarning,
                stacklevel=2,
            )
