"""The walls: bytes and crossovers by hand, and sequences that really have K and V of their own to read."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from tiny_models import random_prompt, write_checkpoint, write_tokenizer

from kvine.config import CacheConfig
from kvine.engine.runner import Runner
from kvine.engine.scheduler import Scheduled
from kvine.errors import ContextLengthError, RequestError
from kvine.evidence.experiments.walls import Walls, run_walls, time_step
from kvine.llm import LLM

KV_PER_TOKEN = 3 * 2 * 16 * 2 * 4  # layers × KV heads × dimensions × K and V × fp32
WEIGHTS = 4 * (3 * (64 * 8 * 16 + 4 * 16 * 64 + 3 * 64 * 128) + 131 * 64 + 7 * 64)


def load(folder: Path, kind: str = "llama", **cache: int) -> LLM:
    source = write_checkpoint(folder, kind)
    write_tokenizer(folder)
    return LLM(source, dtype="fp32", device="cpu", threads=1, cache=CacheConfig(block_size=4, **cache))


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return load(tmp_path_factory.mktemp("tiny"))


def timed_by(fixed: float, of_kv: float):
    """A machine whose step takes `fixed` milliseconds and `of_kv` for each token of past."""
    return lambda runner, step: fixed + of_kv * sum(item.start + 1 for item in step)


def cell(outcome: Walls, batch: int, context: int):
    return next(cell for cell in outcome.cells if (cell.batch, cell.context) == (batch, context))


def test_bytes_and_rates_by_hand(llm: LLM) -> None:
    outcome = run_walls(llm, batches=[4, 1], contexts=[20, 6], steps=1, timer=timed_by(2.0, 0.0))
    assert [(c.batch, c.context) for c in outcome.cells] == [(1, 6), (1, 20), (4, 6), (4, 20)]
    four = cell(outcome, 4, 20)
    assert (four.weight_bytes, four.kv_bytes) == (WEIGHTS, 4 * 21 * KV_PER_TOKEN)
    assert four.tokens_per_second == pytest.approx(4 / 0.002)
    assert four.gigabytes_per_second == pytest.approx((WEIGHTS + 84 * KV_PER_TOKEN) / 0.002 / 1e9)
    assert four.kv_share == pytest.approx(84 * KV_PER_TOKEN / (84 * KV_PER_TOKEN + WEIGHTS))


def test_crossovers_are_predicted_from_bytes_and_measured_from_times(llm: LLM) -> None:
    outcome = run_walls(llm, batches=[1, 2], contexts=[9, 19, 39], steps=1, timer=timed_by(3.0, 0.01))
    for crossover in outcome.crossovers:
        assert crossover.predicted == -(-WEIGHTS // (crossover.batch * KV_PER_TOKEN))
        fixed = 3.0 + 0.01 * crossover.batch  # the new token is there at any context
        assert crossover.measured == pytest.approx(fixed / (0.01 * crossover.batch))


def test_times_that_do_not_grow_have_no_crossover(llm: LLM) -> None:
    outcome = run_walls(llm, batches=[1], contexts=[9, 19], steps=1, timer=timed_by(3.0, -0.01))
    assert outcome.crossovers[0].measured is None
    assert run_walls(llm, batches=[1], contexts=[9], steps=1).crossovers[0].measured is None


def test_a_window_bounds_what_is_read(tmp_path: Path) -> None:
    outcome = run_walls(load(tmp_path, window=8), batches=[2], contexts=[6, 40], steps=1)
    assert [c.kv_bytes for c in outcome.cells] == [2 * 7 * KV_PER_TOKEN, 2 * 8 * KV_PER_TOKEN]
    assert outcome.crossovers[0].predicted is None, "eight tokens are never more bytes than the weights"


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_each_sequence_reads_blocks_of_its_own(tmp_path: Path, kind: str) -> None:
    seen = []

    def look(runner: Runner, step: Sequence[Scheduled]) -> float:
        batch = runner.batch(step)
        for group, tables in zip(batch.groups, (g.block_tables for g in batch.groups), strict=True):
            held = [block for table in tables for block in table if block >= 0]
            assert len(held) == len(set(held)), "no block is shared"
            assert group.slot_mapping.unique().numel() == len(step)
        seen.append((batch.context_len, batch.positions.tolist()))
        for pool, group in zip(runner.attention.pools, batch.groups, strict=True):
            first, *others = ([b for b in table if b >= 0] for table in group.block_tables)
            for other in others:
                torch.testing.assert_close(pool.k[:, other[0]], pool.k[:, first[0]])
            assert pool.k[:, first[0]].abs().min() > 0, "memory that was never written would be one page of zeros"
        return time_step(runner, step)

    run_walls(load(tmp_path, kind), batches=[1, 3], contexts=[18], steps=1, timer=look)
    assert seen == [([19], [18])] * 2 + [([19] * 3, [18] * 3)] * 2, "one step more than is counted; all alike"


def test_what_does_not_fit_is_left_out_and_the_rest_measured(llm: LLM) -> None:
    budget = 3 * 24 * KV_PER_TOKEN  # three sequences of six blocks of four
    outcome = run_walls(llm, batches=[1, 2, 4], contexts=[8, 20], steps=1, budget_bytes=budget)
    assert [c.ms is None for c in outcome.cells] == [False, False, False, False, False, True]
    assert cell(outcome, 4, 20).tokens_per_second is None and outcome.budget_bytes == budget


def test_what_cannot_be_measured_is_refused(llm: LLM) -> None:
    for options in ({"batches": [0]}, {"contexts": [0]}, {"steps": 0}, {"batches": []}):
        with pytest.raises(RequestError, match="whole numbers from 1"):
            run_walls(llm, **({"batches": [1], "contexts": [8]} | options))
    with pytest.raises(RequestError, match="4,096 sequences"):
        run_walls(llm, batches=[1, 4097], contexts=[8])
    with pytest.raises(ContextLengthError, match="512"):
        run_walls(llm, batches=[1], contexts=[512])
    with pytest.raises(RequestError, match="Memory is too short"):
        run_walls(llm, batches=[1], contexts=[400], budget_bytes=1)


def test_the_models_own_cache_is_left_alone(llm: LLM) -> None:
    before = llm.generate(random_prompt(20)).token_ids
    run_walls(llm, batches=[2], contexts=[12], steps=1)
    assert llm.generate(random_prompt(20)).token_ids == before
    assert llm.parts.manager.bytes_referenced == 0
