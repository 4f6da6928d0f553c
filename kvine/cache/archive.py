"""A store's blocks in one file, to keep or to carry elsewhere: magic, then length and frame of each, then a checksum.

A file is read to its end and checked before the first of its blocks is put anywhere.
"""

import hashlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from kvine.cache.disk import DiskStore
from kvine.cache.disk_folder import private_file
from kvine.cache.store import BlockName, DamagedBlockError, Parts, unframe
from kvine.errors import KvineError

_MAGIC = b"kvine-blocks-file 1\n"
_SUM_BYTES = 32
_MOST = 1 << 31  # bytes of a frame; a length beyond it is no length
_BATCH_BYTES = 16 << 20

OnProgress = Callable[[int], None]  # is told of bytes done


class ArchiveError(KvineError):
    """A file of blocks that cannot be read, written or taken in."""


@dataclass(frozen=True)
class Moved:
    """What an export or an import came to.

    Attributes:
        num_blocks: blocks written to the file, or found in it.
        num_bytes: of the file.
        left_out: blocks of the store that were damaged; or blocks of the file that the store had already.
    """

    num_blocks: int
    num_bytes: int
    left_out: int


def export_blocks(store: DiskStore, path: Path, on_progress: OnProgress = lambda _: None) -> Moved:
    """Writes all sound blocks to a file, which appears when it is complete.

    Raises:
        ArchiveError: if it cannot be written.
    """
    new = path.with_name(f"{path.name}.{os.getpid()}.part")
    count = damaged = 0
    try:
        with private_file(new) as file:
            total = hashlib.blake2b(_MAGIC, digest_size=_SUM_BYTES)
            file.write(_MAGIC)
            for block in store.scan():
                data = store.frame_at(block.address) if block.name is not None else None
                if data is None or not _sound(data):
                    damaged += 1
                    continue
                for piece in (len(data).to_bytes(8, "little"), data):
                    total.update(piece)
                    file.write(piece)
                count += 1
                on_progress(len(data))
            end = bytes(8) + count.to_bytes(8, "little")
            total.update(end)
            file.write(end + total.digest())
            file.flush()
            os.fsync(file.fileno())
        num_bytes = new.stat().st_size
        new.replace(path)
    except OSError as error:
        raise ArchiveError(f"{path} cannot be written ({error.strerror}): give another file.") from None
    finally:
        new.unlink(missing_ok=True)
    return Moved(count, num_bytes, damaged)


def import_blocks(store: DiskStore, path: Path, on_progress: OnProgress = lambda _: None) -> Moved:
    """Puts the blocks of a file into a store: all of them, or, where anything is wrong or Ctrl-C ends it, none.

    The file is read twice, so that progress adds up to twice its size.

    Raises:
        ArchiveError: if the file is no such file, cut off or damaged, or the store has no room without forgetting.
    """
    try:
        with path.open("rb") as file:
            names: list[BlockName] = []
            sizes: list[int] = []
            for data in _checked_frames(file, path):
                names.append(unframe(data)[0])
                sizes.append(len(data))
                on_progress(len(data))
            fresh = [not there for there in store.contains(names)]
            if not store.room_for([size for size, new in zip(sizes, fresh, strict=True) if new]):
                raise ArchiveError(
                    f"The blocks of {path} do not fit beside what the cache holds, of {store.limit:,} bytes: give a "
                    "larger --cache-size, or clear it first."
                )
            file.seek(0)
            _put_all(
                store, file, path, [name.address for name, new in zip(names, fresh, strict=True) if new], on_progress
            )
            return Moved(len(names), path.stat().st_size, fresh.count(False))
    except OSError as error:
        raise ArchiveError(f"{path} cannot be read ({error.strerror}): give a file that was exported.") from None


def _put_all(store: DiskStore, file: BinaryIO, path: Path, fresh: list[bytes], on_progress: OnProgress) -> None:
    wanted, batch, size = set(fresh), list[tuple[BlockName, Parts]](), 0
    put = 0
    try:
        for data in _checked_frames(file, path):
            name, parts = unframe(data)
            if name.address in wanted:
                batch.append((name, parts))
                size += len(data)
            if size > _BATCH_BYTES:
                put += store.put(batch)
                batch, size = [], 0
            on_progress(len(data))
        put += store.put(batch)
        if put < len(fresh):
            raise ArchiveError(f"The cache could not take in {path}: it is as it was. Is the disk full?")
    except BaseException:
        store.discard(fresh)
        raise


def _checked_frames(file: BinaryIO, path: Path) -> Iterator[bytes]:
    """Every frame of a file, each checked; ArchiveError at the first thing that is wrong, at the latest at the end."""

    def broken(what: str) -> ArchiveError:
        return ArchiveError(f"{path} {what}: export it again. Nothing was changed.")

    def take(count: int) -> bytes:
        data = file.read(count)
        if len(data) < count:
            raise broken("is cut off")
        total.update(data)
        return data

    total = hashlib.blake2b(digest_size=_SUM_BYTES)
    if file.read(len(_MAGIC)) != _MAGIC:
        raise ArchiveError(
            f"{path} is no file of blocks of this version: give one that kvine cache export has written."
        )
    total.update(_MAGIC)
    count = 0
    while length := int.from_bytes(take(8), "little"):
        if length > _MOST:
            raise broken("is damaged")
        data = take(length)
        if not _sound(data):
            raise broken("is damaged")
        count += 1
        yield data
    if int.from_bytes(take(8), "little") != count:
        raise broken("is damaged")
    digest = total.digest()
    if file.read(_SUM_BYTES + 1) != digest:
        raise broken("is damaged")


def _sound(data: bytes) -> bool:
    try:
        unframe(data)
    except DamagedBlockError:
        return False
    return True
