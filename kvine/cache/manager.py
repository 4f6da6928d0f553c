"""Which sequence holds which blocks: lookup, reserve, commit, fork, crop, release. Knows tokens and ids, no tensors.

All-or-nothing: an operation that cannot be done in whole changes nothing.
"""

from collections.abc import Sequence

from kvine.cache.blocks import BlockPool
from kvine.cache.hashing import HashFunction, digest
from kvine.cache.invariants import check_index, check_references, check_sequence
from kvine.cache.prefix import Node, PrefixIndex, common_prefix
from kvine.cache.sequence import MISSING, BlockCopy, CachedSequence
from kvine.cache.shelf import first_missing, shelves_of
from kvine.cache.spec import CacheSpec
from kvine.cache.store import Tier
from kvine.spans import Spans

__all__ = ["MISSING", "BlockCopy", "CacheManager", "CachedSequence"]


class CacheManager:
    """The one place that hands out blocks.

    A layer group has one shelf, and another for open blocks where its codecs pack (see `kvine.cache.shelf`). Each
    shelf has a pool of ids here, and each sequence a block table for it; the first len(specs) are the groups' own.

    Args:
        specs: one for each layer group, all of one block size.
        budget: bytes of K and V over all groups.
        dtype: compute dtype, `fp32`, `bf16` or `fp16`.
        prefix_caching: whether blocks are published and kept for later sequences.
        capacities: blocks that each shelf's address space holds; by default the whole budget, so that bytes limit them.
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
        self.shelves = shelves_of(self.specs)
        sizes = [shelf.bytes_per_block(dtype) for shelf in self.shelves]
        self.pools = [
            BlockPool(n, size) for n, size in zip(capacities or [budget // s for s in sizes], sizes, strict=True)
        ]
        self.index = PrefixIndex(len(self.shelves), hash_function)
        self._begun = [n for n, shelf in enumerate(self.shelves) if shelf.holds_begun]
        self.copies: list[BlockCopy] = []
        self.num_evictions = 0
        self._sequences: set[CachedSequence] = set()
        self._pinned_sources: list[tuple[int, int]] = []
        self.num_releases = 0
        self.tier: Tier | None = None  # where blocks go and come back from, if there is such a place

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
        return sum(len(sequence.held(shelf)) * pool.bytes_per_block for shelf, pool in enumerate(self.pools))

    def fits_ever(
        self, num_tokens: int, chunk: int, num_sequences: int = 1, num_shared: int = 0, pinned: Spans = ()
    ) -> bool:
        """Whether sequences of num_tokens tokens, computed at most `chunk` at a time, fit an empty cache.

        They are forks of one, with num_shared tokens in common, and keep what is pinned.
        """
        shelves = shelves_of(self.specs, pinned) if pinned else self.shelves
        needs = [shelf.max_forked_blocks(num_tokens, chunk, num_sequences, num_shared) for shelf in shelves]
        if any(need > pool.capacity for need, pool in zip(needs, self.pools, strict=True)):
            return False
        return sum(need * pool.bytes_per_block for need, pool in zip(needs, self.pools, strict=True)) <= self.budget

    def max_chunk(
        self, num_tokens: int, most: int, num_sequences: int = 1, num_shared: int = 0, pinned: Spans = ()
    ) -> int:
        """Most tokens a step may compute of sequences that grow to num_tokens, at most `most`; 0 if they never fit."""
        if self.fits_ever(num_tokens, most, num_sequences, num_shared, pinned):
            return most
        low, high = 0, most
        while high - low > 1:
            middle = (low + high) // 2
            fits = self.fits_ever(num_tokens, middle, num_sequences, num_shared, pinned)
            low, high = (middle, high) if fits else (low, middle)
        return low

    def fits_now(
        self, sequence: CachedSequence, num_tokens: int, chunk: int, num_sequences: int = 1, num_shared: int = 0
    ) -> bool:
        """Whether `sequence`, and forks of it, could grow to num_tokens tokens with what is free or cached now."""
        needs = [
            max(0, shelf.max_forked_blocks(num_tokens, chunk, num_sequences, num_shared) - len(sequence.held(number)))
            for number, shelf in enumerate(sequence.shelves)
        ]
        return self._room_for(needs)

    # -- the life of a sequence ---------------------------------------------------------------------------------------

    def open(self, tokens: Sequence[int], namespace: bytes = b"", pinned: Spans = ()) -> CachedSequence:
        """Starts a sequence that will hold `tokens`, with the longest beginning of them that the cache still holds.

        At most len(tokens) - 1 tokens are taken from the cache, so that the last one is computed and gives logits.
        What is pinned stays visible whatever the windows; the namespace is then another than without.
        """
        root = self.index.root(namespace)
        shelves = shelves_of(self.specs, pinned) if pinned else self.shelves
        sequence = CachedSequence([], [[] for _ in shelves], shelves, [root], pinned)
        root.pins += 1
        self._sequences.add(sequence)
        if self.prefix_caching and len(tokens) > 1:
            if self.tier is not None:
                self.tier.recall(root, tokens, shelves)
            self._attach(sequence, tokens)
        return sequence

    def reserve(self, sequence: CachedSequence, num_new: int) -> bool:
        """Makes room to write num_new tokens after the accepted ones; false, and nothing changed, if there is none.

        A last block that others share or could find is first replaced by a copy (copy on write); `take_copies` lists
        it.
        """
        end = self.specs[0].num_blocks(sequence.num_tokens + num_new)
        last = sequence.num_tokens // self.block_size
        written = [shelf.written(sequence.num_tokens, num_new) for shelf in sequence.shelves]
        more: list[int] = []
        begun: list[int] = []  # blocks that are written to and may be shared
        for table, positions in zip(sequence.tables, written, strict=True):
            held = [position for position in positions if position < len(table) and table[position] != MISSING]
            more.append(len(positions) - len(held))
            begun.append(table[last] if last in held else MISSING)
        copied = [block != MISSING and not self._writable(shelf, block) for shelf, block in enumerate(begun)]
        if not self._room_for([new + copy for new, copy in zip(more, copied, strict=True)]):
            # Where there is no room for a copy, a block that is only found through the index is taken out of it.
            copied = [block != MISSING and self._num_holders(shelf, block) > 1 for shelf, block in enumerate(begun)]
            if not self._room_for([new + copy for new, copy in zip(more, copied, strict=True)]):
                return False
        for shelf, table in enumerate(sequence.tables):
            if copied[shelf]:
                self._copy_on_write(shelf, table, last, sequence.num_tokens % self.block_size)
            elif begun[shelf] != MISSING:
                self._withdraw(shelf, begun[shelf])
            table.extend([MISSING] * (end - len(table)))
            for position in written[shelf]:
                if table[position] == MISSING:
                    table[position] = self._take(shelf)
        return True

    def commit(self, sequence: CachedSequence, tokens: Sequence[int]) -> None:
        """Accepts `tokens`, whose K and V have been written where `reserve` made room.

        Blocks that are full now are published; those that no later query can see are let go.
        """
        before = sequence.num_tokens
        sequence.tokens.extend(tokens)
        assert self.specs[0].num_blocks(sequence.num_tokens) <= len(sequence.tables[0]), "committed more than reserved"
        self._let_die(sequence, range(len(self.specs), len(self.shelves)), before)  # what is sealed lies elsewhere
        if self.prefix_caching:
            while len(sequence.path) <= sequence.num_tokens // self.block_size:
                self._publish_next(sequence)
        self._let_die(sequence, range(len(self.specs)), before)

    def fork(self, sequence: CachedSequence) -> CachedSequence:
        """A second sequence with the same past; blocks are shared until one of the two writes.

        Room that was reserved and not committed stays with the first, which reserves anew before it writes.
        """
        end = self.specs[0].num_blocks(sequence.num_tokens)
        tables = []
        for shelf, table in zip(sequence.shelves, sequence.tables, strict=True):
            kept = table[: shelf.num_kept(sequence.num_tokens)]
            tables.append(kept + [MISSING] * (end - len(kept)))
        twin = CachedSequence(list(sequence.tokens), tables, sequence.shelves, list(sequence.path), sequence.pinned)
        twin.path[-1].pins += 1
        for number, pool in enumerate(self.pools):
            for block in twin.held(number):
                pool.acquire(block)
        self._sequences.add(twin)
        return twin

    def crop(self, sequence: CachedSequence, num_tokens: int) -> int:
        """Cuts a sequence to at most num_tokens tokens and returns how many are left.

        Fewer are left where a window has already let go of blocks that the cut end would see, or where it would lie
        inside a packed block; the caller recomputes the difference. Room reserved and not committed is given up too.
        """

        def find(shelf: int, block: int) -> int | None:
            own = sequence.tables[shelf][block]
            return own if own != MISSING else self._published(sequence.path, shelf, block)

        kept = min(max(num_tokens, 0), sequence.num_tokens)
        while (gap := first_missing(sequence.shelves, kept, lambda n, block: find(n, block) is not None)) is not None:
            kept = gap * self.block_size
        for number, shelf in enumerate(sequence.shelves):
            table = sequence.tables[number]
            for block in shelf.live_blocks(kept):
                if table[block] == MISSING:
                    found = find(number, block)
                    assert found is not None
                    self.pools[number].acquire(found)
                    table[block] = found
        self._release_from(sequence, kept)
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
            if self.tier is not None:
                self.tier.keep(sequence.path)
        self._sequences.remove(sequence)
        self._release_from(sequence, 0)
        self._cut_path(sequence, 0)

    def take_copies(self) -> list[BlockCopy]:
        """The copies to make, in order, before anything more is written; their sources are held until then."""
        copies, self.copies = self.copies, []
        for shelf, block in self._pinned_sources:
            self._release_block(shelf, block)
        self._pinned_sources = []
        return copies

    def take_freed(self, shelf: int) -> list[int]:
        """Free blocks of a shelf whose memory can go back to the system, each named once."""
        freed = sorted(self.pools[shelf].freed)
        self.pools[shelf].freed.clear()
        return freed

    def clear(self) -> None:
        """Forgets everything that is cached for later sequences."""
        for shelf, pool in enumerate(self.pools):
            for block in list(pool.cached):
                self._evict(shelf, block)

    def check(self) -> None:
        """Asserts the invariants: counts, no orphan, tables that agree with visibility, a true index."""
        check_references(self.pools, self._sequences, self._pinned_sources)
        check_index(self.pools, self.index, self._sequences)
        for sequence in self._sequences:
            check_sequence(sequence)
        assert sum(pool.bytes_used for pool in self.pools) <= self.budget, "the budget is exceeded"

    # -- inside -------------------------------------------------------------------------------------------------------

    def _room_for(self, needs: Sequence[int]) -> bool:
        for need, pool in zip(needs, self.pools, strict=True):
            if need > pool.num_free + len(pool.cached):
                return False
        wanted = sum(need * pool.bytes_per_block for need, pool in zip(needs, self.pools, strict=True))
        return self.bytes_referenced + wanted <= self.budget

    def _num_holders(self, shelf: int, block: int) -> int:
        """Sequences that hold a block; copies still to be made of it hold it too, and do not count."""
        return self.pools[shelf].references[block] - self._pinned_sources.count((shelf, block))

    def _writable(self, shelf: int, block: int) -> bool:
        """Whether its one holder may write to a block, copies of it being made before anything is written."""
        pool = self.pools[shelf]
        return pool.writable(block) or (self._num_holders(shelf, block) == 1 and block not in pool.node_of)

    def _take(self, shelf: int) -> int:
        pool = self.pools[shelf]
        while pool.num_free == 0:
            self._evict(shelf, next(iter(pool.cached)))
        while sum(p.bytes_used for p in self.pools) + pool.bytes_per_block > self.budget:
            _, oldest = min((next(iter(p.cached.values())), n) for n, p in enumerate(self.pools) if p.cached)
            self._evict(oldest, next(iter(self.pools[oldest].cached)))
        return pool.take()

    def _evict(self, shelf: int, block: int) -> None:
        if self.tier is not None:
            self.tier.keep_block(shelf, block)
        self.index.prune(self.pools[shelf].evict(block, shelf))
        self.num_evictions += 1

    def _withdraw(self, shelf: int, block: int) -> None:
        if block in self.pools[shelf].node_of:
            self.index.prune(self.pools[shelf].withdraw(block, shelf))

    def _release_block(self, shelf: int, block: int) -> None:
        self.num_releases += 1
        self.pools[shelf].release(block, self.num_releases)

    def _let_die(self, sequence: CachedSequence, shelves: range, before: int) -> None:
        for shelf in shelves:
            table = sequence.tables[shelf]
            for block in reversed(sequence.shelves[shelf].dying(before, sequence.num_tokens)):
                if table[block] != MISSING:
                    self._release_block(shelf, table[block])
                    table[block] = MISSING

    def _release_from(self, sequence: CachedSequence, num_tokens: int) -> None:
        """Lets go of what lies behind num_tokens tokens, the last first: tails are evicted before heads."""
        kept = [shelf.num_kept(num_tokens) for shelf in sequence.shelves]
        for position in reversed(range(min(kept), len(sequence.tables[0]))):
            for shelf, table in enumerate(sequence.tables):
                if position >= kept[shelf] and table[position] != MISSING:
                    self._release_block(shelf, table[position])
                    table[position] = MISSING
        for table in sequence.tables:
            del table[self.specs[0].num_blocks(num_tokens) :]

    def _copy_on_write(self, shelf: int, table: list[int], last: int, num_tokens: int) -> None:
        source = table[last]
        table[last] = self._take(shelf)
        if num_tokens:
            self.copies.append(BlockCopy(shelf, source, table[last], num_tokens))
            self._pinned_sources.append((shelf, source))
        else:
            self._release_block(shelf, source)

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
            partial, shared = self.index.longest_overlap(nodes[gap - 1] if gap else root, begin, self._begun)
            nodes[gap:] = [] if partial is None else [partial]
            length = min(gap * size + shared, limit)
            gap = first_missing(sequence.shelves, length, lambda n, block: nodes[block].blocks[n] is not None)
        for number, shelf in enumerate(sequence.shelves):
            live = set(shelf.live_blocks(length))
            for block in range(shelf.spec.num_blocks(length)):
                found = nodes[block].blocks[number] if block in live else None
                if found is not None:
                    self.pools[number].acquire(found)
                sequence.tables[number].append(MISSING if found is None else found)
        sequence.tokens = list(tokens[:length])
        self._extend_path(sequence, nodes[: length // size])

    def _published(self, path: Sequence[Node], shelf: int, block: int) -> int | None:
        return path[block + 1].blocks[shelf] if block + 1 < len(path) else None

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
            if n.holds(self._begun)
        ):
            return  # an equal or longer one is cached already
        node = self.index.add(parent, tokens)
        self._publish(sequence, node, block)
        self._drop_superseded(parent, node)
        self.index.prune(node)

    def _publish(self, sequence: CachedSequence, node: Node, block: int) -> None:
        for shelf, pool in enumerate(self.pools):
            own = sequence.tables[shelf][block]
            if own != MISSING and node.blocks[shelf] is None and own not in pool.node_of:
                pool.publish(own, node, shelf)

    def _drop_superseded(self, parent: Node, node: Node) -> None:
        """Frees cached tails that `node` begins with: nothing can match them better than it."""
        for tail in list(parent.children.get(node.tokens[0], ())):
            if len(tail.tokens) < len(node.tokens) and common_prefix(tail.tokens, node.tokens) == len(tail.tokens):
                for shelf, found in enumerate(list(tail.blocks)):
                    if found is not None and found in self.pools[shelf].cached and node.blocks[shelf] is not None:
                        self._evict(shelf, found)

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
