"""Windows and sinks of KvineCache: equal to a run without a cache under an explicit mask, at every step."""

import itertools
from typing import Any

import pytest
import torch
from loop_cache import LoopCache
from test_transformers_codecs import tensors_of
from tiny_decoders import decoder, generated, left_padded, masked, seen, text
from torch import Tensor

from kvine.errors import RequestError
from kvine.integrations.transformers import KvineCache

TOKEN_BY_TOKEN = {"prefill_chunk_size": 1}


def without_a_cache(kind: str, ids: Tensor, mask: Tensor, window: int, sinks: int) -> Tensor:
    """Logits [rows, N, V] of one call whose mask is given pair by pair; a layer's own window counts where smaller."""
    model = decoder(kind)
    own = getattr(model.config, "sliding_window", None)
    table = masked(seen(mask, window, sinks))
    if kind == "Gemma3":
        tighter = masked(seen(mask, min(own, window), sinks if window < own else 0))
        table = {"full_attention": table, "sliding_attention": tighter}
    elif own is not None:
        table = masked(seen(mask, min(own, window), sinks if window < own else 0))
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        return model(ids, attention_mask=table, position_ids=positions, use_cache=False).logits


def assert_windowed(kind: str, ids: Tensor, mask: Tensor, window: int, sinks: int, size: int, **options: Any) -> None:
    model = decoder(kind)
    past = KvineCache(model.config, block_size=size, window=window, sink_tokens=sinks, attention_mask=mask)
    result = generated(model, past, ids, mask, **{**TOKEN_BY_TOKEN, **options})
    new = result.sequences.shape[1] - ids.shape[1]
    whole = torch.cat((mask, torch.ones(len(mask), new, dtype=mask.dtype)), 1)
    oracle = without_a_cache(kind, result.sequences, whole, window, sinks)[:, ids.shape[1] - 1 : -1]
    torch.testing.assert_close(torch.stack(result.logits, 1), oracle, rtol=0, atol=1e-4)
    assert torch.equal(result.sequences[:, ids.shape[1] :], oracle.argmax(-1))


@pytest.mark.parametrize(
    ("window", "sinks", "size"), [(1, 0, 4), (6, 0, 4), (8, 3, 4), (5, 4, 8), (7, 1, 1), (3, 9, 4)]
)
@pytest.mark.parametrize("kind", ["Llama", "GPT2", "GPTNeoX", "Phi", "Falcon"])
def test_full_layers_see_the_window_and_the_sinks(kind: str, window: int, sinks: int, size: int) -> None:
    ids = text(1, 19)
    assert_windowed(kind, ids, torch.ones_like(ids), window, sinks, size)


@pytest.mark.parametrize(("window", "sinks"), [(4, 0), (6, 2), (4, 6), (10, 3), (13, 4)])
@pytest.mark.parametrize("kind", ["Gemma3", "Mistral"])
def test_layers_that_slide_by_themselves_see_the_smaller_window(kind: str, window: int, sinks: int) -> None:
    ids = text(1, 19)
    assert_windowed(kind, ids, torch.ones_like(ids), window, sinks, 4)


@pytest.mark.parametrize(("window", "sinks"), [(4, 0), (5, 3), (3, 9), (16, 2)])
@pytest.mark.parametrize("kind", ["Llama", "GPT2", "Gemma3"])
def test_each_padded_row_has_its_own_sinks(kind: str, window: int, sinks: int) -> None:
    if kind == "Gemma3" and window + sinks > 10 and window < 10:
        window = 1  # the largest with so many sinks
    ids, mask = left_padded([21, 13, 7, 2])
    assert_windowed(kind, ids, mask, window, sinks, 4)


