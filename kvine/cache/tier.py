"""Between the cache's memory and a store: what sequences leave behind is written, what later ones need comes back.

Blocks are copied out when their sequence ends, and when they are evicted without having been; a thread of its own
writes them, so that no request waits for a disk. What comes back is published in the prefix index as if it had been
cached all along, before the manager looks a text up.
"""

import itertools
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from kvine.cache.costs import Costs
from kvine.cache.manager import CacheManager
from kvine.cache.prefix import Node
from kvine.cache.shelf import Shelf, first_missing
from kvine.cache.store import BlockName, BlockStore, Parts, chain

_MOST_WAITING = 256 << 20  # bytes that wait to be written; what goes beyond is left in the cache, for its eviction
_AT_ONCE = 16 << 20  # bytes given to the store together


class BlockMemories(Protocol):
    """The memory of blocks, as bytes."""

    def sizes(self, shelf: int) -> tuple[int, ...]:
        """Bytes of each part of a block."""
        ...

    def save(self, shelf: int, block: int) -> Parts:
        """A copy of a full block."""
        ...

    def load(self, shelf: int, block: int, parts: Parts) -> None:
        """Fills a block that has been taken and that nobody can find yet."""
        ...


class StoreTier:
    """A `Tier` over one store.

    Args:
        manager: whose blocks these are; everything but `close` is called by whoever may change it.
        memories: of its shelves.
        store: which is this tier's own from now on.
        label: says in the store's remarks whose blocks these are, such as a model and a dtype.
    """

    def __init__(self, manager: CacheManager, memories: BlockMemories, store: BlockStore, label: str) -> None:
        self.store = store
        self.costs = Costs()
        self._manager = manager
        self._memories = memories
        self._label = label
        self._earlier = store.remarks()
        self._used: set[bytes] = set()  # namespaces that were looked up
        self._remarked: set[bytes] = set()  # namespaces that were written to
        self._waiting: queue.SimpleQueue[tuple[BlockName, Parts] | None] = queue.SimpleQueue()
        self._bytes_waiting = 0
        self._unwritten: set[bytes] = set()
        self._lock = threading.Lock()
        self._closed = False
        self._writer = threading.Thread(target=self._write_on, name="kvine-blocks", daemon=True)
        self._writer.start()

    # -- out of the cache ---------------------------------------------------------------------------------------------

    def keep(self, path: Sequence[Node]) -> None:
        """See `Tier`."""
        if not path[0].key or self._closed:  # a namespace without a key is this process's own
            return
        named: list[tuple[BlockName, int]] = []
        for before, node in itertools.pairwise(path):
            for group in range(len(self._manager.specs)):
                block = node.blocks[group]
                if block is not None:
                    named.append((BlockName(path[0].key, before.key, node.tokens, group), block))
        self._keep_named(named)

    def keep_block(self, shelf: int, block: int) -> None:
        """See `Tier`."""
        node = self._manager.pools[shelf].node_of[block]
        full = len(node.tokens) == self._manager.block_size
        if self._closed or not full or shelf >= len(self._manager.specs) or node.parent is None:
            return
        root = _root(node)
        if root.key:
            self._keep_named([(BlockName(root.key, node.parent.key, node.tokens, shelf), block)])

    def _keep_named(self, named: Sequence[tuple[BlockName, int]]) -> None:
        there = self.store.contains([name for name, _ in named])
        fresh: list[tuple[BlockName, int]] = []
        for (name, block), stored in zip(named, there, strict=True):
            size = sum(self._memories.sizes(name.group))
            with self._lock:
                if not stored and name.address not in self._unwritten and self._bytes_waiting + size <= _MOST_WAITING:
                    self._bytes_waiting += size
                    self._unwritten.add(name.address)
                    fresh.append((name, block))
        # All are copied before the first is handed on, or two threads would take turns at the interpreter.
        copied = [(name, self._memories.save(name.group, block)) for name, block in fresh]
        for item in reversed(copied):  # what is written later is forgotten later: heads
            self._waiting.put(item)

    def _write_on(self) -> None:
        """Writes what waits, until None is next."""
        ended = False
        while not ended:
            batch: list[tuple[BlockName, Parts]] = []
            item, size = self._waiting.get(), 0
            while item is not None:
                batch.append(item)
                size += sum(map(len, item[1]))
                if size >= _AT_ONCE or self._waiting.empty():
                    break
                item = self._waiting.get()
            ended = item is None
            self._write(batch)
            with self._lock:
                self._bytes_waiting -= size
                self._unwritten.difference_update(name.address for name, _ in batch)

    def _write(self, batch: list[tuple[BlockName, Parts]]) -> None:
        if batch:
            self.store.put(batch[::-1])
        for namespace in {name.namespace for name, _ in batch} - self._remarked:
            self._remarked.add(namespace)
            self.store.remark(namespace, self.costs.to_json(self._label))

    def _write_what_is_cached(self) -> None:
        """Writes blocks that found no place among the waiting ones, the last of each text first."""
        groups = range(len(self._manager.specs))
        for node in sorted(self._manager.index.nodes(), key=_depth, reverse=True):
            root, parent = _root(node), node.parent
            if not root.key or parent is None or len(node.tokens) < self._manager.block_size:
                continue
            held = [(BlockName(root.key, parent.key, node.tokens, g), node.blocks[g]) for g in groups]
            named = [(name, block) for name, block in held if block is not None]
            there = self.store.contains([name for name, _ in named])
            for (name, block), stored in zip(named, there, strict=True):
                if not stored:
                    self._write([(name, self._memories.save(name.group, block))])

    def wait(self) -> None:
        """Until everything that was to be kept is written."""
        while self._writer.is_alive():
            with self._lock:
                if not self._bytes_waiting:
                    return
            time.sleep(0.002)

    def close(self) -> None:
        """Writes what is left and closes the store. What happens in the cache from now on is its own business."""
        if not self._closed:
            self._closed = True
            self._waiting.put(None)
            self._writer.join()
            self._write_what_is_cached()
            for namespace in self._used | self._remarked:
                self.store.remark(namespace, self.costs.to_json(self._label))
            self.store.close()

    # -- back into it -------------------------------------------------------------------------------------------------

    def computed(self, num_tokens: int, seconds: float) -> None:
        """A step has computed so many tokens in so many seconds."""
        self.costs.computed(num_tokens, seconds)

    def recall(self, root: Node, tokens: Sequence[int], shelves: Sequence[Shelf]) -> None:
        """See `Tier`. Everything is read and checked before a block of the cache is touched."""
        if not root.key or self._closed:
            return
        if root.key not in self._used:
            self._used.add(root.key)
            self.costs.take_over(self._earlier.get(root.key, b""))
        lookup = _Lookup(self._manager, root, tokens, shelves)
        if lookup.cached >= lookup.most:
            return
        names = lookup.names()
        there = {at for at, found in zip(names, self.store.contains(list(names.values())), strict=True) if found}
        while True:
            length = lookup.longest(lambda shelf, block: lookup.held(shelf, block) or (shelf, block) in there)
            wanted = lookup.wanted(length)
            size = sum(sum(self._memories.sizes(shelf)) for shelf, _ in wanted)
            if length <= lookup.cached or not self.costs.worth_restoring(size, length - lookup.cached):
                return
            began = time.perf_counter()
            if not lookup.room_for(length, wanted):
                return
            found: dict[tuple[int, int], Parts] = {}
            for at in wanted:
                parts = self.store.get(names[at], self._memories.sizes(at[0]))
                if parts is None:
                    there.discard(at)
                    break
                found[at] = parts
            else:
                lookup.adopt(length, found, self._memories.load)
                self.costs.restored(size, time.perf_counter() - began)
                return


