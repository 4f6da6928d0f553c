"""The textbook of the examination against the engine's oracle, which was written apart from it."""

from pathlib import Path

import pytest
import torch
from tiny_models import Subject, random_prompt, write_checkpoint

from kvine.config import CacheConfig
from kvine.evidence.traps.seams import OpenBackend, with_backend
from kvine.evidence.traps.textbook import Textbook

CACHES = [
    CacheConfig(block_size=4),
    CacheConfig(block_size=4, window=6),
    CacheConfig(block_size=4, window=6, sink_tokens=3),
    CacheConfig(block_size=4, window=6, sink_tokens=3, sink_rule="in_cache"),
]


@pytest.mark.parametrize("cache", CACHES, ids=["all", "window", "sinks", "moved"])
@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_the_textbook_computes_what_the_oracle_does(tmp_path: Path, kind: str, cache: CacheConfig) -> None:
    subject = Subject.load(write_checkpoint(tmp_path, kind), "fp32", cache)
    book = Textbook(subject.model, cache)
    tokens = random_prompt(23)
    right: list[torch.Tensor] = []
    subject.dense.observer = lambda name, layer, x: right.append(x) if name == "attn_out" else None
    subject.dense.logits(tokens)
    ours = book.judge(book.inputs(tokens))
    for layer in range(3):
        torch.testing.assert_close(ours.outputs[layer], right[layer], atol=2e-4, rtol=1e-4)
        for position in (0, 5, 22):
            k, v = ours.stored_keys[layer], ours.stored_values[layer]
            reading = book.reading(layer, ours.queries[layer][position], position, k, v)
            single = book.block_output(layer, book.attend(layer, reading)[None])[0]
            torch.testing.assert_close(single, ours.outputs[layer][position], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("cache", CACHES, ids=["all", "window", "sinks", "moved"])
def test_the_open_backend_without_a_fault_has_none(tmp_path: Path, cache: CacheConfig) -> None:
    from kvine.evidence.verify import compare

    subject = Subject.load(write_checkpoint(tmp_path, "llama"), "fp32", cache)
    parts = with_backend(OpenBackend)(subject.parts)
    runs, *_ = compare(parts, subject.dense, subject.config, random_prompt(23), 6, dtype=subject.model.dtype)
    assert {run.verdict for run in runs[1:]} == {"identical"}
