"""What a spec says of visibility, of blocks that die, and of bytes, against brute force and figures done by hand."""

from dataclasses import replace

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import example, given, settings

from kvine.cache.spec import CacheSpec

SPEC = CacheSpec(layers=(0,), num_kv_heads=1, head_dim=1)
runs = st.tuples(st.integers(0, 24), st.integers(1, 7)).map(lambda run: (run[0], run[0] + run[1]))
specs = st.builds(
    lambda size, window, sinks, kept: replace(SPEC, block_size=size, window=window, sink_tokens=sinks).keeping(kept),
    st.sampled_from((1, 2, 3, 4, 8)),
    st.none() | st.integers(1, 20),
    st.integers(0, 9),
    st.just(()) | st.lists(runs, max_size=3).map(tuple),
)
quick = settings(max_examples=100, derandomize=True, deadline=None)
FAR = 45  # queries this far past a position see it no more, unless all do: longer than any window here


def sees(spec: CacheSpec, query: int, key: int) -> bool:
    if key > query:
        return False
    if spec.window is None or key > query - spec.window or key < spec.sink_tokens:
        return True
    return any(key in range(*run) for run in spec.kept)


@quick
@given(spec=specs)
def test_visibility_is_causal_within_the_window_or_a_sink(spec: CacheSpec) -> None:
    q, k = torch.arange(40)[:, None], torch.arange(40)
    expected = [[sees(spec, i, j) for j in range(40)] for i in range(40)]
    assert spec.visible(q, k).tolist() == expected
    assert [[bool(spec.visible(i, j)) for j in range(40)] for i in range(40)] == expected
    for i in range(40):
        window = [j for j in range(i + 1) if spec.window is None or i - j < spec.window]
        assert spec.window_start(i) == window[0]


@quick
@given(spec=specs, length=st.integers(0, 40))
def test_a_block_is_dead_exactly_when_no_later_query_sees_any_of_its_keys(spec: CacheSpec, length: int) -> None:
    size = spec.block_size
    seen = {
        block
        for block in range(-(-length // size))
        if any(sees(spec, q, k) for q in range(length, length + FAR) for k in range(block * size, (block + 1) * size))
    }
    assert spec.live_blocks(length) == sorted(seen)
    assert set(spec.dead_blocks(length)) == set(range(-(-length // size))) - seen


@quick
@given(spec=specs, length=st.integers(0, 30), more=st.integers(0, 30))
def test_dead_blocks_stay_dead(spec: CacheSpec, length: int, more: int) -> None:
    assert set(spec.dead_blocks(length)) <= set(spec.dead_blocks(length + more))


def most_held(spec: CacheSpec, num_tokens: int, chunk: int) -> int:
    """The most blocks held at once over every way to reach num_tokens in steps of at most `chunk`.

    What is held between accepting n tokens and writing the next depends on n alone, so each (n, step) is one case.
    """
    size, most = spec.block_size, 0
    for n in range(num_tokens):
        for step in range(1, min(chunk, num_tokens - n) + 1):
            blocks = {k // size for q in range(n, n + step) for k in range(q + 1) if sees(spec, q, k)}
            # A block at the window's start is kept whole, and one that the step itself outruns is still written.
            blocks |= {k // size for k in range(n, n + step)}
            most = max(most, len(blocks))
    return most


@quick
@given(spec=specs, num_tokens=st.integers(1, 32), chunk=st.integers(1, 40))
@example(spec=replace(SPEC, block_size=4, window=1), num_tokens=9, chunk=1)
@example(spec=replace(SPEC, block_size=4, window=8, sink_tokens=2), num_tokens=30, chunk=5)
def test_max_live_blocks_is_enough_and_hardly_more(spec: CacheSpec, num_tokens: int, chunk: int) -> None:
    bound, most = spec.max_live_blocks(num_tokens, chunk), most_held(spec, num_tokens, chunk)
    assert most <= bound <= most + 1  # one more only where a short text cannot reach the worst alignment
    assert bound <= spec.num_blocks(num_tokens)
    if spec.window is None:
        assert bound == most


def test_max_live_blocks_is_exact_once_a_text_outgrows_window_and_sinks() -> None:
    for size in (1, 2, 3, 4):
        for window in (1, 2, 5, 8):
            for sinks in (0, 1, 4, 5):
                for chunk in (1, 2, 5, 9):
                    spec = replace(SPEC, block_size=size, window=window, sink_tokens=sinks)
                    length = sinks + window + chunk + 3 * size
                    assert spec.max_live_blocks(length, chunk) == most_held(spec, length, chunk), spec


def test_sinks_are_read_by_another_rotation_only_once_the_cache_of_sinks_and_window_is_full() -> None:
    spec = replace(SPEC, window=4, sink_tokens=3, sink_rule="in_cache")
    assert spec.sinks_move_from == 7  # the query at 6 still stands at its own place, the last of 3 + 4
    for other in ({"sink_rule": "absolute"}, {"window": None}, {"sink_tokens": 0}):
        assert replace(spec, **other).sinks_move_from is None


@pytest.mark.parametrize(
    ("spec", "dtype", "expected"),
    [
        # SmolLM2-135M: 30 layers × 3 heads × 64 dims × 32 tokens × (2 + 2) bytes.
        (CacheSpec(tuple(range(30)), 3, 64), "bf16", 737_280),
        (CacheSpec(tuple(range(30)), 3, 64), "fp32", 1_474_560),
        # Llama 3.1 8B at 16 tokens a block: 32 × 8 × 128 × 16 × 4.
        (CacheSpec(tuple(range(32)), 8, 128, block_size=16), "fp16", 2_097_152),
        # Gemma 3 270M's 15 sliding layers: 15 × 1 × 256 × 32 × 4; a window changes how many, not how large.
        (CacheSpec(tuple(range(15)), 1, 256, window=512), "bf16", 491_520),
        # Half-width storage of an fp32 model, and the two codecs told apart: 1 × 2 × 8 × 4 × (2 + 4).
        (CacheSpec((0,), 2, 8, block_size=4, key_codec="fp16", value_codec="exact"), "fp32", 384),
        (CacheSpec((0,), 2, 8, block_size=4, key_codec="fp32", value_codec="bf16"), "fp16", 384),
    ],
)
def test_bytes_per_block(spec: CacheSpec, dtype: str, expected: int) -> None:
    assert spec.bytes_per_block(dtype) == expected
