"""One text's past as a file, and back into the cache: everything is checked before anything is changed.

The file: magic, length and checksum of a header in JSON, the header, then one frame (see `store.frame`) for each block
that a later query sees, in the header's order. Header and frames are all there is, so no byte is without a checksum.
"""

import hashlib
import json
import mmap
import os
import stat
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from kvine.cache.manager import MISSING, CachedSequence, CacheManager
from kvine.cache.prefix import Node
from kvine.cache.shelf import Shelf, shelves_of
from kvine.cache.store import BlockName, DamagedBlockError, Parts, chain, checked_parts, frame
from kvine.errors import SessionError
from kvine.spans import Spans, checked_spans, merged

FORMAT_VERSION = 1
_MAGIC = b"kvine-session "
_VERSION_BYTES = 4
_LENGTH_BYTES = 8
_SUM_BYTES = 32


class Memories(Protocol):
    """The memory of blocks, as bytes."""

    def sizes(self, shelf: int) -> tuple[int, ...]:
        """Bytes of each part of a block."""
        ...

    def save(self, shelf: int, block: int, num_tokens: int | None = None) -> Parts:
        """A copy of a block, of its first num_tokens tokens where it is not full."""
        ...

    def load(self, shelf: int, block: int, parts: Parts) -> None:
        """Fills a block that has been taken and that nobody can find yet."""
        ...


@dataclass(frozen=True)
class Origin:
    """What keys and values depend on beside the tokens.

    Attributes:
        namespace: key of the tree of blocks of texts that pin these positions, which decides; the rest is there to say
            what differs. ValueError where they have no place.
        model: the name that the user gave it.
        weights: fingerprint of weights and rotary tables, in hexadecimal.
        options: what else K and V depend on, by the names of the options.
    """

    namespace: Callable[[Spans], bytes]
    model: str
    weights: str
    options: Mapping[str, Any]


@dataclass(frozen=True)
class Snapshot:
    """A text and what the cache held of it.

    Attributes:
        tokens: the text.
        num_cached: tokens from its beginning whose K and V were held, or had been let go as invisible.
        pinned: positions that stay visible whatever the windows.
        parts: what each shelf held at which position. They lie in the file, which stays mapped as long as they do.
        note: what was given to be kept beside them.
    """

    tokens: list[int]
    num_cached: int
    pinned: Spans
    parts: Mapping[tuple[int, int], Parts]
    note: Any = None


def live_positions(shelves: Sequence[Shelf], num_tokens: int) -> list[tuple[int, int]]:
    """(shelf, position) of all that a later query of a text of num_tokens tokens reads."""
    return [(number, at) for number, shelf in enumerate(shelves) for at in shelf.live_blocks(num_tokens)]


def write_snapshot(
    path: Path,
    origin: Origin,
    borrow: Callable[[], AbstractContextManager[tuple[Sequence[int], CachedSequence]]],
    manager: CacheManager,
    memories: Memories,
    note: Any = None,
) -> int:
    """Writes a file that appears under its name when it is complete and on the disk; returns its bytes.

    Args:
        path: of the file; one that is there is replaced.
        origin: of the keys and values.
        borrow: gives the text and a sequence of `manager` that holds its beginning; nobody changes the cache meanwhile,
            and copies that were asked for have been made. The disk is not waited for then.
        manager: whose blocks these are.
        memories: of its shelves.
        note: is kept beside it; anything that JSON can say.

    Raises:
        SessionError: if it cannot be written; what was there before is as it was.
    """
    try:
        real = Path(os.path.realpath(path))
        if real.exists() and not real.is_file():  # a device or a pipe would be replaced by a file
            raise SessionError(f"{path} is no file: give the name of one, or of none that is there.")
        with _replacing(real) as file:
            with borrow() as (tokens, sequence):
                _write(file, origin, tokens, sequence, manager, memories, note)
            return file.tell()
    except OSError as error:
        raise SessionError(
            f"{path} cannot be written ({error.strerror}): give another file. One that was there is as it was."
        ) from None
    except ValueError:
        raise _no_path(path) from None


def read_snapshot(path: Path, origin: Origin, manager: CacheManager, memories: Memories, vocab_size: int) -> Snapshot:
    """What a file holds, every byte checked.

    Args:
        path: of the file, which is memory-mapped.
        origin: of the keys and values that this cache holds.
        manager: of this cache.
        memories: of its shelves.
        vocab_size: token ids are below it.

    Raises:
        SessionError: if it cannot be read, is no such file, of another version, cut off, damaged, or of another origin.
    """
    data = _mapped(path)
    try:
        header, at = _header(path, data)
        _check_origin(path, header, origin)
        if not all(0 <= token < vocab_size for token in header["tokens"]):
            raise ValueError("it holds unknown tokens")
        return _unpacked(header, data, at, origin, manager, memories)
    except (DamagedBlockError, ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError):
        raise _damaged(path) from None


