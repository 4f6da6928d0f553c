"""Which sequence holds which blocks: lookup, reserve, commit, fork, crop, release. Knows tokens and ids, no tensors.

All-or-nothing: an operation that cannot be done in whole changes nothing.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvine.cache.blocks import BlockPool
from kvine.cache.hashing import HashFunction, digest
from kvine.cache.prefix import Node, PrefixIndex, common_prefix
from kvine.cache.spec import CacheSpec

MISSING = -1  # entry of a block table for a block that no later query can see


@dataclass(frozen=True)
class BlockCopy:
    """A copy the pool must make before the next write: the first num_tokens tokens of a block."""

    group: int
    source: int
    target: int
    num_tokens: int


@dataclass(eq=False)
class CachedSequence:
    """One sequence's hold on the cache.

    Attributes:
        tokens: the accepted tokens whose K and V are held or were let go as invisible.
        tables: for each group its blocks in order of position; `MISSING` where one was let go.
        path: the nodes that spell the published part of `tokens`, root first, so path[i + 1] spells block i.
    """

    tokens: list[int]
    tables: list[list[int]]
    path: list[Node] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """Accepted tokens."""
        return len(self.tokens)


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
        self._clock = 0

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
        held = zip(sequence.tables, self.pools, strict=True)
        return sum(sum(block != MISSING for block in table) * pool.bytes_per_block for table, pool in held)

    def fits_ever(self, num_tokens: int, chunk: int) -> bool:
        """Whether a sequence of num_tokens tokens, computed at most `chunk` at a time, fits an empty cache."""
        needs = [spec.max_live_blocks(num_tokens, chunk) for spec in self.specs]
        if any(need > pool.capacity for need, pool in zip(needs, self.pools, strict=True)):
            return False
        return sum(need * pool.bytes_per_block for need, pool in zip(needs, self.pools, strict=True)) <= self.budget

    def fits_now(self, sequence: CachedSequence, num_tokens: int, chunk: int) -> bool:
        """Whether `sequence` could grow to num_tokens tokens with what is free or cached now."""
        needs = [
            max(0, spec.max_live_blocks(num_tokens, chunk) - sum(block != MISSING for block in table))
            for spec, table in zip(self.specs, sequence.tables, strict=True)
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

        A last block that others share or can find is first replaced by a copy (copy on write); `take_copies` lists it.
        """
        end = self.specs[0].num_blocks(sequence.num_tokens + num_new)
        last = sequence.num_tokens // self.block_size
        shared = [
            last < len(table) and table[last] != MISSING and not pool.writable(table[last])
            for table, pool in zip(sequence.tables, self.pools, strict=True)
        ]
        needs = [max(0, end - len(table)) + s for table, s in zip(sequence.tables, shared, strict=True)]
        if not self._room_for(needs):
            return False
        for group, table in enumerate(sequence.tables):
            if shared[group]:
                self._copy_on_write(group, table, last, sequence.num_tokens % self.block_size)
            table.extend(self._take(group) for _ in range(end - len(table)))
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
        """A second sequence with the same past; blocks are shared until one of the two writes."""
        twin = CachedSequence(list(sequence.tokens), [list(table) for table in sequence.tables], list(sequence.path))
        twin.path[-1].pins += 1
        for pool, table in zip(self.pools, twin.tables, strict=True):
            for block in table:
                if block != MISSING:
                    pool.acquire(block)
        self._sequences.add(twin)
        return twin

    def crop(self, sequence: CachedSequence, num_tokens: int) -> int:
        """Cuts a sequence to at most num_tokens tokens and returns how many are left.

        Fewer are left where a window has already let go of blocks that the cut end would see; the caller recomputes
        the difference. Room reserved and not committed is given up too.
        """
        num_tokens = min(max(num_tokens, 0), sequence.num_tokens)

        def find(group: int, block: int) -> int | None:
            own = sequence.tables[group][block]
            return own if own != MISSING else self._published(sequence.path, group, block)

        kept = self._restorable(num_tokens, lambda group, block: find(group, block) is not None)
        end = self.specs[0].num_blocks(kept)
        for group, spec in enumerate(self.specs):
            table = sequence.tables[group]
            live = set(spec.live_blocks(kept))
            for block in range(end):
                if block in live and table[block] == MISSING:
                    found = find(group, block)
                    assert found is not None
                    self.pools[group].acquire(found)
                    table[block] = found
            self._release_tail(group, table, end)
        del sequence.tokens[kept:]
        self._cut_path(sequence, kept // self.block_size + 1)
        return kept

    def release(self, sequence: CachedSequence, *, keep_tail: bool = True) -> None:
        """Ends a sequence. What it published stays cached; its unfinished last block too, if keep_tail."""
        if self.prefix_caching and keep_tail:
            self._publish_tail(sequence)
        self._sequences.remove(sequence)
        for group, table in enumerate(sequence.tables):
            self._release_tail(group, table, 0)
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
        held: list[dict[int, int]] = [{} for _ in self.pools]
        for group, block in self._pinned_sources:
            held[group][block] = held[group].get(block, 0) + 1
        for sequence in self._sequences:
            self._check_sequence(sequence)
            for group, table in enumerate(sequence.tables):
                for block in table:
                    if block != MISSING:
                        held[group][block] = held[group].get(block, 0) + 1
        for group, pool in enumerate(self.pools):
            pool.check()
            assert held[group] == pool.references, "reference counts differ from what sequences hold"
            for block, node in pool.node_of.items():
                assert node.blocks[group] == block, "a published block is not its node's"
        reachable = self.index.nodes()
        assert len({id(node) for node in reachable}) == len(reachable), "a node is indexed twice"
        for node in reachable:
            assert node.pins or node.children or any(b is not None for b in node.blocks), "a node holds nothing"
            for group, found in enumerate(node.blocks):
                assert found is None or self.pools[group].node_of[found] is node, "a node names a block that is not its"
        assert sum(pool.bytes_used for pool in self.pools) <= self.budget, "the budget is exceeded"

    # -- inside -------------------------------------------------------------------------------------------------------

    def _room_for(self, needs: Sequence[int]) -> bool:
        for need, pool in zip(needs, self.pools, strict=True):
            if need > pool.num_free + len(pool.cached):
                return False
        wanted = sum(need * pool.bytes_per_block for need, pool in zip(needs, self.pools, strict=True))
        return self.bytes_referenced + wanted <= self.budget

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

    def _release_block(self, group: int, block: int) -> None:
        self._clock += 1
        self.pools[group].release(block, self._clock)

    def _release_tail(self, group: int, table: list[int], start: int) -> None:
        for block in reversed(table[start:]):  # tails are older than heads, so they are evicted first
            if block != MISSING:
                self._release_block(group, block)
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
        size = self.block_size
        node = sequence.path[0]
        matched: list[Node] = []
        while (len(matched) + 1) * size <= len(tokens):
            child = self.index.child(node, tuple(tokens[len(matched) * size : (len(matched) + 1) * size]))
            if child is None:
                break
            matched.append(child)
            node = child
        partial, shared = self.index.longest_overlap(node, tokens[len(matched) * size : (len(matched) + 1) * size])
        nodes = [*matched, partial] if partial is not None else matched
        limit = min(len(matched) * size + shared, len(tokens) - 1)
        length = self._restorable(limit, lambda group, block: nodes[block].blocks[group] is not None)
        for group, spec in enumerate(self.specs):
            live = set(spec.live_blocks(length))
            for block in range(spec.num_blocks(length)):
                found = nodes[block].blocks[group] if block in live else None
                if found is not None:
                    self.pools[group].acquire(found)
                sequence.tables[group].append(MISSING if found is None else found)
        sequence.tokens = list(tokens[:length])
        self._extend_path(sequence, matched[: length // size])

    def _restorable(self, length: int, held: Callable[[int, int], bool]) -> int:
        """Largest length, at most the given one, at which every block that a later query can see is held.

        A missing block that is seen at some length is seen at every shorter one down to its own start, so each round
        cuts to the first such block's start.
        """
        while True:
            missing = [
                block
                for group, spec in enumerate(self.specs)
                for block in spec.live_blocks(length)
                if not held(group, block)
            ]
            if not missing:
                return length
            length = min(missing) * self.block_size

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

    def _check_sequence(self, sequence: CachedSequence) -> None:
        needed = self.specs[0].num_blocks(sequence.num_tokens)
        for spec, table in zip(self.specs, sequence.tables, strict=True):
            assert len(table) >= needed, "a table is shorter than its tokens"
            for block in spec.live_blocks(sequence.num_tokens):
                assert table[block] != MISSING, "a visible block was let go"
            own = [block for block in table if block != MISSING]
            assert len(own) == len(set(own)), "a sequence holds a block twice"
        assert len(sequence.path) <= sequence.num_tokens // self.block_size + 1, "the path is longer than the tokens"
        for block, node in enumerate(sequence.path[1:]):
            expected = tuple(sequence.tokens[block * self.block_size : (block + 1) * self.block_size])
            assert node.tokens == expected and node.parent is sequence.path[block], "the path spells other tokens"
