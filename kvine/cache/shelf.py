"""Where a layer group keeps its blocks: all on one shelf, or sealed and open ones apart where a codec packs whole ones.

A manager treats every shelf alike. What is peculiar to packed blocks follows from what the two shelves need at which
length: a sequence can be cut, or its beginning reused, where each shelf still holds what it would need, and so not
inside a sealed block.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvine.cache.spec import CacheSpec
from kvine.spans import Spans


class Shelf(Protocol):
    """Blocks of one size. Positions count a sequence's blocks from 0."""

    @property
    def spec(self) -> CacheSpec:
        """Of the layers whose K and V lie here."""
        ...

    @property
    def stored(self) -> CacheSpec:
        """The same with the codecs of what lies here."""
        ...

    @property
    def holds_begun(self) -> bool:
        """Whether blocks that are not full lie here."""
        ...

    def written(self, num_tokens: int, num_new: int) -> Sequence[int]:
        """Positions that writing num_new tokens after num_tokens accepted ones needs, ascending."""
        ...

    def num_kept(self, num_tokens: int) -> int:
        """From which position on nothing lies here for a sequence of num_tokens accepted tokens."""
        ...

    def live_blocks(self, num_tokens: int) -> list[int]:
        """Positions of what lies here that some later query reads."""
        ...

    def dying(self, before: int, after: int) -> Sequence[int]:
        """Positions, ascending, that nothing reads any more once `before` tokens have become `after`, or earlier."""
        ...

    def num_live_blocks(self, num_tokens: int) -> int:
        """How many positions `live_blocks` lists."""
        ...

    def max_live_blocks(self, num_tokens: int, chunk: int, num_sequences: int = 1) -> int:
        """See `CacheSpec.max_live_blocks`."""
        ...

    def num_forked_blocks(self, num_tokens: int, num_sequences: int, num_shared: int) -> int:
        """See `CacheSpec.num_forked_blocks`."""
        ...

    def max_forked_blocks(
        self, num_tokens: int, chunk: int, num_sequences: int, num_shared: int, num_families: int = 1
    ) -> int:
        """See `CacheSpec.max_forked_blocks`."""
        ...

    def bytes_per_block(self, dtype: str) -> int:
        """Exact bytes of one block over the group's layers, under compute dtype `dtype`."""
        ...


@dataclass(frozen=True)
class _Windowed:
    """What is let go as windows move on."""

    spec: CacheSpec

    @property
    def stored(self) -> CacheSpec:
        return self.spec

    def dying(self, before: int, after: int) -> Sequence[int]:
        passed = range(self.spec.passed_blocks(before).stop, self.spec.passed_blocks(after).stop)
        return [block for block in passed if not self.spec.keeps(block)] if self.spec.kept else passed

    def bytes_per_block(self, dtype: str) -> int:
        return self.spec.bytes_per_block(dtype)