def restore(
    manager: CacheManager, memories: Memories, origin: Origin, snapshot: Snapshot, make_room: Callable[[], bool]
) -> CachedSequence | None:
    """A sequence that holds what a snapshot holds; None, and nothing has changed, if there is no room for it.

    Args:
        manager: takes the blocks.
        memories: of its shelves.
        origin: of its keys and values.
        snapshot: as it was read for this cache.
        make_room: has somebody let go of blocks; false if there is nobody.
    """
    tokens = snapshot.tokens[: snapshot.num_cached]
    sequence = manager.open((), origin.namespace(snapshot.pinned), snapshot.pinned)
    for table in sequence.tables:
        table += [MISSING] * manager.specs[0].num_blocks(len(tokens))
    try:
        rest = _shared(manager, sequence, tokens, snapshot.parts)
        needs = [sum(shelf == number for shelf, _ in rest) for number in range(len(manager.shelves))]
        while not manager._room_for(needs):
            if not make_room():
                manager.release(sequence, keep_tail=False)
                return None
        for shelf, at in rest:
            sequence.tables[shelf][at] = block = manager._take(shelf)
            memories.load(shelf, block, snapshot.parts[shelf, at])
    except BaseException:
        manager.release(sequence, keep_tail=False)
        raise
    sequence.tokens = tokens
    if manager.prefix_caching:
        while len(sequence.path) <= len(tokens) // manager.block_size:
            manager._publish_next(sequence)
    return sequence


# -- inside -----------------------------------------------------------------------------------------------------------


def _shared(
    manager: CacheManager, sequence: CachedSequence, tokens: Sequence[int], wanted: Iterable[tuple[int, int]]
) -> list[tuple[int, int]]:
    """Gives a sequence the blocks that the cache has already, and returns what is left to be taken."""
    nodes: list[Node] = []
    size = manager.block_size
    while (len(nodes) + 1) * size <= len(tokens):
        here = tuple(tokens[len(nodes) * size : (len(nodes) + 1) * size])
        child = manager.index.child(nodes[-1] if nodes else sequence.path[0], here)
        if child is None:
            break
        nodes.append(child)
    rest = []
    for shelf, at in wanted:
        found = nodes[at].blocks[shelf] if at < len(nodes) else None
        if found is None:
            rest.append((shelf, at))
        else:
            manager.pools[shelf].acquire(found)
            sequence.tables[shelf][at] = found
    return rest


def _names(namespace: bytes, tokens: Sequence[int], block_size: int) -> Callable[[int, int], BlockName]:
    """The name of the block at a position, the last one perhaps not full, by shelf and position."""
    full = chain(namespace, tokens, block_size)
    rest = tuple(tokens[len(full) * block_size :])
    if rest:
        full.append(BlockName(namespace, full[-1].key if full else namespace, rest, 0))

    def name(shelf: int, at: int) -> BlockName:
        found = full[at]
        return BlockName(found.namespace, found.parent, found.tokens, shelf)

    return name


def _write(
    file: BinaryIO,
    origin: Origin,
    tokens: Sequence[int],
    sequence: CachedSequence,
    manager: CacheManager,
    memories: Memories,
    note: Any,
) -> None:
    held, namespace = live_positions(sequence.shelves, sequence.num_tokens), origin.namespace(sequence.pinned)
    names = _names(namespace, sequence.tokens, manager.block_size)
    header = {
        "model": origin.model,
        "weights": origin.weights,
        "namespace": namespace.hex(),
        "options": dict(origin.options),
        "pinned": sequence.pinned,
        "tokens": list(tokens),
        "num_cached": sequence.num_tokens,
        "blocks": [[shelf, at, _frame_bytes(names(shelf, at), memories.sizes(shelf))] for shelf, at in held],
        "note": note,
    }
    data = json.dumps(header, separators=(",", ":")).encode()
    file.write(_MAGIC + FORMAT_VERSION.to_bytes(_VERSION_BYTES, "little"))
    file.write(len(data).to_bytes(_LENGTH_BYTES, "little") + _checksum(data) + data)
    for shelf, at in held:
        filled = min(sequence.num_tokens - at * manager.block_size, manager.block_size)
        parts = memories.save(shelf, sequence.tables[shelf][at], None if filled == manager.block_size else filled)
        file.write(frame(names(shelf, at), parts))


