"""The Python API: text in, text out, and the cache stepped by hand."""

import gc
import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import tiny_model
from tiny_text import VOCABULARY, ids, write_tokenizer

from kvine import LLM, CacheConfig, SamplingParams
from kvine.config import EngineConfig
from kvine.engine.resources import most_threads
from kvine.errors import ConfigError, ContextLengthError, RequestError, StepError
from kvine.formats import gguf
from kvine.hub import ModelSource, resolve
from kvine.text.tokenizer import load_tokenizer

CONTEXT = 64
BLOCKS = CacheConfig(block_size=4)
TEN = SamplingParams(max_tokens=10, ignore_eos=True)
Checkpoint = tuple[Any, Path]


@pytest.fixture(scope="module", autouse=True)
def threads_as_before() -> Iterator[None]:
    """`LLM` sets the threads of the process; these models are so tiny that a second one only waits for the first."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def th() -> Checkpoint:
    oracle, folder = tiny_model("TH", max_position_embeddings=CONTEXT)
    return oracle, write_tokenizer(folder)


@pytest.fixture(scope="module")
def tl_with_bos() -> Checkpoint:
    oracle, folder = tiny_model("TL", max_position_embeddings=CONTEXT)
    return oracle, write_tokenizer(folder, bos=True, chat=False)


def open_llm(checkpoint: Checkpoint, **options: Any) -> LLM:
    source = ModelSource("tiny", checkpoint[1], "safetensors", None)
    return LLM(source, device="cpu", dtype="fp32", **{"cache": BLOCKS, "threads": 1, **options})


@pytest.fixture
def llm(th: Checkpoint) -> LLM:
    return open_llm(th)


@torch.inference_mode()
def greedy(oracle: Any, prompt: list[int], count: int, known: int = len(VOCABULARY)) -> list[int]:
    text = list(prompt)
    for _ in range(count):
        text.append(int(oracle(torch.tensor([text])).logits[0, -1, :known].argmax()))
    return text[len(prompt) :]


def nothing_held(llm: LLM) -> None:
    llm.engine.manager.check()
    assert llm.engine.manager.bytes_referenced == 0 and not llm.engine.busy


# -- generate -------------------------------------------------------------------------------------------------------


def test_one_prompt_several_and_ids(th: Checkpoint, llm: LLM) -> None:
    one = llm.generate("Once upon a time", TEN)
    assert one.prompt_ids == ids("Once upon a time")
    assert one.token_ids == greedy(th[0], one.prompt_ids, 10)
    assert one.text == llm.tokenizer.decode(one.token_ids)
    several = llm.generate(["Once upon a time", ids("Hi"), "Hi"], TEN)
    assert [g.token_ids for g in several] == [one.token_ids, *[greedy(th[0], ids("Hi"), 10)] * 2]
    assert llm.generate(ids("Hi"), TEN).token_ids == several[1].token_ids
    assert [g.token_ids for g in llm.generate(["Hi"], [TEN])] == [several[1].token_ids]
    assert llm.generate([], TEN) == []
    nothing_held(llm)


def test_without_a_cache_the_same(llm: LLM) -> None:
    prompts = ["Once upon a time", "x", "The cache changes nothing"]
    params = [TEN, replace(TEN, temperature=1.0, seed=5), replace(TEN, logprobs=2, repetition_penalty=1.3)]
    with_cache, without = llm.generate(prompts, params), llm.generate(prompts, params, use_cache=False)
    assert [g.token_ids for g in with_cache] == [g.token_ids for g in without]
    assert [g.text for g in with_cache] == [g.text for g in without]
    assert all(g.usage.cached_tokens == 0 for g in without)
    assert with_cache[2].logprobs is not None and without[2].logprobs is not None
    for a, b in zip(with_cache[2].logprobs, without[2].logprobs, strict=True):
        assert a.logprob == pytest.approx(b.logprob, abs=1e-4)


def test_the_fields_of_a_result(llm: LLM) -> None:
    cold, warm = (llm.generate("abcdefghij", replace(TEN, logprobs=0)) for _ in range(2))
    assert (cold.finish_reason, cold.detail) == ("length", None)
    assert (cold.usage.prompt_tokens, cold.usage.cached_tokens, cold.usage.completion_tokens) == (10, 0, 10)
    assert (warm.usage.cached_tokens, warm.token_ids) == (9, cold.token_ids)
    assert cold.logprobs is not None and [s.token_id for s in cold.logprobs] == cold.token_ids
    assert cold.timings.prefill_s > 0 and cold.timings.decode_ms > 0
    assert llm.generate("abc", TEN).logprobs is None


def test_each_prompt_has_its_own_parameters_or_all_the_same(llm: LLM) -> None:
    short, long = llm.generate(["ab", "cd"], [replace(TEN, max_tokens=2), TEN])
    assert (len(short.token_ids), len(long.token_ids)) == (2, 10)
    for params in ([TEN], [TEN] * 3, []):
        with pytest.raises(RequestError, match="one for each"):
            llm.generate(["ab", "cd"], params)
    nothing_held(llm)


@pytest.mark.parametrize("bad", ["", [], [[]], [""], ["fine", ""], ["fine", []], [200], ["fine", [-1]], [131]])
@pytest.mark.parametrize("bos", [False, True])
def test_c07_empty_and_unknown_prompts_trouble_nobody_else(
    th: Checkpoint, tl_with_bos: Checkpoint, bad: Any, bos: bool
) -> None:
    checkpoint = tl_with_bos if bos else th
    llm = open_llm(checkpoint)
    stream = llm.stream("Hi", TEN)
    first = next(stream)
    if bad == []:
        assert llm.generate(bad, TEN) == []  # no prompts, no answers
    elif bos and all(prompt == "" or isinstance(prompt, str) for prompt in bad):
        generated = llm.generate(bad, TEN)  # BOS alone is a prompt
        last = generated if isinstance(bad, str) else generated[-1]
        assert last.token_ids == greedy(checkpoint[0], [1], 10)
    else:
        with pytest.raises(RequestError):
            llm.generate(bad, TEN)
    rest = first + "".join(stream)
    assert rest == stream.result.text
    assert stream.result.token_ids == greedy(checkpoint[0], ([1] if bos else []) + ids("Hi"), 10)
    assert llm.generate("a", TEN).finish_reason == "length"
    nothing_held(llm)


@pytest.mark.parametrize("use_cache", [True, False])
def test_c07_no_token_and_one(llm: LLM, use_cache: bool) -> None:
    none = llm.generate("abc", SamplingParams(max_tokens=0, logprobs=1), use_cache=use_cache)
    assert (none.text, none.token_ids, none.finish_reason, none.logprobs) == ("", [], "length", [])
    assert none.usage.completion_tokens == 0 and none.timings.decode_ms == 0
    one = llm.generate("abc", SamplingParams(max_tokens=1, ignore_eos=True), use_cache=use_cache)
    assert len(one.token_ids) == 1 and one.finish_reason == "length"


def test_c08_eos_of_config_and_tokenizer_end_the_text_and_are_not_in_it(llm: LLM) -> None:
    assert {2, VOCABULARY["<|end|>"]} <= set(llm.parts.eos_ids)
    for end in sorted(llm.parts.eos_ids):
        params = SamplingParams(max_tokens=6, logit_bias={end: 1000.0}, min_tokens=3)
        ended = llm.generate("abc", params)
        assert ended.finish_reason == "stop" and ended.token_ids[3:] == [end]
        assert ended.text == llm.tokenizer.decode(ended.token_ids[:3])
        ignored = llm.generate("abc", replace(params, ignore_eos=True))
        assert (ignored.token_ids, ignored.finish_reason) == ([end] * 6, "length")


def test_c08_stop_strings_cut_the_text(llm: LLM) -> None:
    plain = llm.generate("Once upon", replace(TEN, max_tokens=20))
    middle = next(plain.text[n : n + 3] for n in range(2, 15) if len(plain.text[n : n + 3]) == 3)
    at = plain.text.index(middle)
    stopped = llm.generate("Once upon", SamplingParams(max_tokens=20, ignore_eos=True, stop=(middle,)))
    assert (stopped.finish_reason, stopped.text) == ("stop", plain.text[:at])
    streamed = llm.stream("Once upon", SamplingParams(max_tokens=20, ignore_eos=True, stop=(middle,)))
    assert "".join(streamed) == plain.text[:at]
    late = SamplingParams(max_tokens=20, min_tokens=20, ignore_eos=True, stop=(middle,))
    assert llm.generate("Once upon", late).finish_reason == "length"


def test_d08_the_padded_vocabulary_does_not_exist(llm: LLM) -> None:
    bias = dict.fromkeys(range(len(VOCABULARY), 131), 1000.0)
    for params in (replace(TEN, logit_bias=bias), replace(TEN, logit_bias=bias, temperature=2.0, seed=1, logprobs=200)):
        assert max(llm.generate("abc", params).token_ids) < len(VOCABULARY)


# -- context --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("use_cache", [True, False])
def test_a_full_context_ends_the_text_and_says_why(th: Checkpoint, llm: LLM, use_cache: bool) -> None:
    prompt = "a" * (CONTEXT - 5)
    full = llm.generate(prompt, SamplingParams(max_tokens=None, ignore_eos=True), use_cache=use_cache)
    assert (full.finish_reason, len(full.token_ids)) == ("context", 5)
    assert full.detail is not None and "64" in full.detail
    exact = llm.generate(prompt, SamplingParams(max_tokens=5, ignore_eos=True), use_cache=use_cache)
    assert (exact.finish_reason, exact.detail, exact.token_ids) == ("length", None, full.token_ids)
    with pytest.raises(ContextLengthError, match="64"):
        llm.generate("a" * CONTEXT, TEN, use_cache=use_cache)
    nothing_held(llm)


def test_a_cache_too_small_for_the_prompt_or_its_answer(th: Checkpoint) -> None:
    block = 4 * 2 * 2 * 16 * 4 * 2  # tokens, layers, heads, numbers, bytes, K and V: a block of either group
    llm = open_llm(th, cache=replace(BLOCKS, kv_memory=10 * block))
    with pytest.raises(ContextLengthError, match="kv_memory"):
        llm.generate("a" * 40, TEN)
    result = llm.generate("a" * 12, replace(TEN, max_tokens=40))
    assert result.finish_reason == "context" and "kv_memory" in (result.detail or "")
    assert result.token_ids == greedy(th[0], ids("a" * 12), len(result.token_ids))
    nothing_held(llm)
    with pytest.raises(ConfigError, match="kv_memory"):
        open_llm(th, cache=replace(BLOCKS, kv_memory=100))


def test_sinks_counted_in_the_cache_go_on_past_the_context_in_constant_memory(tl_with_bos: Checkpoint) -> None:
    cache = CacheConfig(block_size=4, window=9, sink_tokens=3, sink_rule="in_cache", kv_memory="80KiB")
    llm = open_llm(tl_with_bos, cache=cache, engine=EngineConfig(max_step_tokens=8))
    held: list[int] = []
    llm.trace(lambda call: held.append(call.kv_bytes))
    result = llm.generate("Hello", replace(TEN, max_tokens=3 * CONTEXT))
    assert result.finish_reason == "length" and len(result.token_ids) == 3 * CONTEXT
    block = 4 * 3 * 2 * 16 * 4 * 2
    assert max(held) <= block * (1 + 4), "the sinks' block, and nine tokens of window over at most four"
    assert max(held[-CONTEXT:]) == max(held[8 : 8 + CONTEXT])
    # Each token is the one that a plain pass over the whole text, without a cache, finds most likely.
    text = result.prompt_ids + result.token_ids[: CONTEXT + 20]
    choices = llm.logits(text)[0, :, : len(VOCABULARY)].argmax(-1).tolist()
    assert choices[len(result.prompt_ids) - 1 : -1] == result.token_ids[: CONTEXT + 20]
    nothing_held(llm)


# -- streams --------------------------------------------------------------------------------------------------------


def test_streams_side_by_side_each_say_their_own(llm: LLM) -> None:
    prompts = ["Once upon a time", "Hello", "What is this?"]
    expected = [llm.generate(p, TEN) for p in prompts]
    streams = [llm.stream(p, TEN) for p in prompts]
    texts = [""] * 3
    waiting = {0, 1, 2}
    while waiting:
        for n in sorted(waiting):
            piece = next(streams[n], None)
            if piece is None:
                waiting.remove(n)
            else:
                texts[n] += piece
    assert texts == [g.text for g in expected]
    assert [s.result.token_ids for s in streams] == [g.token_ids for g in expected]
    assert [next(s, None) for s in streams] == [None] * 3
    nothing_held(llm)


def test_closing_a_stream_frees_everything_at_once(llm: LLM) -> None:
    stream, other = llm.stream("Once upon a time", TEN), llm.stream("Hello", TEN)
    next(stream)
    stream.close()
    stream.close()
    assert stream.result.finish_reason == "abort" and len(stream.result.token_ids) >= 1
    assert len(llm.engine.scheduler.running) == 1
    assert other.result.finish_reason == "length"
    nothing_held(llm)


def test_a_stream_that_nobody_holds_any_more_ends(llm: LLM) -> None:
    for _ in llm.stream("Once upon a time", replace(TEN, max_tokens=None)):
        break
    gc.collect()
    llm.generate("x", replace(TEN, max_tokens=1))
    nothing_held(llm)


@pytest.mark.parametrize("use_cache", [True, False])
def test_a_failing_model_call_raises_for_each_and_the_next_one_runs(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, use_cache: bool
) -> None:
    expected = llm.generate("abc", TEN).text
    streams = [llm.stream("abc", TEN, use_cache=use_cache), llm.stream("abcd", TEN, use_cache=use_cache)]
    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.parts.runner, "fused", None)
        patch.setattr(llm.model.decoder, "logits", lambda hidden: 1 / 0)
        with pytest.raises(StepError, match="ZeroDivisionError"):
            next(streams[0])
    if use_cache:  # both were in the step
        with pytest.raises(StepError):
            next(streams[1])
        with pytest.raises(StepError):
            _ = streams[1].result
    else:
        assert streams[1].result.finish_reason == "length"
    assert llm.generate("abc", TEN, use_cache=use_cache).text == expected
    nothing_held(llm)


def test_an_interrupt_ends_all_streams_of_the_step(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(hidden: object) -> None:
        raise KeyboardInterrupt

    streams = [llm.stream("abc", TEN), llm.stream("abcd", TEN)]
    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.parts.runner, "fused", None)
        patch.setattr(llm.model.decoder, "logits", interrupt)
        with pytest.raises(KeyboardInterrupt):
            next(streams[0])
    assert [s.result.finish_reason for s in streams] == ["abort", "abort"]
    nothing_held(llm)


# -- chat -----------------------------------------------------------------------------------------------------------


def test_chat_writes_the_template_and_hits_the_earlier_turns(th: Checkpoint, llm: LLM) -> None:
    messages = [{"role": "user", "content": "Hi there"}]
    answer = llm.chat(messages, TEN)
    user, assistant, end = (VOCABULARY[f"<|{name}|>"] for name in ("user", "assistant", "end"))
    assert answer.prompt_ids == [user, *ids("Hi there"), end, assistant]
    assert answer.token_ids == greedy(th[0], answer.prompt_ids, 10)
    stream = llm.stream_chat(messages, TEN)
    assert "".join(stream) == answer.text
    messages = [*messages, {"role": "assistant", "content": "Hello"}, {"role": "user", "content": "Bye"}]
    assert llm.chat(messages, TEN).usage.cached_tokens >= 11


def test_the_pinned_system_message_is_what_conversations_that_open_with_it_share(th: Checkpoint) -> None:
    llm = open_llm(th, cache=CacheConfig(block_size=4, window=7))
    opening = {"role": "system", "content": "Be odd."}
    messages = [opening, {"role": "user", "content": "Hi there"}]
    (span,) = llm.system_span(messages)
    other = llm.encode_chat([opening, {"role": "user", "content": "Go on"}])
    assert span[0] == 0 and llm.encode_chat(messages)[: span[1]] == other[: span[1]] and span[1] > len("Be odd.")
    with_pin, without = (llm.chat(messages, TEN, pin_system=pin, use_cache=False) for pin in (True, False))
    assert llm.chat(messages, TEN, pin_system=True).token_ids == with_pin.token_ids
    assert llm.generate(with_pin.prompt_ids, TEN, pinned=(span,)).token_ids == with_pin.token_ids
    assert "".join(llm.stream_chat(messages, TEN, pin_system=True)) == with_pin.text
    assert llm.chat(messages, TEN).token_ids == without.token_ids
    with pytest.raises(RequestError, match="no system message to pin"):
        llm.chat(messages[1:], TEN, pin_system=True)


def test_chat_needs_a_template(tl_with_bos: Checkpoint) -> None:
    with pytest.raises(RequestError, match="chat template"):
        open_llm(tl_with_bos).chat([{"role": "user", "content": "Hi"}])


# -- by hand --------------------------------------------------------------------------------------------------------


def test_logits_and_forward_match_a_plain_forward(th: Checkpoint, llm: LLM) -> None:
    tokens = ids("Once upon a time")
    with torch.inference_mode():
        expected = th[0](torch.tensor([tokens])).logits
    for prompt in ("Once upon a time", tokens, torch.tensor(tokens), torch.tensor([tokens])):
        torch.testing.assert_close(llm.logits(prompt), expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(llm.logits(tokens, last=True), expected[:, -1:], atol=1e-4, rtol=1e-4)
    logits, cache = llm.forward("Once ")
    torch.testing.assert_close(logits, expected[:, :5], atol=1e-4, rtol=1e-4)
    logits, same = llm.forward(torch.tensor(tokens[5:]), cache, last=True)
    assert same is cache and len(cache) == len(tokens)
    torch.testing.assert_close(logits, expected[:, -1:], atol=1e-4, rtol=1e-4)


def test_layers_can_be_seen_forked_and_cropped(llm: LLM) -> None:
    _, cache = llm.forward("abcdefghijklmnopqrst")  # 20 tokens, window 8, blocks of 4
    assert cache.positions(1) == list(range(20)) and cache.positions(0) == list(range(12, 20))
    for layer in range(4):
        k, v = cache.layer(layer)
        assert k.shape == v.shape == (1, 2, len(cache.positions(layer)), 16)
    assert cache.num_bytes == (5 + 2) * 4 * 2 * 2 * 16 * 4 * 2
    fork = cache.fork()
    assert all(torch.equal(a, b) for a, b in zip(cache.layer(1), fork.layer(1), strict=True))
    left = fork.crop(10)
    assert left <= 10 and len(fork) == left and len(cache) == 20
    logits, _ = llm.forward("abcdefghijxy"[left:], fork)
    torch.testing.assert_close(logits[0, -1], llm.logits("abcdefghijxy", last=True)[0, 0], atol=1e-4, rtol=1e-4)
    logits, _ = llm.forward("z", cache)
    expected = llm.logits("abcdefghijklmnopqrstz", last=True)
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
    cache.close()
    fork.close()
    nothing_held(llm)


@pytest.mark.parametrize("bad", ["", [], torch.zeros(2, 3, dtype=torch.long), [131], [-1], [1.5], torch.zeros(3)])
def test_ids_that_are_no_text_are_refused(llm: LLM, bad: Any) -> None:
    with pytest.raises(RequestError):
        llm.forward(bad)
    with pytest.raises(RequestError):
        llm.logits(bad)
    nothing_held(llm)


def test_forward_past_the_context_is_refused_and_changes_nothing(llm: LLM) -> None:
    _, cache = llm.forward("a" * 60)
    with pytest.raises(ContextLengthError, match="64"):
        llm.forward("a" * 5, cache)
    assert len(cache) == 60
    llm.forward("a" * 4, cache)


def test_a_gguf_header_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes a tenth of a second of a real one."""
    opened: list[Path] = []
    real = gguf.parse_header
    monkeypatch.setattr(gguf, "parse_header", lambda path, data: (opened.append(path), real(path, data))[1])
    source = resolve("smollm2-135m")
    assert LLM(source, device="cpu", threads=1).encode("Hello") == load_tokenizer(source).encode("Hello")
    assert opened == [source.path]


