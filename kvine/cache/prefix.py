"""The index of published blocks: a tree in which a path of nodes spells a text, block by block.

A node is found by its chained key, and trusted only after its tokens and its parent have been compared.
"""

from collections.abc import Iterable, Sequence
from typing import TypeVar

from kvine.cache.hashing import HashFunction, block_key, digest

_Key = TypeVar("_Key", int, bytes)


class Node:
    """A block's worth of tokens after one particular past; fewer than a block's worth in a finished sequence's tail.

    Attributes:
        blocks: for each shelf the id of the block that holds these tokens' K and V, or None where there is none.
        pins: sequences whose path ends here; a pinned node is not pruned.
    """

    __slots__ = ("blocks", "children", "key", "parent", "pins", "tokens")

    def __init__(self, parent: "Node | None", key: bytes, tokens: tuple[int, ...], num_shelves: int) -> None:
        self.parent = parent
        self.key = key
        self.tokens = tokens
        self.blocks: list[int | None] = [None] * num_shelves
        self.children: dict[int, list[Node]] = {}  # by first token
        self.pins = 0

    def holds(self, shelves: Iterable[int]) -> bool:
        """Whether it has a block on each of these."""
        return all(self.blocks[shelf] is not None for shelf in shelves)


class PrefixIndex:
    """All trees, one root for each namespace.

    Args:
        num_shelves: of the manager; each node holds at most one block on each.
        hash_function: maps bytes to a key. Collisions cost time, never correctness.
    """

    def __init__(self, num_shelves: int, hash_function: HashFunction = digest) -> None:
        self._num_shelves = num_shelves
        self._hash = hash_function
        self._roots: dict[bytes, Node] = {}
        self._by_key: dict[bytes, list[Node]] = {}

    def root(self, namespace: bytes) -> Node:
        """The root of a namespace's tree, made when first asked for."""
        if namespace not in self._roots:
            self._roots[namespace] = Node(None, namespace, (), self._num_shelves)
        return self._roots[namespace]

    def child(self, parent: Node, tokens: tuple[int, ...]) -> Node | None:
        """The node that spells exactly `tokens` after `parent`."""
        for node in self._by_key.get(block_key(parent.key, tokens, self._hash), ()):
            if node.parent is parent and node.tokens == tokens:
                return node
        return None

    def add(self, parent: Node, tokens: tuple[int, ...]) -> Node:
        """The node that spells `tokens` after `parent`, made if there is none."""
        node = self.child(parent, tokens)
        if node is None:
            node = Node(parent, block_key(parent.key, tokens, self._hash), tokens, self._num_shelves)
            parent.children.setdefault(tokens[0], []).append(node)
            self._by_key.setdefault(node.key, []).append(node)
        return node

    def longest_overlap(self, parent: Node, tokens: Sequence[int], shelves: Sequence[int]) -> tuple[Node | None, int]:
        """The child of `parent` with blocks on each of `shelves` that shares the most leading tokens with `tokens`."""
        best: Node | None = None
        length = 0
        for node in parent.children.get(tokens[0], ()) if tokens else ():
            if not node.holds(shelves):
                continue
            shared = common_prefix(node.tokens, tokens)
            if shared > length:
                best, length = node, shared
        return best, length

    def prune(self, node: Node) -> None:
        """Forgets `node` and then its ancestors, as far as nothing holds them any more."""
        while node.parent is not None and not node.pins and not node.children and all(b is None for b in node.blocks):
            parent = node.parent
            _discard(parent.children, node.tokens[0], node)
            _discard(self._by_key, node.key, node)
            node = parent
        if node.parent is None and not node.pins and not node.children:
            self._roots.pop(node.key, None)

    def nodes(self) -> list[Node]:
        """Every node, roots aside."""
        return [node for bucket in self._by_key.values() for node in bucket]


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """How many leading tokens two sequences share."""
    count = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        count += 1
    return count


def _discard(buckets: dict[_Key, list[Node]], key: _Key, node: Node) -> None:
    bucket = buckets[key]
    bucket.remove(node)
    if not bucket:
        del buckets[key]
