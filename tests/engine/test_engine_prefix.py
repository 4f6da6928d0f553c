"""Prefix hits in the engine, on the hash model: its answer changes with any key it should not have read."""

import random
from collections.abc import Sequence
from itertools import product

import pytest
from fakes import (
    VOCAB,
    Outcome,
    cache_free_output,
    collect,
    drain,
    fake_engine,
    nothing_held,
    serve,
)

from kvine.cache.hashing import namespace_key
from kvine.sampling.params import SamplingParams

LONG = SamplingParams(max_tokens=8, ignore_eos=True)


def expected(prompt: Sequence[int], params: SamplingParams = LONG) -> list[int]:
    return cache_free_output(prompt, params, seed=params.seed or 0)[0]


def test_b01_a_hash_of_two_bits_mixes_nothing_up() -> None:
    engine = fake_engine(hash_function=lambda data: bytes([sum(data) % 4]))
    rng = random.Random(1)
    prompts = [[rng.randrange(2) for _ in range(rng.randrange(5, 14))] for _ in range(30)]
    outcomes = serve(engine, prompts, LONG) + serve(engine, prompts, LONG)
    assert [o.tokens for o in outcomes] == [expected(p) for p in prompts] * 2
    assert sum(o.cached for o in outcomes) > 50


def test_b02_only_the_whole_tuple_of_namespace_parts_shares_blocks() -> None:
    texts = [None, "", "a", "ab", "bc", "c"]
    keys = {
        (model, adapter, salt): namespace_key(model, "fp32", (), adapter=adapter, salt=salt)
        for model, adapter, salt in product([b"a", b"ab"], texts, texts)
    }
    assert len(set(keys.values())) == len(keys)


def test_b02_requests_of_another_salt_hit_nothing() -> None:
    engine = fake_engine()
    prompt = [0, 1, 2, 0, 1, 2, 0, 1, 2]
    cached: dict[str | None, list[int]] = {}
    for salt in (None, "", "x", "y", None, "", "x", "y"):
        request_id = engine.add(prompt, LONG, salt=salt)
        outcome = drain(engine)[request_id]
        assert outcome.tokens == expected(prompt)
        cached.setdefault(salt, []).append(outcome.cached)
    assert cached == {salt: [0, 8] for salt in (None, "", "x", "y")}


@pytest.mark.parametrize("length", range(1, 14))
def test_b06_prompts_of_every_length_sent_again_and_extended(length: int) -> None:
    engine = fake_engine()
    prompt = [n % 3 for n in range(length)]
    cached = []
    for _ in range(3):
        [outcome] = serve(engine, [prompt], LONG)
        assert outcome.tokens == expected(prompt)
        cached.append(outcome.cached)
    assert cached == [0, length - 1, length - 1]
    [follow_up] = serve(engine, [[*prompt, 2]], LONG)
    assert follow_up.tokens == expected([*prompt, 2])
    assert length - length % 4 <= follow_up.cached <= length


@pytest.mark.parametrize("budget", [1, 3, 6])
def test_b09_a_twin_that_comes_while_a_block_is_half_written(budget: int) -> None:
    for steps in range(1, 6):
        engine = fake_engine(budget=budget)
        prompt = [0, 1, 2, 0, 1, 2, 0, 1, 2, 0, 1]
        first = engine.add(prompt, LONG)
        outcomes: dict[int, Outcome] = {}
        for _ in range(steps):
            collect(engine.step(), outcomes)
        second = engine.add(prompt, LONG)
        drain(engine, outcomes)
        assert outcomes[first].tokens == outcomes[second].tokens == expected(prompt)
        nothing_held(engine)


def test_b09_a_full_pool_of_cached_blocks_admits_in_whole_or_waits() -> None:
    engine = fake_engine(blocks=11, budget=4)
    rng = random.Random(2)
    for _ in range(25):
        prompts = [[rng.randrange(2) for _ in range(rng.choice([8, 9, 12]))] for _ in range(2)]
        outcomes = serve(engine, prompts, SamplingParams(max_tokens=5, ignore_eos=True))
        assert [o.tokens for o in outcomes] == [expected(p)[:5] for p in prompts]
    assert engine.manager.num_evictions > 20


def test_b10_twins_in_one_step_leave_no_block_counted_twice() -> None:
    engine = fake_engine()
    prompt = [0, 1, 2, 0, 1, 2, 0, 1, 2, 0]
    outcomes = serve(engine, [prompt] * 8, LONG)
    assert all(o.tokens == expected(prompt) for o in outcomes)
    nothing_held(engine)
    manager = engine.manager
    for group, pool in enumerate(manager.pools):
        found = [node.blocks[group] for node in manager.index.nodes() if node.blocks[group] is not None]
        assert sorted(found) == sorted(pool.cached)
    manager.clear()
    assert all(pool.num_free == pool.capacity for pool in manager.pools) and not manager.index.nodes()


def test_b11_many_requests_with_all_kinds_of_ends_leave_nothing_behind() -> None:
    engine = fake_engine(blocks=40, budget=16)
    rng = random.Random(3)
    outcomes: dict[int, Outcome] = {}
    for number in range(120):
        params = SamplingParams(
            max_tokens=rng.choice([1, 3, 12]), stop_token_ids=rng.sample(range(VOCAB), 2), temperature=1.0, seed=number
        )
        request_id = engine.add([rng.randrange(3) for _ in range(rng.randrange(1, 12))], params)
        if number >= 100:  # twenty side by side
            continue
        if rng.random() < 0.2:
            collect(engine.step(), outcomes)
            engine.abort(request_id)
        drain(engine, outcomes)
        nothing_held(engine)
    drain(engine, outcomes)
    nothing_held(engine)
    assert len(outcomes) == 120 and {o.reason for o in outcomes.values()} == {"stop", "length", "abort"}
    assert engine.manager.num_evictions > 0


def test_b14_recomputing_after_preemption_is_not_counted_as_a_hit() -> None:
    engine = fake_engine(blocks=11, budget=6)
    prompts = [[n, n + 1, n + 2, n] for n in range(0, 18, 3)]
    outcomes = serve(engine, prompts, SamplingParams(max_tokens=14, ignore_eos=True))
    assert engine.scheduler.num_preemptions > 0
    assert [o.cached for o in outcomes] == [0] * len(prompts)
