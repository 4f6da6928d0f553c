"""Sessions: whatever is done with one, it goes on like a text that was never anything else."""

import gc
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from session_scenes import (
    BLOCK,
    BLOCKS,
    ELEMENTS,
    PACKED,
    POLICIES,
    TEXT,
    WINDOWS,
    Cold,
    computed,
    continues_like,
    count,
    greedy,
    open_llm,
)
from tiny_text import ids, write_tokenizer

from kvine import LLM, CacheConfig, SamplingParams
from kvine.cache.shelf import shelves_of
from kvine.config import EngineConfig
from kvine.errors import ContextLengthError, RequestError, StepError
from kvine.models.cache_specs import cache_specs
from kvine.session import Session

Tiny = Callable[..., tuple[Any, Path]]


@pytest.fixture(scope="module", autouse=True)
def threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def tl(tiny: Tiny) -> Path:
    return write_tokenizer(tiny("TL", seed=3)[1])


@pytest.fixture(scope="module")
def th(tiny: Tiny) -> Path:
    return write_tokenizer(tiny("TH", seed=3)[1], bos=True)


def alone(policy: CacheConfig) -> CacheConfig:
    """The same, but nothing is kept for later requests: what a session does not hold is computed."""
    return replace(policy, prefix_caching=False)


# -- text -------------------------------------------------------------------------------------------------------------


def test_what_is_appended_and_generated_becomes_the_text(th: Path) -> None:
    llm = open_llm(th)
    session = llm.session("Hello")
    assert session.tokens == [1, *ids("Hello")] and (session.text, session.num_tokens) == ("Hello", 6)
    session.append(" you")
    session.append([])
    session.append("")
    assert session.tokens == [1, *ids("Hello you")], "BOS stands at the beginning only"
    answer = session.generate(greedy(5))
    assert answer.prompt_ids == [1, *ids("Hello you")] and session.tokens == answer.prompt_ids + answer.token_ids
    pieces = session.stream(greedy(4))
    text = "".join(pieces)
    assert session.tokens[-4:] == pieces.token_ids and text == pieces.result.text
    assert pieces.result.usage.prompt_tokens == 15 and pieces.result.usage.cached_tokens == 14


def test_an_ending_token_is_part_of_the_text(tl: Path) -> None:
    session = open_llm(tl).session(TEXT[:9])
    stop = session.fork().generate(greedy(3)).token_ids[2]
    answer = session.generate(SamplingParams(max_tokens=9, stop_token_ids=(stop,), ignore_eos=True))
    assert answer.finish_reason == "stop" and session.tokens == TEXT[:9] + answer.token_ids
    assert answer.token_ids[-1] == stop
    assert session.generate(SamplingParams(max_tokens=0)).token_ids == [] and session.num_tokens == 9 + 3


def test_one_request_may_append_and_generate(tl: Path) -> None:
    llm = open_llm(tl)
    session = llm.session()
    with computed(llm) as fed:
        answer = session.generate(greedy(3), after="Hello")
    assert fed == [(0, 5), (5, 6), (6, 7)] and session.tokens == [*ids("Hello"), *answer.token_ids]
    with computed(llm) as fed:
        pieces = session.stream(greedy(2), after=[9])
        assert "".join(pieces) == pieces.result.text
    assert fed == [(7, 9), (9, 10)] and session.tokens[8:] == [9, *pieces.token_ids]
    session.generate(SamplingParams(max_tokens=0), after="!")
    assert session.tokens[-1:] == ids("!") and session.num_tokens == 12
    waiting = session.stream(greedy(2), after="?")
    waiting.close()
    assert session.num_tokens == 12, "what brought nothing has changed nothing"
    continues_like(session, Cold(tl, BLOCKS))


def test_an_empty_session_needs_a_text_first(tl: Path) -> None:
    session = open_llm(tl).session()
    assert (session.tokens, session.text, session.num_bytes) == ([], "", 0)
    with pytest.raises(RequestError, match="append a text first"):
        session.generate()
    session.append([7])
    assert session.num_cached == 0, "the last token waits for what follows"
    assert session.generate(greedy(1)).usage.cached_tokens == 0
    session.edit(0, session.num_tokens, "")
    assert session.tokens == []


