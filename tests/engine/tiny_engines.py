"""Engines over tiny real checkpoints, and what transformers makes of the same texts."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvine.config import CacheConfig, EngineConfig
from kvine.engine.build import build_engine, dense_attention, standard_parts
from kvine.engine.cache_free import DenseRunner, cache_free_engine
from kvine.engine.engine import Engine, EngineParts
from kvine.engine.runner import Runner
from kvine.engine.stepped import SteppedCache
from kvine.hub import ModelSource
from kvine.models.cache_specs import cache_specs
from kvine.models.load import LoadedModel, load_model
from kvine.rope import RotaryEmbedding, rotate

VOCAB = 131


@dataclass(eq=False)
class Tiny:
    """A checkpoint twice: as transformers has it, the oracle, and as Kvine has loaded it."""

    oracle: Any
    folder: Path
    dtype: str = "fp32"

    @cached_property
    def model(self) -> LoadedModel:
        source = ModelSource(self.folder.name, self.folder, "safetensors", None)
        return load_model(source, dtype=self.dtype, device="cpu")

    @torch.inference_mode()
    def ref(self, tokens: Sequence[int]) -> Tensor:
        """[N, vocabulary], in one plain forward."""
        logits: Tensor = self.oracle(torch.tensor([tokens]), use_cache=False).logits[0]
        return logits.float()

    def greedy(self, prompt: Sequence[int], count: int) -> list[int]:
        text = list(prompt)
        for _ in range(count):
            text.append(int(self.ref(text)[-1].argmax()))
        return text[len(prompt) :]

    def parts(self, cache: CacheConfig, config: EngineConfig) -> EngineParts:
        return standard_parts(self.model, cache, config, vocab_size=VOCAB, eos_ids=())

    def engine(self, cache: CacheConfig | None = None, config: EngineConfig | None = None) -> Engine:
        cache, config = cache or CacheConfig(block_size=4), config or EngineConfig()
        return build_engine(config, self.parts(cache, config))

    def cache_free(self, cache: CacheConfig) -> Engine:
        dense = DenseRunner(self.model.decoder, dense_attention(self.model, cache), self.model.device)
        return cache_free_engine(self.parts(cache, EngineConfig()), dense)

    def stepped(self, cache: CacheConfig | None = None, config: EngineConfig | None = None) -> SteppedCache:
        engine = self.engine(cache, config)
        return stepped_over(engine)

    def memory_of(self, cache: CacheConfig, num_tokens: int, extra_blocks: int = 0) -> CacheConfig:
        """The same cache, with memory for one text of so many tokens and some blocks of each group more."""
        specs = cache_specs(self.model.config, cache)
        sizes = [spec.bytes_per_block("fp32") for spec in specs]
        blocks = [spec.max_live_blocks(num_tokens, num_tokens) + extra_blocks for spec in specs]
        return replace(cache, kv_memory=sum(n * size for n, size in zip(blocks, sizes, strict=True)))


def stepped_over(engine: Engine) -> SteppedCache:
    runner = engine.parts.runner
    assert isinstance(runner, Runner)
    return SteppedCache(runner, engine.config, engine.parts.max_context)


def same_logits(got: Tensor, expected: Tensor) -> None:
    """Matches, as a cache that changes nothing must: the same greedy ids, and logits within 1e-4 of a unit or two."""
    torch.testing.assert_close(got, expected, atol=2e-4, rtol=1e-4)
    assert got.argmax(-1).tolist() == expected.argmax(-1).tolist()


@torch.inference_mode()
def cast_logits(model: LoadedModel, tokens: Sequence[int], kv_dtype: str) -> Tensor:
    """[N, vocabulary] of a plain forward whose rotated keys and values pass through another dtype by value."""
    kept = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[kv_dtype]
    positions = torch.arange(len(tokens))
    ropes = [RotaryEmbedding(layer.rope, model.device) for layer in model.config.layers]

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        cos, sin = ropes[layer].cos_sin(positions)
        group = q.shape[1] // k.shape[1]
        keys, values = (x.to(kept).float().repeat_interleave(group, dim=1) for x in (rotate(k, cos, sin), v))
        scores = torch.einsum("qhd,khd->hqk", rotate(q, cos, sin).float(), keys) * model.config.attention_scale
        scores = scores.masked_fill(positions[:, None] < positions, -torch.inf)
        return torch.einsum("hqk,khd->qhd", scores.softmax(-1), values).to(q.dtype)

    return model.decoder.logits(model.decoder.forward(torch.tensor(tokens), positions, attend))
