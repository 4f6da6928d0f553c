"""The plan audits itself: planned bytes are those that the manager holds and the pool's tensors keep, exactly."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from planned import planned

from kvine.cache.manager import CacheManager
from kvine.config import CacheConfig, EngineConfig
from kvine.engine.build import DTYPE_NAMES, build_engine, standard_parts
from kvine.engine.engine import Engine
from kvine.engine.runner import Runner
from kvine.errors import ConfigError
from kvine.evidence.plan import Plan, machine
from kvine.evidence.plan.sources import subject_of
from kvine.evidence.plan.variants import planner_of
from kvine.hub import ModelSource, resolve
from kvine.models.load import LoadedModel, load_model
from kvine.models.packing import WEIGHTS
from kvine.sampling.params import SamplingParams

KINDS = ("llama", "mistral", "qwen2", "qwen3", "gemma3", "TH")
CACHES = (
    CacheConfig(block_size=1),
    CacheConfig(block_size=4, kv_dtype="fp16"),
    CacheConfig(block_size=32, kv_dtype="bf16"),
    CacheConfig(block_size=8, kv_dtype="fp32", prefix_caching=True),
    CacheConfig(block_size=4, window=5),
    CacheConfig(block_size=8, window=20, sink_tokens=3, sink_rule="in_cache", kv_dtype="bf16"),
    CacheConfig(block_size=8, kv_dtype="int8"),
    CacheConfig(block_size=4, window=20, sink_tokens=3, kv_dtype="int4/int2"),
    CacheConfig(block_size=16, kv_dtype="fp16/int4"),
    CacheConfig(block_size=4, window=6, sink_tokens=1, global_tokens=((9, 14), (30, 31)), kv_dtype="fp16"),
)
LENGTHS = (1, 7, 8, 9, 64)
Tiny = Callable[..., tuple[Any, Path]]
_LOADED: dict[tuple[str, str], LoadedModel] = {}


def loaded(tiny: Tiny, kind: str, dtype: str) -> LoadedModel:
    if (kind, dtype) not in _LOADED:
        folder = tiny(kind)[1]
        _LOADED[kind, dtype] = load_model(ModelSource(kind, folder, "safetensors", None), dtype=dtype, device="cpu")
    return _LOADED[kind, dtype]


def engine_of(model: LoadedModel, cache: CacheConfig, config: EngineConfig) -> Engine:
    return build_engine(config, standard_parts(model, cache, config, vocab_size=131, eos_ids=()))


def steps(engine: Engine, prompts: Sequence[int], length: int) -> Iterator[list[int]]:
    """Computes random texts side by side until each has `length` tokens in the cache, one beginning for each prompt.

    Yields how many tokens of each are there, after each step in which none has ended.
    """
    generator = torch.Generator().manual_seed(7)
    for prompt in prompts:
        ids = torch.randint(3, 131, (prompt,), generator=generator).tolist()
        engine.add(ids, SamplingParams(max_tokens=2 * length, ignore_eos=True))
    while not engine.scheduler.running or max(lengths_in(engine)) < length:
        engine.step()
        yield lengths_in(engine)


def lengths_in(engine: Engine) -> list[int]:
    return [request.num_computed for request in engine.scheduler.running]


def stored_bytes(engine: Engine) -> tuple[int, int]:
    """Bytes of the pools' tensors in the blocks that requests hold, and in all blocks that were ever written."""
    runner = engine.parts.runner
    assert isinstance(runner, Runner)
    held = written = 0
    for pool, blocks in zip(runner.attention.pools, engine.manager.pools, strict=True):
        ids = sorted(blocks.references)
        used = torch.zeros(pool.num_blocks, dtype=torch.bool)
        end = blocks._untouched
        for stored in (pool.k, pool.v):
            held += stored[:, ids].nbytes
            touched = stored[:, :end].transpose(0, 1).flatten(1).float().abs().amax(1) > 0
            used[:end] |= touched
            assert touched[ids].all(), "a block that is held was never written"
            assert not stored[:, end : end + 2].any(), "a block was written that nobody took"
        written += int(used.sum()) * blocks.bytes_per_block
    return held, written


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("cache", CACHES, ids=lambda cache: f"{cache.block_size}-{cache.kv_dtype}-{cache.window}")
@pytest.mark.parametrize("kind", KINDS)
def test_g05_planned_is_what_is_held(tiny: Tiny, kind: str, cache: CacheConfig, dtype: str) -> None:
    model = loaded(tiny, kind, dtype)
    cache, config = replace(cache, kv_memory="4MiB"), EngineConfig(max_step_tokens=36)
    plan = planned(tiny(kind)[1], context=64, batch=3, dtype=dtype, cache=cache, engine=config)
    assert plan.weight_bytes == model.weight_bytes
    planner, engine, seen = planner_of(plan), engine_of(model, cache, config), set()
    for lengths in steps(engine, (1, 7, 62), 64):
        held = sum(planner.held(length, 1) for length in lengths)
        assert held == engine.manager.bytes_referenced <= plan.kv_peak_bytes
        seen |= set(lengths)
    assert seen >= set(LENGTHS)
    in_tensors, ever_written = stored_bytes(engine)
    assert in_tensors == held
    if all(spec.window is None and not spec.packs for spec in plan.specs):  # otherwise blocks come and go
        assert ever_written == held
    else:
        assert held < ever_written <= plan.kv_peak_bytes + engine.manager.bytes_cached