class _Lookup:
    """What a text has in the cache's memory, and how blocks join that."""

    def __init__(self, manager: CacheManager, root: Node, tokens: Sequence[int], shelves: Sequence[Shelf]) -> None:
        self._manager = manager
        self._shelves = shelves
        self._root = root
        self._tokens = tokens
        self._size = manager.block_size
        self._nodes: list[Node] = []
        while (len(self._nodes) + 1) * self._size <= len(tokens):
            child = manager.index.child(self._nodes[-1] if self._nodes else root, self._block(len(self._nodes)))
            if child is None:
                break
            self._nodes.append(child)
        self.most = min(len(tokens) // self._size * self._size, len(tokens) - 1)
        self.cached = self.longest(self.held)

    def held(self, shelf: int, block: int) -> bool:
        """Whether the cache's memory holds a block."""
        return block < len(self._nodes) and self._nodes[block].blocks[shelf] is not None

    def longest(self, held: Callable[[int, int], bool]) -> int:
        """The longest beginning, in whole blocks or all but one token, whose visible blocks are all `held`."""
        length = self.most
        while (gap := first_missing(self._shelves, length, held)) is not None:
            length = gap * self._size
        return length

    def names(self) -> dict[tuple[int, int], BlockName]:
        """The name of each full block of each group."""
        first = chain(self._root.key, self._tokens, self._size)
        return {
            (group, block): BlockName(name.namespace, name.parent, name.tokens, group)
            for group in range(len(self._manager.specs))
            for block, name in enumerate(first)
        }

    def wanted(self, length: int) -> list[tuple[int, int]]:
        """(shelf, block) of what is visible at a length and not held, in order of position."""
        live = [(block, n) for n, shelf in enumerate(self._shelves) for block in shelf.live_blocks(length)]
        return [(shelf, block) for block, shelf in sorted(live) if not self.held(shelf, block)]

    def room_for(self, length: int, wanted: Sequence[tuple[int, int]]) -> bool:
        """Whether blocks can be taken for what is wanted without letting go of what is held."""
        kept = self._pin(length)
        needs = [0] * len(self._manager.shelves)
        for shelf, _ in wanted:
            needs[shelf] += 1
        room = self._manager._room_for(needs)
        self._unpin(kept)
        return room

    def adopt(self, length: int, found: dict[tuple[int, int], Parts], load: Callable[[int, int, Parts], None]) -> None:
        """Takes a block for each that was found, fills it, and publishes all, or none if anything goes wrong."""
        manager = self._manager
        kept = self._pin(length)
        taken: list[tuple[int, int]] = []
        try:
            for (shelf, _), parts in found.items():
                block = manager._take(shelf)
                taken.append((shelf, block))
                load(shelf, block, parts)
            self._publish(dict(zip(found, taken, strict=True)))
        finally:
            self._unpin(kept)
            self._unpin(taken)

    def _publish(self, taken: dict[tuple[int, int], tuple[int, int]]) -> None:
        node = self._root
        for position in range(max(position for _, position in taken) + 1):
            node = self._manager.index.add(node, self._block(position))
            for shelf, pool in enumerate(self._manager.pools):
                if (shelf, position) in taken:
                    pool.publish(taken[shelf, position][1], node, shelf)

    def _block(self, position: int) -> tuple[int, ...]:
        return tuple(self._tokens[position * self._size : (position + 1) * self._size])

    def _pin(self, length: int) -> list[tuple[int, int]]:
        """Holds what is visible and cached, in order of position."""
        pinned: list[tuple[int, int]] = []
        for number, shelf in enumerate(self._shelves):
            for position in shelf.live_blocks(length):
                block = self._nodes[position].blocks[number] if position < len(self._nodes) else None
                if block is not None:
                    self._manager.pools[number].acquire(block)
                    pinned.append((number, block))
        return pinned

    def _unpin(self, pinned: Sequence[tuple[int, int]]) -> None:
        """Lets go again, tails first. No release is counted: there is no more room than before."""
        for shelf, block in reversed(pinned):
            self._manager.pools[shelf].release(block, self._manager.num_releases)


def _root(node: Node) -> Node:
    while node.parent is not None:
        node = node.parent
    return node


def _depth(node: Node) -> int:
    depth = 0
    while node.parent is not None:
        node, depth = node.parent, depth + 1
    return depth
