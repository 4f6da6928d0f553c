import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling_oracle import expected_distribution, expected_scores, expected_token

from kvine.errors import KvineError, RequestError, StepError
from kvine.sampling import sampler as sampler_module
from kvine.sampling.noise import fresh_seed
from kvine.sampling.params import SamplingParams
from kvine.sampling.sampler import Sample, Sampler, SampleRow

INF = math.inf


def row(
    prompt: Sequence[int] = (),
    output: Sequence[int] = (),
    *,
    key: int = 1,
    sample: int = 0,
    banned: Any = (),
    **params: Any,
) -> SampleRow:
    return SampleRow(SamplingParams(**params), prompt, output, key, sample, banned)


def tokens(outcomes: list[Sample | KvineError]) -> list[int]:
    assert all(isinstance(outcome, Sample) for outcome in outcomes), outcomes
    return [outcome.token_id for outcome in outcomes]  # type: ignore[union-attr]


def normal(rows: int, vocab: int, scale: float = 3.0, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


# Temperature


@pytest.mark.parametrize("temperature", [0, 1e-45, 1e-38, 1e-8, 1e-6, 1e-4])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("filters", [{}, {"top_p": 0}, {"top_p": 1e-9}, {"min_p": 1}, {"top_k": 5}])
def test_d01_a_tiny_temperature_is_the_arg_max(
    temperature: float, dtype: torch.dtype, filters: dict[str, float]
) -> None:
    logits = torch.cat((normal(4, 97), normal(4, 97, 3e3).clamp(-1e4, 1e4), torch.full((1, 97), -1e4))).to(dtype)
    rows = [row(key=i, temperature=temperature, logit_bias={3: -100}, **filters) for i in range(9)]
    biased = logits.double()
    biased[:, 3] -= 100
    assert tokens(Sampler(97).sample(logits, rows)) == np.argmax(biased.numpy(), axis=1).tolist()


@pytest.mark.parametrize("filters", [{"top_p": 0}, {"top_p": 1e-9}, {"min_p": 1}, {"top_k": 1}])
@pytest.mark.parametrize("temperature", [1.1e-4, 1.0, 1e4])
def test_d01_filters_that_leave_one_token_leave_the_arg_max(temperature: float, filters: dict[str, float]) -> None:
    logits = normal(50, 97)
    logits[0, :2] = torch.tensor([0.0, 1e-30])  # apart, though exp cannot tell
    logits[0, 2:] = -1.0
    rows = [row(key=i, temperature=temperature, **filters) for i in range(50)]
    assert tokens(Sampler(97).sample(logits, rows)) == logits.numpy().argmax(axis=1).tolist()


def test_d01_a_huge_temperature_is_uniform() -> None:
    logits = normal(2000, 8, 1.0)
    rows = [row(key=7, output=range(i), temperature=1e300) for i in range(2000)]
    counts = np.bincount(tokens(Sampler(8).sample(logits, rows)), minlength=8)
    assert counts.min() > 180


def test_extreme_bias_and_penalties_stay_finite() -> None:
    logits = torch.tensor([[1.0, 2.0, -3.0, 0.5]])
    for extreme in (
        {"logit_bias": {0: 1e308, 1: 1.7e308}, "repetition_penalty": 1e-308},
        {"logit_bias": {0: -1e308, 1: 1e308}, "repetition_penalty": 1e-300, "presence_penalty": -2},
        {"logit_bias": {0: -1.7e308, 2: -1.7e308, 3: -INF}, "repetition_penalty": 1e300},
    ):
        for temperature in (0.0, 1e-3, 1.0):
            one = row([0], [2], key=3, temperature=temperature, logprobs=4, **extreme)
            (outcome,) = Sampler(4).sample(logits, [one])
            assert isinstance(outcome, Sample)
            assert outcome.token_id in (0, 1)
            assert all(math.isfinite(logprob) for _, logprob in outcome.top_logprobs)


# Ties


def test_ties_go_to_the_lowest_id() -> None:
    logits = torch.tensor([[1.0, 5.0, 5.0, 5.0, 0.0, 5.0]])
    sampler = Sampler(6)
    assert tokens(sampler.sample(logits, [row()])) == [1]
    assert tokens(sampler.sample(logits, [row(logit_bias={5: 0.0, 1: -0.5})])) == [2]
    drawn = {name: set[int]() for name in ("top_k", "top_p", "min_p")}
    for key in range(200):
        for name, value in (("top_k", 2), ("top_p", 0.3), ("min_p", 1)):
            drawn[name].update(tokens(sampler.sample(logits, [row(key=key, temperature=1, **{name: value})])))
    assert drawn == {"top_k": {1, 2}, "top_p": {1, 2}, "min_p": {1, 2, 3, 5}}


# Top-k in mixed batches


def test_d07_top_k_of_any_size_in_one_batch_with_greedy_rows() -> None:
    vocab = 131
    kinds = [{"temperature": 1.0, "top_k": k} for k in (-1, 0, 1, vocab - 1, vocab, vocab + 1, 2**31, 100_000)]
    kinds += [{}, {"top_k": 5}, {"top_k": -1}, {"top_k": 2**31}]
    logits = normal(len(kinds), vocab, 1.0)
    logits[:, ::3] = 1.0  # ties across every edge
    rows = [row(key=5, **kind) for kind in kinds]
    together = Sampler(vocab).sample(logits, rows)
    alone = [Sampler(vocab).sample(logits[i : i + 1], [rows[i]])[0] for i in range(len(rows))]
    assert together == alone
    same = logits[:1].expand(len(kinds), -1)
    off = tokens(Sampler(vocab).sample(same, rows))
    assert off[0] == off[1] == off[4] == off[5] == off[6] == off[7]


# The padded vocabulary


def test_d08_padded_ids_are_never_sampled_nor_reported() -> None:
    real, padded = 120, 131
    logits = normal(40, padded)
    logits[:, real:] = 50.0
    logits[0, real:] = math.nan
    bias = {real: 100.0, padded - 1: 1e9, padded: 5.0, 3: 1.0}
    rows = [
        row([real, 1, padded + 4], [padded - 1, 2], key=i, temperature=i % 3, logit_bias=bias, repetition_penalty=0.1)
        for i in range(20)
    ]
    rows += [row([real], key=i, temperature=5.0, top_k=i, logprobs=padded, banned=[real, 5]) for i in range(20)]
    for outcome in Sampler(real).sample(logits, rows):
        assert isinstance(outcome, Sample)
        assert outcome.token_id < real
        assert all(token_id < real for token_id, _ in outcome.top_logprobs)
        assert len(outcome.top_logprobs) in (0, real)
        total = math.fsum(math.exp(logprob) for _, logprob in outcome.top_logprobs)
        assert total == pytest.approx(1.0 if outcome.top_logprobs else 0.0)


# Seeds


def test_d03_a_seed_gives_the_same_token_twice_in_a_batch_and_samples_differ() -> None:
    logits = torch.zeros(1, 1000)
    drawn = tokens(
        Sampler(1000).sample(logits.expand(5, -1), [row(key=7, temperature=1, sample=s) for s in (0, 0, 1, 2, 3)])
    )
    assert drawn[0] == drawn[1]
    assert len(set(drawn)) == 4
    seeds = [0, 1, 2**31, 2**63, 2**64 - 1]
    assert len(set(tokens(Sampler(1000).sample(logits.expand(5, -1), [row(key=s, temperature=1) for s in seeds])))) == 5


def test_d03_without_a_seed_equal_requests_differ() -> None:
    rows = [row(key=fresh_seed(), temperature=1) for _ in range(20)]
    assert len(set(tokens(Sampler(1000).sample(torch.zeros(20, 1000), rows)))) > 10


# Log-probabilities


def test_logprobs_are_the_models_own_and_sorted() -> None:
    logits = normal(1, 50)
    logits[0, 40:] = logits[0].max()  # ten tied for the first place
    expected = torch.log_softmax(logits[0].double(), dim=0)
    request = {"logit_bias": {41: -INF, 7: 30.0}, "repetition_penalty": 1.5, "temperature": 0.7, "top_k": 1}
    (outcome,) = Sampler(50).sample(logits, [row([7], [3], logprobs=12, **request)])
    assert isinstance(outcome, Sample)
    assert outcome.token_id == 7
    assert outcome.logprob == pytest.approx(float(expected[7]), abs=1e-12)
    order = sorted(range(50), key=lambda i: (-float(logits[0, i]), i))[:12]
    assert [token_id for token_id, _ in outcome.top_logprobs] == order
    assert [logprob for _, logprob in outcome.top_logprobs] == pytest.approx(expected[order].tolist(), abs=1e-12)


def test_logprobs_do_not_depend_on_the_number_of_threads() -> None:
    """To the last bit, of so many rows that some differ where torch's own sum is split among threads: a twentieth."""
    logits = normal(200, 50_021)
    before, outcomes = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            outcomes.append(Sampler(50_021).sample(logits, [row(logprobs=3)] * 200))
    finally:
        torch.set_num_threads(before)
    assert outcomes[0] == outcomes[1] == outcomes[2]
    for one, outcome in zip(logits[:3], outcomes[0], strict=False):
        assert isinstance(outcome, Sample)
        exact = max(one.tolist()) - math.log(math.fsum(math.exp(logit) for logit in one.tolist()))
        assert outcome.logprob == pytest.approx(exact, abs=1e-12)


def test_logprobs_of_zero_report_the_chosen_token_only() -> None:
    (with_zero, without) = Sampler(9).sample(normal(2, 9), [row(logprobs=0), row()])
    assert isinstance(with_zero, Sample) and isinstance(without, Sample)
    assert with_zero.logprob is not None and with_zero.top_logprobs == ()
    assert without.logprob is None and without.top_logprobs == ()


# Bad rows


def test_d01_a_bad_row_ends_alone() -> None:
    logits = normal(9, 17)
    logits[1, 4] = math.nan
    logits[3, 16] = INF
    logits[5] = -INF
    params: list[dict[str, Any]] = [{"temperature": 1, "top_p": 0.9}, {}, {"top_k": 3, "temperature": 2}]
    kinds = [params[i % 3] for i in range(9)]
    kinds[1] = {"logit_bias": {4: -INF}}  # a ban does not hide what the model did
    kinds[7] = {"logit_bias": dict.fromkeys(range(17), -INF), "temperature": 1, "logprobs": 3}
    rows = [row([1, 2], [3], key=i, **kind) for i, kind in enumerate(kinds)]
    rows[8] = row(key=8, banned=range(17))
    outcomes = Sampler(17).sample(logits, rows)
    assert [type(outcome) for outcome in outcomes] == [
        *(Sample, StepError, Sample, StepError, Sample, StepError, Sample, RequestError, RequestError)
    ]
    for index, peak in ((1, "nan"), (3, "inf"), (5, "-inf")):
        assert f"The logits of the model have no finite maximum, but {peak}:" in str(outcomes[index])
    assert "logit_bias" in str(outcomes[7])
    for index in (0, 2, 4, 6):
        assert outcomes[index] == Sampler(17).sample(logits[index : index + 1], [rows[index]])[0]


def test_banned_ids_are_not_chosen_and_do_not_change_the_rest() -> None:
    logits = torch.tensor([[0.0, 9.0, 3.0, 9.0]])
    assert tokens(Sampler(4).sample(logits, [row(banned=frozenset({1, 3}))])) == [2]
    assert {tokens(Sampler(4).sample(logits, [row(key=k, temperature=9, banned=[1])]))[0] for k in range(99)} == {
        0,
        2,
        3,
    }


def test_logits_are_left_as_they_were() -> None:
    logits = normal(3, 33)
    before = logits.clone()
    rows = [
        row([1], [2], logit_bias={4: 9.0}, banned=[5], temperature=1, logprobs=2, **kind)
        for kind in ({}, {"top_k": 2}, {"top_p": 0.5})
    ]
    Sampler(33).sample(logits, rows)
    assert torch.equal(logits, before)


def test_logits_that_do_not_fit_are_a_bug() -> None:
    for shape, count in (((2, 8), 1), ((1, 7), 1), ((8,), 1)):
        with pytest.raises(ValueError, match="do not fit"):
            Sampler(8).sample(torch.zeros(shape), [row()] * count)
    assert Sampler(8).sample(torch.zeros(0, 8), []) == []


def test_arg_max_on_a_device_is_the_one_on_the_cpu() -> None:
    logits = normal(6, 40)
    logits[1, 3:9] = 50.0
    logits[2, 7] = INF
    logits[3] = -INF
    assert sampler_module._device_peaks(logits) == sampler_module._peaks(logits)
    logits[4, 5] = math.nan
    for peaks in (sampler_module._device_peaks(logits), sampler_module._peaks(logits)):
        assert peaks[4][0] == 5 and math.isnan(peaks[4][1])


# The whole pipeline, against an oracle, against the distribution, and in company

vocab = 12
ids = st.integers(0, vocab - 1)
logit = st.one_of(st.sampled_from([-2.0, 0.0, 1.0, 1.0, 4.0, -1e4, 1e4]), st.floats(-30, 30, width=32))
requests = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 1e-6, 1e-3, 0.3, 1.0, 2.5, 1e4]),
        "top_k": st.sampled_from([-1, 0, 1, 2, 3, vocab - 1, vocab, 2**31]),
        "top_p": st.sampled_from([0.0, 1e-9, 0.3, 0.5, 0.9, 1.0]),
        "min_p": st.sampled_from([0.0, 0.0, 0.05, 0.5, 1.0]),
        "repetition_penalty": st.sampled_from([1.0, 1.3, 0.5]),
        "presence_penalty": st.sampled_from([0.0, 0.5, -2.0]),
        "frequency_penalty": st.sampled_from([0.0, 0.25, -1.0]),
        "penalty_window": st.sampled_from([None, 0, 1, 3, 50]),
        "logit_bias": st.dictionaries(ids, st.sampled_from([-INF, -3.0, 2.5, 100.0]), max_size=3),
    }
)
rows_of_a_batch = st.tuples(
    st.lists(logit, min_size=vocab, max_size=vocab),
    requests,
    st.lists(ids, max_size=6),
    st.lists(ids, max_size=6),
    st.sets(ids, max_size=2),
    st.integers(0, 2**64 - 1),
    st.integers(0, 3),
)


