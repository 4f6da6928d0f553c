"""Needles and streams: texts token by token, and figures against the oracle; a needle in the real model."""

import math
from pathlib import Path

import pytest
import torch
from tiny_models import random_prompt, write_checkpoint, write_tokenizer

from kvine.engine.build import dense_attention
from kvine.engine.cache_free import DenseRunner
from kvine.errors import ContextLengthError, RequestError
from kvine.evidence.quality.needle import FACTS, Fact, check_needle, find_needles, haystack
from kvine.evidence.quality.policies import parse_policies
from kvine.evidence.quality.streaming import SEGMENTS, compare_streaming, stream_policies
from kvine.evidence.quality.texts import beginning, first_tokens, prose
from kvine.hub import ModelSource
from kvine.llm import LLM


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder: Path = tmp_path_factory.mktemp("tiny")
    write_checkpoint(folder, "llama")
    write_tokenizer(folder)
    return LLM(ModelSource("tiny", folder, "safetensors", None), dtype="fp32", device="cpu", threads=1)


@pytest.fixture(scope="module")
def smollm() -> LLM:
    return LLM("smollm2-135m", dtype="fp32", threads=1)


# -- needles -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [0, 30, 50, 100])
@pytest.mark.parametrize("length", [64, 300])
def test_a_haystack_has_its_length_and_its_fact_at_its_depth(smollm: LLM, length: int, depth: int) -> None:
    tokenizer = smollm.tokenizer
    filler = tokenizer.encode(prose(length), add_special=False)
    text = haystack(tokenizer, FACTS[0], length, depth, filler)
    assert len(text.prompt) == length
    words = tokenizer.decode(text.prompt)
    fact = f"{FACTS[0].lead}{FACTS[0].answer}.\n"
    before, after = words.split(fact)
    assert after.endswith(f"\n\n{FACTS[0].lead}") and tokenizer.decode(text.answer) == FACTS[0].answer
    assert tokenizer.decode(text.prompt[text.at :]).startswith(fact)
    assert before == "" or before.endswith("\n"), "a fact begins a line"
    lines = max(len(tokenizer.encode(line)) for line in (before + after).split("\n")) + 2
    room = length - len(tokenizer.encode(fact)) - len(tokenizer.encode(f"\n\n{FACTS[0].lead}"))
    assert room * depth // 100 - lines <= text.at <= room * depth // 100 + 1


def test_the_real_model_finds_what_it_sees_and_not_what_a_window_has_dropped(smollm: LLM) -> None:
    policies = parse_policies("exact; window=48,sinks=4,sink-rule=in-cache; kv-dtype=fp16")[0]
    cells = find_needles(smollm, policies, lengths=(192,), depths=(0, 100), facts=FACTS[:2])
    found = {(cell.policy, cell.depth): cell for cell in cells}
    assert len(found) == len(cells) == 6 and all(cell.facts == 2 and cell.length == 192 for cell in cells)
    window = policies[1].name
    for depth in (0, 100):
        assert found["exact", depth].found == found["kv-dtype=fp16", depth].found == 2
        assert found["exact", depth].loglik == found["exact", depth].loglik_exact > -2
        assert found["kv-dtype=fp16", depth].loglik == pytest.approx(found["exact", depth].loglik, abs=0.01)
    assert found[window, 0].found == 0 and found[window, 0].loglik < found[window, 0].loglik_exact - 5
    assert found[window, 100].found == 2


def test_an_answers_likelihood_is_that_of_its_tokens(llm: LLM) -> None:
    fact = Fact("w3 w4 w5", " w6 w7 w8")
    (cell,) = find_needles(llm, parse_policies("exact")[0], lengths=(40,), depths=(50,), facts=(fact,))
    text = haystack(llm.tokenizer, fact, 40, 50, llm.tokenizer.encode(prose(40)))
    logprobs = llm.logits([*text.prompt, *text.answer])[0].double().log_softmax(-1)
    rows = range(len(text.prompt) - 1, len(text.prompt) + len(text.answer) - 1)
    assert cell.loglik == pytest.approx(sum(float(logprobs[i, t]) for i, t in zip(rows, text.answer, strict=True)))
    assert cell.found == int([int(logprobs[i].argmax()) for i in rows] == list(text.answer))


