"""Writing without end: tokens, bytes and perplexity against other ways to them, and the real model past its window."""

import math
from pathlib import Path

import pytest
import torch
from tiny_models import write_checkpoint, write_tokenizer

from kvine.config import CacheConfig
from kvine.errors import RequestError
from kvine.evidence.experiments.endless import TEMPERATURE, TOP_P, Endless, Piece, Written, check_endless, run_endless
from kvine.evidence.quality.texts import first_tokens, prose
from kvine.hub import ModelSource
from kvine.llm import LLM
from kvine.sampling.params import SamplingParams

PROMPT, TOKENS, WINDOW, SINKS, PLACES, PIECE = "w3 w5 w9", 600, 40, 3, 4, 30  # the context is 512
BLOCK_BYTES = 32 * 2 * 3 * 2 * 16 * 4  # tokens, K and V, layers, heads, dimensions, fp32


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> ModelSource:
    folder: Path = tmp_path_factory.mktemp("tiny")
    write_checkpoint(folder, "llama")
    write_tokenizer(folder)
    return ModelSource("tiny", folder, "safetensors", None)


def load(source: ModelSource, **cache: object) -> LLM:
    return LLM(source, dtype="fp32", device="cpu", threads=1, cache=CacheConfig(**cache))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def outcome(source: ModelSource) -> Endless:
    return run_endless(
        load(source),
        tokens=TOKENS,
        window=WINDOW,
        sinks=SINKS,
        places=PLACES,
        piece=PIECE,
        passage=0,
        prompt=PROMPT,
        seed=5,
    )


def test_both_texts_are_those_of_one_sampled_request(source: ModelSource, outcome: Endless) -> None:
    params = SamplingParams(max_tokens=TOKENS, temperature=TEMPERATURE, top_p=TOP_P, seed=5, ignore_eos=True)
    with_sinks, without = outcome.written
    llm = load(source, window=WINDOW, sink_tokens=SINKS, sink_rule="in_cache")
    assert list(with_sinks.ids) == llm.generate(PROMPT, params).token_ids
    kept = load(source, window=WINDOW + SINKS).generate(PROMPT, params)
    assert kept.finish_reason == "context" and list(without.ids[: len(kept.token_ids)]) == kept.token_ids
    assert len(without.ids) == TOKENS, "past the model's context too"
    assert with_sinks.ids != without.ids