@pytest.mark.parametrize("cache", CACHES, ids=lambda cache: f"{cache.block_size}-{cache.kv_dtype}-{cache.window}")
@pytest.mark.parametrize("kind", KINDS)
def test_g05_the_planned_memory_is_enough_for_all_and_a_byte_less_is_not(
    tiny: Tiny, kind: str, cache: CacheConfig
) -> None:
    model, folder = loaded(tiny, kind, "fp32"), tiny(kind)[1]
    cache = replace(cache, prefix_caching=False)
    config = EngineConfig(max_step_tokens=16)
    plan = planned(folder, context=50, batch=3, dtype="fp32", cache=cache, engine=config)
    engine = engine_of(model, replace(cache, kv_memory=plan.kv_peak_bytes), config)
    for first in (3, 4, 5):  # each is 50 tokens in the end, of which the last is not fed
        engine.add([first] * 41, SamplingParams(max_tokens=10, ignore_eos=True))
    together = 0
    while engine.busy:
        engine.step()
        together = max(together, len(engine.scheduler.running))
    assert together == 3 and engine.scheduler.num_preemptions == 0
    one = planned(folder, context=50, dtype="fp32", cache=cache, engine=config).kv_peak_bytes
    assert CacheManager(plan.specs, one).fits_ever(50, 16)
    assert not CacheManager(plan.specs, one - 1).fits_ever(50, 16)


def test_an_allocation_in_steps_never_passes_the_planned_most(tiny: Tiny) -> None:
    model, folder = loaded(tiny, "TH", "fp32"), tiny("TH")[1]
    cache, config = CacheConfig(block_size=4, kv_memory="4MiB", prefix_caching=False), EngineConfig(max_step_tokens=16)
    engine = engine_of(model, cache, config)
    plan = planned(folder, context=60, batch=2, cache=cache, engine=config)
    most = 0
    run = engine.parts.runner.run

    def watched(step: Any) -> torch.Tensor:
        nonlocal most
        most = max(most, engine.manager.bytes_referenced)
        return run(step)

    engine.parts.runner.run = watched  # type: ignore[method-assign]
    for _ in steps(engine, (50, 50), 60):
        pass
    assert plan.kv_bytes < most <= plan.kv_peak_bytes


def fits(plan: Plan) -> bool:
    """Recomputed from the parts, not taken from `plan.fits`."""
    assert plan.workspace is not None and plan.weight_bytes is not None
    return plan.weight_bytes + plan.kv_peak_bytes + plan.workspace.nbytes <= plan.fits.memory.value


@pytest.mark.parametrize("memory", [10**8 + 2 * 10**6, 10**8 + 3 * 10**6, 2 * 10**8])
@pytest.mark.parametrize("cache", CACHES, ids=lambda cache: f"{cache.block_size}-{cache.kv_dtype}-{cache.window}")
@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_g05_most_tokens_and_most_requests_are_exact_inverses(
    tiny: Tiny, kind: str, cache: CacheConfig, memory: int
) -> None:
    subject = subject_of(str(tiny(kind)[1]))
    options: dict[str, Any] = {"memory": memory, "cache": cache}
    for batch in (1, 3):
        most = planned(subject, context=8, batch=batch, **options).fits.max_context
        if most is None:
            assert cache.window is not None and fits(planned(subject, context=2**31 - 1, batch=batch, **options))
        else:
            assert most > 0 and fits(planned(subject, context=most, batch=batch, **options))
            assert not fits(planned(subject, context=most + 1, batch=batch, **options))
    for context in (7, 64):
        requests = planned(subject, context=context, **options).fits.max_batch
        assert requests > 0 and fits(planned(subject, context=context, batch=requests, **options))
        assert not fits(planned(subject, context=context, batch=requests + 1, **options))


