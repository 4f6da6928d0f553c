"""Samples and beams as requests: computed once where they are alike, let in and sent away as one, counted in memory."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from fakes import ScriptedModel, View, cache_free_output, fake_engine, nothing_held
from torch import Tensor

from kvine.engine.engine import Engine
from kvine.engine.request import Event
from kvine.errors import ContextLengthError, RequestError, StepError
from kvine.sampling.params import SamplingParams

PROMPT = [0, 1, 2, 0, 1, 2, 0]
FOUR = SamplingParams(max_tokens=6, n=4, temperature=1.0, seed=7, ignore_eos=True)
BEAMS = SamplingParams(max_tokens=6, num_beams=4, ignore_eos=True)


def run(engine: Engine) -> list[Event]:
    events = []
    while engine.busy:
        events += engine.step()
        engine.manager.check()
    return events


def texts(events: Sequence[Event], request: int) -> list[list[int]]:
    own = [event for event in events if event.request_id == request]
    count = 1 + max(event.index for event in own)
    return [[e.sample.token_id for e in own if e.index == i and e.sample is not None] for i in range(count)]


def test_a_prompt_is_computed_once_for_all_samples() -> None:
    engine, calls = fake_engine(views=(View(),)), []
    engine.on_call = calls.append
    request = engine.add(PROMPT, FOUR)
    events = run(engine)
    assert calls[0].positions == ((0, 7),)
    assert [call.positions for call in calls[1:]] == [((p, p + 1),) * 4 for p in range(7, 12)]
    block = engine.manager.specs[0].bytes_per_block("fp32")
    # One block in common, and of each sample the last one, three tokens of which are a copy; then another one each.
    assert [call.kv_bytes // block for call in calls[:3]] == [2, 1 + 4, 1 + 4 + 4]
    expected = [cache_free_output(PROMPT, FOUR, seed=7, views=(View(),), index=i)[0] for i in range(4)]
    assert texts(events, request) == expected
    assert len({tuple(text) for text in texts(events, request)}) == 4
    ends = [event for event in events if event.finish_reason is not None]
    assert [(e.index, e.more) for e in ends] == [(0, True), (1, True), (2, True), (3, False)]
    nothing_held(engine)


def test_a_sample_is_the_same_whatever_n_is() -> None:
    engine = fake_engine()
    several = [engine.add(PROMPT, replace(FOUR, n=n)) for n in (1, 2, 5)]
    events = run(engine)
    one, two, five = (texts(events, request) for request in several)
    assert one == two[:1] and two == five[:2]


def test_samples_end_one_by_one_and_free_what_only_they_held() -> None:
    params = replace(FOUR, max_tokens=30, stop_token_ids=tuple(range(8, 16)))
    engine = fake_engine()
    request = engine.add(PROMPT, params)
    held, ended = [], 0
    events: list[Event] = []
    while engine.busy:
        events += engine.step()
        engine.manager.check()
        ended = sum(event.finish_reason is not None for event in events)
        held.append((ended, engine.manager.bytes_referenced))
    expected = [cache_free_output(PROMPT, params, seed=7, index=i) for i in range(4)]
    assert texts(events, request) == [text for text, _ in expected]
    assert len({len(text) for text, _ in expected}) > 1
    assert held[-1] == (4, 0) and any(0 < count < 4 for count, _ in held)


def test_what_can_never_fit_is_refused_at_the_door() -> None:
    narrow = fake_engine(budget=3)
    with pytest.raises(RequestError, match="4 samples take 4 tokens in each step, and max_step_tokens is 3: raise it"):
        narrow.add(PROMPT, FOUR)
    with pytest.raises(RequestError, match="4 beams take 4 tokens"):
        narrow.add(PROMPT, BEAMS)
    small = fake_engine(blocks=9)  # one text of 7 tokens takes 2 blocks in each group, four take 1 + 4
    small.add(PROMPT, SamplingParams(max_tokens=1))
    with pytest.raises(ContextLengthError, match="more than the cache of 576 bytes can hold for 4 beams: raise kv_mem"):
        small.add(PROMPT, BEAMS)
    run(small)
    nothing_held(small)


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("params", [FOUR, BEAMS], ids=["samples", "beams"])
def test_the_counted_memory_is_enough_and_a_block_less_ends_the_texts_early(
    params: SamplingParams, caching: bool
) -> None:
    """12 tokens, 11 of them fed: in each group one block in common and two for each text, and no other copies."""
    blocks = 2 * (1 + 4 * 2)
    exact = fake_engine(blocks=blocks, prefix_caching=caching)
    exact.add(PROMPT, params)
    assert {event.finish_reason for event in run(exact)} == {None, "length"}
    assert exact.scheduler.num_preemptions == 0
    less = fake_engine(blocks=blocks - 1, prefix_caching=caching)
    less.add(PROMPT, params)
    ends = [event for event in run(less) if event.finish_reason is not None]
    assert [event.finish_reason for event in ends] == ["context"] * 4
    assert "is full at 8 tokens: raise kv_memory" in (ends[0].detail or "")


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("params", [FOUR, BEAMS], ids=["samples", "beams"])
def test_a_preempted_request_comes_back_whole_and_shares_its_beginning_again(
    params: SamplingParams, caching: bool
) -> None:
    params = replace(params, max_tokens=12)
    alone = fake_engine(prefix_caching=caching)
    request = alone.add(PROMPT, params)
    wanted = [(e.index, e.sample, e.hypothesis) for e in run(alone) if e.request_id == request]
    engine = fake_engine(prefix_caching=caching, blocks=30, budget=12)
    older = [engine.add([2, 1, n], SamplingParams(max_tokens=14, ignore_eos=True)) for n in range(2)]
    request = engine.add(PROMPT, params)
    events, calls = [], []
    engine.on_call = calls.append
    while engine.busy:
        events += engine.step()
        engine.manager.check()
        for waiting in engine.scheduler.waiting:
            assert all(line.sequence is None for line in waiting.lines)
    assert engine.scheduler.num_preemptions > 0 and len(older) == 2
    assert [(e.index, e.sample, e.hypothesis) for e in events if e.request_id == request] == wanted
    # Its lines were computed anew, their common beginning by one of them alone.
    prefills = [start for call in calls for start, end in call.positions if start == 0 and end != 3]
    most = 1 + engine.scheduler.num_preemptions
    assert len(prefills) <= most if caching else len(prefills) == most
    nothing_held(engine)


class BrokenBeam(ScriptedModel):
    """Logits that are not finite, from the second step on, in one row."""

    def logits(self, hidden: Tensor) -> Tensor:
        logits = super().logits(hidden)
        if len(logits) > 1:
            logits[1] = torch.nan
        return logits


@pytest.mark.parametrize("params", [FOUR, BEAMS], ids=["samples", "beams"])
def test_unusable_logits_of_one_line_end_its_request_as_one(params: SamplingParams) -> None:
    engine = fake_engine(model=BrokenBeam([3, 4, 5], len(PROMPT)))
    request = engine.add(PROMPT, params)
    events = [event for event in run(engine) if event.finish_reason is not None]
    assert [(e.request_id, e.index, e.more) for e in events] == [(request, i, i < 3) for i in range(4)]
    assert all(isinstance(event.error, StepError) for event in events)
    nothing_held(engine)


def test_a_request_that_bans_all_tokens_ends_as_one() -> None:
    engine = fake_engine()
    engine.add(PROMPT, replace(FOUR, logit_bias={token: float("-inf") for token in range(24)}))
    events = run(engine)
    assert len(events) == 4 and all(isinstance(event.error, RequestError) for event in events)
    nothing_held(engine)


@pytest.mark.parametrize("params", [FOUR, BEAMS], ids=["samples", "beams"])
@pytest.mark.parametrize("steps", [0, 1, 3])
def test_an_aborted_request_ends_all_its_texts_and_holds_nothing(params: SamplingParams, steps: int) -> None:
    engine = fake_engine()
    request = engine.add(PROMPT, params)
    for _ in range(steps):
        engine.step()
    engine.abort(request)
    nothing_held(engine)
    assert [(e.index, e.finish_reason, e.more) for e in run(engine)] == [(i, "abort", i < 3) for i in range(4)]


def test_no_tokens_end_at_once_in_every_text() -> None:
    engine = fake_engine()
    engine.add(PROMPT, replace(BEAMS, max_tokens=0))
    assert [(e.index, e.finish_reason, e.more) for e in engine.step()] == [(i, "length", i < 3) for i in range(4)]


def test_beams_of_a_vocabulary_smaller_than_they_are_many() -> None:
    engine = fake_engine(vocab_size=3)
    engine.add(PROMPT, replace(BEAMS, num_beams=8, max_tokens=2))
    found = [event.hypothesis for event in run(engine) if event.hypothesis is not None]
    assert len(found) == 8 == len({beam.token_ids for beam in found})