def test_each_beam_has_its_own_sinks() -> None:
    model, (ids, mask) = decoder("Llama"), left_padded([14, 5])
    past = KvineCache(model.config, block_size=4, window=6, sink_tokens=3, attention_mask=mask)
    result = generated(model, past, ids, mask, num_beams=3, output_scores=True, **TOKEN_BY_TOKEN)
    scores = []
    for row, sequence in enumerate(result.sequences):
        whole = torch.cat((mask[row], torch.ones(len(sequence) - ids.shape[1], dtype=mask.dtype)))[None]
        logits = without_a_cache("Llama", sequence[None], whole, 6, 3)[0, ids.shape[1] - 1 : -1].log_softmax(-1)
        scores.append(logits.gather(1, sequence[ids.shape[1] :, None]).sum() / len(logits))
    moved = result.beam_indices[:, :-1].clamp(min=0)
    assert bool((moved != moved[:, :1]).any())
    torch.testing.assert_close(result.sequences_scores, torch.stack(scores), rtol=0, atol=1e-4)


def test_each_of_several_answers_has_the_sinks_of_its_prompt() -> None:
    model, (ids, mask) = decoder("Llama"), left_padded([14, 5])
    past = KvineCache(model.config, block_size=4, window=6, sink_tokens=3, attention_mask=mask)
    torch.manual_seed(3)
    result = generated(model, past, ids, mask, do_sample=True, num_return_sequences=2, **TOKEN_BY_TOKEN)
    whole = torch.cat((mask.repeat_interleave(2, 0), torch.ones(4, 24, dtype=mask.dtype)), 1)
    oracle = without_a_cache("Llama", result.sequences, whole, 6, 3)[:, ids.shape[1] - 1 : -1]
    torch.testing.assert_close(torch.stack(result.logits, 1), oracle, rtol=0, atol=1e-4)


def test_rows_that_move_take_their_sinks_along() -> None:
    model, (ids, mask) = decoder("Llama"), left_padded([16, 9, 3])
    rows, caches = torch.tensor([2, 0, 2]), []
    for choice in (torch.arange(3), rows):
        options = {"window": 5, "sink_tokens": 3, "attention_mask": mask[choice]}
        caches.append(KvineCache(model.config, block_size=4, **options))
        generated(model, caches[-1], ids[choice], mask[choice], new=1, **TOKEN_BY_TOKEN)
    caches[0].reorder_cache(rows)
    states = torch.randn(3, 2, 1, 16)
    for ours, other in zip(*(cache.update(states, states, 0) for cache in caches), strict=True):
        torch.testing.assert_close(ours[:, :, -8:], other[:, :, -8:], rtol=0, atol=1e-5)


def test_a_prompt_up_to_window_and_sinks_is_read_at_once() -> None:
    ids = text(2, 11)
    assert_windowed("Llama", ids, torch.ones_like(ids), 8, 3, 4, prefill_chunk_size=None)


@pytest.mark.parametrize("kind", ["Gemma3", "Mistral", "Llama"])
@pytest.mark.parametrize("kv_dtype", ["int4", "k8v4", "bf16", "int2-token/fp16"])
@pytest.mark.parametrize(("window", "sinks"), [(None, 0), (9, 0), (6, 4), (2, 7)])
def test_windows_over_lossy_blocks(kind: str, kv_dtype: str, window: int | None, sinks: int) -> None:
    """What the model's mask leaves of what is returned is, bit for bit, what each row may see of the loops' cache."""
    config, (_, mask) = decoder(kind).config, left_padded([41, 12])
    options = {"kv_dtype": kv_dtype, "block_size": 4, "window": window, "sink_tokens": sinks}
    past = KvineCache(config, **options, attention_mask=mask)
    keys, _, values = kv_dtype.replace("k8v4", "int8/int4").partition("/")
    theirs, own = LoopCache(keys, values or keys, 4), getattr(config, "sliding_window", None)
    torch.manual_seed(0)
    for q, index in itertools.product(range(mask.shape[1]), range(3)):
        length, offset = past.get_mask_sizes(1, index)
        states = torch.randn(2, 2, 1, 16), torch.randn(2, 2, 1, 16)
        slides = own if past.is_sliding[index] else 99
        limit, first = (window, sinks) if window and window < slides else (slides, 0)
        rows = seen(mask[:, : q + 1], limit, first)[:, q] & mask[:, q : q + 1].bool()
        columns = torch.arange(offset, offset + length)
        left = mask[:, offset : offset + length].bool() & (columns > q - slides)
        for ours, other in zip(past.update(*states, index), theirs.update(*states, index), strict=True):
            for row in range(2):
                if mask[row, q]:
                    assert torch.equal(ours[row][:, left[row]], other[row][:, rows[row]])


