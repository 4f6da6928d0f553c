"""Floors by hand computation, the machine's rates, and what rows make of figures."""

import math
from pathlib import Path

import pytest
import torch

from kvine.cache.spec import CacheSpec
from kvine.errors import RequestError
from kvine.evidence.bench.floors import Floor, Floors
from kvine.evidence.bench.machine import Machine, buffer_bytes, matrix_rate
from kvine.evidence.bench.report import row_of
from kvine.evidence.bench.settings import Settings, leading_matches
from kvine.models.config import LayerConfig, ModelConfig
from kvine.rope_scaling import RopeConfig

LAYERS, HIDDEN, INNER, HEADS, KV_HEADS, DIM, VOCAB = 2, 32, 48, 4, 2, 8, 100
LAYER = LayerConfig(None, RopeConfig(10000.0, DIM))
MODEL = ModelConfig(
    "llama", VOCAB, HIDDEN, INNER, LAYERS, HEADS, KV_HEADS, DIM, 1e-5, 512, (LAYER,) * LAYERS, 0.35, tie_embeddings=True
)
SPEC = CacheSpec((0, 1), KV_HEADS, DIM)
STEP_BYTES = 1000
KV_BYTES = LAYERS * KV_HEADS * DIM * 2 * 2  # of one token, K and V in bf16
IN_LAYERS = LAYERS * (HIDDEN * (HEADS + 2 * KV_HEADS) * DIM + HEADS * DIM * HIDDEN + 3 * HIDDEN * INNER)
HEAD = VOCAB * HIDDEN


def floors(read: float, flops: float, held: int = 1500) -> Floors:
    return Floors(Machine("it", 1, read, flops, "fp32"), MODEL, (SPEC,), "bf16", STEP_BYTES, held)


def flops(rows: int, pairs: int) -> int:
    """Of a call that samples once: products with weights, and two products for each pair, head and dimension."""
    return 2 * (IN_LAYERS * rows + HEAD) + 4 * LAYERS * HEADS * DIM * pairs


def test_a_decode_step_reads_the_weights_and_the_past() -> None:
    slow_memory = floors(read=1e3, flops=1e30)
    read = [STEP_BYTES + KV_BYTES * n for n in (11, 12, 13)]  # three steps after the first token, 10 tokens of prompt
    assert slow_memory.decode(10, 4) == Floor(pytest.approx(sum(read) / 3 / 1e3), "read")
    assert slow_memory.prefix_hit(10).seconds == pytest.approx((STEP_BYTES + KV_BYTES * 10) / 1e3)


def test_prefill_multiplies() -> None:
    slow_products = floors(read=1e30, flops=1e6)
    assert slow_products.prefill(10) == Floor(pytest.approx(flops(10, 55) / 1e6), "matrix")


def test_a_batch_reads_the_weights_once_a_step_and_each_past() -> None:
    read = STEP_BYTES + 5 * 10 * KV_BYTES, STEP_BYTES + 5 * 11 * KV_BYTES
    assert floors(read=1e3, flops=1e30).batch(5, 10, 2).seconds == pytest.approx(sum(read) / 1e3)
    computed = 5 * (flops(10, 55) + flops(1, 11))
    assert floors(read=1e30, flops=1e6).batch(5, 10, 2).seconds == pytest.approx(computed / 1e6)


def test_each_call_takes_the_longer_of_reading_and_multiplying() -> None:
    both = floors(read=1e4, flops=1e6)
    prefill = max((STEP_BYTES + 10 * KV_BYTES) / 1e4, flops(10, 55) / 1e6)
    step = max((STEP_BYTES + 11 * KV_BYTES) / 1e4, flops(1, 11) / 1e6)
    assert flops(10, 55) / 1e6 == prefill and flops(1, 11) / 1e6 < step
    assert both.batch(1, 10, 2).seconds == pytest.approx(prefill + step)


def test_memory_is_all_weights_and_one_text() -> None:
    assert floors(1, 1, held=1500).memory(10) == 1500 + 10 * KV_BYTES


def test_shares_are_one_at_the_floor_whether_less_is_better_or_more() -> None:
    time = row_of("kvine", "bf16", "decode", 9, 1, [30.0, 20.0, 22.0], floor=11.0, bound="read")
    assert (time.value, time.low, time.high, time.unit, time.share) == (22.0, 20.0, 30.0, "ms", 0.5)
    assert time.spread == pytest.approx(10 / 22) and time.is_noisy
    rate = row_of("kvine", "bf16", "batch", 9, 8, [50.0, 50.0], floor=200.0, bound="read")
    assert (rate.share, rate.is_noisy, rate.unit) == (0.25, False, "tokens/s")
    once = row_of("kvine", "bf16", "ready", 0, 1, [2.0])
    assert (once.share, once.spread, once.is_noisy) == (None, None, False), "one figure says nothing of how it varies"


def test_the_better_of_two_measurements_counts() -> None:
    first, second = Machine("it", 2, 10.0, 5.0, "bf16"), Machine("it", 2, 9.0, 7.0, "fp32")
    assert first.best_of(second) == second.best_of(first) == Machine("it", 2, 10.0, 7.0, "fp32")


def test_matrices_are_multiplied_at_some_rate() -> None:
    assert 1e8 < matrix_rate(torch.float32, torch.device("cpu"), 0.05) < 1e15


def test_the_buffer_is_several_times_the_largest_cache(tmp_path: Path) -> None:
    for index, size in enumerate(("32K", "2048K", "64M")):
        (tmp_path / f"index{index}").mkdir()
        (tmp_path / f"index{index}" / "size").write_text(f"{size}\n")
    assert buffer_bytes(tmp_path) == 8 * 64 << 20
    assert buffer_bytes(tmp_path / "nowhere") == 256 << 20


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"what": ("decode", "speed")}, "'speed'"),
        ({"what": ()}, "What to measure"),
        ({"repeats": 0}, "at least 1 repeat"),
        ({"tokens": 1}, "2 tokens"),
        ({"batches": (1, 0)}, "1 to 256"),
        ({"batches": (257,)}, "1 to 256"),
        ({"context": 1}, "at least 2"),
        ({"patience": 0.0}, "timeout of up to"),
        ({"patience": math.inf}, "timeout of up to"),
        ({"patience": math.nan}, "timeout of up to"),
    ],
)
def test_what_cannot_be_measured_is_refused(settings: dict, says: str) -> None:
    with pytest.raises(RequestError, match=says):
        Settings(**settings)


def test_texts_are_compared_from_their_beginning() -> None:
    assert leading_matches([1, 2, 3], [1, 2, 4, 3]) == 2
    assert leading_matches([1, 2], [1, 2, 3]) == 2