def test_places_of_a_text(tl: Path) -> None:
    session = open_llm(tl).session("one two one")
    assert session.find("two") == (4, 7) and session.find("one") == (0, 3) and session.find("one", 1) == (8, 11)
    session.edit(*session.find("two"), "three")
    assert session.text == "one three one"
    session.append([3])
    assert session.find("<|user|>") == (13, 14)
    for wrong in ("four", ""):
        with pytest.raises(RequestError, match="does not stand in the session from token 0 on"):
            session.find(wrong)


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda s: s.crop(-1), "the number of tokens that stay, 0 to 9"),
        (lambda s: s.crop(10), "the number of tokens that stay, 0 to 9"),
        (lambda s: s.edit(3, 2, ""), "no tokens 3 to 2 to edit: give 0 <= start <= stop <= 9"),
        (lambda s: s.edit(-1, 2, "a"), "no tokens -1 to 2"),
        (lambda s: s.edit(0, 10, "a"), "no tokens 0 to 10"),
        (lambda s: s.append([131]), "token ids from 0 to 130"),
        (lambda s: s.append([4, "x"]), "whole numbers"),
        (lambda s: s.append(7), "a text or a list of token ids, not 7"),
        (lambda s: s.edit(8, 9, [-1]), "token ids from 0 to 130"),
        (lambda s: s.generate(SamplingParams(n=2, temperature=1)), "fork it for each"),
        (lambda s: s.stream(SamplingParams(num_beams=2)), "fork it for each"),
        (lambda s: s.generate("greedy"), "SamplingParams"),
        (lambda s: s.append([5] * 600), "609 tokens, and the model's context is 512"),
    ],
)
def test_what_cannot_be_done_changes_nothing(tl: Path, act: Callable[[Any], Any], message: str) -> None:
    session = open_llm(tl).session(TEXT[:9])
    with pytest.raises(RequestError, match=message):
        act(session)
    assert session.tokens == TEXT[:9] and session.num_cached == 8
    with computed(session._llm) as fed:
        session.generate(greedy(1))
    assert fed == [(8, 9)]


