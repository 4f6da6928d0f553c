"""Random operations on an engine whose cache holds one request and one block."""

from collections import Counter

import hypothesis.strategies as st
import pytest
from fakes import Outcome, cache_free_output, collect, drain, fake_engine, model_of, nothing_held, serve
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from kvine.errors import ContextLengthError, StepError
from kvine.sampling.params import SamplingParams

LONGEST = 20
counts: Counter[str] = Counter()

tokens = st.integers(0, 2)  # so few that prompts share their beginnings
prompts = st.one_of(st.lists(tokens, min_size=1, max_size=4), st.lists(tokens, min_size=1, max_size=14))
parameters = st.builds(
    SamplingParams,
    max_tokens=st.sampled_from([0, 1, 5, 9, 14, None]),
    temperature=st.sampled_from([0.0, 0.0, 1.0]),
    seed=st.integers(0, 3),
    stop_token_ids=st.sampled_from([(), (), (5,), (9, 11)]),
    ignore_eos=st.sampled_from([True, True, False]),
)


class EngineMachine(RuleBasedStateMachine):
    @initialize(budget=st.integers(1, 9), max_running=st.integers(2, 5))
    def start(self, budget: int, max_running: int) -> None:
        # The longest request needs 5 blocks in each group; there are 11, counted in bytes over both.
        self.engine = fake_engine(budget=budget, max_running=max_running, blocks=11, max_context=LONGEST)
        self.engine.on_call = lambda call: counts.update(["step"])
        self.outcomes: dict[int, Outcome] = {}
        self.asked: dict[int, tuple[list[int], SamplingParams]] = {}
        self.expected: dict[int, tuple[list[int], str]] = {}
        self.aborted: set[int] = set()
        self.doomed: set[int] = set()  # requests that were live when a step failed

    @property
    def live(self) -> list[int]:
        return [i for i in self.asked if i not in self.outcomes or self.outcomes[i].reason is None]

    @rule(several=st.lists(st.tuples(prompts, parameters), min_size=1, max_size=3))
    def add(self, several: list[tuple[list[int], SamplingParams]]) -> None:
        for prompt, params in several:
            counts["add"] += 1
            request_id = self.engine.add(prompt, params)
            self.asked[request_id] = (prompt, params)
            self.expected[request_id] = cache_free_output(prompt, params, seed=params.seed or 0, limit=LONGEST)
            self.check()

    @rule(tokens=st.integers(LONGEST, LONGEST + 2))
    def add_too_long(self, tokens: int) -> None:
        with pytest.raises(ContextLengthError):
            self.engine.add([0] * tokens, SamplingParams())
        self.check()

    @rule(steps=st.integers(1, 4))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            if self.live:
                collect(self.engine.step(), self.outcomes)
                self.check()

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        counts["abort"] += 1
        request_id = data.draw(st.sampled_from(self.live))
        self.engine.abort(request_id)
        self.aborted.add(request_id)
        self.check()

    @precondition(lambda self: self.live)
    @rule(layer=st.integers(0, 9), interrupt=st.booleans())
    def break_a_step(self, layer: int, interrupt: bool) -> None:
        """The model fails before it writes, between two layers, or when all is written; mostly it does not."""
        if layer > 2:
            self.step(layer)
            return
        counts["failure"] += 1
        model = model_of(self.engine)
        model.fail_at_layer, model.error = layer, KeyboardInterrupt() if interrupt else RuntimeError("broken")
        self.doomed |= set(self.live)
        try:
            collect(self.engine.step(), self.outcomes)
        except KeyboardInterrupt:
            collect(self.engine.take_pending(), self.outcomes)
        model.fail_at_layer = None
        self.check()

    def check(self) -> None:
        self.engine.manager.check()
        for request_id, outcome in self.outcomes.items():
            self.check_outcome(request_id, outcome)

    def check_outcome(self, request_id: int, outcome: Outcome) -> None:
        prompt, _ = self.asked[request_id]
        expected, reason = self.expected[request_id]
        assert sum(event.finish_reason is not None for event in outcome.events) <= 1
        if outcome.reason in ("stop", "length", "context"):
            assert (outcome.tokens, outcome.reason) == (expected, reason)
            assert (outcome.last.detail is not None) == (reason == "context")
            return
        assert outcome.tokens == expected[: len(outcome.tokens)]
        if outcome.reason == "abort":
            assert request_id in self.aborted | self.doomed
        elif outcome.reason == "error":
            assert request_id in self.doomed and isinstance(outcome.last.error, StepError)
        assert all(0 <= event.cached_tokens < len(prompt) for event in outcome.events)

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        # Each step computes a token of the oldest request at least, and whoever gives way starts again at most once
        # for each token of an older one.
        bound = 2 * LONGEST * (len(self.live) + 1) ** 2 + 10
        drain(self.engine, self.outcomes, bound=bound)
        self.check()
        assert not self.live and self.outcomes.keys() == self.asked.keys()
        nothing_held(self.engine)
        self.engine.manager.clear()
        assert all(pool.num_free == pool.capacity for pool in self.engine.manager.pools)
        assert not self.engine.manager.index.nodes()
        counts["preemptions"] += self.engine.scheduler.num_preemptions
        counts["hits"] += sum(bool(outcome.events and outcome.cached) for outcome in self.outcomes.values())


def test_random_operations_never_change_an_answer_or_lose_a_block() -> None:
    counts.clear()
    run_state_machine_as_test(
        EngineMachine,
        settings=settings(
            max_examples=36,
            stateful_step_count=50,
            derandomize=True,
            database=None,
            phases=[Phase.generate],  # shrinking takes minutes; to see a smaller failure, add Phase.shrink
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
    assert counts["add"] + counts["step"] + counts["abort"] + counts["failure"] >= 2_000, counts
    assert counts["preemptions"] > 20 and counts["hits"] > 20, counts


def test_preemption_and_prefix_hits_do_happen_here() -> None:
    """The machine above proves nothing unless its cache is really short and its prompts really meet."""
    engine = fake_engine(budget=5, blocks=11)
    same = [0, 1, 2, 0, 1, 2, 0, 1, 2]
    prompts = [same, [*same, 1], [2] * 9, [1] * 10, same]
    params = SamplingParams(max_tokens=9, ignore_eos=True)
    outcomes = serve(engine, prompts, params)
    [again] = serve(engine, [same], params)
    assert engine.scheduler.num_preemptions > 0
    assert engine.manager.num_evictions > 0
    assert again.cached > 0
    assert [o.tokens for o in [*outcomes, again]] == [cache_free_output(p, params)[0] for p in [*prompts, same]]
    nothing_held(engine)


def test_the_fake_model_notices_a_wrong_key() -> None:
    """The proof's own alarm: one stored state changed, and the answer is another."""
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    engine = fake_engine()
    [clean] = serve(engine, [[0, 1, 2, 0, 1]], params)
    assert clean.tokens == cache_free_output([0, 1, 2, 0, 1], params)[0]
    pool = engine.parts.runner.attention.pools[1]  # type: ignore[attr-defined]
    pool.k[0, 0, 0, 1, 0] += 1
    [hit] = serve(engine, [[0, 1, 2, 0, 1]], params)
    assert hit.cached == 4 and hit.tokens != clean.tokens
