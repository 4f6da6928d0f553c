"""Attention by hand: each step against numbers worked out on paper."""

import json
import math

import pytest
import torch
import torch.nn.functional as F

from kvine import toy
from kvine.errors import RequestError


def test_each_step_has_the_numbers_of_paper() -> None:
    result = toy.attend(2)
    # x = (1, 1): q = ((1 + 1), (-1 + 1)); keys (1, 1), (0, 1), (1, 2), (-1, 0); values (2, -1), (0, 1), (2, 0), (-2, 2)
    assert result.query == (2, 0)
    assert result.keys == ((1, 1), (0, 1), (1, 2), (-1, 0))
    assert result.values == ((2, -1), (0, 1), (2, 0), (-2, 2))
    assert result.scores == (2, 0, 2, -2)
    assert result.scaled == pytest.approx((2**0.5, 0, 2**0.5, -(2**0.5)))
    assert result.masked == (*result.scaled[:3], -math.inf)
    total = 2 * math.exp(2**0.5) + 1
    weights = (math.exp(2**0.5) / total, 1 / total, math.exp(2**0.5) / total, 0)
    assert result.weights == pytest.approx(weights)
    assert result.output == pytest.approx((weights[0] * 2 + weights[2] * 2, -weights[0] + weights[1]))


def test_a_query_of_nothing_weighs_all_that_it_sees_alike() -> None:
    assert toy.attend(1, q_scale=0).weights == (0.5, 0.5, 0, 0)
    assert toy.attend(1, q_scale=0, mask=False).weights == (0.25, 0.25, 0.25, 0.25)


@pytest.mark.parametrize("position", range(4))
@pytest.mark.parametrize("q_scale", [-3.0, 0.5, 1.0, 1e6])
@pytest.mark.parametrize("mask", [True, False])
def test_it_is_the_attention_that_torch_computes(position: int, q_scale: float, mask: bool) -> None:
    x, w_q, w_k, w_v = (
        torch.tensor(rows, dtype=torch.float64) for rows in (toy.VECTORS, toy.W_QUERY, toy.W_KEY, toy.W_VALUE)
    )
    out = F.scaled_dot_product_attention(q_scale * x @ w_q.T, x @ w_k.T, x @ w_v.T, is_causal=mask)
    result = toy.attend(position, q_scale=q_scale, mask=mask)
    assert result.output == pytest.approx(out[position].tolist(), abs=1e-12)
    assert sum(result.weights) == pytest.approx(1)


@pytest.mark.parametrize("position", [-1, 4, 1.0, True, None])
def test_there_are_four_positions(position: object) -> None:
    with pytest.raises(RequestError, match="positions 0 to 3"):
        toy.attend(position)  # type: ignore[arg-type]


@pytest.mark.parametrize("q_scale", [math.nan, math.inf, 1e7])
def test_a_scale_is_a_number_in_range(q_scale: float) -> None:
    with pytest.raises(RequestError, match="out of range"):
        toy.attend(q_scale=q_scale)


def test_json_and_displays() -> None:
    result = toy.attend(1, q_scale=0)
    found = json.loads(json.dumps(result.to_json(), allow_nan=False))
    assert found["weights"] == [0.5, 0.5, 0, 0] and found["output"] == [1, 0]
    assert found["masked"] == [0, 0, None, None] and found["keys"][3] == [-1, 0]
    for shown in (str(result), result._repr_html_()):
        assert "0.5000" in shown and "0.0000" in shown and "−∞" in shown and "(1, 0)" in shown
