"""A step in one native call gives the bits that the decoder gives, call by call."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import write_gguf

from kvine import kernels
from kvine.attention.sdpa import SdpaBackend
from kvine.config import CacheConfig, EngineConfig
from kvine.engine.build import build_engine, standard_parts
from kvine.engine.engine import Engine
from kvine.engine.fused import FusedDecoder
from kvine.engine.runner import Runner
from kvine.hub import ModelSource
from kvine.kernels import NEVER
from kvine.kernels.stack import NativeStack
from kvine.models import matmul
from kvine.models.load import LoadedModel, load_model
from kvine.sampling.params import SamplingParams

Make = Callable[..., tuple[Any, Path]]
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 1}),
    "untied-odd-sizes": ("llama", {"hidden_size": 60, "intermediate_size": 89, "tie_word_embeddings": False}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "gemma3": ("gemma3", {"final_logit_softcapping": 5.0, "attn_logit_softcapping": 3.0}),
    "two-groups": ("TH", {}),
}
CACHES = {
    "whole": CacheConfig(block_size=4),
    "sinks": CacheConfig(block_size=3, window=9, sink_tokens=2, sink_rule="in_cache"),
    "fp16": CacheConfig(block_size=4, window=7, sink_tokens=5, sink_rule="absolute", kv_dtype="fp16"),
    "packed": CacheConfig(block_size=4, window=9, sink_tokens=2, sink_rule="in_cache", kv_dtype="int8/int4"),
}
PROMPTS = [[5, 9, 12], [7] * 17, [3, 100, 4, 88, 61, 20, 19, 2, 1, 77, 30], [60, 61]]


def load(folder: Path, dtype: str, form: str = "safetensors", weights: str = "exact") -> LoadedModel:
    source = ModelSource(folder.name, folder, form, None)  # type: ignore[arg-type]
    return load_model(source, dtype=dtype, device="cpu", weights=weights)  # type: ignore[arg-type]


def engine_of(model: LoadedModel, cache: CacheConfig, *, fused: bool) -> tuple[Engine, list[torch.Tensor], list[int]]:
    """An engine, the logits that it will compute, and how many of its steps were one native call."""
    config = EngineConfig(max_step_tokens=16, backend="native")
    parts = standard_parts(model, cache, config, vocab_size=model.config.vocab_size, eos_ids=())
    runner, seen, calls = parts.runner, [], []
    assert isinstance(runner, Runner)
    assert runner.fused is not None
    if not fused:
        runner.fused = None
    else:
        native_run = runner.fused.run
        runner.fused.run = lambda *a, **k: (calls.append(1), native_run(*a, **k))[1]  # type: ignore[method-assign]
    run = runner.run
    runner.run = lambda *a, **k: (seen.append(run(*a, **k)), seen[-1])[1]  # type: ignore[method-assign]
    return build_engine(config, parts), seen, calls


def logits_of(model: LoadedModel, cache: CacheConfig, *, fused: bool) -> tuple[list[torch.Tensor], int]:
    """Logits of each step of four requests, of which two come later; and how many steps were one native call."""
    engine, seen, calls = engine_of(model, cache, fused=fused)
    params = SamplingParams(max_tokens=18, ignore_eos=True)
    for prompt in PROMPTS[:2]:
        engine.add(prompt, params)
    for _ in range(6):
        engine.step()
    for prompt in PROMPTS[2:]:
        engine.add(prompt, params)
    while engine.busy:
        engine.step()
    return seen, len(calls)


def same_bits(model: LoadedModel, cache: CacheConfig) -> None:
    ours, calls = logits_of(model, cache, fused=True)
    theirs, none = logits_of(model, cache, fused=False)
    assert calls > 10
    assert none == 0
    assert len(ours) == len(theirs)
    for step, (got, expected) in enumerate(zip(ours, theirs, strict=True)):
        assert torch.equal(got, expected), f"step {step}"


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("name", MODELS)
def test_steps_give_the_same_bits(name: str, cache: str, tiny: Make) -> None:
    arch, overrides = MODELS[name]
    _, folder = tiny(arch, **overrides)
    for dtype in ("fp32", "bf16"):
        same_bits(load(folder, dtype), CACHES[cache])


@pytest.mark.parametrize("threads", [2, 3])
def test_threads_change_no_bit(threads: int, tiny: Make) -> None:
    _, folder = tiny("gemma3")
    model = load(folder, "bf16")
    alone, _ = logits_of(model, CACHES["sinks"], fused=True)
    torch.set_num_threads(threads)
    try:
        together, _ = logits_of(model, CACHES["sinks"], fused=True)
    finally:
        torch.set_num_threads(1)
    assert all(torch.equal(a, b) for a, b in zip(alone, together, strict=True))


@pytest.mark.parametrize("threads", [2, 3, 5])
@pytest.mark.parametrize("quant", ["Q8_0", "Q4_1", "F32"])
def test_threads_share_a_step_of_several_rows(quant: str, threads: int, tiny: Make) -> None:
    """Each stage has rows of its own for each thread, or columns; none is left out, and none is another's."""
    theirs, folder = tiny("llama")
    model = load(write_gguf(theirs, folder, quant), "fp32", "gguf", "auto")
    torch.set_num_threads(threads)
    try:
        same_bits(model, CACHES["whole"])
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("quant", ["Q8_0", "Q4_1"])
def test_packed_and_exact_weights_mixed(quant: str, tiny: Make) -> None:
    """Rows of 64 are packed, those of 90 (down) cannot be."""
    theirs, folder = tiny("qwen2", intermediate_size=90)
    path = write_gguf(theirs, folder, quant)
    same_bits(load(path, "bf16", "gguf", "auto"), CACHES["whole"])


