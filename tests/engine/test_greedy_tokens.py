"""The whole way from a file to tokens: the cached engine against transformers' own `generate`, from both formats."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import write_gguf

from kvine.config import CacheConfig, EngineConfig
from kvine.engine.build import build_engine, standard_parts
from kvine.hub import ModelSource
from kvine.models.load import load_model
from kvine.sampling.params import SamplingParams

Make = Callable[..., tuple[Any, Path]]
NEW_TOKENS = 32
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-mqa": ("llama", {"num_key_value_heads": 1}),
    "llama-mha": ("llama", {"num_key_value_heads": 4}),
    "mistral": ("mistral", {}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "gemma3": ("gemma3", {}),
}


@pytest.mark.parametrize("form", ["safetensors", "gguf"])
@pytest.mark.parametrize("case", CASES)
def test_32_greedy_tokens_are_those_of_transformers(case: str, form: str, tiny: Make) -> None:
    arch, overrides = CASES[case]
    theirs, folder = tiny(arch, **overrides)
    path = write_gguf(theirs, folder) if form == "gguf" else folder
    model = load_model(ModelSource(case, path, form, None), dtype="fp32", device="cpu")  # type: ignore[arg-type]
    prompt = torch.randint(3, 131, (21,), generator=torch.Generator().manual_seed(5)).tolist()
    with torch.inference_mode():
        ids = torch.tensor([prompt])
        text = theirs.generate(ids, do_sample=False, min_new_tokens=NEW_TOKENS, max_new_tokens=NEW_TOKENS)[0].tolist()

    config = EngineConfig(max_step_tokens=8)
    parts = standard_parts(model, CacheConfig(block_size=4), config, vocab_size=model.config.vocab_size, eos_ids=())
    engine = build_engine(config, parts)
    # With min_new_tokens transformers never draws an EOS id, so neither may this.
    banned = {token: float("-inf") for token in parts.eos_ids}
    engine.add(prompt, SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True, logit_bias=banned))
    tokens: list[int] = []
    while engine.busy:
        tokens += [event.sample.token_id for event in engine.step() if event.sample is not None]
        engine.manager.check()
    assert tokens == text[len(prompt) :]
