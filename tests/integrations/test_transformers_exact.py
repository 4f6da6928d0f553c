"""With `exact`, KvineCache gives what the DynamicCache of transformers does: the same tokens, and the same logits."""

import copy
from typing import Any

import pytest
import torch
from tiny_decoders import KINDS, decoder, generated, left_padded, text
from transformers import DynamicCache

from kvine.integrations.transformers import KvineCache

SLIDING = ("Llama", "Gemma3", "Mistral")


def both(kind: str, ids: Any, mask: Any = None, **options: Any) -> tuple[Any, Any]:
    model = decoder(kind)
    results = []
    for past in (DynamicCache(config=model.config), KvineCache(model.config, block_size=4)):
        torch.manual_seed(7)
        results.append(generated(model, past, ids, mask, **options))
    return results[0], results[1]


def assert_equal(theirs: Any, ours: Any) -> None:
    assert torch.equal(theirs.sequences, ours.sequences)
    torch.testing.assert_close(torch.stack(theirs.logits), torch.stack(ours.logits), rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_greedy(kind: str) -> None:
    assert_equal(*both(kind, text(1, 17)))


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_with_left_padding(kind: str) -> None:
    assert_equal(*both(kind, *left_padded([19, 6, 1])))


@pytest.mark.parametrize("kind", SLIDING)
def test_sampling_with_a_seed(kind: str) -> None:
    theirs, ours = both(kind, text(2, 9), do_sample=True, temperature=1.5)
    assert_equal(theirs, ours)
    assert not torch.equal(ours.sequences, both(kind, text(2, 9))[1].sequences)


@pytest.mark.parametrize("kind", [*SLIDING, "GPT2", "Falcon"])
def test_beams_of_a_batch_with_padding(kind: str) -> None:
    theirs, ours = both(kind, *left_padded([11, 4]), num_beams=3, num_return_sequences=2)
    assert torch.equal(theirs.sequences, ours.sequences)
    moved = ours.beam_indices[:, :-1].clamp(min=0)
    assert bool((moved != moved[:, :1]).any()), "no beam has moved: nothing was reordered"


@pytest.mark.parametrize("kind", [*SLIDING, "GPTNeoX"])
def test_several_answers_and_a_prompt_in_chunks(kind: str) -> None:
    options = {"do_sample": True, "num_return_sequences": 3, "prefill_chunk_size": 5}
    assert_equal(*both(kind, text(1, 23), **options))


@pytest.mark.parametrize("kind", [*SLIDING, "Phi"])
def test_assisted_decoding_takes_drafts_back(kind: str) -> None:
    ids = text(1, 6).repeat(1, 4)  # a prompt that repeats itself, so that drafts are found
    theirs, ours = both(kind, ids, prompt_lookup_num_tokens=4, new=40)
    assert torch.equal(theirs.sequences, ours.sequences)
    assert torch.equal(both(kind, ids, new=40)[1].sequences, ours.sequences)


@pytest.mark.parametrize("kind", SLIDING)
def test_a_conversation_goes_on_in_the_same_cache(kind: str) -> None:
    model = decoder(kind)
    ids = text(1, 11)
    past = KvineCache(model.config, block_size=4)
    first = generated(model, past, ids).sequences
    both_turns = torch.cat((first, text(1, 5, seed=1)), 1)
    again = generated(model, past, both_turns).sequences
    assert torch.equal(again, generated(model, DynamicCache(config=model.config), both_turns).sequences)


@pytest.mark.parametrize("kv_dtype", ["exact", "int4"])
@pytest.mark.parametrize("kind", SLIDING)
def test_two_ways_on_from_one_snapshot(kind: str, kv_dtype: str) -> None:
    model, ids = decoder(kind), text(1, 21)
    snapshot = KvineCache(model.config, kv_dtype=kv_dtype, block_size=4)
    model(ids, past_key_values=snapshot)
    bytes_before = snapshot.num_bytes
    ways = [torch.cat((ids, text(1, 4, seed)), 1) for seed in (5, 6)]
    branched = [generated(model, copy.deepcopy(snapshot), way).sequences for way in ways]
    for way, sequence in zip(ways, branched, strict=True):
        alone = KvineCache(model.config, kv_dtype=kv_dtype, block_size=4)
        model(ids, past_key_values=alone)
        assert torch.equal(generated(model, alone, way).sequences, sequence)
    assert snapshot.get_seq_length() == 21 and snapshot.num_bytes == bytes_before


def test_reset_forgets_everything() -> None:
    model, past = decoder("Gemma3"), KvineCache(decoder("Gemma3").config, kv_dtype="int8", block_size=4)
    first = generated(model, past, text(2, 13)).sequences
    past.reset()
    assert past.num_bytes == 0 and past.get_seq_length() == 0
    assert torch.equal(generated(model, past, text(2, 13)).sequences, first)


@pytest.mark.parametrize("kv_dtype", ["exact", "bf16", "int4"])
def test_rows_are_chosen_and_repeated(kv_dtype: str) -> None:
    model, ids = decoder("Llama"), text(3, 14)
    past = KvineCache(model.config, kv_dtype=kv_dtype, block_size=4)
    model(ids, past_key_values=past)
    past.batch_select_indices(torch.tensor([2, 0]))
    past.batch_repeat_interleave(2)
    rows = [2, 2, 0, 0]
    alone = KvineCache(model.config, kv_dtype=kv_dtype, block_size=4)
    model(ids[rows], past_key_values=alone)
    new = text(4, 3, seed=9)
    ours, theirs = model(new, past_key_values=past).logits, model(new, past_key_values=alone).logits
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


def test_a_call_that_tracks_gradients() -> None:
    """A plain call tracks gradients; what is kept does not hold the graph of every call before."""
    model, past = decoder("Llama"), KvineCache(decoder("Llama").config, block_size=4)
    model(text(1, 6), past_key_values=past)
    model(text(1, 3), past_key_values=past).logits.sum().backward()
    model.zero_grad()
    assert past.get_seq_length() == 9