# -- the machine ----------------------------------------------------------------------------------------------------


def test_g03_the_threads_option_wins(th: Checkpoint) -> None:
    for threads in sorted({1, most_threads()}, reverse=True):
        open_llm(th, threads=threads)
        assert torch.get_num_threads() == threads
    with pytest.raises(ConfigError, match="thread"):
        open_llm(th, threads=0)


def test_the_real_model_adds_and_the_cache_changes_nothing() -> None:
    llm = LLM("smollm2-135m", device="cpu", dtype="fp32")
    params = SamplingParams(max_tokens=6)
    answer = llm.generate("The answer to 2 + 3 is", params)
    assert "5" in answer.text
    assert answer.token_ids == llm.generate("The answer to 2 + 3 is", params, use_cache=False).token_ids


def test_a_text_that_ends_inside_a_possible_stop_string_is_returned_whole(llm: LLM) -> None:
    plain = llm.generate("hello", TEN)
    almost = SamplingParams(max_tokens=10, ignore_eos=True, stop=(plain.text[-1] + "§",))
    assert llm.generate("hello", almost).text == plain.text
    assert "".join(llm.stream("hello", almost)) == plain.text


def test_ids_of_numpy_and_torch_are_one_prompt(llm: LLM) -> None:
    expected = llm.generate([3, 4, 5], TEN).token_ids
    for prompt in (np.array([3, 4, 5]), torch.tensor([3, 4, 5]), [np.int64(i) for i in (3, 4, 5)], (3, 4, 5)):
        assert llm.generate(prompt, TEN).token_ids == expected