def test_a_failed_step_leaves_the_text_and_computes_it_again(tl: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm, cold = open_llm(tl), Cold(tl, BLOCKS)
    session = llm.session(TEXT[:10])
    calls = iter(range(100))
    run = llm.parts.runner.run
    with monkeypatch.context() as patch:
        patch.setattr(llm.parts.runner, "run", lambda step: run(step) if next(calls) < 3 else 1 / 0)
        with pytest.raises(StepError, match="ZeroDivisionError"):
            session.generate(greedy(8))
        assert session.tokens == TEXT[:10]
        with pytest.raises(StepError):
            session.append(TEXT[10:30])
        assert session.tokens == TEXT[:10]
        with pytest.raises(StepError):
            session.edit(2, 3, [9, 9])
    assert session.tokens == TEXT[:10]
    continues_like(session, cold)


# -- one thing at a time ----------------------------------------------------------------------------------------------


def test_a_session_that_generates_is_not_changed(tl: Path) -> None:
    llm = open_llm(tl)
    session = llm.session(TEXT[:10])
    running = session.stream(greedy(20))
    next(running)
    for act in (lambda: session.append([5]), lambda: session.crop(3), session.fork, session.generate):
        with pytest.raises(RequestError, match="still being generated"):
            act()
    running.close()
    assert 10 < session.num_tokens < 30, "what was generated until then stays"
    assert session.tokens == TEXT[:10] + running.token_ids
    continues_like(session, Cold(tl, BLOCKS))


def test_a_dropped_stream_ends_and_leaves_what_it_generated(tl: Path) -> None:
    session = open_llm(tl).session(TEXT[:10])
    for number, _ in enumerate(session.stream(greedy(20))):
        if number == 2:
            break
    session.append([9])
    assert 10 < session.num_tokens < 30
    continues_like(session, Cold(tl, BLOCKS))


def test_closed_and_forgotten_sessions_hold_nothing(tl: Path) -> None:
    llm = open_llm(tl)
    manager = llm.engine.manager
    with llm.session(TEXT[:30]) as session:
        assert session.num_bytes == manager.bytes_referenced > 0
    assert manager.bytes_referenced == 0 < manager.bytes_cached
    session.close()
    for act in (lambda: session.append([5]), session.fork, session.generate, lambda: session.crop(0)):
        with pytest.raises(RequestError, match="closed: begin a new one"):
            act()
    assert llm.generate(TEXT[:30], greedy(1)).usage.cached_tokens == 29, "it is cached like any other text"
    session = llm.session(TEXT[50:80])
    running = session.stream(greedy(20))
    next(running)
    session.close()
    assert running.result.finish_reason == "abort" and manager.bytes_referenced == 0
    llm.session(TEXT[50:80])
    gc.collect()
    llm.generate(TEXT[:5], greedy(1))
    assert manager.bytes_referenced == 0
    manager.check()


# -- equal to a cold run ----------------------------------------------------------------------------------------------


ACTS = st.one_of(
    st.tuples(st.just("append"), st.integers(1, 14)),
    st.tuples(st.just("generate"), st.integers(0, 9)),
    st.tuples(st.just("crop"), st.floats(0, 1)),
    st.tuples(st.just("edit"), st.floats(0, 1), st.integers(0, 6), st.integers(0, 6)),
    st.tuples(st.just("fork"), st.just(0)),
    st.tuples(st.just("return"), st.just(0)),
    st.tuples(st.just("beside"), st.integers(1, 150)),
    st.tuples(st.just("another"), st.integers(150, 195)),
    st.tuples(st.just("save"), st.just(0)),
    st.tuples(st.just("give way"), st.just(0)),
)


class Life:
    """A session and its forks, what is done with them, and the text that each must have come to."""

    def __init__(self, llm: LLM, folder: Path) -> None:
        self.llm, self.folder = llm, folder
        self.session, self.text = llm.session(TEXT[:11]), TEXT[:11]
        self.forks: list[tuple[Session, list[int]]] = []
        self.fresh = iter(range(11, 10**9))

    def new(self, num_tokens: int) -> list[int]:
        return [TEXT[next(self.fresh) % 200] for _ in range(num_tokens)]

    def act(self, name: str, *how: Any) -> None:
        text, session = self.text, self.session
        if name == "append":
            after = text + self.new(how[0])
            session.append(after[len(text) :])
            self.text = after
        elif name == "generate" and text:
            self.text = text + session.generate(greedy(how[0])).token_ids
        elif name == "crop":
            self.text = text[: round(how[0] * len(text))]
            session.crop(len(self.text))
        elif name == "edit":
            start = round(how[0] * len(text))
            stop = min(start + how[1], len(text))
            new = self.new(how[2])
            session.edit(start, stop, new)
            self.text = [*text[:start], *new, *text[stop:]]
        elif name == "fork":
            self.forks.append((session, text))
            self.session = session.fork()
        elif name == "return" and self.forks:
            self.forks.append((session, text))
            self.session, self.text = self.forks.pop(0)
        elif name == "another":
            self.llm.generate(TEXT[how[0] :], greedy(2))
        elif name == "beside" and text:  # two texts in the same steps, of which one may be preempted
            other = self.llm.stream(TEXT[how[0] : how[0] + 30], greedy(9))
            running = session.stream(greedy(9))
            for _ in zip(other, running, strict=False):
                self.llm.engine.manager.check()
            self.text = text + running.result.token_ids
            other.close()
        elif name == "save":
            session.save(self.folder / "session")
            self.session = self.llm.load_session(self.folder / "session")
            session.close()
        elif name == "give way":
            self.llm.engine.scheduler.held.give_way()


def lead(llm: LLM, folder: Path, cold: Cold, acts: list[Any]) -> None:
    life = Life(llm, folder)
    for act in acts:
        with suppress(ContextLengthError):  # where memory is small; nothing has changed then
            life.act(*act)
        assert life.session.tokens == life.text
        llm.engine.manager.check()
    for session, text in [(life.session, life.text), *life.forks]:
        if text and len(text) < MOST:
            assert session.generate(greedy(5)).token_ids == cold(text, 5)
        assert len(session.tokens) == len(text) + 5 * (0 < len(text) < MOST)
        session.close()
    assert llm.engine.manager.bytes_referenced == 0


MOST = 70
LIVES = {
    "policy": st.sampled_from(list(POLICIES)),
    "acts": st.lists(ACTS, min_size=4, max_size=10),
    "caching": st.booleans(),
    "tight": st.booleans(),
    "chunk": st.sampled_from([3, 5, 2048]),
}


def live(folder: Path, tmp_path: Path, policy: str, acts: list[Any], caching: bool, tight: bool, chunk: int) -> None:
    cache = replace(POLICIES[policy], prefix_caching=caching)
    if tight:  # one text of MOST tokens fits, and two or three of what is usual here
        model = open_llm(folder).model.config
        shelves = shelves_of(cache_specs(model, cache))
        cache = replace(
            cache,
            kv_memory=sum(shelf.max_live_blocks(MOST + 5, 5) * shelf.bytes_per_block("fp32") for shelf in shelves),
        )
    lead(
        open_llm(folder, cache, engine=EngineConfig(max_step_tokens=chunk)),
        tmp_path,
        Cold(folder, POLICIES[policy]),
        acts,
    )


QUIET = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]


