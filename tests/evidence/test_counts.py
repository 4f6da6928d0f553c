"""Counted work against what attention and torch really did, and against sums that are written out."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from tiny_models import VOCAB, Subject, random_prompt, write_checkpoint
from torch.utils.flop_counter import FlopCounterMode

from kvine.cache.spec import CacheSpec
from kvine.config import CacheConfig
from kvine.engine.stepped import SteppedCache
from kvine.evidence.experiments.counts import Balance, Counter

LAYERS, HEADS, KV_HEADS, DIM, HIDDEN, MLP = 3, 4, 2, 16, 64, 128
IN_LAYERS = LAYERS * (HIDDEN * (HEADS + 2 * KV_HEADS) * DIM + HEADS * DIM * HIDDEN + 3 * HIDDEN * MLP)


@pytest.fixture(scope="module")
def subject(tmp_path_factory: pytest.TempPathFactory) -> Subject:
    return Subject.load(write_checkpoint(tmp_path_factory.mktemp("tiny"), "llama"), "fp32")


@contextmanager
def scores_computed() -> Iterator[dict[str, int]]:
    """Counts the scores that torch's attention is asked for: all, and those that its mask leaves."""
    counted = {"rectangle": 0, "pairs": 0}
    real = F.scaled_dot_product_attention

    def counting(q, k, v, attn_mask=None, is_causal=False, **options):
        out = real(q, k, v, attn_mask=attn_mask, is_causal=is_causal, **options)
        heads, rows, keys = q.shape[0] * q.shape[1], q.shape[2], k.shape[2]
        visible = torch.ones(rows, keys, dtype=torch.bool)
        visible = visible.tril() if is_causal else visible if attn_mask is None else attn_mask.expand(rows, keys)
        counted["rectangle"] += heads * rows * keys
        counted["pairs"] += heads * int(visible.sum())
        return out

    with patch("torch.nn.functional.scaled_dot_product_attention", counting):
        yield counted


def counter(subject: Subject, all_logits: bool = False) -> Counter:
    return Counter(subject.model.config, subject.parts.manager.specs, "fp32", all_logits)


@pytest.mark.parametrize("cache", [CacheConfig(block_size=4), CacheConfig(block_size=4, window=9)])
def test_scores_are_those_that_attention_was_asked_for(tmp_path: Path, cache: CacheConfig) -> None:
    subject = Subject.load(write_checkpoint(tmp_path, "llama"), "fp32", cache, backend="sdpa")
    ids, count = random_prompt(31), counter(subject)
    with scores_computed() as asked:
        subject.dense.logits(ids, last=True)
    work = count.call(0, 31)
    assert (work.pairs, work.rectangle) == (asked["pairs"], asked["rectangle"])

    stepped = SteppedCache(subject.parts.runner, subject.config, 512)
    with scores_computed() as asked:
        stepped.extend(ids)
    assert count.call(0, 31).pairs == asked["pairs"]
    with scores_computed() as asked:
        stepped.extend([5])
    assert count.call(31, 32).pairs == count.call(31, 32).rectangle == asked["pairs"] == asked["rectangle"]


def test_a_thousand_tokens_as_in_the_textbook(subject: Subject) -> None:
    count = counter(subject)
    heads = LAYERS * HEADS
    assert count.call(0, 1000).rectangle == heads * 1000 * 1000
    assert count.call(0, 1000).pairs == heads * 500_500
    assert count.call(1000, 1001).rectangle == count.call(1000, 1001).pairs == heads * 1 * 1001


@pytest.mark.parametrize("all_logits", [False, True])
def test_flops_are_those_that_torch_counts_of_another_library(tmp_path: Path, all_logits: bool) -> None:
    source = write_checkpoint(tmp_path, "llama")
    count = counter(Subject.load(source, "fp32"), all_logits)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(source.path, attn_implementation="eager").eval()
    ids = torch.tensor([random_prompt(23)])
    past = None
    for rows in ((0, 22), (22, 23)):
        with torch.no_grad(), FlopCounterMode(display=False) as torch_counts:
            fed = ids[:, slice(*rows)]
            past = theirs(fed, past_key_values=past, logits_to_keep=0 if all_logits else 1).past_key_values
        work = count.call(*rows)
        expected = work.linear_flops + 4 * DIM * work.rectangle
        assert torch_counts.get_total_flops() == expected, "eager attention computes masked scores too"


