"""The window experiment: its figures against the cache-free oracle, its texts token by token, and its edge by hand."""

import math
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
from checkpoints import tiny_model
from tiny_models import VOCAB, Subject, random_prompt, write_checkpoint, write_tokenizer
from tiny_text import write_tokenizer as write_character_tokenizer

from kvine.cache.spec import CacheSpec
from kvine.config import CacheConfig
from kvine.errors import ContextLengthError, RequestError
from kvine.evidence.experiments.edge import edges, first_key_seen
from kvine.evidence.experiments.scenes import SCENES, TALK, Scene, scene_text
from kvine.evidence.experiments.window import WindowExperiment, run_window_experiment, stepped
from kvine.hub import ModelSource
from kvine.llm import LLM
from kvine.text.tokenizer import tokenizer_from_folder

WINDOW = 12
SCENE = Scene("tiny", "w9 w8 w7 w6 w5", "w9 w8", "w20 w21", "w22", " w23 w24")
OTHER = Scene("other", "w1 w2 w3", "w1", "w40", "w41 w42", " w43")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    write_checkpoint(folder, "llama")
    write_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return LLM(ModelSource("tiny", folder, "safetensors", None), dtype="fp32", device="cpu", threads=1)


@pytest.fixture(scope="module")
def outcome(llm: LLM) -> WindowExperiment:
    return run_window_experiment(llm, window=WINDOW, turns=2, scenes=(SCENE, OTHER))


def oracle(folder: Path, llm: LLM, scene: Scene, told: bool, **cache: object) -> tuple[float, int, list[float]]:
    """Probability, rank, and losses past the window, without any cache."""
    text = scene_text(llm.tokenizer, scene, 2, told=told)
    ids = [*text.prompt, *text.answer]
    source = ModelSource("tiny", folder, "safetensors", None)
    logits = Subject.load(source, "fp32", CacheConfig(block_size=4, **cache)).dense.logits(ids)  # type: ignore[arg-type]
    logprobs = logits.log_softmax(-1)
    losses = [-float(logprobs[i, ids[i + 1]]) for i in range(len(ids) - 1)]
    answer = losses[len(text.prompt) - 1 :]
    row = logits[len(text.prompt) - 1].tolist()
    rank = sorted(row, reverse=True).index(row[text.answer[0]]) + 1
    return math.exp(-sum(answer)), rank, losses[WINDOW : len(text.prompt) - 1]


@pytest.mark.parametrize("number", range(5))
def test_every_way_of_keeping_gives_what_the_oracle_gives(
    folder: Path, llm: LLM, outcome: WindowExperiment, number: int
) -> None:
    pins = [scene_text(llm.tokenizer, scene, 2).pinned for scene in (SCENE, OTHER)]
    caches: list[tuple[bool, list[dict[str, object]]]] = [
        (True, [{}, {}]),
        (False, [{}, {}]),
        (True, [{"window": WINDOW}] * 2),
        (True, [{"window": WINDOW, "sink_tokens": 4, "sink_rule": "in_cache"}] * 2),
        (True, [{"window": WINDOW, "sink_tokens": pin} for pin in pins]),
    ]
    told, configs = caches[number]
    kept, losses = outcome.kept[number], []
    for recall, scene, config in zip(kept.recalls, (SCENE, OTHER), configs, strict=True):
        probability, rank, past = oracle(folder, llm, scene, told, **config)
        assert recall.probability == pytest.approx(probability, rel=1e-3) and recall.rank == rank
        losses += past
    assert kept.perplexity == pytest.approx(math.exp(np.mean(losses)), rel=1e-4)
    first, second = (recall.probability for recall in kept.recalls)
    assert kept.probability == pytest.approx(math.sqrt(first * second))


def test_what_is_visible_is_the_window_and_what_is_kept_beside_it(llm: LLM, outcome: WindowExperiment) -> None:
    pin = scene_text(llm.tokenizer, SCENE, 2).pinned
    assert [kept.visible for kept in outcome.kept[2:]] == [WINDOW, WINDOW + 4, WINDOW + pin]
    assert outcome.kept[0].visible == outcome.prompt_tokens


def test_a_plain_transcript_where_there_is_no_template(llm: LLM) -> None:
    text = scene_text(llm.tokenizer, SCENE, 0)
    expected = [9, 8, 7, 6, 5, 0, 20, 21, 0, 22]  # "User:" and "Assistant:" are unknown words
    assert (text.prompt, text.answer, text.pinned) == (expected, [23, 24], 6)
    longer = scene_text(llm.tokenizer, SCENE, len(TALK) + 1)
    assert longer.prompt[:6] == expected[:6] and longer.prompt[-5:] == expected[-5:]