@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=QUIET)
@given(**LIVES)
def test_a06_any_act_matches_a_cold_run(th: Path, tmp_path: Path, **life: Any) -> None:
    live(th, tmp_path, **life)


@pytest.mark.slow
@settings(max_examples=200, deadline=None, suppress_health_check=QUIET)
@given(**LIVES)
def test_a06_two_hundred_lives(th: Path, tmp_path: Path, **life: Any) -> None:
    live(th, tmp_path, **life)


@pytest.mark.parametrize("policy", POLICIES)
def test_a13_two_continuations_of_one_snapshot_are_independent(th: Path, policy: str) -> None:
    """An int8 session whose open block is half full among them: both forks write to it, and neither sees the other."""
    llm, cold = open_llm(th, POLICIES[policy]), Cold(th, POLICIES[policy])
    snapshot = llm.session(TEXT[:26])
    first, second = snapshot.fork(), snapshot.fork()
    for fork, more in ((first, TEXT[60:67]), (second, TEXT[90:99])):
        fork.append(more)
    streams = [fork.stream(greedy(8)) for fork in (first, second)]  # side by side, in the same steps
    for _ in zip(*streams, strict=False):
        pass
    for fork, more, stream in ((first, TEXT[60:67], streams[0]), (second, TEXT[90:99], streams[1])):
        assert stream.result.token_ids == cold(TEXT[:26] + more, 8)
        assert fork.tokens == TEXT[:26] + more + stream.token_ids
        assert fork._text.sequence is not None
    assert snapshot.tokens == TEXT[:26]
    continues_like(snapshot, cold)


# -- what is computed -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", {**ELEMENTS, **PACKED})
@pytest.mark.parametrize(
    ("start", "stop", "new"),
    [(17, 19, [9, 9, 9]), (16, 16, [9]), (29, 30, [9]), (30, 30, [9, 9]), (0, 1, [9]), (6, 9, [])],
)
def test_an_edit_computes_what_follows_and_no_more(
    tl: Path, policy: str, start: int, stop: int, new: list[int]
) -> None:
    """To the token where each number is stored by itself, to the start of its block where blocks are packed whole."""
    for caching in (False, True):
        llm = open_llm(tl, replace(POLICIES[policy], prefix_caching=caching))
        session = llm.session(TEXT[:30])
        edited = [*TEXT[:start], *new, *TEXT[stop:30]]
        with computed(llm) as fed:
            session.edit(start, stop, new)
            assert session.num_cached == len(edited) - 1
            after = count(fed)
            answer = session.generate(greedy(4))
        first = min(start, 29)  # of the 30 tokens the last one was not computed yet
        if policy in PACKED and first < 28:  # the block that 28 and 29 lie in is open, and exact
            first = first // BLOCK * BLOCK
        assert fed[0][0] == first and after == len(edited) - 1 - first
        assert fed[-4:] == [(len(edited) - 1 + n, len(edited) + n) for n in range(4)], "and one for each new token"
        assert count(fed) == after + 4
        assert answer.token_ids == Cold(tl, POLICIES[policy])(edited, 4)


