"""Samples and beams through `LLM`: what users get, what streams refuse, and the real model beside transformers."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from beam_oracles import same_beams, transformers_beams
from checkpoints import tiny_model
from tiny_text import write_tokenizer

from kvine import LLM, CacheConfig, SamplingParams
from kvine.config import EngineConfig
from kvine.errors import ContextLengthError, RequestError
from kvine.evidence.transformers_path import TransformersPath
from kvine.hub import ModelSource

BEAMS = SamplingParams(num_beams=3, max_tokens=8, ignore_eos=True)
SAMPLES = SamplingParams(n=3, temperature=1.0, seed=5, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module", autouse=True)
def threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def checkpoint() -> tuple[Any, Path]:
    oracle, folder = tiny_model("TL", max_position_embeddings=64, initializer_range=0.12)
    return oracle, write_tokenizer(folder)


def open_llm(checkpoint: tuple[Any, Path], **options: Any) -> LLM:
    source = ModelSource("tiny", checkpoint[1], "safetensors", None)
    cache = options.pop("cache", CacheConfig(block_size=4))
    return LLM(source, device="cpu", dtype="fp32", threads=1, cache=cache, **options)


@pytest.fixture
def llm(checkpoint: tuple[Any, Path]) -> LLM:
    return open_llm(checkpoint)


def test_beams_come_best_first_and_the_first_is_the_answer(llm: LLM) -> None:
    answer = llm.generate("Once upon a time", BEAMS)
    scores = [choice.score for choice in answer.choices]
    assert len(scores) == 3 and scores == sorted(scores, reverse=True)
    best = answer.choices[0]
    assert (answer.text, answer.token_ids, answer.finish_reason) == (best.text, best.token_ids, "length")
    assert all(choice.text == llm.tokenizer.decode(choice.token_ids) for choice in answer.choices)
    assert answer.usage.completion_tokens == 24 and answer.logprobs is None
    assert answer.timings.prefill_s > 0 and answer.timings.decode_ms > 0
    ids = llm.encode("Once upon a time")
    known = llm.parts.sampler.vocab_size
    row = llm.logits([*ids, *best.token_ids])[0, len(ids) - 1 : -1, :known].double().log_softmax(-1)
    total = sum(float(row[place, token]) for place, token in enumerate(best.token_ids))
    assert best.score == pytest.approx(total / 8, abs=1e-5)
    recomputed = llm.generate("Once upon a time", BEAMS, use_cache=False).choices
    assert [choice.text for choice in recomputed] == [choice.text for choice in answer.choices]


def test_samples_come_in_their_order_each_with_its_own_end(llm: LLM) -> None:
    stopping = llm.tokenizer.decode(llm.generate("Once upon a time", SAMPLES).choices[1].token_ids)[3:5]
    params = SamplingParams(n=3, temperature=1.0, seed=5, max_tokens=8, ignore_eos=True, stop=(stopping,), logprobs=1)
    answer = llm.generate("Once upon a time", params)
    assert answer.choices[1].finish_reason == "stop" and stopping not in answer.choices[1].text
    assert len({choice.text for choice in answer.choices}) == 3
    assert all(c.score is None and c.logprobs and len(c.logprobs) == len(c.token_ids) for c in answer.choices)
    assert answer.usage.completion_tokens == sum(len(choice.token_ids) for choice in answer.choices)
    alone = llm.generate("Once upon a time", SamplingParams(**{**vars(params), "n": 1}))
    assert alone.text == answer.choices[0].text and len(alone.choices) == 1


def test_they_run_beside_others_and_in_threads_of_one_engine(llm: LLM) -> None:
    alone = [llm.generate("Once upon", params) for params in (BEAMS, SAMPLES, SamplingParams(max_tokens=8))]
    together = llm.generate(["Once upon"] * 3, [BEAMS, SAMPLES, SamplingParams(max_tokens=8)])
    assert [[c.text for c in one.choices] for one in together] == [[c.text for c in one.choices] for one in alone]
    llm.engine.manager.check()
    assert llm.engine.manager.bytes_referenced == 0


def test_a_stream_of_several_texts_is_refused_and_chat_gives_them_all(llm: LLM) -> None:
    for params, name in ((BEAMS, "num_beams=3"), (SAMPLES, "n=3")):
        with pytest.raises(RequestError, match=f"A stream shows one text as it comes, and {name} asks for several"):
            llm.stream("Once upon", params)
        with pytest.raises(RequestError, match="use generate or chat"):
            llm.stream_chat([{"role": "user", "content": "Hi"}], params)
        assert len(llm.chat([{"role": "user", "content": "Hi"}], params).choices) == 3
    assert not llm.engine.busy


def test_what_cannot_fit_is_refused_before_anything_runs(checkpoint: tuple[Any, Path]) -> None:
    with pytest.raises(RequestError, match="3 beams take 3 tokens in each step"):
        open_llm(checkpoint, engine=EngineConfig(max_step_tokens=2)).generate("Once upon", BEAMS)
    small = open_llm(checkpoint, cache=CacheConfig(block_size=4, kv_memory=5 * 4 * 3 * 2 * 2 * 16 * 4))
    prompt = list(range(3, 17))  # 14 tokens: three whole blocks in common, and one for each beam
    with pytest.raises(ContextLengthError, match="can hold for 3 beams"):
        small.generate(prompt, BEAMS)
    assert small.generate(prompt, SamplingParams(max_tokens=2, ignore_eos=True)).finish_reason == "length"


def test_beams_of_a_full_context_say_so(llm: LLM) -> None:
    answer = llm.generate(list(range(3, 60)), SamplingParams(num_beams=2, max_tokens=None, ignore_eos=True))
    assert [choice.finish_reason for choice in answer.choices] == ["context"] * 2
    assert "context of 64 tokens" in (answer.detail or "")


def test_beams_that_are_closed_in_the_middle_hold_nothing(llm: LLM) -> None:
    running = llm.begin(llm.encode("Once upon"), BEAMS)
    llm.pump(llm.engine)
    llm.pump(llm.engine)
    running.close()
    assert [choice.finish_reason for choice in running.result.choices] == ["abort"] * 3
    assert llm.engine.manager.bytes_referenced == 0


def test_smollm2_finds_the_beams_of_transformers() -> None:
    """The real model in fp32: two prompts of uneven length at once, padded there and not here."""
    llm = LLM("smollm2-135m", dtype="fp32", device="cpu")
    oracle = TransformersPath(llm.source, torch.float32, llm.model.device)._model
    prompts = [llm.encode("The capital of France is"), llm.encode("Once upon a time, in a village by the sea,")]
    ends = sorted(llm.parts.eos_ids)
    for length_penalty, early_stopping, num_beams in ((1.0, False, 4), (2.0, "never", 3), (-1.0, True, 2)):
        params = SamplingParams(
            num_beams=num_beams, max_tokens=6, length_penalty=length_penalty, early_stopping=early_stopping
        )
        found = [[(c.token_ids, c.score or 0.0) for c in one.choices] for one in llm.generate(prompts, params)]
        same_beams(found, transformers_beams(oracle, prompts, params, ends), rel=1e-3)
