"""Which sequence holds which blocks: lookup, reserve, commit, fork, crop, release. Knows tokens and ids, no tensors.

All-or-nothing: an operation that cannot be done in whole changes nothing.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvine.cache.blocks import BlockPool
from kvine.cache.hashing import HashFunction, digest
from kvine.cache.invariants import check_index, check_references, check_sequence
from kvine.cache.prefix import Node, PrefixIndex, common_prefix
from kvine.cache.sequence import MISSING, CachedSequence
from kvine.cache.spec import CacheSpec

__all__ = ["MISSING", "BlockCopy", "CacheManager", "CachedSequence"]


@dataclass(frozen=True)
class BlockCopy:
    """A copy the pool must make before the next write: the first num_tokens tokens of a block."""

    group: int
    source: int
    target: int
    num_tokens: int


class CacheManager:
    """The one place that hands out blocks.

    Args:
        specs: one for each layer group, all of one block size.
        budget: bytes of K and V over all groups.
        dtype: compute dtype, `fp32`, `bf16` or `fp16`.
        prefix_caching: whether blocks are published and kept for later sequences.
        capacities: blocks that each group's address space holds; by default the whole budget for each, so that only
            the bytes limit them.
        hash_function: of the prefix index, see there.
    """

    def __init__(
        self,
        specs: Sequence[CacheSpec],
        budget: int,
        *,
        dtype: str = "fp32",
        prefix_caching: bool = True,
        capacities: Sequence[int] | None = None,
        hash_function: HashFunction = digest,
    ) -> None:
        self.specs = tuple(specs)
        self.block_size = self.specs[0].block_size
        assert all(spec.block_size == self.block_size for spec in self.specs), "all groups share one block size"
        self.budget = budget
        self.prefix_caching = prefix_caching
        sizes = [spec.bytes_per_block(dtype) for spec in self.specs]
        self.pools = [
            BlockPool(n, size) for n, size in zip(capacities or [budget // s for s in sizes], sizes, strict=True)
        ]
        self.index = PrefixIndex(len(self.specs), hash_function)
        self.copies: list[BlockCopy] = []
        self.num_evictions = 0
        self._sequences: set[CachedSequence] = set()
        self._pinned_sources: list[tuple[int, int]] = []
        self.num_releases = 0

    # -- what there is ------------------------------------------------------------------------------------------------

    @property
    def bytes_referenced(self) -> int:
        """Bytes of K and V that live sequences hold; shared blocks count once."""
        return sum(len(pool.references) * pool.bytes_per_block for pool in self.pools)

    @property
    def bytes_cached(self) -> int:
        """Bytes of K and V kept for later sequences only."""
        return sum(len(pool.cached) * pool.bytes_per_block for pool in self.pools)

    def bytes_held(self, sequence: CachedSequence) -> int:
        """Bytes of K and V in the blocks of one sequence."""
        return sum(len(sequence.held(group)) * pool.bytes_per_block for group, pool in enumerate(self.pools))

    def fits_ever(self, num_tokens: int, chunk: int, num_sequences: int = 1, num_shared: int = 0) -> bool:
        """Whether sequences of num_tokens tokens, computed at most `chunk` at a time, fit an empty cache.

        They are forks of one, with num_shared tokens in common.
        """
        needs = [spec.max_forked_blocks(num_tokens, chunk, num_sequences, num_shared) for spec in self.specs]
        if any(need > pool.capacity for need, pool in zip(needs, self.pools, strict=True)):
            return False
        return sum(need * pool.bytes_per_block for need, pool in zip(needs, self.pools, strict=True)) <= self.budget

    def max_chunk(self, num_tokens: int, most: int, num_sequences: int = 1, num_shared: int = 0) -> int:
        """Most tokens a step may compute of sequences that grow to num_tokens, at most `most`; 0 if they never fit."""
        if self.fits_ever(num_tokens, most, num_sequences, num_shared):
            return most
        low, high = 0, most
        while high - low > 1:
            middle = (low + high) // 2
            fits = self.fits_ever(num_tokens, middle, num_sequences, num_shared)
            low, high = (middle, high) if fits else (low, middle)
        return low

    def fits_now(
        self, sequence: CachedSequence, num_tokens: int, chunk: int, num_sequences: int = 1, num_shared: int = 0
    ) -> bool:
        """Whether `sequence`, and forks of it, could grow to num_tokens tokens with what is free or cached now."""
        needs = [
            max(
                0,
                spec.max_forked_blocks(num_tokens, chunk, num_sequences, num_shared) - len(sequence.held(group)),
            )
            for group, spec in enumerate(self.specs)
        ]
        return self._room_for(needs)

    # -- the life of a sequence ---------------------------------------------------------------------------------------

    def open(self, tokens: Sequence[int], namespace: bytes = b"") -> CachedSequence:
        """Starts a sequence that will hold `tokens`, with the longest beginning of them that the cache still holds.

        At most len(tokens) - 1 tokens are taken from the cache, so that the last one is computed and gives logits.
        """
        root = self.index.root(namespace)
        sequence = CachedSequence([], [[] for _ in self.specs], [root])
        root.pins += 1
        self._sequences.add(sequence)
        if self.prefix_caching and len(tokens) > 1:
            self._attach(sequence, tokens)
        return sequence

    def reserve(self, sequence: CachedSequence, num_new: int) -> bool:
        """Makes room to write num_new tokens after the accepted ones; false, and nothing changed, if there is none.

        A last block that others share or could find is first replaced by a copy (copy on write); `take_copies` lists
        it.
        """
        end = self.specs[0].num_blocks(sequence.num_tokens + num_new)
        last = sequence.num_tokens // self.block_size
        more = max(0, end - len(sequence.tables[0]))
        begun = [
            (pool, table[last]) for pool, table in zip(self.pools, sequence.tables, strict=True) if last < len(table)
        ]
        copied = [not self._writable(group, block) for group, (_, block) in enumerate(begun)]
        copied = copied or [False] * len(self.pools)
        if not self._room_for([more + copy for copy in copied]):
            # Where there is no room for a copy, a block that is only found through the index is taken out of it.
            alone = [pool.references[b] - self._pins(group, b) == 1 for group, (pool, b) in enumerate(begun)]
            copied = [not a for a in alone] or copied
            if not self._room_for([more + copy for copy in copied]):
                return False
        for group, table in enumerate(sequence.tables):
            if copied[group]:
                self._copy_on_write(group, table, last, sequence.num_tokens % self.block_size)
            elif begun:
                self._withdraw(group, table[last])
            table.extend(self._take(group) for _ in range(more))
        return True

    def commit(self, sequence: CachedSequence, tokens: Sequence[int]) -> None:
        """Accepts `tokens`, whose K and V have been written where `reserve` made room.

        Blocks that are full now are published; those that no later query can see are let go.
        """
        sequence.tokens.extend(tokens)
        assert self.specs[0].num_blocks(sequence.num_tokens) <= len(sequence.tables[0]), "committed more than reserved"
        if self.prefix_caching:
            while len(sequence.path) <= sequence.num_tokens // self.block_size:
                self._publish_next(sequence)
        for group, spec in enumerate(self.specs):
            table = sequence.tables[group]
            for block in reversed(spec.dead_blocks(sequence.num_tokens)):
                if table[block] == MISSING:
                    break  # what died earlier lies before it
                self._release_block(group, table[block])
                table[block] = MISSING

    def fork(self, sequence: CachedSequence) -> CachedSequence:
        """A second sequence with the same past; blocks are shared until one of the two writes.

        Room that was reserved and not committed stays with the first, which reserves anew before it writes.
        """
        end = self.specs[0].num_blocks(sequence.num_tokens)
        twin = CachedSequence(list(sequence.tokens), [table[:end] for table in sequence.tables], list(sequence.path))
        twin.path[-1].pins += 1
        for group, pool in enumerate(self.pools):
            for block in twin.held(group):
                pool.acquire(block)
        self._sequences.add(twin)
        return twin

    def crop(self, sequence: CachedSequence, num_tokens: int) -> int:
        """Cuts a sequence to at most num_tokens tokens and returns how many are left.

        Fewer are left where a window has already let go of blocks that the cut end would see; the caller recomputes
        the difference. Room reserved and not committed is given up too.
        """

        def find(group: int, block: int) -> int | None:
            own = sequence.tables[group][block]
            return own if own != MISSING else self._published(sequence.path, group, block)

        kept = min(max(num_tokens, 0), sequence.num_tokens)
        while (gap := self._first_missing(kept, lambda group, block: find(group, block) is not None)) is not None:
            kept = gap * self.block_size
        end = self.specs[0].num_blocks(kept)
        for group, spec in enumerate(self.specs):
            table = sequence.tables[group]
            for block in spec.live_blocks(kept):
                if table[block] == MISSING:
                    found = find(group, block)
                    assert found is not None
                    self.pools[group].acquire(found)
                    table[block] = found
        self._release_from(sequence, end)
        del sequence.tokens[kept:]
        self._cut_path(sequence, kept // self.block_size + 1)
        return kept

    def release(self, sequence: CachedSequence, *, keep_tail: bool = True) -> None:
        """Ends a sequence. What it published stays cached; its unfinished last block too, if keep_tail."""
        if self.prefix_caching:
            for block, node in enumerate(sequence.path[1:]):
                self._publish(sequence, node, block)  # stands in for another's equal block that was evicted meanwhile
            if keep_tail:
                self._publish_tail(sequence)
        self._sequences.remove(sequence)
        self._release_from(sequence, 0)
        self._cut_path(sequence, 0)

    def take_copies(self) -> list[BlockCopy]:
        """The copies to make, in order, before anything more is written; their sources are held until then."""
        copies, self.copies = self.copies, []
        for group, block in self._pinned_sources:
            self._release_block(group, block)
        self._pinned_sources = []
        return copies

    def take_freed(self, group: int) -> list[int]:
        """Free blocks of a group whose memory can go back to the system, each named once."""
        freed = sorted(self.pools[group].freed)
        self.pools[group].freed.clear()
        return freed

    def clear(self) -> None:
        """Forgets everything that is cached for later sequences."""
        for group, pool in enumerate(self.pools):
            for block in list(pool.cached):
                self._evict(group, block)

    def check(self) -> None:
        """Asserts the invariants: counts, no orphan, tables that agree with visibility, a true index."""
        check_references(self.pools, self._sequences, self._pinned_sources)
        check_index(self.pools, self.index, self._sequences)
        for sequence in self._sequences:
            check_sequence(sequence, self.specs)
        assert sum(pool.bytes_used for pool in self.pools) <= self.budget, "the budget is exceeded"

    # -- inside -------------------------------------------------------------------------------------------------------

    def _room_for(self, needs: Sequence[int]) -> bool:
        for need, pool in zip(needs, self.pools, strict=True):
            if need > pool.num_free + len(pool.cached):
                return False
        wanted = sum(need * pool.bytes_per_block for need, pool in zip(needs, self.pools, strict=True))
        return self.bytes_referenced + wanted <= self.budget

    def _pins(self, group: int, block: int) -> int:
        """How many copies are still to be made of a block."""
        return self._pinned_sources.count((group, block))

    def _writable(self, group: int, block: int) -> bool:
        """Whether its one holder may write to a block, copies of it being made before anything is written."""
        pool = self.pools[group]
        if pool.writable(block):
            return True
        pins = self._pins(group, block)
        return pins > 0 and pool.references[block] - pins == 1 and block not in pool.node_of

    def _take(self, group: int) -> int:
        pool = self.pools[group]
        while pool.num_free == 0:
            self._evict(group, next(iter(pool.cached)))
        while sum(p.bytes_used for p in self.pools) + pool.bytes_per_block > self.budget:
            _, oldest = min((next(iter(p.cached.values())), g) for g, p in enumerate(self.pools) if p.cached)
            self._evict(oldest, next(iter(self.pools[oldest].cached)))
        return pool.take()

    def _evict(self, group: int, block: int) -> None:
        self.index.prune(self.pools[group].evict(block, group))
        self.num_evictions += 1

    def _withdraw(self, group: int, block: int) -> None:
        if block in self.pools[group].node_of:
            self.index.prune(self.pools[group].withdraw(block, group))

    def _release_block(self, group: int, block: int) -> None:
        self.num_releases += 1
        self.pools[group].release(block, self.num_releases)

    def _release_from(self, sequence: CachedSequence, start: int) -> None:
        """Lets go of blocks from `start` on, the last of every group first: tails are evicted before heads."""
        for position in reversed(range(start, len(sequence.tables[0]))):
            for group, table in enumerate(sequence.tables):
                if table[position] != MISSING:
                    self._release_block(group, table[position])
        for table in sequence.tables:
            del table[start:]

    def _copy_on_write(self, group: int, table: list[int], last: int, num_tokens: int) -> None:
        source = table[last]
        table[last] = self._take(group)
        if num_tokens:
            self.copies.append(BlockCopy(group, source, table[last], num_tokens))
            self._pinned_sources.append((group, source))
        else:
            self._release_block(group, source)

    def _attach(self, sequence: CachedSequence, tokens: Sequence[int]) -> None:
        size, root = self.block_size, sequence.path[0]
        nodes: list[Node] = []
        while (len(nodes) + 1) * size <= len(tokens):
            here = tuple(tokens[len(nodes) * size : (len(nodes) + 1) * size])
            child = self.index.child(nodes[-1] if nodes else root, here)
            if child is None:
                break
            nodes.append(child)
        limit = len(tokens) - 1
        gap: int | None = len(nodes)  # the first block that is not held in whole; another may begin as it does
        while gap is not None:
            begin = tokens[gap * size : min((gap + 1) * size, limit)]
            partial, shared = self.index.longest_overlap(nodes[gap - 1] if gap else root, begin)
            nodes[gap:] = [] if partial is None else [partial]
            length = min(gap * size + shared, limit)
            gap = self._first_missing(length, lambda group, block: nodes[block].blocks[group] is not None)
        for group, spec in enumerate(self.specs):
            live = set(spec.live_blocks(length))
            for block in range(spec.num_blocks(length)):
                found = nodes[block].blocks[group] if block in live else None
                if found is not None:
                    self.pools[group].acquire(found)
                sequence.tables[group].append(MISSING if found is None else found)
        sequence.tokens = list(tokens[:length])
        self._extend_path(sequence, nodes[: length // size])

    def _first_missing(self, length: int, held: Callable[[int, int], bool]) -> int | None:
        """The first block that some query at `length` or later sees and some group does not hold.

        It is seen at every shorter length too, down to its own start: nothing in between can be restored.
        """
        groups = enumerate(self.specs)
        return min((b for g, spec in groups for b in spec.live_blocks(length) if not held(g, b)), default=None)

    def _published(self, path: Sequence[Node], group: int, block: int) -> int | None:
        return path[block + 1].blocks[group] if block + 1 < len(path) else None

    def _publish_next(self, sequence: CachedSequence) -> None:
        block = len(sequence.path) - 1
        tokens = tuple(sequence.tokens[block * self.block_size : (block + 1) * self.block_size])
        node = self.index.add(sequence.path[-1], tokens)
        self._publish(sequence, node, block)
        self._drop_superseded(sequence.path[-1], node)
        self._extend_path(sequence, [node])

    def _publish_tail(self, sequence: CachedSequence) -> None:
        block, length = divmod(sequence.num_tokens, self.block_size)
        if not length:
            return
        parent = sequence.path[-1]
        tokens = tuple(sequence.tokens[block * self.block_size :])
        if any(
            common_prefix(n.tokens, tokens) == length
            for n in parent.children.get(tokens[0], ())
            if None not in n.blocks
        ):
            return  # an equal or longer one is cached already
        node = self.index.add(parent, tokens)
        self._publish(sequence, node, block)
        self._drop_superseded(parent, node)
        self.index.prune(node)

    def _publish(self, sequence: CachedSequence, node: Node, block: int) -> None:
        for group, pool in enumerate(self.pools):
            own = sequence.tables[group][block]
            if own != MISSING and node.blocks[group] is None and own not in pool.node_of:
                pool.publish(own, node, group)

    def _drop_superseded(self, parent: Node, node: Node) -> None:
        """Frees cached tails that `node` begins with: nothing can match them better than it."""
        for tail in list(parent.children.get(node.tokens[0], ())):
            if len(tail.tokens) < len(node.tokens) and common_prefix(tail.tokens, node.tokens) == len(tail.tokens):
                for group, found in enumerate(list(tail.blocks)):
                    if found is not None and found in self.pools[group].cached and node.blocks[group] is not None:
                        self._evict(group, found)

    def _extend_path(self, sequence: CachedSequence, nodes: Sequence[Node]) -> None:
        if nodes:
            sequence.path[-1].pins -= 1
            sequence.path.extend(nodes)
            sequence.path[-1].pins += 1

    def _cut_path(self, sequence: CachedSequence, length: int) -> None:
        if length < len(sequence.path):
            last = sequence.path[-1]
            del sequence.path[length:]
            if sequence.path:
                sequence.path[-1].pins += 1
            last.pins -= 1
            self.index.prune(last)
