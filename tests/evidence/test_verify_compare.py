"""`verify`'s comparison: healthy engines raise no alarm, and each fault is seen, whichever token it leaves alone."""

from pathlib import Path

import broken_parts
import pytest
import torch
from broken_parts import Fault, with_fault
from safetensors.torch import load_file, save_file
from tiny_models import Subject, random_prompt, write_checkpoint

from kvine.config import CacheConfig
from kvine.errors import RequestError
from kvine.evidence.judge import Rounding, Run, judge
from kvine.evidence.paths import Record
from kvine.evidence.transformers_path import PathUnavailableError, TransformersPath
from kvine.evidence.verify import CACHED, IN_COMPANY, TRANSFORMERS, compare


def run(subject: Subject, prompt: list[int], new_tokens: int, other=None) -> tuple[list[Run], Rounding]:
    return compare(
        subject.parts, subject.dense, subject.config, prompt, new_tokens, dtype=subject.model.dtype, other=other
    )


def verdicts(runs: list[Run]) -> dict[str, str]:
    return {run.path: run.verdict for run in runs[1:]}


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3"])
def test_healthy_engines_raise_no_alarm(tmp_path: Path, kind: str, dtype: str) -> None:
    for seed in range(4):
        source = write_checkpoint(tmp_path / str(seed), kind, seed)
        subject = Subject.load(source, dtype, CacheConfig(block_size=(1, 4, 32)[seed % 3]))
        runs, rounding = run(subject, random_prompt((1, 5, 37, 90)[seed], seed), 12)
        assert runs[0].verdict == "reference" and rounding.bound > 0
        assert set(verdicts(runs).values()) <= ({"identical"} if dtype == "fp32" else {"identical", "rounding"})


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(("kind", "weights"), [("llama", "q8"), ("llama", "q4"), ("qwen3", "q8"), ("gemma3", "q4")])
def test_healthy_packed_weights_raise_no_alarm(tmp_path: Path, kind: str, weights: str, dtype: str) -> None:
    """In fp32 too: a number that is rounded to 8 bits may fall to either side, which an exact product's never does."""
    for seed in range(4):
        subject = Subject.load(write_checkpoint(tmp_path / str(seed), kind, seed), dtype, weights=weights)
        runs, rounding = run(subject, random_prompt((1, 5, 37, 90)[seed], seed), 12)
        assert subject.model.packings and runs[0].verdict == "reference"
        assert set(verdicts(runs).values()) <= {"identical", "rounding"}
        assert rounding.measured > 1e-4 * rounding.logit_range, "what 8 bits make of it is part of the measure"


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(
    "fault",
    [broken_parts.late_positions, broken_parts.stale_block, broken_parts.last_key_dropped],
    ids=lambda fault: fault.__name__,
)
def test_gross_faults_are_seen_with_packed_weights_too(tmp_path: Path, fault: Fault, dtype: str) -> None:
    subject = Subject.load(write_checkpoint(tmp_path, "llama"), dtype, weights="q8")
    subject.parts = with_fault(subject.parts, fault)
    assert set(verdicts(run(subject, random_prompt(37), 12)[0]).values()) == {"fault"}


@pytest.mark.parametrize("sink_rule", ["absolute", "in_cache"])
def test_healthy_windows_and_sinks_raise_no_alarm(tmp_path: Path, sink_rule: str) -> None:
    cache = CacheConfig(block_size=4, window=16, sink_tokens=3, sink_rule=sink_rule)  # type: ignore[arg-type]
    subject = Subject.load(write_checkpoint(tmp_path, "llama"), "fp32", cache)
    assert set(verdicts(run(subject, random_prompt(40), 12)[0]).values()) == {"identical"}


@pytest.mark.parametrize(("kind", "dtype"), [("qwen3", "fp32"), ("qwen3", "bf16"), ("gemma3", "fp32")])
def test_transformers_agrees(tmp_path: Path, kind: str, dtype: str) -> None:
    source = write_checkpoint(tmp_path, kind)
    subject = Subject.load(source, dtype)
    other = TransformersPath(source, subject.model.dtype, subject.model.device)
    runs, _ = run(subject, random_prompt(37), 12, other.run)
    assert verdicts(runs)[TRANSFORMERS] in ("identical", "rounding")
    assert runs[-1].tokens == 12