def test_needles_that_cannot_be_are_a_sentence(llm: LLM) -> None:
    with pytest.raises(RequestError, match="--needle-lengths"):
        check_needle([0], [0])
    with pytest.raises(RequestError, match="--needle-depths"):
        check_needle([64], [0, 101])
    with pytest.raises(ContextLengthError, match="--needle-lengths"):
        find_needles(llm, parse_policies("exact")[0], lengths=(512,), depths=(0,))
    with pytest.raises(RequestError, match="have no room for a fact and its question: give "):
        haystack(llm.tokenizer, FACTS[0], 5, 0, [])


# -- streams -----------------------------------------------------------------------------------------------------------


def test_streams_are_the_oracles(llm: LLM) -> None:
    ids, window = random_prompt(600), 24  # the context is 512
    outcome = compare_streaming(llm, ids, window=window, sampled=10)
    assert (outcome.tokens, outcome.window, outcome.context, outcome.sampled_tokens) == (600, window, 512, 10)
    policies = stream_policies(window)
    names = ["dense", *(policy.name for policy in policies[1:]), "window computed anew"]
    assert [stream.name for stream in outcome.streams] == names
    sample = list(range(window, 600))[56::57][:10]
    for policy, stream in zip(policies, outcome.streams, strict=False):
        dense = DenseRunner(llm.model.decoder, dense_attention(llm.model, policy.cache), llm.model.device)
        rows = dense.logits(ids).double().log_softmax(-1)
        loss = [-float(rows[i - 1, ids[i]]) for i in range(1, 600)]
        assert stream.perplexity == pytest.approx(_perplexity(loss[window - 1 :]), rel=1e-5)
        assert stream.sampled == pytest.approx(_perplexity([loss[i - 1] for i in sample]), rel=1e-5)
        parts = [loss[599 * part // SEGMENTS : 599 * (part + 1) // SEGMENTS] for part in range(SEGMENTS)]
        assert stream.segments == pytest.approx([_perplexity(part) for part in parts], rel=1e-5)
    anew = [-float(llm.logits(ids[i - window : i], last=True)[0, -1].double().log_softmax(-1)[ids[i]]) for i in sample]
    assert outcome.streams[-1].perplexity is None
    assert outcome.streams[-1].sampled == pytest.approx(_perplexity(anew), rel=1e-5)


def test_ways_with_sinks_see_as_many_tokens_as_the_window_without() -> None:
    seen = {policy.cache.window + policy.cache.sink_tokens for policy in stream_policies(64)[1:]}
    assert seen == {64}
    assert [policy.cache.sink_tokens for policy in stream_policies(64)] == [0, 0, 1, 2, 4, 8]
    assert [policy.cache.sink_tokens for policy in stream_policies(4)] == [0, 0, 1, 2]


def test_streams_need_a_text_that_is_long(llm: LLM) -> None:
    with pytest.raises(RequestError, match="not far longer than a window of 256: read 1,024 or more by --tokens"):
        compare_streaming(llm, random_prompt(600))
    with pytest.raises(RequestError, match="--streaming-window is 1"):
        compare_streaming(llm, random_prompt(600), window=1)


def _perplexity(losses: list[float]) -> float:
    return math.exp(sum(losses) / len(losses))


# -- the real model ----------------------------------------------------------------------------------------------------


def test_sinks_save_the_real_model_past_the_window(smollm: LLM) -> None:
    """arXiv:2309.17453: without the first tokens perplexity explodes; four of them bring it back."""
    ids = first_tokens(smollm.tokenizer, prose(512), 512)
    outcome = compare_streaming(smollm, ids, window=64, sampled=16)
    by = {stream.name: stream for stream in outcome.streams}
    none, four = by["window=64"], by["window=60,sinks=4,sink-rule=in_cache"]
    assert none.sampled > 2 * four.sampled
    assert none.perplexity is not None and four.perplexity is not None and none.perplexity > 2 * four.perplexity
    assert four.sampled == pytest.approx(by["window computed anew"].sampled, rel=0.5)
    assert four.bytes < by["dense"].bytes / 2


def test_the_prose_begins_as_the_model_reads_it(smollm: LLM) -> None:
    ids = first_tokens(smollm.tokenizer, prose(100), 100)
    assert len(ids) == 100 and smollm.tokenizer.decode(ids) == prose()[: len(smollm.tokenizer.decode(ids))]
    assert [*beginning(smollm.tokenizer), *ids] == smollm.encode(prose(100))[: 100 + len(beginning(smollm.tokenizer))]
    assert torch.tensor(ids).max() < smollm.tokenizer.vocab_size
