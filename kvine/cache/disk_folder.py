"""The folder of a disk store: whose it is, who is using it, and whether its database may be trusted.

LMDB trusts its file. So whoever opens it alone has it audited first, by `lmdb.verify`, which reads bytes and never maps
them; a file that fails is set aside, and a new one begun.
"""

import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from kvine.config import parse_bytes
from kvine.errors import ConfigError, KvineWarning

if sys.platform != "win32":
    import fcntl

if TYPE_CHECKING:
    from kvine.cache.disk import DiskStore

FORMAT = "kvine-blocks"
FORMAT_VERSION = 1
DATABASE, SET_ASIDE, FORMAT_FILE = "blocks.mdb", "damaged.mdb", "format"
_LOCKS = ("opening.lock", "in-use.lock")
PATIENCE_S = 60.0  # an audit of some gigabytes takes seconds


class StoreFolder:
    """A folder that belongs to a store; made when it is not there, readable by its owner only.

    Args:
        path: the folder.
        create: whether to make it where there is none.

    Raises:
        ConfigError: if it cannot be made or read, holds something else, or is of a later format.
    """

    def __init__(self, path: Path, *, create: bool = True) -> None:
        self.path = path.expanduser()
        self.database = self.path / DATABASE
        self.set_aside = self.path / SET_ASIDE
        self.damage: str | None = None  # why a file was set aside just now
        self._presence: int | None = None
        try:
            self._prepare(create)
        except OSError as error:
            raise ConfigError(
                f"The cache folder {self.path} cannot be used ({error.strerror}): give another as cache_dir."
            ) from None

    @property
    def lock_file(self) -> Path:
        """LMDB's own, beside the database."""
        return self.path / f"{DATABASE}-lock"

    @property
    def bytes_on_disk(self) -> int:
        """Bytes of all its files but the one set aside."""
        files = (self.database, self.lock_file, self.path / FORMAT_FILE)
        return sum(file.stat().st_size for file in files if file.exists())

    @contextmanager
    def opening(self) -> Iterator[bool]:
        """Holds off everybody else who opens the store; gives whether nobody has it open now.

        From then on until `leave`, this process counts as one that has it open.
        """
        from filelock import FileLock, Timeout

        try:
            with FileLock(self.path / _LOCKS[0], timeout=PATIENCE_S, mode=0o600):
                yield self._enter()
        except Timeout:
            raise ConfigError(f"Another process keeps opening the cache folder {self.path}: try again later.") from None

    def leave(self) -> None:
        """This process does not have it open any more."""
        if self._presence is not None:
            os.close(self._presence)
            self._presence = None

    def put_aside(self, reason: str) -> None:
        """Moves a damaged database out of the way and says so."""
        self.damage = reason
        self.database.replace(self.set_aside)
        self.lock_file.unlink(missing_ok=True)
        warnings.warn(
            f"The cache's file {self.database} is damaged ({reason}). It was set aside as {self.set_aside.name} and a "
            "new one begun: what it held is computed again. Delete it when you have no use for it.",
            KvineWarning,
            stacklevel=2,
        )

    def replace_database(self, write: Callable[[int], None]) -> None:
        """Has the database written anew to a file descriptor and puts it in the place of the old one."""
        new = self.path / f"{DATABASE}.new"
        try:
            with private_file(new) as file:
                write(file.fileno())
                os.fsync(file.fileno())
        except BaseException:
            new.unlink()
            raise
        new.replace(self.database)
        self.lock_file.unlink(missing_ok=True)

    def _prepare(self, create: bool) -> None:
        mark = self.path / FORMAT_FILE
        if not mark.exists():
            if self.path.exists() and (not self.path.is_dir() or any(map(_foreign, self.path.iterdir()))):
                raise ConfigError(
                    f"{self.path} holds something else than a cache: give an empty or a new folder as cache_dir."
                )
            if not create:
                raise ConfigError(f"There is no cache in {self.path}: give the cache_dir that it was kept in.")
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.path.chmod(0o700)
            new = self.path / f"{FORMAT_FILE}.{os.getpid()}"  # whoever else makes the folder now sees all of it or none
            with private_file(new) as file:
                file.write(f"{FORMAT} {FORMAT_VERSION}\n".encode())
            new.replace(mark)
        words = mark.read_bytes()[:100].split()
        if words != [FORMAT.encode(), str(FORMAT_VERSION).encode()]:
            said = " ".join(word.decode(errors="replace") for word in words) or "nothing"
            raise ConfigError(
                f"{self.path} says that it holds {said!r}, and this version of Kvine reads "
                f"'{FORMAT} {FORMAT_VERSION}': give another folder as cache_dir, or delete this one."
            )

    def _enter(self) -> bool:
        """Notes that this process has the store open; true where it is the only one that has."""
        if sys.platform == "win32":
            return False  # nothing is renamed there while it may be mapped
        self._presence = os.open(self.path / _LOCKS[1], os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(self._presence, fcntl.LOCK_EX | fcntl.LOCK_NB)
            alone = True
        except OSError:
            alone = False
        fcntl.flock(self._presence, fcntl.LOCK_SH)
        return alone


def private_file(path: Path) -> BinaryIO:
    """A new, empty file that only its owner can read."""
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb")


def _foreign(file: Path) -> bool:
    return not file.name.startswith((FORMAT_FILE, DATABASE, SET_ASIDE, *_LOCKS))


def disk_store(folder: str | os.PathLike[str], size: int | str | None, *, create: bool = True) -> "DiskStore":
    """The store in a folder, see `DiskStore`; `size` is its limit, in bytes or such as `2GiB`.

    Raises:
        ConfigError: as `DiskStore` does, and if lmdb is not installed.
    """
    try:
        from kvine.cache.disk import DiskStore
    except ImportError:
        raise ConfigError("A cache on disk needs lmdb: pip install 'kvine[store]'.") from None
    return DiskStore(Path(folder), None if size is None else parse_bytes(size), create=create)


def damage(database: Path) -> str | None:
    """What is wrong with a database file that nobody writes to; None if it may be opened."""
    from lmdb.verify import VerifyError, verify

    try:
        problems = verify(str(database), subdir=False)  # type: ignore[no-untyped-call]
    except VerifyError as error:
        return str(error)
    return str(problems[0]) if problems else None