def build(drawn: Any) -> tuple[list[float], SampleRow]:
    logits, params, prompt, output, banned, key, sample = drawn
    return logits, row(prompt, output, key=key, sample=sample, banned=banned, logprobs=3, **params)


@settings(max_examples=300, deadline=None)
@given(rows_of_a_batch)
def test_the_pipeline_is_the_oracle(drawn: Any) -> None:
    logits, one = build(drawn)
    (outcome,) = Sampler(vocab).sample(torch.tensor([logits]), [one])
    assert isinstance(outcome, Sample)
    args = (logits, one.params, one.prompt_ids, one.output_ids, one.banned_ids)
    assert outcome.token_id == expected_token(*args, seed=one.seed, sample_index=one.sample_index)


@settings(max_examples=100, deadline=None)
@given(st.lists(rows_of_a_batch, min_size=2, max_size=6), st.randoms(use_true_random=False))
def test_a_row_is_the_same_alone_in_company_and_in_any_order(drawn: list[Any], random: Any) -> None:
    batch = [build(one) for one in drawn]
    padding = [INF, math.nan, 1e30]  # ids past the vocabulary
    alone = [Sampler(vocab).sample(torch.tensor([logits]), [one])[0] for logits, one in batch]
    order = list(range(len(batch)))
    random.shuffle(order)
    stacked = torch.tensor([batch[i][0] + padding for i in order])
    together = Sampler(vocab).sample(stacked, [batch[i][1] for i in order])
    assert together == [alone[i] for i in order]


