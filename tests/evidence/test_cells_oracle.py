"""What rounding may do at most to the reference of a cell."""

from pathlib import Path

import pytest
from tiny_models import VOCAB, write_checkpoint

from kvine.config import CacheConfig
from kvine.evidence.cells.oracle import Oracle
from kvine.models.load import load_model


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_coarsest_dtype_on_the_way_and_a_lost_beginning_say_how_much(tmp_path: Path, dtype: str) -> None:
    oracle = Oracle(load_model(write_checkpoint(tmp_path, "llama"), dtype=dtype, device="cpu"), VOCAB)
    exact = {"fp32": 1e-3, "bf16": 1e-1}[dtype]
    assert oracle._largest_share(CacheConfig()) == exact
    assert oracle._largest_share(CacheConfig(kv_dtype="bf16")) == 1e-1
    assert oracle._largest_share(CacheConfig(kv_dtype="fp16")) == max(exact, 2e-2)
    assert oracle._largest_share(CacheConfig(window=12)) == 4 * exact
    assert oracle._largest_share(CacheConfig(window=12, sink_tokens=3)) == exact
    assert oracle._largest_share(CacheConfig(window=12, kv_dtype="bf16")) == 4e-1