@pytest.mark.parametrize("kernel", kernels.available())
def test_each_instruction_set(kernel: str, tiny: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(kernels.VARIABLE, kernel)
    monkeypatch.setattr("kvine.models.matmul._MAX_PORTABLE_ROWS", dict.fromkeys(kernels.chosen().dtypes, 8))  # type: ignore[union-attr]
    for dtype in ("fp16", "fp32"):
        same_bits(load(tiny("qwen3")[1], dtype), CACHES["sinks"])


def test_what_the_kernels_do_not_take_is_left_to_the_decoder(tiny: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load(tiny("llama")[1], "fp32")
    parts = standard_parts(model, CacheConfig(), EngineConfig(backend="sdpa"), vocab_size=131, eos_ids=())
    assert isinstance(parts.runner, Runner)
    assert isinstance(parts.runner.attention.backends[0], SdpaBackend)
    assert parts.runner.fused is None
    monkeypatch.setenv(kernels.VARIABLE, "off")
    without = load(tiny("llama")[1], "fp32")
    parts = standard_parts(without, CacheConfig(), EngineConfig(), vocab_size=131, eos_ids=())
    assert isinstance(parts.runner, Runner)
    assert parts.runner.fused is None
    attention = parts.runner.attention
    assert FusedDecoder.bind(model.decoder, attention, kernels.load("portable")) is None


def test_more_rows_than_the_kernels_are_good_for(tiny: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(matmul._MAX_NATIVE_ROWS, torch.bfloat16, 1)
    monkeypatch.setattr("kvine.models.matmul._MAX_NATIVE_ROWS_BESIDE_MATRIX_UNITS", 1)
    engine, _, calls = engine_of(load(tiny("llama")[1], "bf16"), CACHES["whole"], fused=True)
    for prompt in ([4], [5]):
        engine.add(prompt, SamplingParams(max_tokens=4, ignore_eos=True))
    while engine.busy:
        engine.step()
    assert not calls


def test_what_is_not_there_is_refused_before_anything_is_written(tiny: Make) -> None:
    engine, _, _ = engine_of(load(tiny("llama")[1], "fp32"), CACHES["whole"], fused=True)
    runner = engine.parts.runner
    assert isinstance(runner, Runner)
    assert runner.fused is not None
    stack: NativeStack = runner.fused._stack
    pool = runner.attention.pools[0]
    before = pool.k.clone()
    plain = [0, 1, 0, 0, 0, NEVER, 0, 1]  # row 0 has one key, and no sinks or runs
    fine = [*plain, 2]  # in block 2
    for ids, wanted, group in (
        ([131], [0], fine),
        ([-1], [0], fine),
        ([5], [1], fine),
        ([5], [0], [*plain, pool.num_blocks]),
        ([5], [0], [*plain, -1]),
    ):
        with pytest.raises(IndexError):
            stack.run(ids, wanted, [group])
    with pytest.raises(IndexError):
        stack.run([5], [0], [])
    assert torch.equal(pool.k, before)
    assert stack.run([5], [0], [fine]).shape == (1, 131)
    assert not torch.equal(pool.k, before)
