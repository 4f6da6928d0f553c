"""The weights shown are those that the model used: against transformers, and against what attention gave out."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_text import write_tokenizer

from kvine import LLM, CacheConfig
from kvine.config import EngineConfig
from kvine.hub import ModelSource

Tiny = Callable[..., tuple[Any, Path]]


def open_llm(folder: Path, **options: Any) -> LLM:
    write_tokenizer(folder)
    source = ModelSource("tiny", folder, "safetensors", None)
    return LLM(source, device="cpu", dtype="fp32", threads=1, **{"cache": CacheConfig(block_size=4), **options})


def text_of(length: int) -> list[int]:
    return torch.randint(6, 100, (length,), generator=torch.Generator().manual_seed(length)).tolist()


# With a window of 8 and blocks of 4, the query at 10 sees position 3, whose block is let go when it has been computed.
@pytest.mark.parametrize("length", [1, 2, 11, 25])
@pytest.mark.parametrize("arch", ["llama", "qwen3", "gemma3"])
def test_the_weights_are_those_of_transformers(tiny: Tiny, arch: str, length: int) -> None:
    oracle, folder = tiny(arch)
    ids = text_of(length)
    with torch.inference_mode():
        expected = oracle(torch.tensor([ids]), output_attentions=True).attentions
    explanation = open_llm(folder).explain(ids, steps=0)
    assert explanation.weights.shape == (3, 4, length)
    for layer, attention in enumerate(expected):
        torch.testing.assert_close(explanation.weights[layer], attention[0, :, -1], rtol=0, atol=1e-5)
        assert explanation.visible[layer].tolist() == (attention[0, 0, -1] > 0).tolist()


CACHES = {
    "plain": CacheConfig(block_size=4),
    "window": CacheConfig(block_size=4, window=5),
    "sinks": CacheConfig(block_size=4, window=6, sink_tokens=3),
    "sinks inside the cache": CacheConfig(block_size=4, window=6, sink_tokens=3, sink_rule="in_cache"),
    "fp16": CacheConfig(block_size=4, kv_dtype="fp16"),
    "packed keys": CacheConfig(block_size=4, kv_dtype="int2/exact"),
}


# 9 is the first position that reads sinks inside the cache elsewhere; the last of 24 tokens fills its block.
@pytest.mark.parametrize("length", [10, 23, 24])
@pytest.mark.parametrize("cache", CACHES.values(), ids=CACHES.keys())
@pytest.mark.parametrize(("arch", "softcap"), [("gemma3", None), ("qwen3", 1.5)])
def test_weights_times_values_are_what_attention_gave_out(
    tiny: Tiny, arch: str, softcap: float | None, cache: CacheConfig, length: int
) -> None:
    llm = open_llm(tiny(arch)[1], cache=cache)
    runner = llm.parts.runner
    runner.attention.softcap = softcap
    ids = text_of(length)
    weights = llm.explain(ids, steps=0).weights

    found: dict[int, torch.Tensor] = {}
    _, held = llm.forward(ids[:-1])
    past = [(held.layer(number)[1][0], held.positions(number)) for number in range(3)]
    runner.observer = lambda name, layer, tensor: found.update({layer: tensor[-1]} if name == "attn_out" else {})
    llm.forward(ids[-1:], held)
    for number, layer in enumerate(llm.model.decoder.layers):
        before, positions = past[number]
        values = torch.cat((before, held.layer(number)[1][0, :, -1:]), dim=1).float()  # [Hkv, held, D]
        heads = [weights[number, head, [*positions, length - 1]] @ values[head // 2] for head in range(4)]
        out = layer.o_proj(torch.cat(heads)[None])
        if layer.post_attn_norm is not None:
            out = layer.post_attn_norm(out)
        torch.testing.assert_close(out[0], found[number], rtol=1e-4, atol=1e-5)


def test_chunks_of_the_prompt_change_nothing(tiny: Tiny) -> None:
    folder = tiny("gemma3")[1]
    ids = text_of(25)
    whole = open_llm(folder).explain(ids, steps=1)
    chunks = open_llm(folder, engine=EngineConfig(max_step_tokens=3)).explain(ids, steps=1)
    torch.testing.assert_close(chunks.weights, whole.weights, rtol=0, atol=1e-5)
    assert chunks.steps[0].computed == whole.steps[0].computed
