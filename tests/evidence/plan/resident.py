"""Run in a process of its own: what loading a model and answering takes of its memory, as JSON.

Arguments: model, dtype, weights, batch, prompt tokens, new tokens, tokens in a step. torch and its kernels are there
before the memory is counted; nothing else of the model is.
"""

import json
import sys

import torch
import torch.nn.functional as F

from kvine.config import CacheConfig, EngineConfig
from kvine.engine.build import build_engine, standard_parts
from kvine.evidence.memory import PeakMemory
from kvine.hub import resolve
from kvine.models.load import load_model
from kvine.sampling.params import SamplingParams


def main() -> None:
    model, dtype, weights = sys.argv[1:4]
    batch, prompt, new, step = map(int, sys.argv[4:8])
    torch.set_num_threads(1)
    small = torch.ones(8, 8)
    F.scaled_dot_product_attention(small[None, None], small[None, None], F.linear(small, small)[None, None])
    cache, config = CacheConfig(kv_memory="4GiB", prefix_caching=False), EngineConfig(max_step_tokens=step)
    cpu = torch.device("cpu")
    held = 0
    with PeakMemory(cpu) as memory:
        loaded = load_model(resolve(model, fetch=False), dtype=dtype, device="cpu", weights=weights)
        parts = standard_parts(loaded, cache, config, vocab_size=loaded.config.vocab_size, eos_ids=())
        engine = build_engine(config, parts)
        generator = torch.Generator().manual_seed(0)
        for _ in range(batch):
            ids = torch.randint(5, 40_000, (prompt,), generator=generator).tolist()
            engine.add(ids, SamplingParams(max_tokens=new, ignore_eos=True))
        while engine.busy:
            engine.step()
            held = max(held, engine.manager.bytes_referenced)
    assert memory.peak_bytes is not None and memory.start_bytes is not None
    print(json.dumps({"taken": memory.peak_bytes - memory.start_bytes, "mapped": loaded.mapped_bytes, "held": held}))


main()
