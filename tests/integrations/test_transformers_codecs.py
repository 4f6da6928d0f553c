"""Codecs of KvineCache: what attention reads, equal to plain loops; what is stored, to the byte; nothing besides."""

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from loop_cache import LoopCache
from tiny_decoders import decoder, generated, left_padded, text
from torch import Tensor

from kvine.cache.layout import part_bytes, split_codecs
from kvine.integrations.transformers import KvineCache

CODECS = ("fp16", "bf16", "int8", "int4", "int2", "k8v4", "int4-token", "int8/exact", "fp16/int2", "int2-token/bf16")
PACKED = ("int8", "int4", "int2", "k8v4")
SIZE, LAYERS, HEADS, WIDTH = 8, 3, 2, 16  # of the tiny Llama


def loop_cache(kv_dtype: str) -> LoopCache:
    keys, _, values = kv_dtype.partition("/")
    if kv_dtype == "k8v4":
        keys, values = "int8", "int4"
    return LoopCache(keys, values or keys.removesuffix("-token"), SIZE)


@pytest.mark.parametrize("kv_dtype", CODECS)
def test_attention_reads_what_plain_loops_give(kv_dtype: str) -> None:
    model, (ids, mask) = decoder("Llama"), left_padded([21, 10])
    ours = generated(model, KvineCache(model.config, kv_dtype=kv_dtype, block_size=SIZE), ids, mask)
    theirs = generated(model, loop_cache(kv_dtype), ids, mask)
    assert torch.equal(ours.sequences, theirs.sequences)
    torch.testing.assert_close(torch.stack(ours.logits), torch.stack(theirs.logits), rtol=0, atol=1e-4)


@pytest.mark.parametrize("kv_dtype", ["int4", "int2"])
def test_the_loss_is_there(kv_dtype: str) -> None:
    model, ids = decoder("Llama"), text(1, 21)
    exact, lossy = (
        torch.stack(generated(model, KvineCache(model.config, kv_dtype=name, block_size=SIZE), ids).logits)
        for name in ("exact", kv_dtype)
    )
    torch.testing.assert_close(lossy[0], exact[0], rtol=0, atol=1e-5)  # the prompt's call reads itself exactly
    assert (lossy[1] - exact[1]).abs().max() > 0.01


@pytest.mark.parametrize("kv_dtype", ["int4", "k8v4", "bf16"])
def test_a_prompt_in_chunks_is_lossy_where_blocks_were_full_before_the_chunk(kv_dtype: str) -> None:
    model, ids = decoder("Llama"), text(1, 45)
    ours = generated(model, KvineCache(model.config, kv_dtype=kv_dtype, block_size=SIZE), ids, prefill_chunk_size=11)
    theirs = generated(model, loop_cache(kv_dtype), ids, prefill_chunk_size=11)
    assert torch.equal(ours.sequences, theirs.sequences)


@pytest.mark.parametrize("kv_dtype", ["int8", "int4"])
def test_beams_move_packed_blocks(kv_dtype: str) -> None:
    model, (ids, mask) = decoder("Llama"), left_padded([21, 17])
    options = {"num_beams": 3, "new": 20}
    ours = generated(model, KvineCache(model.config, kv_dtype=kv_dtype, block_size=SIZE), ids, mask, **options)
    theirs = generated(model, loop_cache(kv_dtype), ids, mask, **options)
    assert torch.equal(ours.sequences, theirs.sequences)
    moved = ours.beam_indices[:, :-1].clamp(min=0)
    assert bool((moved != moved[:, :1]).any())


@pytest.mark.parametrize("kind", ["GPT2", "GPTNeoX", "Phi", "Falcon", "Bloom"])
def test_other_models_are_read_alike(kind: str) -> None:
    model, ids = decoder(kind), text(2, 19)
    ours = generated(model, KvineCache(model.config, kv_dtype="int4", block_size=SIZE), ids)
    assert torch.equal(ours.sequences, generated(model, LoopCache("int4", "int4", SIZE), ids).sequences)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kv_dtype", ["exact", *CODECS])
def test_the_bytes_are_those_that_are_planned(kv_dtype: str, dtype: torch.dtype) -> None:
    model, past = decoder("Llama", dtype), KvineCache(decoder("Llama").config, kv_dtype=kv_dtype, block_size=SIZE)
    name = {torch.float32: "fp32", torch.bfloat16: "bf16"}[dtype]
    for tokens in step_by_step(model, past, rows=2, prompt=13, steps=14):
        blocks, rest = divmod(tokens, SIZE)
        planned = 0
        for part, codec in zip(("key", "value"), split_codecs(kv_dtype), strict=True):
            item = {"fp32": 4, "fp16": 2, "bf16": 2}.get(codec, dtype.itemsize)
            planned += blocks * part_bytes(part, codec, SIZE, WIDTH, name) + rest * WIDTH * item
        assert past.num_bytes == 2 * LAYERS * HEADS * planned


