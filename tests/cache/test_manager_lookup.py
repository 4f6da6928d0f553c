"""What a lookup finds: never too much, never another's, and as much as can be had."""

import itertools
import random
import subprocess
import sys

import pytest
from driving import FULL, SIZE, WINDOWED, hit, manager_of, run

from kvine.cache.hashing import block_key, digest, framed, namespace_key
from kvine.cache.manager import MISSING, BlockCopy
from kvine.cache.spec import CacheSpec

# -- lookup -----------------------------------------------------------------------------------------------------------


def test_b06_a_cached_prompt_leaves_one_token_to_compute_at_every_length() -> None:
    for length in range(1, 14):
        manager = manager_of(100)
        prompt = list(range(length))
        assert [run(manager, prompt) for _ in range(3)] == [0, length - 1, length - 1]
        assert run(manager, [*prompt, 99]) == length
        assert run(manager, [*prompt, 99, 98]) == length + 1


def test_a_partly_matching_block_gives_its_first_tokens_as_a_copy() -> None:
    manager = manager_of(100)
    run(manager, list(range(12)))
    sequence = manager.open([*range(6), 77, 78])
    assert sequence.tokens == list(range(6))
    shared = sequence.tables[0][1]
    assert manager.reserve(sequence, 2)
    assert manager.take_copies() == [BlockCopy(0, shared, sequence.tables[0][1], 2)]
    assert sequence.tables[0][1] != shared
    manager.commit(sequence, [77, 78])
    assert hit(manager, [*range(12), 0]) == 12  # the block that was copied still serves its own text
    assert hit(manager, [*range(6), 77, 78, 0]) == 8


def test_of_several_partly_matching_blocks_the_longest_match_is_taken() -> None:
    manager = manager_of(100)
    for tokens in ([0, 1, 2, 3, 4, 9, 9, 9], [0, 1, 2, 3, 4, 5, 6], [0, 1, 2, 3, 4, 5, 9, 9]):
        run(manager, tokens)
    assert hit(manager, [0, 1, 2, 3, 4, 5, 6, 7, 8]) == 7


def test_a_partly_held_block_gives_way_to_a_sibling_that_begins_alike() -> None:
    both = (FULL, WINDOWED)
    manager = manager_of(100, *both)
    run(manager, [0, 1, 2, 3, 4, 5, 6, 7])
    second = manager.index.nodes()[-1]
    assert second.tokens == (4, 5, 6, 7)
    manager._evict(1, second.blocks[1])  # one group has lost its half
    assert hit(manager, [0, 1, 2, 3, 4, 5, 6, 7, 8]) == 4
    run(manager, [0, 1, 2, 3, 4, 5, 9])
    assert hit(manager, [0, 1, 2, 3, 4, 5, 6, 7, 8]) == 6


def test_a_longer_partial_match_may_stand_where_a_whole_block_may_not() -> None:
    """At 8 tokens the window of 8 still reaches block 0; three tokens later it does not."""
    manager = manager_of(100, CacheSpec((0,), 1, 2, block_size=SIZE, window=8))
    run(manager, list(range(12)))
    first = next(node for node in manager.index.nodes() if node.tokens == (0, 1, 2, 3))
    manager._evict(0, first.blocks[0])
    assert hit(manager, [*range(11), 99]) == 11
    assert hit(manager, [*range(10), 99]) == 0


def test_open_takes_only_what_later_queries_see() -> None:
    manager = manager_of(100, FULL, WINDOWED)
    run(manager, list(range(24)))
    sequence = manager.open(list(range(24)))
    assert sequence.num_tokens == 23
    assert MISSING not in sequence.tables[0]
    # A query at 23 sees 16 … 23, and the sinks 0 and 1: blocks 4 and 5, and block 0.
    assert [block != MISSING for block in sequence.tables[1]] == [True, False, False, False, True, True]


def test_without_prefix_caching_nothing_is_kept() -> None:
    manager = manager_of(100, prefix_caching=False)
    assert [run(manager, list(range(10))) for _ in range(2)] == [0, 0]
    assert manager.bytes_cached == 0
    assert not manager.index.nodes()


# -- keys -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [0, 2, 3, 4])
def test_b01_colliding_hashes_never_change_a_hit(bits: int) -> None:
    rng = random.Random(bits)
    colliding = manager_of(40, hash_function=lambda data: bytes([digest(data)[0] % (1 << bits)]))
    sound = manager_of(40)
    hits = []
    for _ in range(200):
        tokens = [rng.randrange(2) for _ in range(rng.randrange(1, 18))]
        namespace = rng.choice((b"a", b"b"))
        hits.append(run(colliding, tokens, namespace))
        assert hits[-1] == run(sound, tokens, namespace)
    assert any(hits)


def test_b01_hits_do_not_depend_on_the_interpreters_hash_seed() -> None:
    program = (
        "import random; from kvine.cache.manager import CacheManager; from kvine.cache.spec import CacheSpec\n"
        "m, rng = CacheManager([CacheSpec((0,), 1, 2, block_size=2)], 640), random.Random(0)\n"
        "for _ in range(60):\n"
        "    tokens = [rng.randrange(2) for _ in range(9)]; s = m.open(tokens); print(s.num_tokens, end=' ')\n"
        "    assert m.reserve(s, 9 - s.num_tokens); m.take_copies()\n"
        "    m.commit(s, tokens[s.num_tokens:]); m.release(s)\n"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", program], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        ).stdout
        for seed in ("0", "1", "4294967295")
    }
    assert len(outputs) == 1 and any(int(found) for found in outputs.pop().split())


def test_b02_only_an_equal_tuple_of_fingerprint_adapter_and_salt_hits() -> None:
    names = (None, "", "a", "bc", "ab", "c")
    tuples = list(itertools.product((b"", b"a", b"ab"), names, names))
    manager = manager_of(10_000)
    prompt = list(range(9))
    for fingerprint, adapter, salt in tuples:
        namespace = namespace_key(fingerprint, "fp32", [FULL], adapter=adapter, salt=salt)
        assert run(manager, prompt, namespace) == 0, (fingerprint, adapter, salt)
    for fingerprint, adapter, salt in tuples:
        namespace = namespace_key(fingerprint, "fp32", [FULL], adapter=adapter, salt=salt)
        assert hit(manager, prompt, namespace) == 8


def test_b02_a_namespace_depends_on_dtype_and_every_spec() -> None:
    variants = [("fp32", [FULL]), ("bf16", [FULL]), ("fp32", [WINDOWED]), ("fp32", [FULL, WINDOWED])]
    variants.append(("fp32", [CacheSpec((0,), 1, 2, block_size=SIZE, key_codec="fp16")]))
    variants.append(("fp32", [CacheSpec((0,), 1, 2, block_size=SIZE, value_codec="fp16")]))
    assert len({namespace_key(b"f", dtype, specs) for dtype, specs in variants}) == len(variants)


def test_framed_parts_never_read_alike() -> None:
    pieces = (None, "", "a", "b", "ab", "-", "+", "+a", b"+\x01\0\0\0\0\0\0\0a")
    lists = [parts for n in range(4) for parts in itertools.product(pieces, repeat=n)]
    assert len({framed(parts) for parts in lists}) == len(lists)


def test_a_block_key_names_its_whole_past() -> None:
    keys = {block_key(parent, tokens) for parent in (b"", b"x") for tokens in ([1, 2], [2, 1], [1], [1, 2, 0], [258])}
    assert len(keys) == 10
