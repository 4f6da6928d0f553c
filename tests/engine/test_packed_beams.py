"""Beams and samples over packed blocks: forks share sealed blocks and copy the open one, whoever attends."""

import functools

import pytest
from checkpoints import tiny_model
from tiny_engines import Tiny

from kvine.config import CacheConfig, EngineConfig
from kvine.engine.build import dense_attention
from kvine.engine.cache_free import DenseRunner, cache_free_engine
from kvine.engine.engine import Engine
from kvine.evidence.cells.quantizer import block_loss
from kvine.sampling.params import SamplingParams

PROMPTS = ([5, 9, 17, 4, 33, 21, 8], [40, 3, 3, 77, 12])


@functools.cache
def tiny() -> Tiny:
    return Tiny(*tiny_model("llama"))


def texts(engine: Engine, params: SamplingParams) -> list[list[tuple[int, ...]]]:
    """All texts of each prompt, as far as its events tell, in their order."""
    ids = [engine.add(prompt, params) for prompt in PROMPTS]
    found: dict[int, dict[int, list[int]]] = {number: {} for number in ids}
    while engine.busy:
        for event in engine.step():
            assert event.error is None
            if event.hypothesis is not None:
                found[event.request_id][event.index] = list(event.hypothesis.token_ids)
            elif event.sample is not None:
                found[event.request_id].setdefault(event.index, []).append(event.sample.token_id)
        engine.manager.check()
    return [[tuple(found[number][index]) for index in sorted(found[number])] for number in ids]


@pytest.mark.parametrize("name", ["int8", "int4", "fp16/int2"])
@pytest.mark.parametrize("backend", ["native", "sdpa", "reference"])
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(max_tokens=11, ignore_eos=True, num_beams=3),
        SamplingParams(max_tokens=11, ignore_eos=True, n=3, temperature=1.0, seed=3),
    ],
    ids=["beams", "samples"],
)
def test_forks_over_packed_blocks_equal_the_cache_free_oracle(name: str, backend: str, params: SamplingParams) -> None:
    model, cache = tiny(), CacheConfig(4, kv_dtype=name)
    loss = block_loss(cache)
    dense = DenseRunner(model.model.decoder, dense_attention(model.model, cache, loss=loss), model.model.device)
    expected = texts(cache_free_engine(model.parts(cache, EngineConfig()), dense), params)
    assert len(expected[0]) == 3 and len(set(expected[0])) == 3
    assert texts(model.engine(cache, EngineConfig(backend=backend)), params) == expected
