"""The real SmolLM2 under transformers with KvineCache and in Kvine's engine: the same options, the same tokens."""

from typing import Any

import pytest
import torch
import transformers
from tiny_decoders import generated
from transformers import DynamicCache

from kvine import LLM, CacheConfig, SamplingParams
from kvine.hub import resolve
from kvine.integrations.transformers import KvineCache

PROMPT = "The capital of Japan is Tokyo, the capital of Italy is Rome, and the capital of"
NEW = 24


@pytest.fixture(scope="module")
def smollm2() -> Any:
    path = resolve("smollm2-135m").path
    model = transformers.AutoModelForCausalLM.from_pretrained(
        str(path.parent),
        gguf_file=path.name,
        quantization_config=transformers.GgufConfig(dequantize=True),
        dtype=torch.float32,
        local_files_only=True,
    )
    model.generation_config = transformers.GenerationConfig()
    return model.eval()


@pytest.mark.parametrize(
    "options",
    [
        {"kv_dtype": "exact"},
        {"kv_dtype": "bf16"},
        {"window": 12, "sink_tokens": 2, "block_size": 8},
        {"window": 12, "kv_dtype": "bf16", "block_size": 8},
    ],
)
def test_it_writes_what_the_engine_writes(smollm2: Any, options: dict[str, Any]) -> None:
    llm = LLM("smollm2-135m", dtype="fp32", cache=CacheConfig(**options))
    answer = llm.generate(PROMPT, SamplingParams(max_tokens=NEW, temperature=0, ignore_eos=True))
    ids, past = torch.tensor([answer.prompt_ids]), KvineCache(smollm2.config, **options)
    chunks = {"prefill_chunk_size": 1} if "window" in options else {}
    sequence = generated(smollm2, past, ids, new=NEW, **chunks).sequences[0, ids.shape[1] :].tolist()
    assert sequence == answer.token_ids


def test_a_packed_cache_keeps_the_answer_and_a_fraction_of_the_bytes(smollm2: Any) -> None:
    ids = torch.tensor([LLM("smollm2-135m", dtype="fp32").encode(PROMPT)])
    exact = generated(smollm2, DynamicCache(config=smollm2.config), ids, new=NEW).sequences
    past = KvineCache(smollm2.config, kv_dtype="int8", block_size=8)
    assert torch.equal(generated(smollm2, past, ids, new=NEW).sequences[:, :-8], exact[:, :-8])
    whole = past.get_seq_length() * smollm2.config.num_hidden_layers * 2 * 3 * 64 * 4
    assert past.num_bytes < 0.5 * whole