def _frame_bytes(name: BlockName, sizes: Sequence[int]) -> int:
    return len(frame(name, tuple(b"" for _ in sizes))) + sum(sizes)


def _unpacked(
    header: dict[str, Any], data: memoryview, at: int, origin: Origin, manager: CacheManager, memories: Memories
) -> Snapshot:
    tokens, num_cached = [int(token) for token in header["tokens"]], int(header["num_cached"])
    pinned = merged(checked_spans(header["pinned"]))
    blocks = [(int(shelf), int(position), int(length)) for shelf, position, length in header["blocks"]]
    if not 0 <= num_cached <= len(tokens):
        raise ValueError("more is cached than there is")
    live = live_positions(shelves_of(manager.specs, pinned), num_cached)
    if [(shelf, position) for shelf, position, _ in blocks] != live:
        raise ValueError("it holds other blocks than a later query sees")
    names = _names(origin.namespace(pinned), tokens[:num_cached], manager.block_size)
    parts: dict[tuple[int, int], Parts] = {}
    for shelf, position, length in blocks:
        found = data[at : at + length]
        parts[shelf, position] = checked_parts(found, names(shelf, position), memories.sizes(shelf))
        at += length
    if at != len(data):
        raise ValueError("something follows")
    return Snapshot(tokens, num_cached, pinned, parts, header["note"])


def _header(path: Path, data: memoryview) -> tuple[dict[str, Any], int]:
    """The header, and where the blocks begin."""
    if data[: len(_MAGIC)] != _MAGIC:
        raise SessionError(f"{path} is no session's file: give one that was saved by Session.save.")
    at = len(_MAGIC)
    version = int.from_bytes(data[at : (at := at + _VERSION_BYTES)], "little")
    length = int.from_bytes(data[at : (at := at + _LENGTH_BYTES)], "little")
    said = data[at : (at := at + _SUM_BYTES)]
    written = data[at : at + length]
    if version != FORMAT_VERSION and at <= len(data):
        raise SessionError(
            f"{path} is of format {version}, and this version of Kvine reads {FORMAT_VERSION}: load it with the "
            "version that saved it, or make the session anew."
        )
    if len(written) != length or said != _checksum(written):
        raise _damaged(path)
    header: dict[str, Any] = json.loads(bytes(written))
    return header, at + length


def _check_origin(path: Path, header: dict[str, Any], origin: Origin) -> None:
    with suppress(ValueError):  # sinks inside this cache may leave no place for what is pinned
        if header["namespace"] == origin.namespace(merged(checked_spans(header["pinned"]))).hex():
            return
    there, here = header["options"], json.loads(json.dumps(dict(origin.options)))
    names = [name for name in {**there, **here} if there.get(name) != here.get(name)]
    if names:
        differs = "with " + ", ".join(f"{name} {there.get(name)} (here {here.get(name)})" for name in names)
    elif header["weights"] != origin.weights:
        differs = f"for {header['model']} and its weights, which are not those of {origin.model} as it is loaded here"
    else:
        differs = "with keys and values of another kind"
    raise SessionError(f"{path} was saved {differs}: load the model as it was then, or make the session anew.")


def _mapped(path: Path) -> memoryview:
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # reading from a pipe would wait for ever
            raise SessionError(f"{path} is no file: give one that was saved by Session.save.")
        with path.open("rb") as file:
            if not file.read(1):
                raise SessionError(f"{path} is empty: give a file that was saved by Session.save.")
            return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    except OSError as error:
        raise SessionError(f"{path} cannot be read ({error.strerror}): give a session's file.") from None
    except ValueError:  # what has no size cannot be mapped either
        raise _no_path(path) from None


def _no_path(path: Path) -> SessionError:
    return SessionError(f"{str(path)!r} names no file that can hold a session: give another name.")


def _damaged(path: Path) -> SessionError:
    return SessionError(f"{path} is damaged or cut off: save the session again, or take a copy. Nothing was changed.")


def _checksum(data: bytes | memoryview) -> bytes:
    return hashlib.blake2b(data, digest_size=_SUM_BYTES).digest()


@contextmanager
def _replacing(path: Path) -> Iterator[BinaryIO]:
    """A new file beside `path`, for its owner only, which takes the name when it is written and on the disk."""
    handle, new = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".part", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        Path(new).replace(path)
    except BaseException:
        Path(new).unlink(missing_ok=True)
        raise
    with suppress(OSError):  # not everywhere can a folder be written through; the file itself is complete
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
