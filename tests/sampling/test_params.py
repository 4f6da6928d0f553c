import copy
import dataclasses
import math
import pickle
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from kvine.errors import RequestError
from kvine.sampling.params import NOT_WITH_BEAMS, SamplingParams

NAN, INF = math.nan, math.inf

REFUSED = [
    *[("temperature", v) for v in (NAN, INF, -INF, -1, -1e-9, "0.7", None, True, 10**400, [1])],
    *[("top_p", v) for v in (NAN, INF, -0.1, 1.1, "1", None, False)],
    *[("min_p", v) for v in (NAN, INF, -0.1, 1.1, "0", None)],
    *[("top_k", v) for v in (-2, 1.5, 40.0, "40", None, True)],
    *[("repetition_penalty", v) for v in (NAN, INF, 0, 0.0, -1, None)],
    *[("presence_penalty", v) for v in (NAN, -2.1, 2.1, None)],
    *[("frequency_penalty", v) for v in (NAN, -2.1, 2.1, INF)],
    *[("penalty_window", v) for v in (-1, 1.0, "3", False)],
    *[("max_tokens", v) for v in (-1, 1.0, "16", True)],
    *[("min_tokens", v) for v in (-1, 1.0, None, 257)],
    *[("seed", v) for v in (-1, 2**64, 1.0, "7", True, NAN)],
    *[("logprobs", v) for v in (-1, 1.0, True, "5")],
    *[("logit_bias", v) for v in ({1: NAN}, {1: INF}, {1: "2"}, {1: None}, {1: True}, {-1: 0.0}, {1.0: 0.0})],
    *[("logit_bias", v) for v in ({"-1": 0.0}, {"x": 0.0}, {"²": 0.0}, {True: 0.0}, {"7": 0.0, 7: 1.0}, None, [1])],
    *[("stop", v) for v in ("", ("a", ""), (1,), None, {"a": 1}, 7, b"a")],
    *[("stop_token_ids", v) for v in ((-1,), ("1",), (1.0,), (True,), 5, None, "12")],
    *[("ignore_eos", v) for v in (1, None, "true")],
]


@pytest.mark.parametrize(("name", "value"), REFUSED, ids=lambda v: repr(v)[:20])
def test_d01_values_out_of_range_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{name: value})
    message = str(caught.value)
    assert name in message
    assert "must" in message
    assert message.endswith(".")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("temperature", v) for v in (0, 1e-45, 1e-38, 1e-8, 1, 2.5, 1e4, np.float32(0.5))],
        *[("top_p", v) for v in (0, 1e-9, 0.5, 1)],
        *[("min_p", v) for v in (0, 1)],
        *[("top_k", v) for v in (-1, 0, 1, 2**31, np.int64(3))],
        *[("repetition_penalty", v) for v in (0.5, 1, 1.3)],
        *[("presence_penalty", v) for v in (-2, 2)],
        *[("penalty_window", v) for v in (None, 0, 3)],
        *[("max_tokens", v) for v in (None, 0, 1)],
        *[("seed", v) for v in (None, 0, 2**31, 2**63, 2**64 - 1)],
        *[("logprobs", v) for v in (None, 0, 20)],
    ],
    ids=lambda v: repr(v)[:20],
)
def test_values_in_range_are_kept(name: str, value: Any) -> None:
    assert getattr(SamplingParams(**{name: value}), name) == value


def test_d03_seed_zero_is_a_seed_and_a_string_is_told_what_to_be() -> None:
    assert SamplingParams(seed=0).seed == 0
    assert SamplingParams(seed=0) != SamplingParams()
    with pytest.raises(RequestError, match="seed must be an integer"):
        SamplingParams(seed="7")  # type: ignore[arg-type]


def test_max_tokens_may_be_zero_but_not_below_min_tokens() -> None:
    assert SamplingParams(max_tokens=0).max_tokens == 0
    assert SamplingParams(max_tokens=None, min_tokens=9).min_tokens == 9
    assert SamplingParams(max_tokens=9, min_tokens=9).min_tokens == 9
    with pytest.raises(RequestError, match=r"min_tokens must be at most max_tokens \(8\), not 9"):
        SamplingParams(max_tokens=8, min_tokens=9)


