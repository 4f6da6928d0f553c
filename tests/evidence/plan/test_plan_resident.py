"""What a process really takes on the real models, beside the plan."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from planned import planned

from kvine.config import CacheConfig, EngineConfig
from kvine.evidence.memory import STATUS

TOLERANCE = 1.05


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "dtype", "weights", "batch", "prompt", "new", "step"),
    [
        ("smollm2-135m", "bf16", "exact", 1, 2048, 2, 2048),  # activations of a long step
        ("smollm2-135m", "fp32", "exact", 1, 2048, 2, 2048),
        ("smollm2-135m", "bf16", "exact", 8, 128, 3, 256),  # logits of several rows, the head converted in pieces
        ("smollm2-135m", "bf16", "exact", 1, 600, 3, 128),  # chunks
        ("gemma3-270m", "bf16", "exact", 1, 1024, 3, 512),  # windows, and a vocabulary of 262,144
        ("smollm2-135m", "bf16", "packed", 1, 2048, 2, 2048),
        ("gemma3-270m", "bf16", "packed", 6, 128, 3, 256),
    ],
)
def test_resident_memory_stays_within_the_plan(
    model: str, dtype: str, weights: str, batch: int, prompt: int, new: int, step: int
) -> None:
    assert STATUS.exists(), "resident memory is read from /proc"
    script = Path(__file__).with_name("resident.py")
    command = [sys.executable, str(script), model, dtype, weights, *map(str, (batch, prompt, new, step))]
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    measured = json.loads(done.stdout)
    cache, engine = CacheConfig(prefix_caching=False), EngineConfig(max_step_tokens=step)
    plan = planned(
        model, context=prompt + new - 1, batch=batch, dtype=dtype, weights=weights, cache=cache, engine=engine
    )
    assert plan.weight_bytes is not None and plan.workspace is not None
    assert measured["held"] <= plan.kv_peak_bytes
    taken, promised = measured["taken"] + measured["mapped"], plan.fits.needed_bytes
    print(f"{taken / 2**20:.0f} MiB taken, {promised / 2**20:.0f} MiB planned")
    assert taken <= TOLERANCE * promised
    # The plan is no empty promise: all but the workspace is really taken.
    assert taken >= (plan.weight_bytes + measured["held"]) / TOLERANCE
