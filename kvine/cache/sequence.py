"""What one sequence holds of the cache: its accepted tokens, its block tables, its place in the prefix index."""

from dataclasses import dataclass, field

from kvine.cache.prefix import Node
from kvine.cache.shelf import Shelf
from kvine.spans import Spans

MISSING = -1  # entry of a block table for a block that no later query can see


@dataclass(eq=False)
class CachedSequence:
    """One sequence's hold on the cache.

    Attributes:
        tokens: the accepted tokens whose K and V are held or were let go as invisible.
        tables: for each shelf its blocks in order of position; `MISSING` where one was let go or is on another shelf.
        shelves: what it keeps on each.
        pinned: positions that stay visible whatever the windows; `shelves` know of it.
        path: the nodes that spell the published part of `tokens`, root first, so path[i + 1] spells block i.
    """

    tokens: list[int]
    tables: list[list[int]]
    shelves: tuple[Shelf, ...]
    path: list[Node] = field(default_factory=list)
    pinned: Spans = ()

    @property
    def num_tokens(self) -> int:
        """Accepted tokens."""
        return len(self.tokens)

    def held(self, shelf: int) -> list[int]:
        """The blocks that it has on a shelf, in order of position."""
        return [block for block in self.tables[shelf] if block != MISSING]


@dataclass(frozen=True)
class BlockCopy:
    """A copy to make before the next write: the first num_tokens tokens of a block of one shelf."""

    shelf: int
    source: int
    target: int
    num_tokens: int