def test_sixteen_tokens_in_four_and_two_bits_by_hand() -> None:
    """Of 8 tokens with 16 channels: 128 numbers, 16 pairs of fp16 for keys by channel, 8 for values by token."""
    for kv_dtype, per_head in (("int4", 2 * 64 + 16 * 4 + 8 * 4), ("int2", 2 * 32 + 16 * 4 + 8 * 4)):
        model, past = decoder("Llama"), KvineCache(decoder("Llama").config, kv_dtype=kv_dtype, block_size=SIZE)
        model(text(1, 16), past_key_values=past)
        assert past.num_bytes == LAYERS * HEADS * 2 * per_head


@pytest.mark.parametrize("kv_dtype", PACKED)
def test_what_is_counted_is_all_that_is_alive(kv_dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the exact keys and values no tensor survives the call, and no view keeps more memory than is counted."""
    model, past = decoder("Llama"), KvineCache(decoder("Llama").config, kv_dtype=kv_dtype, block_size=SIZE)
    seen: list[weakref.ref[Tensor]] = []
    update = KvineCache.update

    def watched(self: Any, keys: Tensor, values: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        read = update(self, keys, values, *args, **kwargs)
        seen.extend(weakref.ref(tensor) for tensor in (keys, values, *read))
        return read

    monkeypatch.setattr(KvineCache, "update", watched)
    for tokens in step_by_step(model, past, rows=1, prompt=2 * SIZE + 3, steps=SIZE + 2):
        gc.collect()
        assert seen and not any(reference() is not None for reference in seen)
        stored = list(tensors_of(past))
        assert sum(tensor.untyped_storage().nbytes() for tensor in stored) == past.num_bytes
        exact = [tensor for tensor in stored if tensor.is_floating_point()]
        assert {tensor.shape[2] for tensor in exact} == {tokens % SIZE}
        assert len(exact) == 2 * LAYERS


def test_no_more_than_a_block_is_unpacked() -> None:
    model, past = decoder("Llama"), KvineCache(decoder("Llama").config, kv_dtype="int4", block_size=SIZE)
    for tokens in step_by_step(model, past, rows=1, prompt=1, steps=5 * SIZE):
        unpacked = [tensor.shape[2] for tensor in tensors_of(past) if tensor.is_floating_point()]
        assert unpacked == [tokens % SIZE] * 2 * LAYERS and max(unpacked) < SIZE


@pytest.mark.parametrize("kv_dtype", ["exact", "fp32", "fp16", "int4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_attention_is_given_the_dtype_of_the_model(kv_dtype: str, dtype: torch.dtype) -> None:
    past = KvineCache(decoder("Llama").config, kv_dtype=kv_dtype, block_size=SIZE)
    for tokens in (11, 1):
        states = torch.randn(1, HEADS, tokens, WIDTH, dtype=dtype)
        assert [read.dtype for read in past.update(states, states.clone(), 0)] == [dtype, dtype]


@pytest.mark.parametrize("kv_dtype", ["exact", "bf16", "int4"])
def test_the_default_dtype_changes_nothing(kv_dtype: str) -> None:
    states = [torch.randn(2, HEADS, n, WIDTH) for n in (13, 1, 6)]

    def read() -> tuple[list[Tensor], int]:
        past = KvineCache(decoder("Llama").config, kv_dtype=kv_dtype, block_size=SIZE)
        return [part for state in states for part in past.update(state, -state, 0)], past.num_bytes

    plain = read()
    torch.set_default_dtype(torch.float64)
    try:
        other = read()
    finally:
        torch.set_default_dtype(torch.float32)
    assert plain[1] == other[1]
    assert all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(plain[0], other[0], strict=True))


def step_by_step(model: Any, past: KvineCache, *, rows: int, prompt: int, steps: int) -> Iterator[int]:
    """Runs a prompt and then single tokens; after each call, how many tokens there are."""
    ids = text(rows, prompt + steps)
    for end in range(prompt, prompt + steps):
        with torch.no_grad():
            model(ids[:, past.get_seq_length() : end], past_key_values=past)
        assert past.get_seq_length() == end
        yield end


def tensors_of(past: KvineCache) -> Iterator[Tensor]:
    """Every tensor that the cache holds, found without asking it."""
    todo, done = [past], set()
    while todo:
        thing: Any = todo.pop()
        if id(thing) in done:
            continue
        done.add(id(thing))
        if isinstance(thing, Tensor):
            yield thing
        elif isinstance(thing, list | tuple):
            todo.extend(thing)
        elif isinstance(thing, dict):
            todo.extend(thing.values())
        elif hasattr(thing, "__dict__"):
            todo.extend(vars(thing).values())
