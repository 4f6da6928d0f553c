"""What the engine hands to the sampler and to the head, on the hash model."""

from collections.abc import Sequence

import pytest
import torch
from fakes import (
    VOCAB,
    ScriptedModel,
    cache_free_output,
    drain,
    fake_engine,
    model_of,
    nothing_held,
    serve,
)

from kvine.errors import RequestError
from kvine.sampling.params import SamplingParams

LONG = SamplingParams(max_tokens=8, ignore_eos=True)


def expected(prompt: Sequence[int], params: SamplingParams = LONG) -> list[int]:
    return cache_free_output(prompt, params, seed=params.seed or 0)[0]


def test_d03_a_seed_means_the_same_alone_in_a_batch_and_after_preemption() -> None:
    prompt = [0, 1, 2, 0]
    params = SamplingParams(max_tokens=12, temperature=1.0, seed=0, ignore_eos=True)
    alone = serve(fake_engine(), [prompt], params)[0].tokens
    assert alone == expected(prompt, params)
    assert [o.tokens for o in serve(fake_engine(), [prompt] * 2, params)] == [alone] * 2
    short = fake_engine(blocks=11, budget=5)
    outcomes = serve(short, [[1, 1, 2], [2, 2], prompt, [1, 0], prompt], params)
    assert short.scheduler.num_preemptions > 0
    assert outcomes[2].tokens == outcomes[4].tokens == alone


def test_d03_without_a_seed_texts_differ() -> None:
    params = SamplingParams(max_tokens=8, temperature=1.0, ignore_eos=True)
    texts = {tuple(o.tokens) for o in serve(fake_engine(), [[0, 1, 2]] * 20, params)}
    assert len(texts) > 1


@pytest.mark.parametrize("top_k", [-1, 0, 1, VOCAB - 1, VOCAB, VOCAB + 1, 2**31])
def test_d07_a_row_is_the_same_in_mixed_company(top_k: int) -> None:
    mixed = [
        SamplingParams(max_tokens=6, temperature=1.0, top_k=top_k, seed=3, ignore_eos=True),
        SamplingParams(max_tokens=6, ignore_eos=True),
        SamplingParams(max_tokens=6, temperature=0.8, top_p=0.7, seed=9, repetition_penalty=1.4, ignore_eos=True),
        SamplingParams(max_tokens=6, presence_penalty=1.0, logit_bias={4: 1.0}, logprobs=3, ignore_eos=True),
    ]
    engine = fake_engine()
    ids = [engine.add([0, 1, n], params) for n, params in enumerate([*mixed, *mixed[::-1]])]
    outcomes = drain(engine)
    for n, (request_id, params) in enumerate(zip(ids, [*mixed, *mixed[::-1]], strict=True)):
        assert outcomes[request_id].tokens == expected([0, 1, n], params)


def test_d08_ids_of_the_padded_vocabulary_are_never_drawn() -> None:
    """The model has 24 ids, the tokenizer 20: pushed or scripted, the last four do not exist."""
    engine = fake_engine(model=ScriptedModel([22] * 9, 2), vocab_size=20, eos={19})
    params = [
        SamplingParams(max_tokens=5, logprobs=20, repetition_penalty=1.1),
        SamplingParams(max_tokens=5, temperature=1.0, logit_bias={21: 100.0}, presence_penalty=1.0),
        SamplingParams(max_tokens=5, stop_token_ids=(23,), min_tokens=2),
    ]
    ids = [engine.add([1, 2], p) for p in params]
    outcomes = drain(engine)
    assert all(max(outcomes[i].tokens) < 20 for i in ids)
    sample = outcomes[ids[0]].events[0].sample
    assert sample is not None and len(sample.top_logprobs) == 20
    with pytest.raises(RequestError):
        engine.add([20], LONG)


def test_g01_logits_are_computed_for_sampled_rows_only() -> None:
    engine = fake_engine(budget=5)
    ids = [engine.add([0, 1, 2] * n, SamplingParams(max_tokens=3, ignore_eos=True)) for n in (1, 3, 5)]
    sampled = 0
    rows = model_of(engine).rows_of_logits
    while engine.busy:
        rows.clear()
        events = engine.step()
        assert sum(rows) == sum(event.sample is not None for event in events)
        sampled += sum(rows)
    assert sampled == 3 * len(ids)


def test_one_call_is_reported_as_it_was() -> None:
    engine = fake_engine(budget=5)
    calls = []
    engine.on_call = calls.append
    serve(engine, [[0, 1, 2, 0, 1, 2, 0]], SamplingParams(max_tokens=2, ignore_eos=True))
    assert [call.positions for call in calls] == [((0, 5),), ((5, 7),), ((7, 8),)]
    assert [call.cache_length for call in calls] == [(5,), (7,), (8,)]
    assert [call.input_shape for call in calls] == [(1, 5), (1, 2), (1, 1)]
    block = engine.manager.specs[0].bytes_per_block("fp32")
    assert block == 2 * 4 * 2 * 4  # K and V, tokens, numbers, bytes
    assert [call.kv_bytes for call in calls] == [4 * block] * 3
    assert [call.step for call in calls] == [1, 2, 3]


def test_aborting_frees_at_once_and_unknown_ids_are_ignored() -> None:
    engine = fake_engine()
    request_id = engine.add([0, 1, 2, 0, 1], LONG)
    engine.step()
    assert engine.manager.bytes_referenced > 0
    engine.abort(request_id)
    engine.abort(request_id)
    engine.abort(12_345)
    nothing_held(engine)
    assert [e.finish_reason for e in engine.take_pending()] == ["abort"] and not engine.busy


def test_the_engine_without_prefix_caching_gives_the_same_and_keeps_nothing() -> None:
    engine = fake_engine(prefix_caching=False, blocks=11, budget=5)
    prompts = [[0, 1, 2, 0, 1]] * 4
    outcomes = serve(engine, prompts, LONG)
    assert [o.tokens for o in outcomes] == [expected(p) for p in prompts]
    assert all(o.cached == 0 for o in outcomes)
    assert all(pool.num_free == pool.capacity for pool in engine.manager.pools)


def test_the_default_dtype_of_torch_is_nobodys_business() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        [outcome] = serve(fake_engine(), [[0, 1, 2]], LONG)
    finally:
        torch.set_default_dtype(torch.float32)
    assert outcome.tokens == expected([0, 1, 2])
