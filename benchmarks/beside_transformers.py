"""Times Kvine and transformers side by side on one model: same file, same dtype, same prompts, in turns.

Prints a table, or one JSON object with --json. Ratios are of medians; absolute times belong to the machine.

    python benchmarks/beside_transformers.py --dtype bf16 --rounds 3
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from kvine.evidence.prompts import DEFAULT_PROMPT, QUESTION
from kvine.hub import DEFAULT_MODEL, ModelSource
from kvine.llm import LLM

TORCH_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
now = time.perf_counter


def load_transformers(source: ModelSource, dtype: str) -> Any:
    """transformers' own model of the same file."""
    from transformers import AutoModelForCausalLM, GgufConfig

    if source.format == "gguf":
        model = AutoModelForCausalLM.from_pretrained(
            source.path.parent,
            gguf_file=source.path.name,
            dtype=TORCH_DTYPES[dtype],
            quantization_config=GgufConfig(dequantize=True),
        )
    else:
        model = AutoModelForCausalLM.from_pretrained(source.path, dtype=TORCH_DTYPES[dtype])
    return model.eval()


@torch.inference_mode()
def time_transformers(model: Any, ids: list[int], steps: int) -> tuple[float, float]:
    """Seconds of the prefill, and milliseconds of one decode step."""
    began = now()
    out = model(input_ids=torch.tensor([ids]), use_cache=True, logits_to_keep=1)
    token = out.logits[:, -1:].argmax(-1)
    prefill, began = now() - began, now()
    for _ in range(steps):
        out = model(input_ids=token, cache=out.cache, use_cache=True)
        token = out.logits[:, -1:].argmax(-1)
    return prefill, (now() - began) / steps * 1e3


def time_kvine(llm: LLM, ids: list[int], steps: int) -> tuple[float, float]:
    """The same, through Kvine's block cache."""
    began = now()
    logits, cache = llm.forward(ids, last=True)
    token = int(logits[0, -1].argmax())
    prefill, began = now() - began, now()
    for _ in range(steps):
        logits, cache = llm.forward([token], cache, last=True)
        token = int(logits[0, -1].argmax())
    return prefill, (now() - began) / steps * 1e3


def main() -> None:
    """Runs the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--dtype", default="bf16", choices=TORCH_DTYPES)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=63)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()

    llm = LLM(options.model, dtype=options.dtype)
    peer = load_transformers(llm.source, options.dtype)
    engines: dict[str, Callable[[list[int]], tuple[float, float]]] = {
        "kvine": lambda ids: time_kvine(llm, ids, options.steps),
        "transformers": lambda ids: time_transformers(peer, ids, options.steps),
    }
    rows = []
    for name, prompt in (("short", QUESTION), ("long", DEFAULT_PROMPT)):
        ids = llm.encode(prompt)
        times: dict[str, list[tuple[float, float]]] = {engine: [] for engine in engines}
        for round_number in range(options.rounds + 1):  # the first round warms up and is not counted
            for engine, measure in engines.items():
                measured = measure(ids)
                if round_number:
                    times[engine].append(measured)
                print(f"{name} round {round_number} {engine}: {measured}", file=sys.stderr, flush=True)
        for i, what in enumerate(("prefill_s", "decode_ms")):
            ours, theirs = (statistics.median(t[i] for t in times[engine]) for engine in ("kvine", "transformers"))
            row = {"what": what, "context": len(ids), "dtype": options.dtype, "kvine": ours, "transformers": theirs}
            rows.append({**row, "speedup": theirs / ours})
    if options.json:
        print(json.dumps({"model": options.model, "threads": torch.get_num_threads(), "rows": rows}))
        return
    print(f"{'what':<10} {'context':>7} {'dtype':>5} {'kvine':>9} {'transformers':>12} {'speedup':>8}")
    for row in rows:
        figures = f"{row['kvine']:9.3f} {row['transformers']:12.3f} {row['speedup']:7.2f}×"
        print(f"{row['what']:<10} {row['context']:>7} {row['dtype']:>5} {figures}")


if __name__ == "__main__":
    main()
