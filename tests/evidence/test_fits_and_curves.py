"""Curves: exponents of times that are known, the shape of what is measured, and what is refused."""

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tiny_models import write_checkpoint, write_tokenizer

from kvine.errors import ContextLengthError, RequestError
from kvine.evidence.experiments.curves import Curve, Fit, generation_stamps, run_curves
from kvine.evidence.experiments.fits import fit_power
from kvine.evidence.experiments.trial import Trial
from kvine.llm import LLM


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder = tmp_path_factory.mktemp("tiny")
    source = write_checkpoint(folder, "llama")
    write_tokenizer(folder)
    return LLM(source, dtype="fp32", device="cpu", threads=1)


def test_a_power_law_is_found_with_its_range() -> None:
    x = [10, 20, 40, 80]
    law = fit_power(x, [3 * n**2.5 for n in x])
    assert law.exponent == pytest.approx(2.5) and law.factor == pytest.approx(3)
    assert law.r2 == pytest.approx(1) and (law.low, law.high) == (10, 80)


def test_r2_is_the_share_of_the_logarithms_variance() -> None:
    x, y = [1, 2, 4, 8, 16], [1.0, 3.0, 3.0, 9.0, 10.0]
    correlation = np.corrcoef(np.log(x), np.log(y))[0, 1]
    assert fit_power(x, y).r2 == pytest.approx(correlation**2)
    assert fit_power(x, [7.0] * 5).r2 == 1.0


def test_one_size_is_no_curve() -> None:
    with pytest.raises(RequestError, match="2 different sizes"):
        fit_power([4, 4], [1, 2])


def textbook_stamps(llm: LLM, trial: Trial, on_token: Callable[[int], None]) -> list[float]:
    """Seconds of a machine whose time is pairs alone: n² a step without a cache, n with one after the prompt's n²."""
    now, stamps, prompt = 0.0, [], len(trial.prompt_ids)
    for done in range(trial.new_tokens):
        n = prompt + done
        now += n**2 if trial.path == "cache-free" or not done else n
        stamps.append(now)
        on_token(done + 1)
    return stamps


def fit_of(curve: Curve, path: str, per: str, what: str) -> Fit:
    return next(fit for fit in curve.fits if (fit.path, fit.per, fit.what) == (path, per, what))


def test_exponents_of_times_that_are_known(llm: LLM) -> None:
    outcome = run_curves(
        llm,
        ("prompt", "output"),
        prompt_sizes=[200, 100, 400],
        output_sizes=[64, 128, 256, 500],
        repeats=2,
        stamps=textbook_stamps,
    )
    prompt, output = outcome.curves
    assert (prompt.grow, prompt.fixed, output.grow, output.fixed) == ("prompt", 5, "output", 1)
    assert [point.size for point in prompt.of("cached")] == [100, 200, 400]
    assert [point.length for point in prompt.of("cached")] == [104, 204, 404]
    assert [point.length for point in output.of("cache-free")] == [64, 128, 256, 500]
    for curve in outcome.curves:
        for path, step in (("cache-free", 2), ("cached", 1)):
            assert fit_of(curve, path, "step", "time").law.exponent == pytest.approx(step, abs=0.05)
            assert fit_of(curve, path, "step", "pairs").law.exponent == pytest.approx(step, abs=0.02)
            assert fit_of(curve, path, "step", "time").theory == step
    for path, total in (("cache-free", 3), ("cached", 2)):
        for what in ("time", "pairs"):
            law = fit_of(output, path, "total", what).law
            assert law.exponent == pytest.approx(total, abs=0.05) and law.r2 > 0.999
            assert (law.low, law.high) == (64, 500)
        assert fit_of(output, path, "total", "time").theory == total


def test_points_hold_times_and_work_of_their_own_size(llm: LLM) -> None:
    outcome = run_curves(
        llm, ("output",), prompt_sizes=[], output_sizes=[4, 16], repeats=1, stamps=textbook_stamps, logits="last"
    )
    short, long = outcome.curves[0].of("cache-free")
    assert short.total_ms == 1e3 * sum(n**2 for n in range(1, 5)) and short.first_ms == 1e3
    assert long.decode_ms == pytest.approx((long.total_ms - long.first_ms) / 15)
    assert long.total.pairs == outcome.heads * sum(n * (n + 1) // 2 for n in range(1, 17))
    assert long.step.pairs == outcome.heads * 16 * 17 // 2
    cached = outcome.curves[0].of("cached")[-1]
    assert cached.step.pairs == outcome.heads * 16 and cached.total.pairs == outcome.heads * 16 * 17 // 2
    assert outcome.rows[0].total_ms == long.total_ms and outcome.rows[1].peak_bytes is None
    assert outcome.speedup == long.total_ms / cached.total_ms


def test_real_generations_are_timed_token_by_token(llm: LLM) -> None:
    told: list[tuple[int, int]] = []
    outcome = run_curves(
        llm,
        ("prompt", "output"),
        prompt_sizes=[8, 24],
        output_sizes=[2, 6],
        repeats=1,
        progress=lambda what, done, total: told.append((done, total)),
    )
    for curve in outcome.curves:
        for point in curve.points:
            assert 0 < point.first_ms < point.total_ms and point.step_ms > 0
        assert all(math.isfinite(fit.law.exponent) for fit in curve.fits)
    assert told[:6] == [(done, 5) for done in range(6)] and told[-1] == (6, 6)
    assert llm.parts.manager.bytes_referenced == 0


def test_stamps_ascend(llm: LLM) -> None:
    trial = Trial("", "auto", "auto", None, "cached", "last", [1, 2, 3], 4)
    stamps = generation_stamps(llm, trial, lambda done: None)
    assert len(stamps) == 4 and stamps == sorted(stamps) and stamps[0] > 0


@pytest.mark.parametrize(
    ("grow", "prompts", "outputs", "repeats", "error", "said"),
    [
        ("prompt", [8], [2, 4], 1, RequestError, "2 different prompt sizes"),
        ("prompt", [0, 8], [2, 4], 1, RequestError, "of 1 or more"),
        ("output", [8, 9], [1, 4], 1, RequestError, "of 2 or more"),
        ("output", [8, 9], [2, 4], 0, RequestError, "1 repeat"),
        ("prompt", [8, 508], [2, 4], 1, ContextLengthError, "513"),
        ("output", [8, 9], [2, 512], 1, ContextLengthError, "512"),
    ],
)
def test_what_cannot_be_measured_is_refused_first(
    llm: LLM, grow: str, prompts: list[int], outputs: list[int], repeats: int, error: type, said: str
) -> None:
    def never(*_: object) -> list[float]:
        raise AssertionError("nothing may be measured")

    with pytest.raises(error, match=said):
        run_curves(llm, (grow,), prompt_sizes=prompts, output_sizes=outputs, repeats=repeats, stamps=never)  # type: ignore[arg-type]


def test_what_grows_not_needs_no_sizes(llm: LLM, tmp_path: Path) -> None:
    outcome = run_curves(
        llm, ("prompt",), prompt_sizes=[4, 8], output_sizes=[], repeats=1, stamps=textbook_stamps, logits="last"
    )
    assert len(outcome.curves) == 1
