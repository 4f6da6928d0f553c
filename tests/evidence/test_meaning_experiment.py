"""The meaning experiment against transformers' own keys and values, and what it makes of words and their tokens."""

import math
from pathlib import Path

import pytest
import torch
import transformers
from checkpoints import tiny_model
from tiny_models import VOCAB, write_checkpoint, write_tokenizer
from tiny_text import ids as character_ids
from tiny_text import write_tokenizer as write_character_tokenizer

from kvine.errors import ContextLengthError, RequestError
from kvine.evidence.experiments.meaning import compare_meaning, distance
from kvine.evidence.prompts import APPLE, BITTEN_APPLE, NEW_APPLE
from kvine.hub import ModelSource
from kvine.llm import LLM

ONE, TWO = "w3 w7 w50 w9", "w4 w8 w50"  # w50 at positions 2 and 2
MOVED = "w4 w8 w90 w50"  # and at 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    write_checkpoint(folder, "llama")
    write_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return LLM(ModelSource("tiny", folder, "safetensors", None), dtype="fp32", device="cpu", threads=1)


def their_kv(folder: Path, ids: list[int]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Keys before rotation and values of every layer, [N, Hkv × D], from transformers' projections."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    keys: list[torch.Tensor] = []
    values: list[torch.Tensor] = []
    for layer in model.model.layers:
        layer.self_attn.k_proj.register_forward_hook(lambda m, i, out: keys.append(out[0]))
        layer.self_attn.v_proj.register_forward_hook(lambda m, i, out: values.append(out[0]))
    with torch.no_grad():
        model(torch.tensor([ids]))
    return keys, values


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / torch.sqrt((a.norm() ** 2 + b.norm() ** 2) / 2))


def test_distances_are_those_of_transformers_keys_and_values(folder: Path, llm: LLM) -> None:
    outcome = compare_meaning(llm, (ONE, MOVED), "w50")
    (token,) = outcome.tokens
    assert (token.token_id, token.positions) == (50, (2, 3)) and outcome.pieces[1] == ("w4", "w8", "w90", "w50")
    keys_one, values_one = their_kv(folder, [3, 7, 50, 9])
    keys_two, values_two = their_kv(folder, [4, 8, 90, 50])
    for layer in token.layers:
        n = layer.layer
        k, v = (keys_one[n][2], keys_two[n][3]), (values_one[n][2], values_two[n][3])
        if n:
            assert layer.key.relative == pytest.approx(relative(*k), abs=1e-4)
            assert layer.value.relative == pytest.approx(relative(*v), abs=1e-4)
            assert layer.key.cosine == pytest.approx(1 - float(torch.cosine_similarity(*k, dim=0)), abs=1e-4)
        others = sorted(relative(keys_one[n][2], keys_one[n][i]) for i in (0, 1, 3))
        assert layer.others_key.relative == pytest.approx(others[1], abs=1e-4)


def test_equal_in_layer_0_and_apart_later(llm: LLM) -> None:
    (token,) = compare_meaning(llm, (ONE, MOVED), "w50").tokens
    first, *later = token.layers
    assert first.key.relative < 1e-6 and first.value.relative < 1e-6
    assert all(layer.key.relative > 0.01 and layer.value.relative > 0.01 for layer in later)
    assert first.rotated_key.relative > 0.01, "another position is another rotation"


def test_rotated_keys_are_what_the_cache_holds(llm: LLM) -> None:
    (token,) = compare_meaning(llm, (ONE, MOVED), "w50").tokens
    held = []
    for sentence, position in ((ONE, 2), (MOVED, 3)):
        _, cache = llm.forward(sentence)
        held.append([cache.layer(n)[0][0, :, position].flatten() for n in range(3)])
        cache.close()
    for layer, one, two in zip(token.layers, *held, strict=True):
        assert layer.rotated_key.relative == pytest.approx(relative(one, two), abs=1e-5)


def test_at_equal_positions_rotation_changes_no_distance(llm: LLM) -> None:
    (token,) = compare_meaning(llm, (ONE, TWO), "w50").tokens
    assert token.positions == (2, 2)
    for layer in token.layers:
        assert layer.rotated_key.relative == pytest.approx(layer.key.relative, abs=1e-6)


def test_the_same_beginning_is_no_difference_at_all(llm: LLM) -> None:
    (token,) = compare_meaning(llm, ("w3 w50 w9", "w3 w50 w8 w7"), "w50").tokens
    assert all(layer.value.relative < 1e-6 for layer in token.layers), "what comes later cannot reach back"


def test_a_word_of_several_tokens_and_its_last_occurrence(tmp_path: Path) -> None:
    _, folder = tiny_model("llama", vocab_size=VOCAB)
    write_character_tokenizer(folder)
    llm = LLM(ModelSource("tiny", folder, "safetensors", None), dtype="fp32", device="cpu", threads=1)
    outcome = compare_meaning(llm, ("an oak, one oak", "my oak"), "oak")
    assert [token.token_id for token in outcome.tokens] == character_ids("oak")
    assert [token.positions for token in outcome.tokens] == [(12, 3), (13, 4), (14, 5)]
    assert all(token.layers[0].key.relative < 1e-6 < token.layers[1].key.relative for token in outcome.tokens)


def test_mistakes_are_sentences(llm: LLM) -> None:
    with pytest.raises(RequestError, match="does not hold 'w51'"):
        compare_meaning(llm, (ONE, TWO), "w51")
    with pytest.raises(RequestError, match="word is empty"):
        compare_meaning(llm, (ONE, TWO), "")
    with pytest.raises(RequestError, match="cuts 'w5' into"):  # inside w50 in the one, a token in the other
        compare_meaning(llm, (ONE, "w1 w5"), "w5")
    with pytest.raises(ContextLengthError, match="512 are read at once"):
        compare_meaning(llm, (" ".join(["w50"] * 513), TWO), "w50")


def test_distance_at_its_landmarks() -> None:
    east, north = torch.tensor([3.0, 0.0]), torch.tensor([0.0, 3.0])
    assert distance(east, east) == distance(north, north) and distance(east, east).relative == 0
    assert distance(east, north).relative == pytest.approx(math.sqrt(2))
    assert distance(east, north).cosine == pytest.approx(1)
    assert distance(east, -east).relative == pytest.approx(2) and distance(east, -east).cosine == pytest.approx(2)
    assert distance(east, 2 * east).cosine == 0
    assert distance(east, 2 * east).relative == pytest.approx(3 / math.sqrt((9 + 36) / 2))
    near = torch.tensor([3.0, 1e-6], dtype=torch.float64)
    assert distance(east, near).cosine == pytest.approx(5.56e-14, rel=1e-2), "nothing is lost to rounding near 0"


def test_both_apples_share_their_word() -> None:
    assert BITTEN_APPLE.endswith(APPLE) and NEW_APPLE.endswith(APPLE) and BITTEN_APPLE != NEW_APPLE
