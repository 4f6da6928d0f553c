"""Drives a cache manager as an engine would, without a model: what all its tests begin with."""

from collections.abc import Sequence

from kvine.cache.manager import CachedSequence, CacheManager
from kvine.cache.spec import CacheSpec

SIZE = 4
FULL = CacheSpec(layers=(0,), num_kv_heads=1, head_dim=2, block_size=SIZE)  # 64 bytes a block in fp32
WINDOWED = CacheSpec(layers=(1,), num_kv_heads=1, head_dim=2, block_size=SIZE, window=8, sink_tokens=2)
BLOCK = 64


def manager_of(blocks: int, *specs: CacheSpec, **options: object) -> CacheManager:
    """A manager whose budget is `blocks` blocks, over all groups."""
    return CacheManager(specs or (FULL,), blocks * BLOCK, **options)  # type: ignore[arg-type]


def grow(manager: CacheManager, sequence: CachedSequence, tokens: Sequence[int], chunk: int = 100) -> None:
    """Computes tokens as a runner does, and checks the manager after each step."""
    for start in range(0, len(tokens), chunk):
        part = tokens[start : start + chunk]
        assert manager.reserve(sequence, len(part))
        manager.check()
        manager.take_copies()
        manager.commit(sequence, part)
        manager.check()


def run(manager: CacheManager, tokens: Sequence[int], namespace: bytes = b"", *, keep_tail: bool = True) -> int:
    """Serves one text to its end; returns how many of its tokens came from the cache."""
    sequence = manager.open(tokens, namespace)
    hit = sequence.num_tokens
    grow(manager, sequence, tokens[hit:])
    manager.release(sequence, keep_tail=keep_tail)
    manager.check()
    return hit


def hit(manager: CacheManager, tokens: Sequence[int], namespace: bytes = b"") -> int:
    """How many tokens a lookup would find, leaving everything as it was."""
    sequence = manager.open(tokens, namespace)
    found = sequence.num_tokens
    manager.release(sequence, keep_tail=False)
    manager.check()
    return found


def state(manager: CacheManager, sequence: CachedSequence) -> object:
    """What an operation that fails must leave as it was."""
    pools = [(dict(p.references), dict(p.cached), p.num_free, set(p.node_of)) for p in manager.pools]
    return pools, [list(t) for t in sequence.tables], list(manager.copies), manager.num_evictions
