"""Tiny random checkpoints for the tests of the evidence room, written by transformers."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path

import tokenizers
import torch
import transformers
from tokenizers.decoders import ByteLevel
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from kvine.config import CacheConfig, EngineConfig
from kvine.engine.build import dense_attention, standard_parts
from kvine.engine.cache_free import DenseRunner
from kvine.engine.engine import EngineParts
from kvine.hub import ModelSource
from kvine.models.load import LoadedModel, load_model

VOCAB = 131
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "initializer_range": 0.15,  # large enough for attention to matter
}


def write_checkpoint(folder: Path, kind: str, seed: int = 0) -> ModelSource:
    """A llama, a qwen3 (QK-norm), or a gemma3 with layers that alternate between a window of 8 and all."""
    torch.manual_seed(seed)
    if kind == "llama":
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))
    elif kind == "qwen3":
        model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SIZES))
    else:
        layers = ["sliding_attention", "full_attention", "sliding_attention"]
        config = transformers.Gemma3TextConfig(**SIZES, sliding_window=8, layer_types=layers)
        model = transformers.Gemma3ForCausalLM(config)
    model.save_pretrained(folder)
    return ModelSource(kind, folder, "safetensors", None)


def write_tokenizer(folder: Path) -> None:
    """One token for each of the words w0, w1, ..."""
    tokenizer = tokenizers.Tokenizer(WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.decoder = ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))


@dataclass
class Subject:
    """An engine's parts, whose attention, backend or manager a test may exchange."""

    model: LoadedModel
    parts: EngineParts
    dense: DenseRunner
    config: EngineConfig

    @classmethod
    def load(
        cls,
        source: ModelSource,
        dtype: str,
        cache: CacheConfig | None = None,
        *,
        backend: str = "auto",
        weights: str = "auto",
    ) -> "Subject":
        cache, config = cache or CacheConfig(block_size=4), EngineConfig(backend=backend)
        model = load_model(source, dtype=dtype, device="cpu", weights=weights)
        parts = standard_parts(model, cache, config, vocab_size=VOCAB, eos_ids=())
        return cls(model, parts, DenseRunner(model.decoder, dense_attention(model, cache), model.device), config)

    def exchange(self, **parts: object) -> None:
        self.parts = dataclasses.replace(self.parts, **parts)


def random_prompt(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCAB, (length,), generator=generator).tolist()