@pytest.mark.parametrize(
    "wrong",
    [
        lambda llm: llm.generate(5),
        lambda llm: llm.generate(None),
        lambda llm: llm.generate("a", {"max_tokens": 3}),
        lambda llm: llm.generate("a", [None, None]),
        lambda llm: llm.forward("ab")[1].crop(-1),
        lambda llm: llm.forward("ab")[1].layer(99),
    ],
)
def test_what_is_no_prompt_and_no_parameter_is_said_so(llm: LLM, wrong: Callable[[LLM], object]) -> None:
    with pytest.raises(RequestError):
        wrong(llm)


def test_a_cache_stays_with_its_llm(th: Checkpoint, llm: LLM) -> None:
    _, cache = llm.forward("abc")
    with pytest.raises(RequestError, match="another LLM"):
        open_llm(th).forward("d", cache)
    assert len(cache) == 3


@pytest.mark.parametrize("threads", [0, -1, 10**12, 1.5, "2", True])
def test_threads_that_no_machine_runs_are_refused(th: Checkpoint, threads: Any) -> None:
    with pytest.raises(ConfigError, match="threads"):
        open_llm(th, threads=threads)


def test_a_fork_that_has_no_room_to_grow_keeps_its_past(th: Checkpoint) -> None:
    llm = open_llm(th, cache=CacheConfig(block_size=4, kv_memory="24KiB"), engine=EngineConfig(max_step_tokens=4))
    _, cache = llm.forward(ids("abcdef"))
    twin = cache.fork()
    with pytest.raises(ContextLengthError):
        llm.forward(ids("x" * 50), twin)
    for number in range(3):
        for own, shared in zip(cache.layer(number), twin.layer(number), strict=True):
            assert torch.equal(own, shared) and own.abs().min() > 0
    cache.close()
    twin.close()
    assert llm.engine.manager.bytes_referenced == 0
    llm.engine.manager.check()