def test_flops_and_bytes_by_hand(subject: Subject) -> None:
    work = counter(subject).call(99, 100)
    assert work.linear_flops == 2 * (IN_LAYERS + VOCAB * HIDDEN)
    assert work.attention_flops == LAYERS * HEADS * 100 * 4 * DIM
    norms = (2 * LAYERS + 1) * HIDDEN
    assert work.weight_bytes == 4 * (IN_LAYERS + VOCAB * HIDDEN + norms), "of the embedding beside the head one row"
    assert work.kv_bytes == 100 * LAYERS * KV_HEADS * DIM * 2 * 4
    assert work.bytes == work.weight_bytes + work.kv_bytes and work.flops == work.linear_flops + work.attention_flops
    assert counter(subject).call(0, 100).kv_bytes == work.kv_bytes, "a cache saves computing the past, not reading it"


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
@pytest.mark.parametrize("weights", ["exact", "q8", "q4"])
def test_weights_are_read_as_they_are_held(tmp_path: Path, kind: str, weights: str) -> None:
    """A head of its own beside an embedding table, and one that is that table."""
    subject = Subject.load(write_checkpoint(tmp_path, kind), "bf16", weights=weights)
    count = Counter(subject.model.config, subject.parts.manager.specs, "bf16", packings=subject.model.packings)
    assert count.call(9, 10).weight_bytes == count.weight_bytes == subject.model.step_bytes
    table = subject.model.decoder.embedding.weight.nbytes
    assert subject.model.weight_bytes - count.weight_bytes == (0 if subject.model.config.tie_embeddings else table)


@pytest.mark.parametrize(("window", "sinks"), [(None, 0), (1, 0), (5, 0), (5, 3), (2, 9), (40, 4)])
def test_pairs_under_windows_and_sinks_follow_the_rule_of_visibility(window: int | None, sinks: int) -> None:
    spec = CacheSpec((0,), 1, 8, 4, window=window, sink_tokens=sinks)
    positions = np.arange(50)
    visible = np.asarray(spec.visible(positions[:, None], positions[None, :]))
    assert [spec.num_visible_pairs(end) for end in range(51)] == [int(visible[:end].sum()) for end in range(51)]


def test_generations_add_up_their_calls(subject: Subject) -> None:
    count, heads = counter(subject), LAYERS * HEADS
    assert count.cache_free(7, 3).pairs == heads * sum(n * (n + 1) // 2 for n in (7, 8, 9))
    assert count.cached(7, 3).pairs == heads * (28 + 8 + 9)
    assert count.cached(7, 1) == count.cache_free(7, 1) == count.call(0, 7)
    assert count.cached(7, 3).weight_bytes == 3 * count.weight_bytes


def test_balance_is_where_one_outgrows_the_other(subject: Subject) -> None:
    balance = Balance.of(counter(subject))
    count = counter(subject)
    assert balance.cached_bytes == -(-count.weight_bytes // (LAYERS * KV_HEADS * DIM * 2 * 4))
    assert balance.cached_flops == -(-2 * (IN_LAYERS + VOCAB * HIDDEN) // (LAYERS * HEADS * 4 * DIM))
    least = balance.cache_free_flops
    assert least is not None
    for n, outweighs in ((least - 1, False), (least, True)):
        attention, products = LAYERS * HEADS * 4 * DIM * n * (n + 1) // 2, 2 * (IN_LAYERS * n + VOCAB * HIDDEN)
        assert (attention >= products) is outweighs


def test_a_window_never_outweighs_what_is_larger(tmp_path: Path) -> None:
    subject = Subject.load(write_checkpoint(tmp_path, "llama"), "fp32", CacheConfig(window=8))
    assert Balance.of(counter(subject)) == Balance(None, None, None)
