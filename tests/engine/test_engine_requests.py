"""The life of requests, broken steps included, on the hash model and on scripted ones."""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from fakes import (
    EOS,
    VOCAB,
    HashModel,
    Outcome,
    ScriptedModel,
    View,
    cache_free_output,
    collect,
    drain,
    fake_engine,
    fake_parts,
    model_of,
    nothing_held,
    serve,
    with_runner,
)
from torch import Tensor

from kvine.config import EngineConfig
from kvine.engine.engine import Engine, ModelCall
from kvine.engine.stepped import SteppedCache
from kvine.errors import ContextLengthError, RequestError, StepError
from kvine.sampling.params import SamplingParams

LONG = SamplingParams(max_tokens=8, ignore_eos=True)


def expected(prompt: Sequence[int], params: SamplingParams = LONG) -> list[int]:
    return cache_free_output(prompt, params, seed=params.seed or 0)[0]


@pytest.mark.parametrize("length", [15, 20, 21, 23, 24, 27, 28, 29, 36])
def test_c01_what_can_never_fit_is_refused_and_those_behind_it_run(length: int) -> None:
    engine = fake_engine(blocks=10, budget=2_048)  # three blocks hold any window of 6, and seven are left: 28 tokens
    behind = [[0, 1, 2], [2, 1]]
    prompt = [1] * length
    if length > 28:
        with pytest.raises(ContextLengthError, match="kv_memory"):
            engine.add(prompt, LONG)
        outcomes = serve(engine, behind, LONG)
    else:
        request_id = engine.add(prompt, LONG)
        ids = [engine.add(p, LONG) for p in behind]
        done = drain(engine)
        outcomes = [done[i] for i in ids]
        # The last token is never fed, so 28 cached tokens make room for a text of 29.
        assert done[request_id].tokens == expected(prompt)[: 29 - length]
        assert done[request_id].reason == ("length" if length + 8 <= 29 else "context")
        assert "kv_memory" in (done[request_id].last.detail or "kv_memory")
    assert [o.tokens for o in outcomes] == [expected(p) for p in behind]
    nothing_held(engine)


@pytest.mark.parametrize("bad", [[], [VOCAB], [-1], [1.5], ["a"], [None]])
def test_c07_a_prompt_that_cannot_be_served_is_its_own_problem(bad: list[int]) -> None:
    engine = fake_engine()
    stream = engine.add([0, 1, 2], LONG)
    outcomes: dict[int, Outcome] = {}
    collect(engine.step(), outcomes)
    with pytest.raises(RequestError):
        engine.add(bad, LONG)
    drain(engine, outcomes)
    assert outcomes[stream].tokens == expected([0, 1, 2])
    assert serve(engine, [[1]], LONG)[0].tokens == expected([1])


def test_c07_no_tokens_asked_for_and_one() -> None:
    engine = fake_engine(max_context=5)
    stream = engine.add([2, 2], SamplingParams(max_tokens=3))
    none = engine.add([0, 1, 2, 0, 1], SamplingParams(max_tokens=0))
    one = engine.add([0, 1, 2, 0], SamplingParams(max_tokens=1, ignore_eos=True))
    with pytest.raises(ContextLengthError):
        engine.add([0, 1, 2, 0, 1], SamplingParams(max_tokens=1))
    outcomes = drain(engine)
    assert (outcomes[none].tokens, outcomes[none].reason) == ([], "length")
    assert (outcomes[one].tokens, outcomes[one].reason) == (expected([0, 1, 2, 0])[:1], "length")
    assert outcomes[stream].tokens == expected([2, 2])[:3]


def test_numpy_ids_are_a_prompt() -> None:
    engine = fake_engine()
    [outcome] = serve(engine, [np.array([0, 1, 2])], LONG)  # type: ignore[list-item]
    assert outcome.tokens == expected([0, 1, 2])


