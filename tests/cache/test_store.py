"""What a frame says of its block, and that no two different blocks share a key."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvine.cache.hashing import namespace_key
from kvine.cache.store import BlockName, DamagedBlockError, chain, checked_parts, frame, unframe

keys = st.binary(max_size=20)
names = st.builds(
    BlockName, keys, keys, st.lists(st.integers(0, 2**31), max_size=6).map(tuple), st.integers(0, 2**16 - 1)
)
all_parts = st.lists(st.binary(max_size=40), min_size=1, max_size=3).map(tuple)


@given(names, all_parts)
def test_a_frame_gives_back_name_and_parts(name, parts):
    found, kept = unframe(frame(name, parts))
    assert found == name and tuple(map(bytes, kept)) == parts
    assert tuple(map(bytes, checked_parts(frame(name, parts), name, [len(p) for p in parts]))) == parts


@given(names, all_parts, st.data())
def test_no_changed_bit_and_no_lost_byte_goes_unnoticed(name, parts, data):
    whole = bytearray(frame(name, parts))
    at, bit = data.draw(st.integers(0, len(whole) - 1)), data.draw(st.integers(0, 7))
    with pytest.raises(DamagedBlockError):
        unframe(whole[:at])
    with pytest.raises(DamagedBlockError):
        unframe(whole + b"\0")
    whole[at] ^= 1 << bit
    with pytest.raises(DamagedBlockError):
        unframe(whole)


@given(names, names, all_parts)
def test_a_sound_frame_of_another_block_is_no_answer(stored, asked, parts):
    sizes = [len(part) for part in parts]
    if stored != asked:
        with pytest.raises(DamagedBlockError):
            checked_parts(frame(stored, parts), asked, sizes)
    with pytest.raises(DamagedBlockError):
        checked_parts(frame(stored, parts), stored, [*sizes, 0])
    with pytest.raises(DamagedBlockError):
        checked_parts(frame(stored, parts), stored, [sizes[0] + 1, *sizes[1:]])


texts = st.one_of(st.none(), st.text(max_size=4))
spaces = st.tuples(
    st.binary(max_size=4), st.sampled_from(["fp32", "bf16"]), st.lists(st.text(max_size=3), max_size=2), texts, texts
)


def space_key(fingerprint, dtype, specs, adapter, salt):
    return namespace_key(fingerprint, dtype, specs, adapter=adapter, salt=salt)


@given(spaces, spaces)
def test_namespaces_are_one_only_where_every_part_is(a, b):
    assert (space_key(*a) == space_key(*b)) == (a == b)


@given(st.text(min_size=1, max_size=4), st.text(min_size=1, max_size=4))
def test_what_belongs_to_one_part_never_reads_as_anothers(a, b):
    """An adapter that is called like a salt, a part that goes over into the next, none against an empty one."""
    spellings = [
        (b"f", "fp32", (), a, b),
        (b"f", "fp32", (), a + b, ""),
        (b"f", "fp32", (), a + b, None),
        (b"f", "fp32", (), "", a + b),
        (b"f", "fp32", (), None, a + b),
        (b"f" + a.encode(), "fp32", (), b, None),
        (b"f", "fp32" + a, (), b, None),
        (b"f", "fp32", (a,), b, None),
        (b"f", "fp32", (), None, None),
        (b"f", "fp32", (), "", ""),
    ]
    distinct = set(spellings)
    assert len({space_key(*spelling) for spelling in spellings}) == len(distinct)


@given(st.lists(st.integers(0, 9), max_size=14), st.lists(st.integers(0, 9), max_size=14), st.booleans())
def test_a_block_is_named_by_everything_before_it(a, b, same_space):
    first, second = chain(b"x", a, 3), chain(b"x" if same_space else b"y", b, 3)
    assert len(first) == len(a) // 3
    for i, (one, other) in enumerate(zip(first, second, strict=False)):
        alike = same_space and a[: 3 * (i + 1)] == b[: 3 * (i + 1)]
        assert (one == other) == (one.key == other.key) == (one.address == other.address) == alike
        assert one.parent == (first[i - 1].key if i else b"x")


def test_groups_of_one_block_lie_apart():
    first, second = (chain(b"x", [1, 2], 2, group)[0] for group in (0, 1))
    assert first.key == second.key and first.address != second.address and first != second