def test_a_memory_without_room_for_a_token_says_so(tiny: Tiny) -> None:
    plan = planned(tiny("llama")[1], memory="1MB")
    assert plan.fits.max_context == 0 and plan.fits.max_batch == 0 and not plan.fits.fits
    assert plan.warnings[-1] == "This plan does not fit the memory."


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("asked", ["auto", "fp32", "bf16", "fp16"])
def test_planned_weights_are_loaded_weights(tiny: Tiny, stored: torch.dtype, asked: str) -> None:
    for kind, tied in (("llama", False), ("qwen3", True), ("gemma3", True), ("qwen2", False)):
        oracle, folder = tiny(kind, dtype=stored, tie_word_embeddings=tied)
        model = load_model(ModelSource(kind, folder, "safetensors", None), dtype=asked, device="cpu")
        plan = planned(folder, dtype=asked)
        assert plan.weight_bytes == model.weight_bytes
        assert plan.subject.dtype == DTYPE_NAMES[model.dtype]
        assert plan.subject.weights.stored_bytes == oracle.num_parameters() * stored.itemsize


@pytest.mark.parametrize("quant", ["F32", "F16", "Q8_0", "Q4_0"])
def test_planned_weights_of_gguf_are_loaded_weights(tiny: Tiny, quant: str) -> None:
    from checkpoints import write_gguf

    for kind in ("llama", "gemma3"):
        oracle, folder = tiny(kind)
        path = write_gguf(oracle, folder, quant)
        for asked in ("auto", "fp32"):
            model = load_model(ModelSource(kind, path, "gguf", None), dtype=asked, device="cpu")
            plan = planned(path, dtype=asked)
            assert plan.weight_bytes == model.weight_bytes
            assert plan.subject.dtype == DTYPE_NAMES[model.dtype]
            assert plan.subject.model == model.config


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("asked", ["auto", "fp32"])
def test_planned_packed_weights_are_loaded_weights(tiny: Tiny, weights: str, asked: str) -> None:
    from checkpoints import write_gguf

    for kind, quant in (("llama", "Q8_0"), ("gemma3", "Q5_0"), ("llama", None), ("qwen3", None), ("qwen2", None)):
        oracle, folder = tiny(kind, dtype=torch.bfloat16)
        path, form = (folder, "safetensors") if quant is None else (write_gguf(oracle, folder, quant), "gguf")
        source = ModelSource(kind, path, form, None)  # type: ignore[arg-type]
        model = load_model(source, dtype=asked, device="cpu", weights=weights)
        is_packed = weights[0] == "q" or (
            quant is not None and (weights == "packed" or (weights, asked) == ("auto",) * 2)
        )
        plan = planned(path, dtype=asked, weights=weights)
        assert bool(model.packings) == is_packed and plan.subject.packings == model.packings
        assert plan.weight_bytes == model.weight_bytes
        assert plan.subject.weights is not None
        assert plan.subject.weights.bytes_per_step(1) == model.step_bytes + plan.subject.weights.row_bytes


@pytest.mark.parametrize("name", ["smollm2-135m", "gemma3-270m"])
def test_planned_weights_of_the_real_models_are_loaded_weights(name: str) -> None:
    """Of files in four bits to eight, in superblocks too."""
    for weights in ("auto", "q8"):
        model = load_model(resolve(name), device="cpu", weights=weights)
        plan = planned(name, weights=weights)
        assert (plan.weight_bytes, plan.subject.packings) == (model.weight_bytes, model.packings)
        assert f"{len(model.packings)} weights" in str(plan.subject.dtype_reason)


def test_what_has_no_kernels_is_planned_exact(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    from checkpoints import write_gguf

    oracle, folder = tiny("llama")
    path = write_gguf(oracle, folder, "Q8_0")
    packed, exact = planned(path), planned(path, weights="exact")
    assert packed.weight_bytes < exact.weight_bytes
    monkeypatch.setenv("KVINE_KERNELS", "off")
    without = planned(path)
    assert without.weight_bytes == exact.weight_bytes and "no kernels" in str(without.subject.dtype_reason)
    with pytest.raises(ConfigError, match="need a CPU with Kvine's compiled kernels"):
        planned(path, weights="packed")
    monkeypatch.delenv("KVINE_KERNELS")
    monkeypatch.setattr(machine, "_KERNELS", folder)
    assert planned(path).weight_bytes == exact.weight_bytes, "nothing is compiled there"
    with pytest.raises(ConfigError, match="weights 'q3' is unknown"):
        planned(path, weights="q3")
