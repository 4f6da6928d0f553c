"""Work and reads are counted right, the text is the one that is generated, and every form of display holds it."""

import json
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_text import VOCABULARY, ids, write_tokenizer
from torch.utils.flop_counter import FlopCounterMode

from kvine import LLM, CacheConfig, Explanation, SamplingParams
from kvine.errors import ContextLengthError, RequestError, StepError
from kvine.explain.explanation import Token
from kvine.explain.words import count, layer_list
from kvine.hub import ModelSource

PROMPT = "Once upon a time"
WINDOW, HEADS, KV_HEADS, HEAD_DIM = 8, 4, 2, 16


@pytest.fixture(scope="module")
def oracle_and_llm(tiny: Callable[..., tuple[Any, Path]]) -> tuple[Any, LLM]:
    oracle, folder = tiny("TH")  # four layers, sliding (window 8) and full by turns
    source = ModelSource("tiny", write_tokenizer(folder), "safetensors", None)
    cache = CacheConfig(block_size=4, kv_dtype="fp16")
    return oracle, LLM(source, device="cpu", dtype="fp32", threads=1, cache=cache)


@pytest.fixture(scope="module")
def llm(oracle_and_llm: tuple[Any, LLM]) -> LLM:
    return oracle_and_llm[1]


@pytest.fixture(scope="module")
def explanation(llm: LLM) -> Explanation:
    return llm.explain(PROMPT, steps=3, layer=1, head=3, top=5)


def sees(layer: int, query: int, key: int) -> bool:
    return key <= query and (layer % 2 == 1 or query - key < WINDOW)


# -- what is counted ------------------------------------------------------------------------------------------------


def test_scores_and_reads_follow_what_each_query_sees(explanation: Explanation) -> None:
    for number, step in enumerate(explanation.steps):
        last = len(PROMPT) + number
        own = sum(sees(layer, last, key) for layer in range(4) for key in range(last + 1))
        every = sum(sees(layer, q, key) for layer in range(4) for q in range(last + 1) for key in range(last + 1))
        assert step.computed.scores == own * HEADS and step.cache_free.scores == every * HEADS
        assert step.computed.attention_flops == own * HEADS * HEAD_DIM * 2 * 2
        assert step.read.numbers == own * KV_HEADS * HEAD_DIM
        assert step.read.k_bytes == step.read.v_bytes == step.read.numbers * 2, "fp16 in the cache"


def test_one_token_is_computed_where_the_cache_free_way_computes_all(
    explanation: Explanation, oracle_and_llm: tuple[Any, LLM]
) -> None:
    for number, step in enumerate(explanation.steps):
        tokens = len(PROMPT) + number + 1
        assert (step.token.position, step.computed.tokens, step.cache_free.tokens) == (tokens - 1, 1, tokens)
        assert (step.computed.q.numbers, step.computed.k.numbers) == (4 * HEADS * HEAD_DIM, 4 * KV_HEADS * HEAD_DIM)
        assert step.computed.v == step.computed.k and step.computed.k.num_bytes == step.computed.k.numbers * 4
        for name in ("q", "k", "v"):
            one, all_of_them = getattr(step.computed, name), getattr(step.cache_free, name)
            assert all_of_them.numbers == tokens * one.numbers and all_of_them.flops == tokens * one.flops
        assert step.cache_free.other_flops == tokens * step.computed.other_flops
        for work in (step.computed, step.cache_free):
            assert work.flops == sum((work.q.flops, work.k.flops, work.v.flops, work.attention_flops, work.other_flops))


def test_flops_are_those_that_torch_counts_in_transformers(
    explanation: Explanation, oracle_and_llm: tuple[Any, LLM]
) -> None:
    oracle, work = oracle_and_llm[0], explanation.steps[0].cache_free
    text = torch.randint(0, 100, (1, work.tokens))
    with torch.inference_mode(), FlopCounterMode(display=False) as counter:
        oracle(text)
    head = 2 * work.tokens * oracle.config.hidden_size * oracle.config.vocab_size
    square = 2 * 2 * HEAD_DIM * HEADS * 4 * work.tokens**2  # it multiplies first and masks afterwards
    assert counter.get_total_flops() == work.flops - work.attention_flops + square + head


def test_the_cache_numbers_qkv_as_a_cache_free_run_shows_them(explanation: Explanation, llm: LLM) -> None:
    seen = {"q": 0, "k": 0, "v": 0}
    llm.dense.observer = lambda name, layer, tensor: seen.update(
        {name: seen[name] + tensor.numel()} if name in seen else {}
    )
    text = [token.token_id for token in explanation.tokens] + [explanation.steps[0].token.token_id]
    llm.logits(text)
    llm.dense.observer = None
    work = explanation.steps[0].cache_free
    assert seen == {"q": work.q.numbers, "k": work.k.numbers, "v": work.v.numbers}