def test_a_conversation_by_the_models_template(tmp_path: Path) -> None:
    tokenizer = tokenizer_from_folder(write_character_tokenizer(tmp_path))
    scene = SCENES[0]
    text = scene_text(tokenizer, scene, 1)
    asked, said = TALK[0]
    expected = (
        f"<|system|>{scene.system}<|end|><|user|>{asked}<|end|><|assistant|>{said}<|end|>"
        f"<|user|>{scene.question}<|end|><|assistant|>{scene.lead}"
    )
    assert tokenizer.decode(text.prompt, skip_special=False) == expected
    kept = tokenizer.decode(text.prompt[: text.pinned], skip_special=False)
    assert kept == f"<|system|>{scene.system}<|end|><|user|>", "up to where conversations begin to differ"
    assert tokenizer.decode(text.answer) == scene.answer


@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.name)
def test_only_the_first_message_knows_the_answer(scene: Scene) -> None:
    word = scene.answer.strip()
    talk = " ".join(" ".join(turn) for turn in TALK)
    assert word in scene.system and word not in scene.without + scene.question + scene.lead
    assert f" {word}" not in talk or word == "red"  # light passes through red; no vase does
    assert not scene.lead.endswith(" ") and scene.answer.startswith(" ")


def test_the_4097th_token_of_a_window_of_4096_loses_key_0() -> None:
    full, losing = edges(4096, 0, 32)
    assert (full.query, full.seen, full.first, full.last, full.lost) == (4095, 4096, 0, 4095, ())
    assert (losing.query, losing.seen, losing.first, losing.last, losing.lost) == (4096, 4096, 1, 4096, (0,))
    assert losing.block_freed_at == 4096 + 31, "keys 0 to 31 go together, with the block"


def test_sinks_beside_a_window_move_the_loss() -> None:
    full, losing = edges(4096, 4, 32)
    assert (full.query, full.seen, full.lost) == (4099, 4100, ())
    assert (losing.query, losing.seen, losing.first, losing.lost) == (4100, 4100, 5, (4,))
    assert losing.block_freed_at is None, "its block holds the sinks"
    assert edges(4096, 32, 32)[1].block_freed_at == 4096 + 63


@pytest.mark.parametrize("kind", ["llama", "gemma3"])  # whose layer 0 has a window of its own, of 8
def test_in_the_model_the_first_key_is_seen_once_more_and_then_not(tmp_path: Path, kind: str) -> None:
    source = write_checkpoint(tmp_path, kind)
    write_tokenizer(tmp_path)
    llm = LLM(source, dtype="fp32", device="cpu", threads=1)
    seen = first_key_seen(stepped(llm, CacheConfig(window=WINDOW)), random_prompt(40))
    assert seen.window == (8 if kind == "gemma3" else WINDOW)
    assert seen.last_to_see > 1e-3 and seen.first_to_miss == 0


def test_a_window_that_is_one_too_wide_is_seen(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVINE_KERNELS", "off")  # a backend that asks `visible` for every pair

    def visible(spec: CacheSpec, q, k):
        return (k <= q) & (q - k <= spec.window)

    def window_start(spec: CacheSpec, q: int) -> int:
        return max(0, q - spec.window)

    with patch.object(CacheSpec, "visible", visible), patch.object(CacheSpec, "window_start", window_start):
        seen = first_key_seen(stepped(llm, CacheConfig(window=WINDOW)), random_prompt(40))
    assert seen.first_to_miss > 1e-3


def test_texts_that_show_nothing_are_refused(llm: LLM) -> None:
    with pytest.raises(RequestError, match="still sees the first message: raise turns"):
        run_window_experiment(llm, window=200, turns=1, scenes=(SCENE,))
    with pytest.raises(ContextLengthError, match="lower turns"):
        run_window_experiment(llm, window=WINDOW, turns=40, scenes=(SCENE,))


def test_a_fact_is_kept_if_it_is_nearer_to_kept_than_to_never_told(outcome: WindowExperiment) -> None:
    everything, never = outcome.kept[0], outcome.kept[1]
    middle = math.sqrt(everything.probability * never.probability)
    for kept in outcome.kept:
        assert outcome.keeps(kept) is (kept.probability > middle)
    assert outcome.tells is (everything.probability > 10 * never.probability)


def test_another_vocabulary_than_the_models_is_no_trouble(tmp_path: Path) -> None:
    _, folder = tiny_model("llama", vocab_size=VOCAB, max_position_embeddings=1024)
    write_character_tokenizer(folder)
    llm = LLM(ModelSource("tiny", folder, "safetensors", None), dtype="fp32", device="cpu", threads=1)
    outcome = run_window_experiment(llm, window=64, turns=1, scenes=SCENES[:1])
    assert all(math.isfinite(kept.perplexity) for kept in outcome.kept)
    assert torch.tensor([kept.probability for kept in outcome.kept]).min() > 0
