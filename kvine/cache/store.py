"""What a store of sealed blocks is asked for, and how it frames a block so that a wrong one is never taken for right.

A store is content-addressed: a block's key chains all tokens before it, back to a namespace (see `hashing`). The frame
says once more, in full, what the block is; a checksum covers all of it.
"""

import hashlib
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from kvine.cache.hashing import block_key, framed
from kvine.cache.prefix import Node
from kvine.cache.shelf import Shelf

FORMAT_VERSION = 1
_MAGIC = b"KVB" + bytes([FORMAT_VERSION])
_SUM_BYTES = 16
_LENGTH = struct.Struct("<I")
_SIZES = struct.Struct("<Q")

Parts = tuple[bytes | memoryview, ...]  # what a group keeps of a block: keys, then values, as stored


class DamagedBlockError(Exception):
    """A frame that does not hold what it says. Stores turn it into a miss; no user ever sees it."""


@dataclass(frozen=True)
class BlockName:
    """All that the content of a block depends on.

    Attributes:
        namespace: key of the tree of blocks, see `hashing.namespace_key`.
        parent: key of the block before; of the first block, the namespace.
        tokens: the block's own tokens, as many as a block has.
        group: number of the layer group whose keys and values these are.
    """

    namespace: bytes
    parent: bytes
    tokens: tuple[int, ...]
    group: int

    @cached_property
    def key(self) -> bytes:
        """The block's key, which its children name as their parent."""
        return block_key(self.parent, self.tokens)

    @property
    def address(self) -> bytes:
        """Where a store keeps it: key and group."""
        return self.key + self.group.to_bytes(2, "big")


@dataclass(frozen=True)
class StoreStats:
    """What a store holds, and what has happened since it was opened.

    Attributes:
        num_blocks: blocks in it, each group's counted by itself.
        bytes_stored: of their frames.
        bytes_on_disk: of all its files; 0 where a store has none.
        bytes_limit: what it may take.
        hits, misses: blocks asked for that were there, or not.
        damaged: misses because a block was not what it should be.
        puts: blocks written.
        refused: blocks that could not be written.
        evictions: blocks that made room for others.
    """

    num_blocks: int
    bytes_stored: int
    bytes_on_disk: int
    bytes_limit: int
    hits: int
    misses: int
    damaged: int
    puts: int
    refused: int
    evictions: int


class BlockStore(Protocol):
    """A place for sealed blocks outside of the cache's memory. Its methods may be called from several threads.

    It may forget anything at any time, and never returns anything but what was put under the very same name.
    """

    def contains(self, names: Sequence[BlockName]) -> list[bool]:
        """Whether each is there, unread: `get` may still find it damaged."""
        ...

    def get(self, name: BlockName, sizes: Sequence[int]) -> Parts | None:
        """A block's parts, which have these sizes in bytes; None if it is not there or not exactly that."""
        ...

    def put(self, blocks: Sequence[tuple[BlockName, Parts]]) -> int:
        """Keeps blocks, in order of position: of those that were put together the last are forgotten first.

        Returns how many of them are in the store now. One that cannot be written loses nothing else.
        """
        ...

    def remark(self, subject: bytes, text: bytes) -> None:
        """Keeps a few bytes about a subject, such as what was measured in a namespace."""
        ...

    def remarks(self) -> Mapping[bytes, bytes]:
        """All remarks, by subject."""
        ...

    def stats(self) -> StoreStats:
        """What it holds and what has happened."""
        ...

    def clear(self) -> None:
        """Forgets everything."""
        ...

    def close(self) -> None:
        """Ends its use; what was put stays. Closing twice does nothing."""
        ...


