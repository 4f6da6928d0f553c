"""Random healthy configurations, in which the examination must find nothing."""

import random
from dataclasses import dataclass
from pathlib import Path

from tiny_models import write_checkpoint

from kvine.config import CacheConfig, EngineConfig
from kvine.engine.build import standard_parts
from kvine.engine.engine import EngineParts
from kvine.evidence.traps.examine import Finding, Lab, examine
from kvine.models.load import LoadedModel


@dataclass(frozen=True)
class Configuration:
    """One of them."""

    kind: str
    dtype: str
    backend: str
    cache: CacheConfig
    seed: int

    def build(self, model: LoadedModel, cache: CacheConfig) -> EngineParts:
        config = EngineConfig(backend=self.backend)
        return standard_parts(model, cache, config, vocab_size=model.config.vocab_size, eos_ids=())


def random_configuration(seed: int) -> Configuration:
    chance = random.Random(seed)
    window = chance.choice([None, None, chance.randint(1, 40)])
    return Configuration(
        chance.choice(["llama", "qwen3", "gemma3"]),
        chance.choice(["fp32", "fp32", "bf16", "fp16"]),
        chance.choice(["native", "sdpa", "reference"]),
        CacheConfig(
            block_size=chance.choice([1, 2, 3, 4, 5, 8, 16, 32]),
            kv_dtype=chance.choice(["exact", "exact", "fp32", "fp16", "bf16"]),
            window=window,
            sink_tokens=chance.choice([0, chance.randint(1, 6)]) if window else 0,
            sink_rule=chance.choice(["absolute", "in_cache"]),  # type: ignore[arg-type]
            prefix_caching=chance.random() < 0.8,
        ),
        seed,
    )


def examine_healthy(folder: Path, configuration: Configuration) -> Finding:
    source = write_checkpoint(folder, configuration.kind, configuration.seed)
    lab = Lab(source, dtype=configuration.dtype, cache=configuration.cache, seed=configuration.seed)
    return examine(lab, configuration.build)
