"""Random operations on an engine that serves beams, samples and ordinary requests from a cache with room for one."""

from collections import Counter
from dataclasses import replace

import hypothesis.strategies as st
from beam_oracles import brute_force
from fakes import (
    EOS,
    WINDOWED_AND_FULL,
    cache_free_logits,
    cache_free_output,
    fake_engine,
    model_of,
    nothing_held,
)
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from kvine.engine.request import Event
from kvine.errors import ContextLengthError, StepError
from kvine.sampling.params import SamplingParams

LONGEST = 20
counts: Counter[str] = Counter()

tokens = st.integers(0, 2)  # so few that prompts share their beginnings
prompts = st.one_of(st.lists(tokens, min_size=1, max_size=4), st.lists(tokens, min_size=5, max_size=9))
ends = st.sampled_from([(), (5, 9, 11), tuple(range(3, 12))])
lengths = st.sampled_from([0, 1, 6, 11, 11])
beams = st.builds(
    SamplingParams,
    max_tokens=lengths,
    num_beams=st.integers(2, 4),
    length_penalty=st.sampled_from([0.0, 1.0, 2.0, -1.0]),
    early_stopping=st.sampled_from([True, False, "never"]),
    stop_token_ids=ends,
    ignore_eos=st.booleans(),
)
samples = st.builds(
    SamplingParams,
    max_tokens=lengths,
    n=st.integers(1, 4),
    temperature=st.just(1.0),
    seed=st.integers(0, 3),
    stop_token_ids=ends,
    ignore_eos=st.booleans(),
)
greedy = st.builds(SamplingParams, max_tokens=lengths, stop_token_ids=ends)

Texts = list[tuple[list[int], str]]


def expected_texts(prompt: list[int], params: SamplingParams, limit: int) -> Texts:
    """The texts of a request and why each ends, computed without any part of the engine but the `limit` it has set."""
    ending = {*params.stop_token_ids, *(() if params.ignore_eos else (EOS,))}
    if params.num_beams == 1:
        return [cache_free_output(prompt, params, seed=params.seed or 0, limit=limit, index=i) for i in range(params.n)]
    if params.max_tokens == 0:
        return [([], "length")] * params.num_beams
    short = replace(params, max_tokens=min(params.max_tokens or LONGEST, limit - len(prompt)))
    found = brute_force(lambda text: cache_free_logits(tuple(text), WINDOWED_AND_FULL), prompt, short, ends=ending)

    def reason(text: list[int]) -> str:
        return "stop" if text[-1] in ending else "length" if len(text) == params.max_tokens else "context"

    return [(text, reason(text)) for text, _ in found]


