"""What packed weights do to a model's predictions: perplexity on English prose, beside llama.cpp on the same tokens.

The prose is Python's own documentation (`pydoc_data.topics`), so the figures belong to a version of Python. Its first
tokens are scored in windows that know nothing of each other: all but a window's first, given those before. The rest is
fp32, so that what differs is the weights and what is multiplied with them. llama.cpp runs in an interpreter that has
llama-cpp-python, with K and V in fp32 too.

    python benchmarks/perplexity.py model.gguf --weights exact packed --llama-cpp ~/llama/bin/python
"""

import argparse
import json
import math
import platform
import subprocess
import sys
from dataclasses import asdict, dataclass
from pydoc_data.topics import topics

import torch

from kvine.llm import LLM

Windows = list[list[int]]
# Rows of logits that are widened at a time: a vocabulary of 262,144 takes 1 MiB for each.
ROWS = 64

# Runs in the other interpreter: windows come on stdin, the summed negative log-likelihood goes to stdout.
THEIRS = """
import json, sys
import numpy as np
from llama_cpp import Llama, GGML_TYPE_F32
task = json.load(sys.stdin)
length = max(map(len, task["windows"]))
llm = Llama(task["path"], n_ctx=length, n_batch=length, n_ubatch=length, n_threads=task["threads"],
            n_threads_batch=task["threads"], type_k=GGML_TYPE_F32, type_v=GGML_TYPE_F32, logits_all=True, verbose=False)
total = 0.0
for ids in task["windows"]:
    llm.reset()
    llm.eval(ids)
    for i, token in enumerate(ids[1:]):
        row = llm.scores[i].astype(np.float64)
        total += np.log(np.exp(row - row.max()).sum()) + row.max() - row[token]
print(json.dumps(total))
"""


@dataclass(frozen=True)
class Row:
    """One engine's figure on one model. `nats` is the mean negative log-likelihood of a token, `bytes` the weights'."""

    model: str
    engine: str
    weights: str
    bytes: int | None
    nats: float
    perplexity: float


def windows_of(llm: LLM, tokens: int, length: int) -> Windows:
    """The first tokens of the prose in windows, each behind the model's own beginning of a text, if it has one."""
    prose = "\n\n".join(topics[name] for name in sorted(topics))
    ids = llm.encode(prose[: tokens * 16])
    begin = ids[: len(ids) - len(llm.tokenizer.encode(prose[: tokens * 16], add_special=False))]
    body, step = ids[len(begin) :][:tokens], length - len(begin)
    return [begin + body[i : i + step] for i in range(0, len(body), step) if len(body[i : i + step]) > 1]


@torch.inference_mode()
def negative_log_likelihood(llm: LLM, windows: Windows) -> float:
    """Summed over all scored tokens, in nats."""
    total = 0.0
    for ids in windows:
        logits = llm.logits(ids)[0]  # [N, vocabulary]
        for start in range(0, len(ids) - 1, ROWS):
            rows = logits[start : min(start + ROWS, len(ids) - 1)].double()
            targets = torch.tensor(ids[start + 1 : start + 1 + len(rows)])
            total -= float(rows.log_softmax(-1).gather(1, targets[:, None]).sum())
    return total


def theirs(python: str, path: str, windows: Windows) -> float:
    """The same by llama.cpp."""
    task = json.dumps({"path": path, "windows": windows, "threads": torch.get_num_threads()})
    ended = subprocess.run([python, "-c", THEIRS], input=task, capture_output=True, text=True, check=False)
    if ended.returncode:
        sys.exit(f"llama.cpp failed on {path}: {ended.stderr[-500:]}")
    return float(json.loads(ended.stdout.splitlines()[-1]))


def measure(name: str, options: argparse.Namespace) -> list[Row]:
    """All engines on one model."""
    rows: list[Row] = []

    def add(engine: str, weights: str, nbytes: int | None, summed: float) -> None:
        nats = summed / scored
        rows.append(Row(name, engine, weights, nbytes, nats, math.exp(nats)))
        print(f"{name}: {engine} {weights}: {rows[-1].perplexity:.4f}", file=sys.stderr, flush=True)

    for weights in options.weights:
        llm = LLM(name, dtype="fp32", weights=weights)
        windows = windows_of(llm, options.tokens, options.window)
        scored = sum(len(ids) - 1 for ids in windows)
        source = llm.source
        add("kvine", weights, llm.model.weight_bytes, negative_log_likelihood(llm, windows))
        del llm
    if options.llama_cpp and source.format == "gguf":
        add("llama.cpp", "as stored", None, theirs(options.llama_cpp, str(source.path), windows))
    return rows


def main() -> None:
    """Prints a table, or with --json one object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", metavar="MODEL")
    parser.add_argument("--weights", nargs="+", default=["exact", "packed"], help="how Kvine keeps them, one by one")
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--llama-cpp", metavar="PYTHON", help="an interpreter that has llama-cpp-python")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = [row for name in options.models for row in measure(name, options)]
    if options.json:
        about = {"python": platform.python_version(), "tokens": options.tokens, "window": options.window}
        print(json.dumps({**about, "rows": [asdict(row) for row in rows]}))
        return
    print(f"{'model':<24} {'engine':<10} {'weights':<10} {'bytes':>14} {'perplexity':>11} {'to the first':>13}")
    first = {row.model: row.perplexity for row in reversed(rows)}
    for row in rows:
        size = "" if row.bytes is None else f"{row.bytes:,}"
        change = f"{row.perplexity / first[row.model] - 1:+.2%}"
        figures = f"{size:>14} {row.perplexity:11.4f} {change:>13}"
        print(f"{row.model[-24:]:<24} {row.engine:<10} {row.weights:<10} {figures}")


if __name__ == "__main__":
    main()
