import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvine.sampling.params import SamplingParams
from kvine.sampling.processors import add_bias, add_penalties, ban, draw, most_likely, nucleus

LOGITS = [2.0, -1.0, 0.5, 0.0, -3.0, 4.0, 1.0, -0.5]
PROMPT = [0, 1, 1]
OUTPUT = [5, 5, 4]


def penalized(params: SamplingParams, prompt: list[int], output: list[int]) -> list[float]:
    logits = torch.tensor(LOGITS, dtype=torch.float64)
    add_penalties(logits, params, prompt, output)
    return logits.tolist()


@pytest.mark.parametrize(
    ("window", "expected"),
    [
        (None, [1.0, -2.0, 0.5, 0.0, -6.75, 1.0, 1.0, -0.5]),
        (0, LOGITS),
        (1, [2.0, -1.0, 0.5, 0.0, -6.75, 4.0, 1.0, -0.5]),  # only the last 4
        (2, [2.0, -1.0, 0.5, 0.0, -6.75, 1.25, 1.0, -0.5]),  # 5 is counted once
        (3, [2.0, -1.0, 0.5, 0.0, -6.75, 1.0, 1.0, -0.5]),  # the output
        (4, [2.0, -2.0, 0.5, 0.0, -6.75, 1.0, 1.0, -0.5]),  # and the prompt's last 1
        (6, [1.0, -2.0, 0.5, 0.0, -6.75, 1.0, 1.0, -0.5]),
        (11, [1.0, -2.0, 0.5, 0.0, -6.75, 1.0, 1.0, -0.5]),
    ],
)
def test_d05_penalties_by_hand(window: int | None, expected: list[float]) -> None:
    params = SamplingParams(repetition_penalty=2.0, presence_penalty=0.5, frequency_penalty=0.25, penalty_window=window)
    assert penalized(params, PROMPT, OUTPUT) == expected


def test_d05_first_step_sees_the_prompt_and_only_repetition_does() -> None:
    repetition = SamplingParams(repetition_penalty=2.0)
    assert penalized(repetition, PROMPT, []) == [1.0, -2.0, *LOGITS[2:]]
    others = SamplingParams(presence_penalty=2.0, frequency_penalty=2.0)
    assert penalized(others, PROMPT, []) == LOGITS


def test_d05_a_penalty_below_one_favours_and_zero_stays_zero() -> None:
    params = SamplingParams(repetition_penalty=0.5, presence_penalty=-1.0)
    assert penalized(params, [0, 3], [4]) == [4.0, -1.0, 0.5, 0.0, -0.5, 4.0, 1.0, -0.5]


def test_bias_and_bans_by_hand_and_unknown_ids_change_nothing() -> None:
    logits = torch.tensor(LOGITS, dtype=torch.float64)
    add_bias(logits, {0: 1.5, 5: -math.inf, 8: 100.0, 2**70: 100.0})
    ban(logits, [2, 8, 2**70])
    assert logits.tolist() == [3.5, -1.0, -math.inf, 0.0, -3.0, -math.inf, 1.0, -0.5]


@given(st.lists(st.sampled_from([-math.inf, -1.0, 0.0, 0.5, 3.0]), min_size=1, max_size=40), st.integers(0, 50))
def test_most_likely_takes_the_lowest_ids_among_equals(values: list[float], k: int) -> None:
    expected = sorted(range(len(values)), key=lambda i: (-values[i], i))[:k]
    assert sorted(most_likely(torch.tensor(values), k).tolist()) == sorted(expected)


@pytest.mark.parametrize(
    ("probabilities", "top_p", "kept"),
    [
        ([0.1, 0.4, 0.2, 0.3], 0.0, [1]),
        ([0.1, 0.4, 0.2, 0.3], 0.39, [1]),
        ([0.1, 0.4, 0.2, 0.3], 0.41, [1, 3]),
        ([0.1, 0.4, 0.2, 0.3], 0.71, [1, 2, 3]),
        ([0.1, 0.4, 0.2, 0.3], 0.91, [0, 1, 2, 3]),
        ([0.25, 0.25, 0.25, 0.25], 0.0, [0]),
        ([0.25, 0.25, 0.25, 0.25], 0.5, [0, 1]),
        ([0.25, 0.25, 0.25, 0.25], 0.51, [0, 1, 2]),
        ([1.0, 0.0, 0.0], 0.999, [0]),
        ([0.0, 0.5, 0.5], 1 - 2**-53, [1, 2]),
    ],
)
def test_nucleus_by_hand(probabilities: list[float], top_p: float, kept: list[int]) -> None:
    weights = np.array(probabilities) / max(probabilities)
    with np.errstate(divide="ignore"):
        scores = np.log(weights)
    assert nucleus(scores, np.exp(scores), top_p).tolist() == kept


def test_draw_by_hand() -> None:
    weights = np.array([0.0, 1.0, 0.0, 2.0, 1.0, 0.0])
    points = [0.0, 0.2499, 0.25, 0.7499, 0.75, 1 - 2**-53]
    assert [draw(weights, u) for u in points] == [1, 1, 3, 3, 4, 4]


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=20), st.sampled_from([0.0, 0.5, 1 - 2**-53]))
def test_draw_never_takes_what_has_no_weight(weights: list[float], u: float) -> None:
    weights = [*weights, 1.0, 0.0]
    assert weights[draw(np.array(weights), u)] > 0
