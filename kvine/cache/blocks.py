"""Which blocks of one layer group are free, referenced or cached. Counts and ids only; the memory is the pool's.

free → referenced → (cached →) free. A block is *open* or *sealed* by what its sequence has written, which is the
manager's business; here it only matters whether a node of the prefix index vouches for its contents.
"""

import heapq
from collections import OrderedDict

from kvine.cache.prefix import Node


class BlockPool:
    """Blocks 0 … capacity - 1 of one layer group.

    Args:
        capacity: how many blocks the group's address space has room for.
        bytes_per_block: exact bytes of K and V in one.
    """

    def __init__(self, capacity: int, bytes_per_block: int) -> None:
        self.capacity = capacity
        self.bytes_per_block = bytes_per_block
        self.references: dict[int, int] = {}
        self.cached: OrderedDict[int, int] = OrderedDict()  # id → time of release, oldest first
        self.node_of: dict[int, Node] = {}  # published blocks, referenced or cached
        self.freed: set[int] = set()  # free blocks whose memory has not been given back
        self._returned: list[int] = []  # heap, so that low ids are used first
        self._untouched = 0  # ids from here on were never taken

    @property
    def num_free(self) -> int:
        """Blocks that hold nothing."""
        return len(self._returned) + self.capacity - self._untouched

    @property
    def bytes_used(self) -> int:
        """Bytes of referenced and cached blocks."""
        return (len(self.references) + len(self.cached)) * self.bytes_per_block

    def take(self) -> int:
        """Takes a free block, with one reference. The caller has made sure that there is one."""
        if self._returned:
            block = heapq.heappop(self._returned)
        else:
            block = self._untouched
            self._untouched += 1
        self.freed.discard(block)
        self.references[block] = 1
        return block

    def acquire(self, block: int) -> None:
        """Adds a reference to a referenced or cached block."""
        self.cached.pop(block, None)
        self.references[block] = self.references.get(block, 0) + 1

    def release(self, block: int, now: int) -> None:
        """Drops a reference; the last one leaves the block cached if it is published, else free."""
        self.references[block] -= 1
        if self.references[block]:
            return
        del self.references[block]
        if block in self.node_of:
            self.cached[block] = now
        else:
            self._free(block)

    def publish(self, block: int, node: Node, group: int) -> None:
        """Lets `node` vouch for a block's contents."""
        node.blocks[group] = block
        self.node_of[block] = node

    def withdraw(self, block: int, group: int) -> Node:
        """Lets nobody find a published block any more; returns the node that has lost it, for the caller to prune."""
        node = self.node_of.pop(block)
        node.blocks[group] = None
        return node

    def evict(self, block: int, group: int) -> Node:
        """Frees a cached block; returns the node that has lost it, for the caller to prune."""
        del self.cached[block]
        node = self.withdraw(block, group)
        self._free(block)
        return node

    def writable(self, block: int) -> bool:
        """Whether a sequence that holds the block may write to it: it alone holds it and nobody can find it."""
        return self.references[block] == 1 and block not in self.node_of

    def check(self) -> None:
        """Asserts that each block is in exactly one state and that the counts add up."""
        free = set(self._returned) | set(range(self._untouched, self.capacity))
        assert len(self._returned) == len(set(self._returned)), "a block is free twice"
        assert not free & self.references.keys() and not free & self.cached.keys(), "a free block is in use"
        assert not self.references.keys() & self.cached.keys(), "a referenced block is cached"
        assert len(free) + len(self.references) + len(self.cached) == self.capacity, "blocks were lost"
        assert all(count > 0 for count in self.references.values()), "a reference count is not positive"
        assert self.cached.keys() <= self.node_of.keys(), "a cached block cannot be found"
        assert self.node_of.keys() <= self.references.keys() | self.cached.keys(), "a free block can be found"
        assert self.freed <= free, "a block in use counts as freed"

    def _free(self, block: int) -> None:
        heapq.heappush(self._returned, block)
        self.freed.add(block)
