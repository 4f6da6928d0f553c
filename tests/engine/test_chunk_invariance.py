"""With packed weights no sum depends on how a text is cut into steps: the same logits, bit for bit."""

import pytest
import torch
from checkpoints import tiny_model, write_gguf
from tiny_engines import stepped_over

from kvine import kernels
from kvine.config import CacheConfig, EngineConfig
from kvine.engine.build import build_engine, standard_parts
from kvine.hub import ModelSource, resolve
from kvine.models.load import LoadedModel, load_model


def logits_of(model: LoadedModel, cache: CacheConfig, ids: list[int], chunk: int) -> torch.Tensor:
    """[1, N, vocabulary] of a text that is read `chunk` tokens at a time."""
    config = EngineConfig(chunk, backend="native")
    parts = standard_parts(model, cache, config, vocab_size=model.config.vocab_size, eos_ids=())
    return stepped_over(build_engine(config, parts)).extend(ids)


def text(length: int, vocabulary: int) -> list[int]:
    return torch.randint(3, vocabulary, (length,), generator=torch.Generator().manual_seed(2)).tolist()


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_real_model_gives_the_same_logits_whatever_the_chunk(dtype: str) -> None:
    model = load_model(resolve("smollm2-135m"), dtype=dtype, device="cpu", weights="packed")
    ids = text(150, model.config.vocab_size)
    for cache in (CacheConfig(), CacheConfig(kv_dtype="int8"), CacheConfig(kv_dtype="int4-token/int2", window=70)):
        whole = logits_of(model, cache, ids, 2_048)
        for chunk in (1, 7, 33, 64):
            assert torch.equal(logits_of(model, cache, ids, chunk), whole), (cache.kv_dtype, chunk)


@pytest.mark.parametrize("path", kernels.available())
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("arch", ["llama", "gemma3"])
def test_windows_and_sinks_do_not_depend_on_the_chunk(
    arch: str, dtype: str, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(kernels.VARIABLE, path)
    oracle, folder = tiny_model(arch)
    source = ModelSource(arch, write_gguf(oracle, folder, "Q4_1"), "gguf", None)
    model = load_model(source, dtype=dtype, device="cpu", weights="packed")
    ids = text(70, model.config.vocab_size)
    caches = (
        CacheConfig(block_size=4),
        CacheConfig(block_size=3, window=9, sink_tokens=2, sink_rule="in_cache"),
        CacheConfig(block_size=4, kv_dtype="int4"),
        CacheConfig(block_size=3, kv_dtype="int8/int4", window=9, sink_tokens=2, sink_rule="in_cache"),
        CacheConfig(block_size=8, kv_dtype="fp16/int2"),
        CacheConfig(block_size=16, kv_dtype="int2-token/exact", window=20),
    )
    for cache in caches:
        whole = logits_of(model, cache, ids, 2_048)
        for chunk in (1, 2, 16, 33):
            assert torch.equal(logits_of(model, cache, ids, chunk), whole), (cache.kv_dtype, cache.window, chunk)