FAULTS: list[Fault] = [
    broken_parts.late_positions,
    broken_parts.stale_block,
    broken_parts.lost_write,
    broken_parts.last_key_dropped,
    broken_parts.slightly_off_scale,
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_faults_are_seen(tmp_path: Path, kind: str, fault: Fault) -> None:
    subject = Subject.load(write_checkpoint(tmp_path, kind), "fp32")
    subject.parts = with_fault(subject.parts, fault)
    runs, _ = run(subject, random_prompt(37), 12)
    assert verdicts(runs) == {CACHED: "fault", IN_COMPANY: "fault"}
    assert runs[0].verdict == "reference", "the reference does not share the fault"


def test_a_window_one_short_is_seen(tmp_path: Path) -> None:
    subject = Subject.load(write_checkpoint(tmp_path, "gemma3"), "fp32")
    subject.parts = with_fault(subject.parts, broken_parts.narrow_window)
    assert set(verdicts(run(subject, random_prompt(37), 12)[0]).values()) == {"fault"}


@pytest.mark.parametrize(
    "fault",
    [broken_parts.late_positions, broken_parts.stale_block, broken_parts.last_key_dropped],
    ids=lambda fault: fault.__name__,
)
def test_gross_faults_are_seen_in_bf16_too(tmp_path: Path, fault: Fault) -> None:
    subject = Subject.load(write_checkpoint(tmp_path, "llama"), "bf16")
    subject.parts = with_fault(subject.parts, fault)
    assert set(verdicts(run(subject, random_prompt(37), 12)[0]).values()) == {"fault"}


def test_a_fault_that_changes_no_token_is_seen(tmp_path: Path) -> None:
    subject = Subject.load(write_checkpoint(tmp_path, "llama"), "fp32")
    subject.parts = with_fault(subject.parts, broken_parts.slightly_off_scale)
    cached = run(subject, random_prompt(37), 12)[0][1]
    assert cached.identical and cached.first_divergence is None
    assert cached.verdict == "fault"
    assert cached.difference is not None and cached.bound is not None and cached.difference > cached.bound


def test_a_failing_step_is_a_fault(tmp_path: Path) -> None:
    subject = Subject.load(write_checkpoint(tmp_path, "llama"), "fp32")
    subject.parts = with_fault(subject.parts, broken_parts.failing_step)
    cached = run(subject, random_prompt(9), 4)[0][1]
    assert cached.verdict == "fault" and "no room for scores" in (cached.reason or "")
    subject.parts.manager.check()
    assert subject.parts.manager.bytes_referenced == 0


def test_a_wrong_oracle_is_a_fault_and_a_missing_one_is_not(tmp_path: Path) -> None:
    """The other library's model has other weights, or cannot be loaded."""
    subject = Subject.load(write_checkpoint(tmp_path / "a", "llama", 0), "fp32")
    stranger = write_checkpoint(tmp_path / "b", "llama", 1)
    other = TransformersPath(stranger, subject.model.dtype, subject.model.device)
    assert verdicts(run(subject, random_prompt(9), 4, other.run)[0])[TRANSFORMERS] == "fault"

    def unavailable(*_: object) -> Record:
        raise PathUnavailableError("transformers is not installed")

    last = run(subject, random_prompt(9), 4, unavailable)[0][-1]
    assert (last.verdict, last.identical, last.reason) == ("not run", None, "transformers is not installed")


def test_a_checkpoint_that_transformers_would_fill_at_random_is_not_run(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path, "llama")
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(PathUnavailableError, match=r"1 tensors of it, such as model\.layers\.1\.mlp\.up_proj"):
        TransformersPath(source, torch.float32, torch.device("cpu"))


def test_what_does_not_fit_is_refused_before_it_runs(tmp_path: Path) -> None:
    subject = Subject.load(write_checkpoint(tmp_path, "llama"), "fp32")
    with pytest.raises(RequestError, match="exceed the model's context of 512"):
        run(subject, random_prompt(500), 13)
    with pytest.raises(RequestError, match="at least 1 new token"):
        run(subject, random_prompt(5), 0)


# -- the judgement itself, on numbers worked out by hand ---------------------------------------------------------------

REFERENCE = Record([0, 1], torch.tensor([[2.0, 1.0, 0.0], [0.0, 3.0, 2.98]]))
ROUNDING = Rounding("fp32", measured=0.005, logit_range=3.0, bound=0.02, limit=0.03)


def judged(chosen: list[int], logits: list[list[float]]) -> Run:
    return judge("p", Record(chosen, torch.tensor(logits)), REFERENCE, ROUNDING, prompt_tokens=7, piece=str)


def test_a_near_tie_within_the_bound_is_rounding() -> None:
    outcome = judged([0, 2], [[2.0, 1.0, 0.0], [0.0, 2.985, 2.99]])
    assert outcome.verdict == "rounding" and not outcome.identical and outcome.matching == 1
    first = outcome.first_divergence
    assert first is not None and first.verdict == "rounding"
    assert (first.step, first.position, first.bound) == (1, 8, 0.04)
    assert first.gap == pytest.approx(0.02)
    assert [c.token_id for c in first.candidates] == [1, 2]
    assert first.candidates[1].path_logit == pytest.approx(2.99)


def test_a_difference_beyond_the_bound_is_a_fault_at_any_step() -> None:
    assert judged([0, 1], [[2.0, 1.0, 0.03], [0.0, 3.0, 2.98]]).verdict == "fault"
    outcome = judged([0, 2], [[2.0, 1.03, 0.0], [0.0, 2.985, 2.99]])
    assert outcome.verdict == "fault" and outcome.first_divergence is not None
    assert outcome.first_divergence.verdict == "fault", "a near-tie excuses nothing in a path that is wrong elsewhere"
    assert (outcome.difference, outcome.difference_step) == (pytest.approx(0.03), 0)


def test_nan_is_a_fault() -> None:
    outcome = judged([0, 1], [[2.0, 1.0, float("nan")], [0.0, 3.0, 2.98]])
    assert outcome.verdict == "fault" and outcome.identical
