"""The cache experiment: what is measured, how it is summed up, and that peak memory sees what is really taken."""

from pathlib import Path

import pytest
import torch
from tiny_models import random_prompt, write_checkpoint, write_tokenizer

from kvine.errors import KvineError, RequestError
from kvine.evidence.experiments.cache import CacheExperiment, memory_sentence, run_cache_experiment
from kvine.evidence.experiments.trial import Outcome, Trial, measure, run_trial
from kvine.evidence.memory import PeakMemory, own_bytes
from kvine.hub import ModelSource
from kvine.llm import LLM

MB = 10**6


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> ModelSource:
    folder = tmp_path_factory.mktemp("tiny")
    checkpoint = write_checkpoint(folder, "llama")
    write_tokenizer(folder)
    return checkpoint


def trial(source: ModelSource, **changes: object) -> Trial:
    values = {
        "model": str(source.path),
        "dtype": "fp32",
        "device": "cpu",
        "threads": 1,
        "path": "cached",
        "logits": "last",
        "prompt_ids": random_prompt(37),
        "new_tokens": 6,
    }
    return Trial(**(values | changes))  # type: ignore[arg-type]


def test_all_paths_generate_the_same_tokens(source: ModelSource) -> None:
    llm = LLM(source, dtype="fp32", device="cpu", threads=1)
    outcomes = [
        measure(llm, trial(source, path=path, logits=logits), lambda done: None)
        for path in ("cache-free", "cached")
        for logits in ("all", "last")
    ]
    assert all(outcome.token_ids == outcomes[0].token_ids for outcome in outcomes)
    assert len(outcomes[0].token_ids) == 6
    for outcome in outcomes:
        assert outcome.total_ms == pytest.approx(outcome.prefill_ms + 5 * outcome.decode_ms)
    assert llm.parts.manager.bytes_referenced == 0, "the stepped cache is closed"


def test_a_trial_runs_in_a_process_of_its_own(source: ModelSource) -> None:
    seen: list[int] = []
    outcome = run_trial(trial(source), seen.append)
    assert seen == [0, 1, 2, 3, 4, 5, 6]
    assert len(outcome.token_ids) == 6 and outcome.dtype == "fp32" and outcome.device == "cpu"
    assert outcome.peak_bytes is not None and outcome.start_bytes is not None
    assert outcome.peak_bytes >= outcome.start_bytes > MB


def test_a_mistake_in_the_other_process_is_told_in_its_words(source: ModelSource) -> None:
    with pytest.raises(KvineError, match="512"):
        run_trial(trial(source, prompt_ids=random_prompt(513)), lambda done: None)


def test_peak_memory_sees_what_was_taken_and_given_back() -> None:
    with PeakMemory(torch.device("cpu")) as memory:
        block = torch.ones(50 * MB)  # 200 MB
        assert own_bytes() is not None
        del block
    assert memory.start_bytes is not None and memory.peak_bytes is not None
    assert 195 * MB < memory.peak_bytes - memory.start_bytes < 260 * MB


def test_peak_memory_leaves_out_mapped_files(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    torch.zeros(25 * MB).numpy().tofile(path)
    with PeakMemory(torch.device("cpu")) as memory:
        mapped = torch.from_file(str(path), shared=False, size=25 * MB)
        assert float(mapped.sum()) == 0  # every page is resident now
    assert memory.start_bytes is not None and memory.peak_bytes is not None
    assert memory.peak_bytes - memory.start_bytes < 20 * MB


def experiment_of(source: ModelSource, numbers: dict[tuple[str, str], list[tuple[float, int]]]) -> CacheExperiment:
    """An experiment whose trials bring these times and peaks, in turn."""
    left = {key: iter(several) for key, several in numbers.items()}

    def measure_trial(asked: Trial, on_token: object) -> Outcome:
        total, peak = next(left[asked.path, asked.logits])
        return Outcome(total, total / 2, 1.0, 100 * MB, peak * MB, "fp32", "cpu", [1, 2])

    return run_cache_experiment(
        source, prompt="w1 w2 w3", new_tokens=2, repeats=3, logits="both", measure=measure_trial
    )


def test_rows_are_medians_and_the_sentence_follows_the_measured_peaks(source: ModelSource) -> None:
    outcome = experiment_of(
        source,
        {
            ("cache-free", "all"): [(90.0, 500), (60.0, 480), (70.0, 479)],
            ("cached", "all"): [(10.0, 300), (20.0, 290), (99.0, 280)],
            ("cache-free", "last"): [(50.0, 150)] * 3,
            ("cached", "last"): [(10.0, 190)] * 3,
        },
    )
    assert (outcome.prompt_tokens, outcome.modes) == (3, ("all", "last"))
    assert outcome.row("cache-free", "all").total_ms == 70 and outcome.row("cached", "all").peak_bytes == 290 * MB
    assert outcome.speedup("all") == 3.5 and outcome.speedup("last") == 5.0
    assert outcome.same_tokens
    assert memory_sentence(outcome) == (
        "Beside the weights, where the logits of all positions are kept, the cache-free path needs 190.0 MB more than "
        "the cached one; where only the last position's logits are computed, the cached path needs 40.0 MB more than "
        "the cache-free one."
    )


def test_numbers_below_one_are_refused(source: ModelSource) -> None:
    with pytest.raises(RequestError, match="at least 1 token and 1 repeat"):
        run_cache_experiment(source, prompt="w1", new_tokens=0)