def test_groups_say_what_the_cache_holds(explanation: Explanation) -> None:
    sliding, full = explanation.groups
    assert (sliding.layers, sliding.window, full.layers, full.window) == ((0, 2), WINDOW, (1, 3), None)
    assert full.k_shape == full.v_shape == (1, KV_HEADS, 16, HEAD_DIM)
    assert sliding.k_shape == (1, KV_HEADS, 8, HEAD_DIM), "two of four blocks are let go"
    assert [group.num_bytes for group in explanation.groups] == [2 * 2 * KV_HEADS * n * HEAD_DIM * 2 for n in (8, 16)]
    assert explanation.block_bytes == sum(group.num_bytes for group in explanation.groups), "whole blocks, all full"


def test_groups_of_packed_blocks_are_there_once_with_their_own_bytes(llm: LLM) -> None:
    for codec, bits in (("int8", (8, 8)), ("k8v4", (8, 4))):
        packed = LLM(llm.source, device="cpu", dtype="fp32", threads=1, cache=CacheConfig(4, kv_dtype=codec))
        explanation = packed.explain(PROMPT[:14], steps=0)
        assert [group.layers for group in explanation.groups] == [(0, 2), (1, 3)]
        full = explanation.groups[1]
        assert full.stored_as == ("int8" if codec == "int8" else "int8/int4") and full.k_shape[2] == 14
        scales = 4 * HEAD_DIM + 4 * 4  # of a block: a channel's key and a token's value have a scale and a minimum
        sealed = 4 * HEAD_DIM * sum(bits) // 8 + scales
        assert full.num_bytes == 2 * KV_HEADS * (3 * sealed + 2 * HEAD_DIM * 2 * 4)


# -- the text -------------------------------------------------------------------------------------------------------


def test_tokens_and_candidates_are_those_of_the_model(
    explanation: Explanation, oracle_and_llm: tuple[Any, LLM]
) -> None:
    oracle, llm = oracle_and_llm
    assert [(t.position, t.token_id, t.text) for t in explanation.tokens] == [
        (position, number, PROMPT[position]) for position, number in enumerate(ids(PROMPT))
    ]
    exact = LLM(llm.source, device="cpu", dtype="fp32", threads=1).explain(PROMPT, steps=0, top=5)
    with torch.inference_mode():
        logits = oracle(torch.tensor([ids(PROMPT)])).logits[0, -1, : len(VOCABULARY)]
    most = logits.softmax(-1).topk(5)
    assert [c.token_id for c in exact.candidates] == most.indices.tolist()
    torch.testing.assert_close(torch.tensor([c.probability for c in exact.candidates]), most.values, rtol=0, atol=1e-5)
    torch.testing.assert_close(torch.tensor([c.logit for c in exact.candidates]), logits[most.indices])


def test_the_steps_are_what_greedy_generation_does(explanation: Explanation, llm: LLM) -> None:
    generated = llm.generate(PROMPT, SamplingParams(max_tokens=4, ignore_eos=True)).token_ids
    assert [explanation.candidates[0].token_id, *(step.next.token_id for step in explanation.steps)] == generated
    assert [step.token.token_id for step in explanation.steps] == generated[:-1] and not explanation.ended


