"""What holds of a cache manager between any two operations. Tests ask after every one of them.

A cache that breaks one of these gives wrong text much later and elsewhere, so the break is named where it happens.
"""

from collections import Counter
from collections.abc import Collection, Sequence

from kvine.cache.blocks import BlockPool
from kvine.cache.prefix import PrefixIndex
from kvine.cache.sequence import MISSING, CachedSequence


def check_references(
    pools: Sequence[BlockPool], sequences: Collection[CachedSequence], pinned: Sequence[tuple[int, int]]
) -> None:
    """Asserts that what sequences and pending copies hold is what each pool counts: no orphan, no block too few."""
    for shelf, pool in enumerate(pools):
        pool.check()
        held = Counter(block for pinned_shelf, block in pinned if pinned_shelf == shelf)
        for sequence in sequences:
            held.update(sequence.held(shelf))
        assert held == pool.references, "reference counts differ from what sequences hold"


def check_index(pools: Sequence[BlockPool], index: PrefixIndex, sequences: Collection[CachedSequence]) -> None:
    """Asserts that index and pools agree on which node vouches for which block, and that no empty node is left."""
    nodes = index.nodes()
    ends = Counter(id(sequence.path[-1]) for sequence in sequences)
    assert len({id(node) for node in nodes}) == len(nodes), "a node is indexed twice"
    for node in nodes:
        assert node.pins == ends[id(node)], "a node is pinned by other sequences than those that end there"
        assert node.pins or node.children or any(b is not None for b in node.blocks), "a node holds nothing"
        for shelf, found in enumerate(node.blocks):
            assert found is None or pools[shelf].node_of[found] is node, "a node names a block that is not its"
    for shelf, pool in enumerate(pools):
        for block, node in pool.node_of.items():
            assert node.blocks[shelf] == block, "a published block is not its node's"


def check_sequence(sequence: CachedSequence) -> None:
    """Asserts that a sequence holds every block that a later query reads, each once, and that its path spells it."""
    size = sequence.shelves[0].spec.block_size
    for number, shelf in enumerate(sequence.shelves):
        table, own = sequence.tables[number], sequence.held(number)
        assert len(table) >= shelf.spec.num_blocks(sequence.num_tokens), "a table is shorter than its tokens"
        for block in shelf.live_blocks(sequence.num_tokens):
            assert table[block] != MISSING, "a visible block was let go"
        assert len(own) == len(set(own)), "a sequence holds a block twice"
    assert len(sequence.path) <= sequence.num_tokens // size + 1, "the path is longer than the tokens"
    for block, node in enumerate(sequence.path[1:]):
        expected = tuple(sequence.tokens[block * size : (block + 1) * size])
        assert node.tokens == expected and node.parent is sequence.path[block], "the path spells other tokens"