class LineMachine(RuleBasedStateMachine):
    @initialize(
        budget=st.integers(4, 12),
        max_running=st.integers(2, 5),
        block_size=st.sampled_from([1, 2, 4]),
        tokens=st.integers(30, 80),
        caching=st.booleans(),
    )
    def start(self, budget: int, max_running: int, block_size: int, tokens: int, caching: bool) -> None:
        # Memory for so many tokens over both groups: four long beams fit, or end early for want of room.
        blocks = 2 * tokens // (2 * block_size)
        self.engine = fake_engine(
            budget=budget, max_running=max_running, blocks=blocks, block_size=block_size, prefix_caching=caching
        )
        self.asked: dict[int, tuple[list[int], SamplingParams, int]] = {}
        self.texts: dict[int, dict[int, list[int]]] = {}
        self.reasons: dict[int, dict[int, str]] = {}
        self.over: set[int] = set()
        self.doomed: set[int] = set()
        self.engine.on_call = lambda call: counts.update(["step"])

    @property
    def live(self) -> list[int]:
        return [i for i in self.asked if i not in self.over]

    @rule(several=st.lists(st.tuples(prompts, st.one_of(beams, samples, greedy)), min_size=1, max_size=3))
    def add(self, several: list[tuple[list[int], SamplingParams]]) -> None:
        for prompt, params in several:
            self.add_one(prompt, params)

    def add_one(self, prompt: list[int], params: SamplingParams) -> None:
        counts["beams" if params.num_beams > 1 else "samples" if params.n > 1 else "single"] += 1
        try:
            request = self.engine.add(prompt, params)
        except ContextLengthError:
            counts["refused"] += 1
            return
        limit, _ = self.engine._limit(prompt, params)
        self.asked[request] = prompt, params, limit
        self.texts[request], self.reasons[request] = {}, {}

    @rule(steps=st.integers(1, 6))
    def step(self, steps: int = 1) -> None:
        for _ in range(steps):
            self.take(self.engine.step())

    @precondition(lambda self: self.live)
    @rule(data=st.data(), now=st.integers(0, 3))
    def abort(self, data: st.DataObject, now: int) -> None:
        if now:  # mostly not: what is aborted is never preempted
            return
        request = data.draw(st.sampled_from(self.live))
        self.doomed.add(request)
        self.engine.abort(request)
        self.take([])
        counts["abort"] += 1

    @precondition(lambda self: self.live)
    @rule(layer=st.integers(0, 12))
    def break_a_step(self, layer: int) -> None:
        """The model fails before it writes, between two layers, or when all is written; mostly it does not."""
        if layer <= 2:
            self.doomed |= set(self.live)
            model_of(self.engine).fail_at_layer = layer
            counts["failure"] += 1
        self.step()
        model_of(self.engine).fail_at_layer = None

    def take(self, events: list[Event]) -> None:
        self.engine.manager.check()
        waiting = [line for request in self.engine.scheduler.waiting for line in request.lines]
        assert all(line.sequence is None for line in waiting), "a request was sent away in part"
        for event in events:
            request, index = event.request_id, event.index
            assert request not in self.over, "a request spoke after its end"
            assert index not in self.reasons[request], "a text went on after its end"
            text = self.texts[request].setdefault(index, [])
            if event.sample is not None:
                text.append(event.sample.token_id)
            if event.hypothesis is not None:
                text.extend(event.hypothesis.token_ids)
            if event.finish_reason is not None:
                self.reasons[request][index] = event.finish_reason
                assert event.error is None or isinstance(event.error, StepError)
                if not event.more:
                    self.over.add(request)
                    self.check_texts(request)

    def check_texts(self, request: int) -> None:
        prompt, params, limit = self.asked[request]
        expected = expected_texts(prompt, params, limit)
        assert sorted(self.reasons[request]) == list(range(params.num_lines))
        for index, reason in self.reasons[request].items():
            text = self.texts[request][index]
            if reason in ("abort", "error"):
                assert request in self.doomed
                assert params.num_beams > 1 or text == expected[index][0][: len(text)]
            else:
                assert (text, reason) == expected[index], (prompt, params, index)
        counts.update(set(self.reasons[request].values()))

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        bound = 8 * LONGEST * (len(self.live) + 1) ** 2 + 10
        while self.engine.busy:
            self.take(self.engine.step())
            bound -= 1
            assert bound, "the engine does not come to an end"
        assert not self.live
        nothing_held(self.engine)
        self.engine.manager.clear()
        assert not self.engine.manager.index.nodes()
        counts["preemptions"] += self.engine.scheduler.num_preemptions


def test_random_operations_on_beams_samples_and_single_texts_never_change_an_answer() -> None:
    counts.clear()
    run_state_machine_as_test(
        LineMachine,
        settings=settings(
            max_examples=40,
            stateful_step_count=40,
            derandomize=True,
            database=None,
            phases=[Phase.generate],  # shrinking takes minutes; to see a smaller failure, add Phase.shrink
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
    assert counts["preemptions"] > 20 and counts["failure"] > 5 and counts["abort"] > 20, counts
    assert min(counts["beams"], counts["samples"], counts["single"]) > 40, counts