@dataclass(frozen=True)
class WholeShelf(_Windowed):
    """All blocks of a group whose codecs work element by element: a block is the same before and after it is full."""

    holds_begun = True

    def written(self, num_tokens: int, num_new: int) -> range:
        """Up to the last token's."""
        return range(num_tokens // self.spec.block_size, self.spec.num_blocks(num_tokens + num_new))

    def num_kept(self, num_tokens: int) -> int:
        """Full ones and the last."""
        return self.spec.num_blocks(num_tokens)

    def live_blocks(self, num_tokens: int) -> list[int]:
        """What windows and sinks see."""
        return self.spec.live_blocks(num_tokens)

    def num_live_blocks(self, num_tokens: int) -> int:
        """What windows and sinks see."""
        return self.spec.num_live_blocks(num_tokens)

    def max_live_blocks(self, num_tokens: int, chunk: int, num_sequences: int = 1) -> int:
        """See `CacheSpec.max_live_blocks`."""
        return self.spec.max_live_blocks(num_tokens, chunk, num_sequences)

    def num_forked_blocks(self, num_tokens: int, num_sequences: int, num_shared: int) -> int:
        """See `CacheSpec.num_forked_blocks`."""
        return self.spec.num_forked_blocks(num_tokens, num_sequences, num_shared)

    def max_forked_blocks(
        self, num_tokens: int, chunk: int, num_sequences: int, num_shared: int, num_families: int = 1
    ) -> int:
        """See `CacheSpec.max_forked_blocks`."""
        return self.spec.max_forked_blocks(num_tokens, chunk, num_sequences, num_shared, num_families)


@dataclass(frozen=True)
class SealedShelf(_Windowed):
    """The full blocks of a group with a packed codec, packed."""

    holds_begun = False

    def written(self, num_tokens: int, num_new: int) -> range:
        """Those that become full."""
        return range(num_tokens // self.spec.block_size, self.num_kept(num_tokens + num_new))

    def num_kept(self, num_tokens: int) -> int:
        """Full ones."""
        return num_tokens // self.spec.block_size

    def live_blocks(self, num_tokens: int) -> list[int]:
        """What windows and sinks see, if it is full."""
        full = self.num_kept(num_tokens)
        return [block for block in self.spec.live_blocks(num_tokens) if block < full]

    def num_live_blocks(self, num_tokens: int) -> int:
        """What windows and sinks see, if it is full."""
        return self.num_kept(num_tokens) - self.spec.num_dead_blocks(num_tokens)

    def max_live_blocks(self, num_tokens: int, chunk: int, num_sequences: int = 1) -> int:
        """What a group without packed codecs may need, less blocks that never become full."""
        most = self.spec.max_live_blocks(num_tokens, chunk, num_sequences)
        return min(most, num_sequences * self.num_kept(num_tokens))

    def num_forked_blocks(self, num_tokens: int, num_sequences: int, num_shared: int) -> int:
        """Shared ones once, and each fork's own."""
        shared = self.num_kept(min(num_shared, num_tokens))
        shared -= self.spec.num_dead_blocks(num_tokens, shared)
        return shared + num_sequences * (self.num_live_blocks(num_tokens) - shared)

    def max_forked_blocks(
        self, num_tokens: int, chunk: int, num_sequences: int, num_shared: int, num_families: int = 1
    ) -> int:
        """Full ones of what a group without packed codecs may need."""
        if num_sequences == 1:
            return self.max_live_blocks(num_tokens, chunk, num_families)
        most = self.spec.max_forked_blocks(num_tokens, chunk, num_sequences, num_shared, num_families)
        full, shared = self.num_kept(num_tokens), self.num_kept(min(num_shared, num_tokens))
        return min(most, num_families * (shared + num_sequences * (full - shared)))


@dataclass(frozen=True)
class OpenShelf:
    """The last, unfinished block of each sequence in a group with a packed codec, exact."""

    spec: CacheSpec
    holds_begun = True

    @property
    def stored(self) -> CacheSpec:
        """Exact where the codecs pack."""
        return self.spec.opened()

    def written(self, num_tokens: int, num_new: int) -> Sequence[int]:
        """The begun one and the last, unless that is full: whole blocks are packed as they are computed."""
        size = self.spec.block_size
        begun, last = num_tokens // size, (num_tokens + num_new) // size
        positions = [begun] if num_tokens % size else []
        return [*positions, last] if (num_tokens + num_new) % size and last not in positions else positions

    def num_kept(self, num_tokens: int) -> int:
        """Up to the last."""
        return self.spec.num_blocks(num_tokens)

    def live_blocks(self, num_tokens: int) -> list[int]:
        """The last, unless it is full."""
        return [num_tokens // self.spec.block_size] if num_tokens % self.spec.block_size else []

    def dying(self, before: int, after: int) -> range:
        """What has become full."""
        return range(before // self.spec.block_size, after // self.spec.block_size)

    def num_live_blocks(self, num_tokens: int) -> int:
        """One, or none."""
        return int(num_tokens % self.spec.block_size > 0)

    def max_live_blocks(self, num_tokens: int, chunk: int, num_sequences: int = 1) -> int:
        """One for each sequence, and a second while a step fills the first and begins the next."""
        if num_tokens <= self.spec.block_size:
            return num_sequences * (num_tokens % self.spec.block_size > 0 or num_tokens > 1)
        return num_sequences + min(num_sequences, chunk // 2)

    def num_forked_blocks(self, num_tokens: int, num_sequences: int, num_shared: int) -> int:
        """Each fork's own."""
        return num_sequences * self.num_live_blocks(num_tokens)

    def max_forked_blocks(
        self, num_tokens: int, chunk: int, num_sequences: int, num_shared: int, num_families: int = 1
    ) -> int:
        """Of each fork as of a sequence by itself."""
        return self.max_live_blocks(num_tokens, max(chunk, num_sequences), num_families * num_sequences)

    def bytes_per_block(self, dtype: str) -> int:
        """Exact K and V, or as an element-wise codec stores them."""
        return self.stored.bytes_per_block(dtype)


def shelves_of(specs: Sequence[CacheSpec], pinned: Spans = ()) -> tuple[Shelf, ...]:
    """The shelves of all groups: first each group's own, in order, then those of open blocks beside packed ones.

    With `pinned`, of a sequence of which these positions stay visible; ValueError as `CacheSpec.keeping`.
    """
    specs = [spec.keeping(pinned) for spec in specs] if pinned else specs
    own: list[Shelf] = [SealedShelf(spec) if spec.packs else WholeShelf(spec) for spec in specs]
    return (*own, *(OpenShelf(spec) for spec in specs if spec.packs))


def first_missing(shelves: Sequence[Shelf], length: int, held: Callable[[int, int], bool]) -> int | None:
    """The first block that some query at `length` or later sees and some shelf does not hold; `held(shelf, block)`.

    It is seen at every shorter length too, down to its own start: nothing in between can be restored.
    """
    numbered = enumerate(shelves)
    return min((b for n, shelf in numbered for b in shelf.live_blocks(length) if not held(n, b)), default=None)