def test_bytes_are_those_of_the_blocks_that_the_next_query_sees(outcome: Endless) -> None:
    starts = [(TOKENS - PIECE) * place // (PLACES - 1) for place in range(PLACES)]
    for text, window, sinks in zip(outcome.written, (WINDOW, WINDOW + SINKS), (SINKS, 0), strict=True):
        held = []
        for written in range(TOKENS):
            computed = 3 + written  # the prompt, and all but the last one written
            visible = [k for k in range(computed) if computed - k < window or k < sinks]
            held.append(len({k // 32 for k in visible}) * BLOCK_BYTES)
        assert [piece.start for piece in text.pieces] == starts
        assert [piece.held for piece in text.pieces] == [
            max(held[start:end]) for start, end in zip(starts, [*starts[1:], TOKENS], strict=True)
        ]
        assert len({piece.held for piece in text.pieces[1:-1]}) == 1, "memory is constant"
        assert max(held) <= text.planned


def test_perplexity_is_of_the_part_by_itself(source: ModelSource, outcome: Endless) -> None:
    llm = load(source)
    for text in outcome.written:
        for piece in text.pieces:
            ids = list(text.ids[piece.start : piece.start + PIECE])
            rows = llm.logits(ids)[0].double().log_softmax(-1)
            loss = -sum(float(rows[i, ids[i + 1]]) for i in range(PIECE - 1)) / (PIECE - 1)
            assert piece.perplexity == pytest.approx(math.exp(loss), rel=1e-4)
            grams = [ids[i : i + 4] for i in range(PIECE - 3)]
            assert piece.repeated == pytest.approx(sum(g in grams[:i] for i, g in enumerate(grams)) / len(grams))
        mean = math.prod(piece.perplexity for piece in text.pieces[1:]) ** (1 / (PLACES - 1))
        assert text.perplexity == pytest.approx(mean)


def test_turns_read_prose_and_write_on(source: ModelSource) -> None:
    """Each turn writes what one request over all of the text before it writes, past the model's context too."""
    outcome = run_endless(
        load(source), tokens=600, window=WINDOW, sinks=SINKS, places=3, piece=40, passage=20, prompt=PROMPT, seed=3
    )
    with_sinks, without = outcome.written
    llm, exact = load(source, window=WINDOW, sink_tokens=SINKS, sink_rule="in_cache"), load(source)
    text, prose_ids = llm.encode(PROMPT), first_tokens(llm.tokenizer, prose(600), 600)
    for turn in range(15):
        text += prose_ids[20 * turn : 20 * (turn + 1)]
        params = SamplingParams(max_tokens=20, temperature=TEMPERATURE, top_p=TOP_P, seed=3, ignore_eos=True)
        text += llm.generate(text, params).token_ids
    assert [*llm.encode(PROMPT), *with_sinks.ids[:600]] == text and len(without.ids) == 600
    assert with_sinks.ids != without.ids
    for piece in with_sinks.pieces:
        lost = []
        for turn in (piece.start, piece.start + 40):
            ids = list(with_sinks.ids[turn : turn + 40])
            rows = exact.logits(ids)[0].double().log_softmax(-1)
            lost += [-float(rows[i - 1, ids[i]]) for i in range(20, 40)]
        assert piece.perplexity == pytest.approx(math.exp(sum(lost) / 40), rel=1e-4)
    assert [piece.start for piece in with_sinks.pieces] == [0, 240, 520]


@pytest.mark.slow
def test_smollm2_stays_fluent_past_its_window_with_sinks_and_not_without() -> None:
    outcome = run_endless(LLM("smollm2-135m", threads=1), tokens=768, window=64, places=3, piece=128, passage=32)
    with_sinks, without = outcome.written
    assert with_sinks.circles is None, "or its perplexity would say nothing"
    assert with_sinks.perplexity < without.perplexity / 1.5
    assert len({piece.held for piece in with_sinks.pieces[1:]}) == 1


def test_a_text_in_circles_is_told_from_a_fluent_one() -> None:
    """The perplexity of a loop is the lowest of all: it must never pass for fluency."""
    fluent, loop = Piece(0, 8.0, 0.1, 1), Piece(50, 1.2, 0.98, 1)
    assert Written("", (fluent, fluent), 1, (), "").circles is None
    assert Written("", (fluent, loop), 1, (), "").circles == 50


@pytest.mark.slow
def test_50000_tokens_in_constant_memory_are_fluent_with_sinks_and_not_without() -> None:
    outcome = run_endless(LLM("smollm2-135m", threads=torch.get_num_threads()), tokens=50_000)
    assert outcome.tokens > 6 * outcome.context
    for text in outcome.written:
        assert len(text.ids) == 50_000
        assert len({piece.held for piece in text.pieces}) == 1 and text.pieces[0].held <= text.planned
    with_sinks, without = outcome.written
    assert with_sinks.circles is None, "or its perplexity would say nothing"
    assert with_sinks.perplexity < without.perplexity / 1.5
    last = [piece.perplexity for piece in with_sinks.pieces[-4:]]
    assert math.prod(last) ** (1 / 4) < 2 * with_sinks.perplexity, "it does not get worse"


@pytest.mark.parametrize(
    ("numbers", "said"),
    [
        ((1000, 1, 4, 2, 64), "--window is 1"),
        ((1000, 64, 0, 2, 64), "--sinks is 0"),
        ((1000, 64, 4, 1, 64), "--places is 1"),
        ((1000, 64, 4, 2, 4), "--piece is 4"),
        ((1000, 64, 4, 2, 64, 4), "--passage is 4"),
        ((1000, 64, 4, 2, 64, 10), "--piece is 64, and a turn writes 10 tokens"),
        ((1000, 64, 4, 8, 64, 64), "1,000 tokens have no room for 8 parts of 64"),
        ((1000, 64, 4, 8, 512, 0), "1,000 tokens have no room for 8 parts of 512: raise --tokens, or lower --places"),
    ],
)
def test_what_cannot_be_is_a_sentence(numbers: tuple[int, ...], said: str) -> None:
    with pytest.raises(RequestError, match=said):
        check_endless(*numbers)


def test_a_part_that_the_model_cannot_read_is_a_sentence(source: ModelSource) -> None:
    with pytest.raises(RequestError, match="does not fit the model's context of 512, in which it is judged"):
        run_endless(load(source), tokens=2000, places=2, piece=600, passage=0)