def test_one_stop_string_is_one_stop() -> None:
    assert SamplingParams(stop="END").stop == ("END",)
    assert SamplingParams(stop=["a", "bc"]).stop == ("a", "bc")
    assert SamplingParams(stop_token_ids=[3, np.int32(4)]).stop_token_ids == (3, 4)


def test_logit_bias_takes_json_keys_and_is_a_copy() -> None:
    bias: dict[Any, float] = {"12": 1, 3: -INF}
    params = SamplingParams(logit_bias=bias)
    bias[3] = 5.0
    assert params.logit_bias == {12: 1.0, 3: -INF}


def test_params_are_values() -> None:
    params = SamplingParams(temperature=0.5, logit_bias={1: 2.0}, stop=["x"])
    for twin in (copy.deepcopy(params), pickle.loads(pickle.dumps(params)), dataclasses.replace(params)):
        assert twin == params
        assert hash(twin) == hash(params)
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.temperature = 1.0  # type: ignore[misc]


def test_what_is_greedy_and_what_edits_logits() -> None:
    assert all(SamplingParams(temperature=t).greedy for t in (0, 1e-45, 1e-38, 1e-8, 1e-4))
    assert not SamplingParams(temperature=1.001e-4).greedy
    assert not SamplingParams(temperature=0.7, top_k=4, penalty_window=2).edits_logits
    for name, value in (("logit_bias", {1: 0.5}), ("repetition_penalty", 0.9), ("presence_penalty", -1)):
        assert SamplingParams(**{name: value}).edits_logits
    assert SamplingParams(frequency_penalty=0.1).edits_logits


def test_params_load_without_torch() -> None:
    code = "import sys, kvine.sampling.params; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


BEAMS_REFUSE = [
    ({"n": 2, "temperature": 1.0}, "n"),
    ({"temperature": 0.7}, "temperature"),
    ({"top_k": 5}, "top_k"),
    ({"top_p": 0.9}, "top_p"),
    ({"min_p": 0.1}, "min_p"),
    ({"repetition_penalty": 1.2}, "repetition_penalty"),
    ({"presence_penalty": 0.5}, "presence_penalty"),
    ({"frequency_penalty": -0.5}, "frequency_penalty"),
    ({"logit_bias": {3: 1.0}}, "logit_bias"),
    ({"logprobs": 0}, "logprobs"),
    ({"stop": "."}, "stop"),
]


@pytest.mark.parametrize(("options", "name"), BEAMS_REFUSE)
def test_beams_refuse_what_would_draw_or_rank_otherwise(options: dict[str, Any], name: str) -> None:
    with pytest.raises(RequestError, match=rf"num_beams=2 does not go with {name}: "):
        SamplingParams(num_beams=2, **options)


def test_the_list_of_what_beams_refuse_is_reviewed() -> None:
    """An option that is neither refused nor named here is new: say what beam search makes of it."""
    taken = {"max_tokens", "min_tokens", "penalty_window", "seed", "stop_token_ids", "ignore_eos"}
    own = {"num_beams", "length_penalty", "early_stopping"}
    assert {name for name, _, _ in NOT_WITH_BEAMS} == {name for _, name in BEAMS_REFUSE}
    assert {f.name for f in dataclasses.fields(SamplingParams)} == taken | own | {name for _, name in BEAMS_REFUSE}
    SamplingParams(num_beams=2, min_tokens=1, penalty_window=3, seed=1, stop_token_ids=(3,), ignore_eos=True, top_k=-1)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"num_beams": 0}, "num_beams must be an integer of at least 1"),
        ({"n": 0}, "n must be an integer of at least 1"),
        ({"n": 2}, "n=2 greedy samples would all be the same: give a temperature above 0.0001, or num_beams"),
        ({"length_penalty": 2.0}, "belong to beam search: give num_beams above 1 too"),
        ({"early_stopping": True}, "belong to beam search: give num_beams above 1 too"),
        ({"num_beams": 2, "length_penalty": float("nan")}, "length_penalty must be a number from -10 to 10"),
        ({"num_beams": 2, "length_penalty": 11}, "length_penalty must be a number from -10 to 10"),
        ({"num_beams": 2, "early_stopping": "always"}, 'early_stopping must be true, false or "never"'),
        ({"num_beams": 2, "early_stopping": 1}, 'early_stopping must be true, false or "never"'),
    ],
)
def test_several_texts_are_asked_for_sensibly_or_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(RequestError, match=says):
        SamplingParams(**options)