def test_a_row_of_a_real_vocabulary_is_the_same_alone_and_in_company_to_the_bit() -> None:
    """Rows of an odd width start at odd addresses: nothing may hang on how they are aligned."""
    size = 49_157
    logits = normal(5, size + 3, 2.5)
    kinds: list[dict[str, Any]] = [{"top_p": 0.95}, {"top_k": 40}, {"min_p": 0.02}, {}, {"repetition_penalty": 1.1}]
    rows = [row([5, 6], [7], key=i, temperature=0.9, logprobs=4, **kind) for i, kind in enumerate(kinds)]
    together = Sampler(size).sample(logits, rows)
    for index in range(5):
        assert Sampler(size).sample(logits[index : index + 1].clone(), [rows[index]]) == [together[index]]


@pytest.mark.parametrize(("varying", "draws"), [("position", 20_000), ("seed", 4_000), ("sample", 4_000)])
def test_keyed_draws_follow_the_distribution(varying: str, draws: int) -> None:
    """Chi-square with 6 degrees of freedom: above 37 in 1.8 of a million cases, and the noise is fixed."""
    logits = torch.tensor([[1.0, 2.0, -1.0, 0.5, 3.0, 0.0, 2.5, -4.0]])
    params = SamplingParams(temperature=1.3, min_p=0.02)
    places = {"position": lambda i: (range(i), 11, 0), "seed": lambda i: ((), i, 0), "sample": lambda i: ((), 11, i)}
    rows = [SampleRow(params, (), *places[varying](i)) for i in range(draws)]
    counts = np.bincount(tokens(Sampler(8).sample(logits.expand(draws, -1), rows)), minlength=8)
    weights = expected_distribution(expected_scores(logits[0].tolist(), params), params)
    assert set(np.flatnonzero(counts)) == set(weights)
    assert len(weights) == 7
    expected = {i: draws * weight / math.fsum(weights.values()) for i, weight in weights.items()}
    assert sum((counts[i] - n) ** 2 / n for i, n in expected.items()) < 37