def test_it_stops_where_the_text_ends(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    generated = llm.generate(PROMPT, SamplingParams(max_tokens=4, ignore_eos=True)).token_ids
    monkeypatch.setattr(llm, "parts", replace(llm.parts, eos_ids=frozenset({generated[2]})))
    ended = llm.explain(PROMPT, steps=9)
    assert [step.token.token_id for step in ended.steps] == generated[:2] and ended.ended
    assert "ends the text after 2 steps" in str(ended)


def test_special_tokens_are_marked(llm: LLM) -> None:
    special, plain, unknown = llm.explain([VOCABULARY["<|user|>"], VOCABULARY["u"], 130], steps=0).tokens
    assert (special.text, special.special) == ("<|user|>", True)
    assert (plain.text, plain.special) == ("u", False) and (unknown.text, unknown.special) == ("", True)


# -- mistakes, and what is left behind ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"layer": 4}, "layers 0 to 3, and no layer 4"),
        ({"layer": -1}, "no layer -1"),
        ({"head": 99}, "query heads 0 to 3, and no query head 99"),
        ({"steps": -1}, "steps is -1"),
        ({"top": 0}, "top is 0"),
        ({"prompt": ""}, "no tokens"),
        ({"prompt": [131]}, "token ids from 0 to 130"),
    ],
)
def test_a_mistake_is_a_sentence(llm: LLM, options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(RequestError, match=sentence):
        llm.explain(**{"prompt": PROMPT, **options})


def test_a_text_that_does_not_fit_is_refused_before_it_is_read(llm: LLM) -> None:
    with pytest.raises(ContextLengthError, match="510 tokens of prompt and 3 decode steps do not fit"):
        llm.explain("x" * 510, steps=3)


def test_logits_that_are_no_numbers_are_reported(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llm.model.decoder, "logits", lambda hidden: torch.full((len(hidden), 131), torch.nan))
    with pytest.raises(StepError, match=f"The logits of {llm.source.path} have no finite maximum, but nan"):
        llm.explain(PROMPT)


def test_nothing_is_left_behind(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = llm.parts.runner
    before = runner.observer = lambda *_: None
    llm.explain(PROMPT)
    assert runner.observer is before

    def fails(*_: object, **__: object) -> None:
        raise RuntimeError("in the middle")

    monkeypatch.setattr(llm.model.decoder, "logits", fails)
    with pytest.raises(RuntimeError, match="in the middle") as caught:  # its traceback keeps what was local alive
        llm.explain(PROMPT)
    assert runner.observer is before
    runner.observer = None
    llm.engine.manager.check()
    assert llm.engine.manager.bytes_referenced == 0, caught


# -- views and displays ---------------------------------------------------------------------------------------------


def test_views_are_means_that_add_up_to_one(explanation: Explanation) -> None:
    weights = explanation.weights.double()
    for layer, head in ((None, None), (2, None), (None, 3), (2, 3)):
        view = explanation.attention(layer, head)
        picked = weights if layer is None else weights[layer : layer + 1]
        picked = picked if head is None else picked[:, head : head + 1]
        assert view.weights == pytest.approx(picked.mean((0, 1)).tolist(), abs=1e-12)
        assert sum(view.weights) == pytest.approx(1, abs=1e-6)
        assert view.kv_head == (None if head is None else 1)
    assert explanation.attention(0).visible == (False,) * 8 + (True,) * 8
    assert explanation.attention(0).weights[:8] == (0.0,) * 8
    assert explanation.attention(None).visible == (True,) * 16
    with pytest.raises(RequestError, match="no layer 7"):
        explanation.attention(7)


def test_json_is_strict_and_whole(explanation: Explanation) -> None:
    found = json.loads(json.dumps(explanation.to_json(), allow_nan=False))
    assert found["attention"]["layer"] == 1 and found["attention"]["head"] == 3
    assert found["attention"]["weights"] == list(explanation.attention(1, 3).weights)
    assert found["tokens"][1] == {"position": 1, "token_id": ids("n")[0], "text": "n", "special": False}
    assert [group["k_shape"] for group in found["groups"]] == [[1, 2, 8, 16], [1, 2, 16, 16]]
    step = found["steps"][0]
    assert step["computed"]["flops"] == explanation.steps[0].computed.flops
    assert {"q", "k", "v", "scores", "tokens"} <= step["cache_free"].keys()
    assert step["read"] == vars(explanation.steps[0].read)
    assert len(found["candidates"]) == 5 and "queries" in found["not_cached"]


class Tags(HTMLParser):
    """Collects tags, and holds them to being closed in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.open.append(tag)
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.text += data


def test_html_is_escaped_self_contained_and_has_its_numbers_as_text(explanation: Explanation) -> None:
    evil = Token(0, 7, "<script>alert(1)</script>", False)
    first = replace(explanation.candidates[0], text='"><img src=x onerror=alert(1)>')
    shown = replace(explanation, tokens=(evil, *explanation.tokens[1:]), candidates=(first,), model="<b>")
    parser = Tags()
    parser.feed(shown._repr_html_())
    tags = {tag for tag, _ in parser.seen}
    assert not parser.open
    assert tags == {"style", "div", "table", "caption", "thead", "tbody", "tr", "th", "td", "span", "p"}
    assert not any(name in ("src", "href") or name.startswith("on") for _, attrs in parser.seen for name in attrs)
    assert "'<script>alert(1)</script>'" in parser.text and "onerror" in parser.text
    for weight in shown.attention(1, 3).weights:
        assert f"{weight:.4f}" in parser.text
    assert sum(tag == "caption" for tag, _ in parser.seen) == sum(tag == "table" for tag, _ in parser.seen) == 6
    assert {attrs["scope"] for tag, attrs in parser.seen if tag == "th"} == {"col", "row"}


def test_print_shows_it_and_repr_is_short(explanation: Explanation) -> None:
    text = str(explanation)
    assert "layer 1, head 3 (K/V head 1)" in text and "Queries are not cached" in text
    for step in explanation.steps:
        assert f"Position {step.token.position}: {step.token.text!r} ({step.token.token_id}) goes in" in text
    assert repr(explanation) == "Explanation(tiny: 16 tokens of prompt, 3 decode steps)"


def test_words_for_numbers() -> None:
    assert [count(n) for n in (0, 99_999, 100_000, 1_234_567, 999_600, 2 * 10**12)] == [
        *("0", "99,999", "100 k", "1.23 M", "1 M", "2 T"),
    ]
    assert layer_list([0, 1, 2, 4, 6, 7]) == "0–2, 4, 6–7"