class StopAt:
    """A stop checker that fires at its n-th token, and remembers what it was shown."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.seen: list[int] = []

    def append(self, token_id: int) -> bool:
        self.seen.append(token_id)
        return len(self.seen) == self.count


def scripted(script: Sequence[int], prompt: Sequence[int], params: SamplingParams, **options: object) -> Outcome:
    engine = fake_engine(model=ScriptedModel(script, len(prompt)), **options)
    [outcome] = serve(engine, [prompt], params)
    nothing_held(engine)
    return outcome


@pytest.mark.parametrize("eos", [20, 21, 22])
@pytest.mark.parametrize("at", [0, 3])
def test_c08_every_eos_of_the_joined_lists_ends_the_text(eos: int, at: int) -> None:
    script = [5] * at + [eos, 6, 6, 6, 6, 6, 6]
    outcome = scripted(script, [1, 2], SamplingParams(max_tokens=7), eos={20, 21, 22})
    assert (outcome.tokens, outcome.reason) == ([5] * at + [eos], "stop")


def test_c08_min_tokens_holds_back_eos_and_stop_ids_alike() -> None:
    for ending in (EOS, 9):
        params = SamplingParams(max_tokens=6, min_tokens=4, stop_token_ids=(9,))
        outcome = scripted([ending] * 6, [1, 2], params)
        assert outcome.reason == "stop" and len(outcome.tokens) == 5
        assert outcome.tokens[-1] == ending and not {EOS, 9} & set(outcome.tokens[:4])


def test_c08_ignore_eos_runs_on_but_stop_ids_still_stop() -> None:
    outcome = scripted([EOS, EOS, EOS, EOS], [1, 2], SamplingParams(max_tokens=4, ignore_eos=True))
    assert (outcome.tokens, outcome.reason) == ([EOS] * 4, "length")
    params = SamplingParams(max_tokens=4, ignore_eos=True, stop_token_ids=(7,))
    outcome = scripted([EOS, 7, 5, 5], [1, 2], params)
    assert (outcome.tokens, outcome.reason) == ([EOS, 7], "stop")


def test_c08_the_ending_id_never_reaches_the_text() -> None:
    stop = StopAt(99)
    engine = fake_engine(model=ScriptedModel([4, 5, EOS], 2))
    request_id = engine.add([1, 2], SamplingParams(max_tokens=9), stop=stop)
    outcome = drain(engine)[request_id]
    assert (outcome.tokens, outcome.reason, stop.seen) == ([4, 5, EOS], "stop", [4, 5])


def test_c08_a_stop_string_wins_over_max_tokens_at_the_same_token() -> None:
    engine = fake_engine(model=ScriptedModel([4, 5, 6], 2))
    request_id = engine.add([1, 2], SamplingParams(max_tokens=3), stop=StopAt(3))
    assert drain(engine)[request_id].reason == "stop"


def test_c11_a_long_prompt_never_withholds_a_running_request_its_next_token() -> None:
    engine = fake_engine(budget=6, max_running=8)
    running = [engine.add([n], SamplingParams(max_tokens=30, ignore_eos=True)) for n in range(4)]
    outcomes: dict[int, Outcome] = {}
    collect(engine.step(), outcomes)
    for _ in range(25):
        engine.add([2, 1] * 20, SamplingParams(max_tokens=1))
        before = [len(outcomes[r].tokens) for r in running]
        collect(engine.step(), outcomes)
        assert [len(outcomes[r].tokens) for r in running] == [n + 1 for n in before]


def test_who_gave_way_comes_back_before_those_who_came_later_and_the_oldest_never_gives_way() -> None:
    engine = fake_engine(blocks=11, max_running=2)
    params = SamplingParams(max_tokens=14, ignore_eos=True)
    first, second, third = (engine.add([n, 1, 2], params) for n in range(3))
    outcomes: dict[int, Outcome] = {}
    while not engine.scheduler.num_preemptions:
        collect(engine.step(), outcomes)
    assert [request.id for request in engine.scheduler.running] == [first]
    assert [request.id for request in engine.scheduler.waiting] == [second, third]
    drain(engine, outcomes)
    assert [outcomes[i].tokens for i in (first, second, third)] == [expected([n, 1, 2], params) for n in range(3)]


@pytest.mark.parametrize("chunk", range(1, 13))
def test_c13_chunks_of_every_size_with_a_hit_that_ends_inside_one(chunk: int) -> None:
    prompt = [0, 1, 2, 0, 1, 2, 0, 1, 2, 0, 1]
    engine = fake_engine(budget=chunk)
    assert serve(engine, [prompt[:6]], SamplingParams(max_tokens=1))[0].cached == 0
    [outcome] = serve(engine, [prompt], LONG)
    assert outcome.cached == 6 and outcome.tokens == expected(prompt)


@pytest.mark.parametrize("layer", [0, 1, 2])
@pytest.mark.parametrize("chunk", range(5))
def test_c13_an_exception_in_a_chunk_leaves_nothing_that_a_retry_could_read(chunk: int, layer: int) -> None:
    prompt = [0, 1, 2, 0, 1, 2, 0, 1, 2, 0, 1]
    engine = fake_engine(budget=3)
    engine.add([0, 1, 2, 0, 1], SamplingParams(max_tokens=1))
    drain(engine)
    failing = engine.add(prompt, LONG)
    outcomes: dict[int, Outcome] = {}
    for _ in range(chunk):
        collect(engine.step(), outcomes)
    model_of(engine).fail_at_layer = layer
    drain(engine, outcomes)
    assert outcomes[failing].reason == "error"
    error = outcomes[failing].last.error
    assert isinstance(error, StepError) and isinstance(error.__cause__, RuntimeError)
    nothing_held(engine)
    assert serve(engine, [prompt], LONG)[0].tokens == expected(prompt)


def test_f07_a_broken_step_ends_its_requests_and_the_engine_lives() -> None:
    engine = with_runner(fake_engine(max_running=2), calls={1})
    ids = [engine.add([n, 1, 2], LONG) for n in range(3)]
    outcomes = drain(engine)
    assert [outcomes[i].reason for i in ids] == ["error", "error", "length"]
    assert outcomes[ids[2]].tokens == expected([2, 1, 2])
    nothing_held(engine)


def test_an_interrupted_step_tells_every_request_in_it() -> None:
    engine = fake_engine(max_running=2)
    ids = [engine.add([n, 1, 2], LONG) for n in range(3)]
    engine.abort(engine.add([1], LONG))
    model = model_of(engine)
    model.fail_at_layer, model.error = 1, KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    outcomes = drain(engine)
    assert [outcomes[i].reason for i in ids] == ["abort", "abort", "length"]
    assert len(outcomes) == 4, "the event that waited for this step was lost"
    nothing_held(engine)


class BrokenSampler:
    vocab_size = VOCAB

    def sample(self, logits: Tensor, rows: object) -> None:
        raise ValueError("the sampler broke")


def test_a_broken_sampler_is_a_broken_step() -> None:
    parts = fake_parts()
    engine = Engine(replace(parts, sampler=BrokenSampler()), EngineConfig())  # type: ignore[arg-type]
    request_id = engine.add([0, 1, 2, 0, 1], LONG)
    assert drain(engine)[request_id].reason == "error"
    nothing_held(engine)
    assert not any(pool.cached for pool in engine.manager.pools)


class NaNOnce(HashModel):
    """Gives NaN for the logits of its first row, once."""

    done = False

    def logits(self, hidden: Tensor) -> Tensor:
        logits = super().logits(hidden)
        if not self.done:
            logits[0] = math.nan
            self.done = True
        return logits


def test_logits_of_nan_end_one_request_and_leave_none_of_its_keys_behind() -> None:
    engine = fake_engine(model=NaNOnce(2))
    sick, well = engine.add([0, 1, 2, 0, 1], LONG), engine.add([2, 1, 0], LONG)
    outcomes = drain(engine)
    assert outcomes[sick].reason == "error" and isinstance(outcomes[sick].last.error, StepError)
    assert outcomes[well].tokens == expected([2, 1, 0])
    assert serve(engine, [[0, 1, 2, 0, 1]], LONG)[0].cached == 0


def test_memory_held_by_hand_refuses_only_those_who_need_it() -> None:
    parts = fake_parts(blocks=12)
    engine = Engine(parts, EngineConfig())
    by_hand = SteppedCache(parts.runner, engine.config, None)  # type: ignore[arg-type]
    by_hand.extend([0] * 15)
    big, small = engine.add([1] * 16, LONG), engine.add([1, 2], SamplingParams(max_tokens=2, ignore_eos=True))
    outcomes = drain(engine)
    assert outcomes[big].reason == "error" and "close" in str(outcomes[big].last.error)
    assert outcomes[small].tokens == expected([1, 2])[:2]
    by_hand.close()
    assert serve(engine, [[1] * 16], LONG)[0].tokens == expected([1] * 16)[:8]
    nothing_held(engine)


def test_chunks_shrink_to_what_a_window_leaves_of_a_small_cache() -> None:
    """Four blocks of 4 hold any window of 6 and a few tokens more: a text of any length passes through them."""
    views = (View(window=6),)
    prompt = [0, 1, 2, 2, 1] * 12
    engine = fake_engine(views=views, blocks=4)
    outcome = serve(engine, [prompt], LONG)[0]
    assert outcome.tokens == cache_free_output(prompt, LONG, seed=0, views=views)[0]
    assert outcome.reason == "length"
    nothing_held(engine)


def test_a_callback_that_raises_loses_no_token() -> None:
    engine = fake_engine()
    request_id = engine.add([0, 1, 2], LONG)

    def complain(call: ModelCall) -> None:
        raise OSError(f"call {call.step} was the last straw")

    engine.on_call = complain
    with pytest.raises(OSError, match="call 1"):
        engine.step()
    engine.on_call = None
    assert drain(engine)[request_id].tokens == expected([0, 1, 2])


def test_a_blocked_head_is_not_looked_up_again_until_something_is_released(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = fake_engine(blocks=12)
    first = engine.add([1] * 12, LONG)
    outcomes: dict[int, Outcome] = {}
    collect(engine.step(), outcomes)
    second = engine.add([2] * 16, LONG)
    lookups = []
    opened = engine.manager.open
    monkeypatch.setattr(engine.manager, "open", lambda *given: lookups.append(given) or opened(*given))
    while first not in outcomes or outcomes[first].reason is None:
        collect(engine.step(), outcomes)
    assert 1 <= len(lookups) <= 4  # LONG takes seven more steps; the first one's window releases a block now and then
    outcomes = drain(engine, outcomes)
    assert outcomes[second].tokens == expected([2] * 16)