class Tier(Protocol):
    """What a cache manager tells of blocks that might go to a store, and asks for blocks that might come from one."""

    def recall(self, root: Node, tokens: Sequence[int], shelves: Sequence[Shelf]) -> None:
        """Before a text is looked up: brings what is worth bringing back into the cache, or changes nothing.

        Args:
            root: of the tree that it is looked up in.
            tokens: the text.
            shelves: what its sequence keeps on each.
        """
        ...

    def keep(self, path: Sequence[Node]) -> None:
        """A sequence ends whose full blocks these nodes spell, the root first."""
        ...

    def keep_block(self, shelf: int, block: int) -> None:
        """A cached block is about to be evicted."""
        ...

    def close(self) -> None:
        """Writes what is left to write and lets go of the store."""
        ...

    def computed(self, num_tokens: int, seconds: float) -> None:
        """A step has computed so many tokens in so many seconds."""
        ...


def frame(name: BlockName, parts: Parts) -> bytes:
    """A block as it is stored: magic and version, length of the header, header, parts, checksum of all that."""
    tokens = struct.pack(f"<{len(name.tokens)}q", *name.tokens)
    sizes = b"".join(_SIZES.pack(len(part)) for part in parts)
    header = framed((name.namespace, name.parent, name.key, tokens, name.group.to_bytes(2, "big"), sizes))
    body = b"".join((_MAGIC, _LENGTH.pack(len(header)), header, *parts))
    return body + _checksum(body)


def unframe(data: bytes | memoryview) -> tuple[BlockName, Parts]:
    """What `frame` was given.

    Raises:
        DamagedBlockError: if a single bit is another, or the key is not that of parent and tokens.
    """
    view = memoryview(data)
    start = len(_MAGIC) + _LENGTH.size
    if len(view) < start + _SUM_BYTES or view[: len(_MAGIC)] != _MAGIC:
        raise DamagedBlockError("it does not begin as a block of this format does")
    if _checksum(view[:-_SUM_BYTES]) != view[-_SUM_BYTES:]:
        raise DamagedBlockError("its checksum is another")
    end = start + _LENGTH.unpack(view[len(_MAGIC) : start])[0]
    try:
        namespace, parent, key, tokens, group, sizes = _unframed(bytes(view[start:end]))
        name = BlockName(
            namespace, parent, struct.unpack(f"<{len(tokens) // 8}q", tokens), int.from_bytes(group, "big")
        )
        lengths = [_SIZES.unpack_from(sizes, at)[0] for at in range(0, len(sizes), _SIZES.size)]
    except (ValueError, struct.error) as error:
        raise DamagedBlockError(f"its header cannot be read ({error})") from None
    if name.key != key:
        raise DamagedBlockError("its key is not that of its tokens")
    if end + sum(lengths) != len(view) - _SUM_BYTES:
        raise DamagedBlockError("its parts have other sizes")
    return name, tuple(_split(view[end:-_SUM_BYTES], lengths))


def checked_parts(data: bytes | memoryview, name: BlockName, sizes: Sequence[int]) -> Parts:
    """The parts in a frame, if it is that of the block `name` with parts of these sizes; else DamagedBlockError."""
    found, parts = unframe(data)
    if found != name or [len(part) for part in parts] != list(sizes):
        raise DamagedBlockError("it is another block")
    return parts


def chain(namespace: bytes, tokens: Sequence[int], block_size: int, group: int = 0) -> list[BlockName]:
    """The names of all full blocks at the beginning of a text."""
    names: list[BlockName] = []
    for start in range(0, len(tokens) - block_size + 1, block_size):
        parent = names[-1].key if names else namespace
        names.append(BlockName(namespace, parent, tuple(tokens[start : start + block_size]), group))
    return names


def _checksum(data: bytes | memoryview) -> bytes:
    return hashlib.blake2b(data, digest_size=_SUM_BYTES).digest()


def _unframed(data: bytes) -> list[bytes]:
    """The parts that `hashing.framed` has joined; ValueError where it cannot have."""
    parts: list[bytes] = []
    at = 0
    while at < len(data):
        length = int.from_bytes(data[at + 1 : at + 9], "little")
        if data[at : at + 1] != b"+" or at + 9 + length > len(data):
            raise ValueError("a part is cut off")
        parts.append(data[at + 9 : at + 9 + length])
        at += 9 + length
    return parts


def _split(data: memoryview, lengths: Iterable[int]) -> Iterable[memoryview]:
    at = 0
    for length in lengths:
        yield data[at : at + length]
        at += length