def test_tokens_that_an_edit_repeats_are_not_computed_again(tl: Path) -> None:
    llm = open_llm(tl)
    session = llm.session(TEXT[:30])
    with computed(llm) as fed:
        session.edit(10, 20, [*TEXT[10:17], 9, *TEXT[18:20]])
        assert fed == [(17, 29)]
        session.edit(17, 18, TEXT[17:18])
    assert count(fed) <= 12 + 12, "the old text may have been kept"
    with computed(llm) as fed:
        session.edit(3, 3, [])
    assert fed == []


def test_what_the_prefix_cache_holds_of_the_new_text_is_used(tl: Path) -> None:
    llm = open_llm(tl)
    session = llm.session(TEXT[:41])
    session.edit(5, 6, [9])
    with computed(llm) as fed:
        session.edit(5, 6, TEXT[5:6])
    assert fed == [(39, 40)], "undone: all were still there, and a request computes its last token"


@pytest.mark.parametrize(("model", "length"), [("tl", 31), ("th", 24)])
@pytest.mark.parametrize("policy", WINDOWS)
def test_under_a_window_an_edit_computes_what_the_window_let_go_of_too(
    request: pytest.FixtureRequest, model: str, policy: str, length: int
) -> None:
    """From the token itself, if every layer still holds what its query sees; else from the end of the sinks' blocks.

    The rule is worked out here anew: a layer holds whole blocks, from the one of its window's first token on, and those
    that sinks lie in; where it does not hold a block that a position sees, no position behind that block will do.
    """
    folder, cache = request.getfixturevalue(model), alone(WINDOWS[policy])
    llm, cold = open_llm(folder, cache), Cold(folder, cache)
    specs = cache_specs(llm.model.config, cache)
    packed = any(spec.packs for spec in specs)
    for start in range(0, length, 5):
        session = llm.session(TEXT[:length])
        end = length - 1  # tokens computed

        def resumes(at: int, end: int = end) -> bool:
            if packed and at % BLOCK and at // BLOCK < end // BLOCK:
                return False
            for spec in specs:
                seen = {k // BLOCK for k in range(at) for q in [at] if bool(spec.visible(q, k))}
                sinks = {k // BLOCK for run in ((0, spec.sink_tokens), *spec.kept) for k in range(*run)}
                first_held = 0 if spec.window is None else max(0, end - spec.window + 1) // BLOCK
                if any(block not in sinks and block < first_held for block in seen):
                    return False
            return True

        first = max(at for at in range(min(start, end) + 1) if resumes(at))
        with computed(llm) as fed:
            session.edit(start, start + 1, [9])
            session.generate(greedy(1))
        assert count(fed) == length - first, (start, fed, first)
        assert session.tokens[-1:] == cold([*TEXT[:start], 9, *TEXT[start + 1 : length]], 1)
        session.close()


@pytest.mark.parametrize("policy", WINDOWS)
def test_what_the_cache_has_kept_of_a_window_need_not_be_computed(th: Path, policy: str) -> None:
    llm = open_llm(th, WINDOWS[policy])
    session = llm.session(TEXT[:40])
    with computed(llm) as fed:
        session.edit(24, 25, [9])
    assert fed == [(24, 39)]


# -- memory -----------------------------------------------------------------------------------------------------------


def small(folder: Path, num_blocks: int, **options: Any) -> LLM:
    block = cache_specs(open_llm(folder).model.config, BLOCKS)[0].bytes_per_block("fp32")
    return open_llm(folder, CacheConfig(block_size=BLOCK, kv_memory=num_blocks * block, **options))


@pytest.mark.parametrize("caching", [True, False])
def test_idle_sessions_give_way_and_come_back(tl: Path, caching: bool) -> None:
    llm, cold = small(tl, 20, prefix_caching=caching), Cold(tl, BLOCKS)
    manager = llm.engine.manager
    sessions = [llm.session(TEXT[n : n + 30]) for n in (0, 40, 80)]  # 8 blocks each
    assert [s.num_cached for s in sessions] == [0, 29, 29], "the least recently used has given way"
    assert manager.bytes_referenced <= manager.budget
    answer = llm.generate(TEXT[100:170], greedy(8))
    assert answer.token_ids == cold(TEXT[100:170], 8)
    assert [s.num_cached for s in sessions] == [0, 0, 0]
    for n, session in zip((0, 40, 80), sessions, strict=True):
        assert session.generate(greedy(6)).token_ids == cold(TEXT[n : n + 30])
        manager.check()


def test_idle_sessions_give_way_to_caches_stepped_by_hand(tl: Path) -> None:
    llm = small(tl, 12)
    session = llm.session(TEXT[:30])
    _, stepped = llm.forward(TEXT[40:80], last=True)
    assert session.num_cached == 0 and len(stepped) == 40
    stepped.close()
    continues_like(session, Cold(tl, BLOCKS))


def test_sessions_that_run_side_by_side_preempt_each_other_and_end(tl: Path) -> None:
    llm, cold = small(tl, 14), Cold(tl, BLOCKS)
    sessions = [llm.session(TEXT[n : n + 20]) for n in (0, 40, 80)]
    streams = [session.stream(greedy(20)) for session in sessions]
    answers = [stream.result.token_ids for stream in streams]
    assert llm.engine.scheduler.num_preemptions > 0
    assert answers == [cold(TEXT[n : n + 20], 20) for n in (0, 40, 80)]
    llm.engine.manager.check()


def test_threads_go_on_with_sessions_of_their_own_and_with_one(tl: Path, tmp_path: Path) -> None:
    llm, cold = small(tl, 24), Cold(tl, BLOCKS)
    shared = llm.session(TEXT[150:165])

    def live(number: int) -> tuple[list[int], list[int]]:
        session = llm.session(TEXT[number : number + 12])
        for turn in range(3):
            session.generate(greedy(4), after=[number + turn + 5])
            session.edit(3, 4, [number + 9])
            session.save(tmp_path / str(number))
            session = llm.load_session(tmp_path / str(number))
            with suppress(RequestError):  # somebody else is at it
                shared.append([number + 5])
        return session.tokens, session.generate(greedy(4)).token_ids

    with ThreadPoolExecutor(4) as pool:
        for tokens, answer in pool.map(live, range(4)):
            assert answer == cold(tokens, 4)
    continues_like(shared, cold)
    assert TEXT[150:165] == shared.tokens[:15] and len(shared.tokens) > 15


def test_what_never_fits_is_refused(tl: Path) -> None:
    llm = small(tl, 5)
    with pytest.raises(ContextLengthError, match="raise kv_memory"):
        llm.session(TEXT[:30])
    session = llm.session(TEXT[:15])
    with pytest.raises(ContextLengthError, match="raise kv_memory"):
        session.append(TEXT[15:30])
    assert session.tokens == TEXT[:15]
    assert session.generate(greedy(30)).finish_reason == "context"
    continues_like(llm.session(TEXT[:15]), Cold(tl, BLOCKS), 4)


def test_forks_share_their_blocks(tl: Path) -> None:
    llm = open_llm(tl)
    manager = llm.engine.manager
    session = llm.session(TEXT[:42])  # 41 computed: 11 blocks, the last with one token
    block = manager.pools[0].bytes_per_block
    forks = [session.fork() for _ in range(4)]
    assert manager.bytes_referenced == 11 * block
    for number, fork in enumerate(forks):
        fork.append([number + 5])
    assert manager.bytes_referenced == (11 + 4) * block, "one block copied for each"
    session.crop(8)
    for fork in forks:
        fork.close()
    assert manager.bytes_referenced == 2 * block