def test_ctrl_c_waits_until_the_bookkeeping_of_a_step_is_done(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = llm.generate("hello", TEN).text
    stream = llm.stream("hello", TEN)
    commit = llm.engine.manager.commit

    def interrupted(*given: Any) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        commit(*given)

    monkeypatch.setattr(llm.engine.manager, "commit", interrupted)
    text = ""
    with pytest.raises(KeyboardInterrupt):
        text += next(stream)
    monkeypatch.undo()
    llm.engine.manager.check()
    assert text + "".join(stream) == expected, "the interrupted step's token is lost"
    assert llm.engine.manager.bytes_referenced == 0


def test_threads_share_an_llm(llm: LLM) -> None:
    """Each gets what it would get alone, whoever makes the steps."""
    prompts = ["abc", "the", "x y z", "abcd", "q"] * 3
    alone = [llm.generate(prompt, TEN).text for prompt in prompts]
    with ThreadPoolExecutor(5) as pool:
        together = list(pool.map(lambda prompt: llm.generate(prompt, TEN).text, prompts))
        streamed = list(pool.map(lambda prompt: "".join(llm.stream(prompt, TEN)), prompts))
        stepped = list(pool.map(lambda prompt: llm.forward(prompt, last=True)[0], prompts))
    assert together == streamed == alone
    assert all(len(logits) == 1 for logits in stepped)
    nothing_held(llm)