@pytest.mark.parametrize(("kind", "window", "sinks"), [("Llama", 9, 3), ("Gemma3", 5, 2), ("Gemma3", None, 0)])
def test_lengths_are_those_of_what_is_returned(kind: str, window: int | None, sinks: int) -> None:
    model = decoder(kind)
    past = KvineCache(model.config, kv_dtype="int8", block_size=4, window=window, sink_tokens=sinks)
    length = 0
    for tokens in (5, 2, *[1] * 30):
        for index in range(len(past.layers)):
            sizes = past.get_mask_sizes(tokens, index)
            keys, values = past.update(torch.randn(1, 2, tokens, 16), torch.randn(1, 2, tokens, 16), index)
            assert sizes == (keys.shape[2], length + tokens - keys.shape[2]) and values.shape == keys.shape
            assert past.get_seq_length(index) == length + tokens
        length += tokens
    own = [10, None, 10] if kind == "Gemma3" else [None] * 3
    for index, slides in enumerate(own):
        assert past.is_sliding[index] == (slides is not None)
        if window or slides:
            assert past.get_mask_sizes(1, index)[0] == (window + sinks if window else slides)


@pytest.mark.parametrize("kv_dtype", ["exact", "int4"])
@pytest.mark.parametrize(("kind", "window", "sinks"), [("Llama", 9, 3), ("Llama", 2, 0), ("Mistral", None, 0)])
def test_memory_stays_constant(kind: str, window: int | None, sinks: int, kv_dtype: str) -> None:
    """Blocks that no later query sees are let go: what is kept repeats itself from block to block."""
    model = decoder(kind)
    past = KvineCache(model.config, kv_dtype=kv_dtype, block_size=4, window=window, sink_tokens=sinks)
    kept = []
    for token in text(1, 72)[0]:
        with torch.no_grad():
            model(token[None, None], past_key_values=past)
        kept.append(past.num_bytes)
        assert sum(tensor.untyped_storage().nbytes() for tensor in tensors_of(past)) == past.num_bytes
    assert kept[32:36] * 10 == kept[32:]
    blocks = 1 + -(-sinks // 4) + -(-(window or 10) // 4)
    assert max(kept) <= 3 * 2 * 2 * 16 * 4 * 4 * blocks


@pytest.mark.parametrize("kv_dtype", ["exact", "bf16"])
@pytest.mark.parametrize(("kind", "window"), [("Llama", None), ("Llama", 9), ("Gemma3", None)])
def test_what_is_cropped_was_never_there(kind: str, window: int | None, kv_dtype: str) -> None:
    model, options = decoder(kind), {"kv_dtype": kv_dtype, "block_size": 4, "window": window}
    ids = text(1, 30)
    for end, left in itertools.product((9, 22), (1, 2)):
        past, fresh = (KvineCache(model.config, **options) for _ in range(2))
        with torch.no_grad():
            for at in range(end):
                model(ids[:, at : at + 1], past_key_values=past)
                if at < end - left:
                    model(ids[:, at : at + 1], past_key_values=fresh)
            if kind == "Gemma3" and (end, left) == (22, 2):  # the block with token 11, which 20 tokens need, is gone
                with pytest.raises(RequestError, match="let go of what 20 tokens need"):
                    past.crop(-left)
                assert past.get_seq_length(1) == 22
                continue
            past.crop(-left)
            assert past.get_seq_length() == end - left
            logits = [model(ids[:, 25:26], past_key_values=cache).logits for cache in (past, fresh)]
            torch.testing.assert_close(*logits, rtol=0, atol=1e-5)
