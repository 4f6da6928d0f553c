"""Blocks whose content follows from their name, so that whoever reads one knows what it must be; and who writes them.

As a program: puts blocks of texts into a store, on and on, and prints a line after each put.
"""

import hashlib
import sys
from itertools import count

from kvine.cache.disk import DiskStore
from kvine.cache.store import BlockName, Parts, chain

SIZES = (3000, 5000)


def content(name: BlockName, sizes: tuple[int, ...] = SIZES) -> Parts:
    seed = hashlib.sha256(name.namespace + name.address).digest()
    return tuple((seed * (size // 32 + 1))[i : i + size] for i, size in enumerate(sizes))


def blocks(names: list[BlockName]) -> list[tuple[BlockName, Parts]]:
    return [(name, content(name)) for name in names]


def text(number: int, namespace: bytes = b"namespace") -> list[BlockName]:
    """The names of a text of eight blocks."""
    return chain(namespace, [number * 1000 + i for i in range(32)], 4)


if __name__ == "__main__":
    folder, limit, first = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    store = DiskStore(folder, limit)
    for number in count(first):
        assert store.put(blocks(text(number))) == 8
        print(number, flush=True)
