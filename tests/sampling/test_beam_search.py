"""Beam search on its own, over logits that are written down."""

import math

import pytest
import torch
from torch import Tensor

from kvine.errors import StepError
from kvine.sampling.beam_search import BeamSearch, Continuation, EarlyStopping

END = 3


def search(
    num_beams: int = 2,
    *,
    length_penalty: float = 1.0,
    early_stopping: EarlyStopping = False,
    max_length: int = 4,
    min_length: int = 0,
) -> BeamSearch:
    return BeamSearch(
        num_beams,
        length_penalty=length_penalty,
        early_stopping=early_stopping,
        end_ids={END},
        max_length=max_length,
        min_length=min_length,
    )


def logits(*rows: list[float]) -> Tensor:
    """Rows of probabilities, as logits."""
    return torch.tensor(rows).log()


def test_one_step_by_hand() -> None:
    beams = search()
    assert beams.advance(logits([0.5, 0.3, 0.1, 0.1])) == [Continuation(0, 0), Continuation(0, 1)]
    # 0.5 × 0.4 and 0.3 × 0.8 against 0.5 × 0.3: both next lines may come of either.
    assert beams.advance(logits([0.4, 0.3, 0.2, 0.1], [0.05, 0.8, 0.05, 0.1])) == [
        Continuation(1, 1),
        Continuation(0, 0),
    ]
    assert beams.finished == [] and beams.num_lines == 2


def test_one_line_may_take_all_places() -> None:
    beams = search()
    beams.advance(logits([0.89, 0.09, 0.01, 0.01]))
    assert beams.advance(logits([0.3, 0.3, 0.3, 0.1], [0.9, 0.04, 0.03, 0.03])) == [
        Continuation(0, 0),
        Continuation(0, 1),  # of equals the lowest id, which is also deterministic
    ]


def test_an_end_outside_the_best_beams_ends_nothing() -> None:
    beams = search()
    beams.advance(logits([0.4, 0.35, 0.05, 0.2]))
    assert beams.finished == []
    beams.advance(logits([0.1, 0.1, 0.1, 0.7], [0.4, 0.3, 0.2, 0.1]))
    assert [h.token_ids for h in beams.finished] == [(0, END)] and beams.finished[0].ended
    assert beams.finished[0].score == pytest.approx(math.log(0.28) / 2)


@pytest.mark.parametrize(("length_penalty", "first"), [(0.0, (END,)), (2.0, (0, 0, 0))])
def test_the_length_penalty_favours_short_or_long(length_penalty: float, first: tuple[int, ...]) -> None:
    beams = search(length_penalty=length_penalty, early_stopping="never", max_length=3)
    while beams.advance(logits(*[[0.55, 0.03, 0.02, 0.4]] * beams.num_lines)):
        pass
    assert beams.finished[0].token_ids == first and len(beams.finished) == 2


def test_when_it_stops() -> None:
    """At the first chance, when the best line falls behind, or when it can no longer win at any length."""
    lasted: dict[EarlyStopping, int] = {}
    for early_stopping in (True, False, "never"):
        beams = search(early_stopping=early_stopping, max_length=30)
        steps = 1
        while beams.advance(logits(*[[0.6, 0.05, 0.05, 0.3]] * beams.num_lines)):
            steps += 1
        lasted[early_stopping] = steps  # type: ignore[index]
    assert lasted[True] < lasted[False] <= lasted["never"] == 30


def test_min_length_holds_the_end_back() -> None:
    beams = search(min_length=2)
    beams.advance(logits([0.1, 0.1, 0.1, 0.7]))
    beams.advance(logits([0.1, 0.1, 0.1, 0.7], [0.1, 0.1, 0.1, 0.7]))
    assert beams.finished == []
    beams.advance(logits([0.1, 0.1, 0.1, 0.7], [0.1, 0.1, 0.1, 0.7]))
    assert {len(h.token_ids) for h in beams.finished} == {3}


def test_the_limit_ends_all_lines() -> None:
    beams = search(max_length=1)
    assert beams.advance(logits([0.5, 0.3, 0.1, 0.1])) == []
    assert [(h.token_ids, h.ended) for h in beams.finished] == [((0,), False), ((1,), False)]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_unusable_logits_change_nothing(bad: float) -> None:
    beams = search()
    with pytest.raises(StepError):
        beams.advance(torch.tensor([[0.0, bad, 0.0, 0.0]]))
    assert beams.num_lines == 1 and beams.finished == []
