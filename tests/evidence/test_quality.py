"""What a policy costs: figures held to transformers, to the cache-free oracle, and to sums by hand."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tiny_models import random_prompt, write_checkpoint, write_tokenizer

from kvine.config import CacheConfig
from kvine.engine.build import dense_attention
from kvine.engine.cache_free import DenseRunner
from kvine.errors import ConfigError, RequestError
from kvine.evidence.cells.quantizer import block_loss
from kvine.evidence.quality import Evaluation, Policy, Scored, evaluate, parse_policies
from kvine.evidence.quality.pareto import non_dominated
from kvine.evidence.quality.reader import CHUNK, Reader, memory_needed
from kvine.evidence.quality.scores import Tally, logprobs, losses
from kvine.evidence.quality.texts import stretches
from kvine.hub import ModelSource
from kvine.llm import LLM

KINDS = ("llama", "gemma3")
IDS = random_prompt(300)


@pytest.fixture(scope="module", params=KINDS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    write_checkpoint(folder, request.param)
    write_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return LLM(ModelSource("tiny", folder, "safetensors", None), dtype="fp32", device="cpu", threads=1)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder = tmp_path_factory.mktemp("llama")
    write_checkpoint(folder, "llama")
    write_tokenizer(folder)
    return LLM(ModelSource("tiny", folder, "safetensors", None), dtype="fp32", device="cpu", threads=1)


def run(llm: LLM, policies: str, ids: list[int] = IDS, **options: object) -> Evaluation:
    return evaluate(llm, parse_policies(policies)[0], ids, **options)  # type: ignore[arg-type]


def only(outcome: Evaluation) -> Scored:
    _, policy = outcome.policies
    return policy


def oracle(llm: LLM, cache: CacheConfig, ids: list[int] = IDS, **loses: Any) -> float:
    """Perplexity without a cache, of a text in one go."""
    dense = DenseRunner(llm.model.decoder, dense_attention(llm.model, cache, **loses), llm.model.device)
    logprobs = dense.logits(ids).double().log_softmax(-1)
    return math.exp(-sum(float(logprobs[i, ids[i + 1]]) for i in range(len(ids) - 1)) / (len(ids) - 1))


# -- the exact cache ---------------------------------------------------------------------------------------------------


def test_exact_beside_exact_loses_nothing_and_is_transformers_perplexity(llm: LLM, folder: Path) -> None:
    outcome = run(llm, "exact; block-size=8")
    exact, other = outcome.policies
    assert exact.name == "exact" and exact.kl == 0 and exact.top1 == 1 and exact.mass_lost == 0
    assert other.kl < 1e-9 and other.top1 > 0.99, "another block size changes the order of sums only"
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.tensor([IDS])
    with torch.no_grad():
        theirs = math.exp(float(model(ids, labels=ids).loss))
    assert exact.perplexity == pytest.approx(theirs, rel=1e-3)
    assert exact.tokens == len(IDS) - 1


def test_the_exact_cache_is_compared_with_though_nobody_named_it(llama: LLM) -> None:
    assert [one.name for one in run(llama, "window=9").policies] == ["exact", "window=9"]
    assert [one.name for one in run(llama, "window=9; exact; window=9").policies] == ["exact", "window=9"]


# -- lossy ones --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words",
    ["window=40", "window=40,sinks=4", "window=37,sinks=3,sink-rule=in-cache", "window=1", "window=150,block-size=7"],
)
def test_a_windows_perplexity_is_that_of_the_same_visibility_without_a_cache(llm: LLM, words: str) -> None:
    found = only(run(llm, words))
    assert found.perplexity == pytest.approx(oracle(llm, found.cache), rel=1e-5)
    assert found.kl > 1e-4 and found.top1 < 1


def test_what_a_codec_loses_is_in_the_figures(llama: LLM) -> None:
    found = only(run(llama, "kv-dtype=bf16"))
    rounded = oracle(llama, CacheConfig(), keep=lambda x: x.bfloat16().to(x.dtype))
    lost = abs(rounded - oracle(llama, CacheConfig()))
    assert lost > 1e-3 and abs(found.perplexity - rounded) < lost / 5, "some keys lie where sums decide how they round"
    assert 1e-8 < found.kl < 1e-2 and found.mass_lost == 0


@pytest.mark.parametrize("words", ["kv-dtype=int8", "kv-dtype=int2", "kv-dtype=k8v4,window=40,sinks=4,block-size=8"])
def test_a_packed_policys_perplexity_is_that_of_the_same_loss_without_a_cache(llm: LLM, words: str) -> None:
    found = only(run(llm, words))
    lossy = oracle(llm, found.cache, loss=block_loss(found.cache))
    lost = abs(lossy - oracle(llm, CacheConfig()))
    assert lost > 1e-3 and abs(found.perplexity - lossy) < lost / 5, "some numbers lie where sums decide how they round"


def test_fewer_bits_lose_more_and_take_less(llama: LLM) -> None:
    _, *packed = run(llama, "kv-dtype=int8; kv-dtype=int4; kv-dtype=int2").policies
    assert [one.kl for one in packed] == sorted(one.kl for one in packed) and packed[0].kl > 0
    assert [one.bytes for one in packed] == sorted((one.bytes for one in packed), reverse=True)
    assert all(one.mass_lost == 0 for one in packed)


def test_all_tokens_are_read_through_the_cache_in_chunks_and_then_one_by_one(
    llama: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    fed: list[int] = []
    read, step = Reader.read, Reader.step
    monkeypatch.setattr(Reader, "read", lambda self, ids, **more: (fed.append(len(ids)), read(self, ids, **more))[1])
    monkeypatch.setattr(Reader, "step", lambda self, token: (fed.append(-1), step(self, token))[1])
    only(run(llama, "window=40", decode_steps=5))
    whole = [CHUNK, CHUNK, len(IDS) - 1 - 5 - 2 * CHUNK]
    assert [n for n in fed if n > 1] == [n for n in whole for _ in range(3)], "exact twice, once to compare with"
    assert fed.count(-1) == 2 * 5 and fed.count(1) == 5


def test_decode_steps_are_timed_and_change_no_figure(llama: LLM) -> None:
    timed, not_timed = only(run(llama, "window=40", decode_steps=8)), only(run(llama, "window=40", decode_steps=0))
    assert timed.ms is not None and timed.ms > 0 and not_timed.ms is None
    assert timed.perplexity == pytest.approx(not_timed.perplexity, rel=1e-6)
    assert timed.tokens == not_timed.tokens


# -- attention mass ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("window", "sinks"), [(40, 0), (40, 4), (3, 1)])
def test_lost_mass_is_what_transformers_weights_say(llm: LLM, folder: Path, window: int, sinks: int) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        weights = model(torch.tensor([IDS[:-1]]), output_attentions=True).attentions  # layers of [1, Hq, N, N]
    q, k = torch.arange(len(IDS) - 1)[:, None], torch.arange(len(IDS) - 1)
    hidden = []
    for number in range(len(weights)):
        own = llm.model.config.layers[number].window
        limit = window if own is None or window < own else own
        kept = sinks if own is None or window < own else 0  # sinks belong to the cache's window
        gone = (q - k >= limit) & (k >= kept)
        hidden.append(float((weights[number][0] * gone).sum() / weights[number][0].sum()))
    found = only(run(llm, f"window={window},sinks={sinks}"))
    assert found.mass_lost_by_layer == pytest.approx(hidden, abs=1e-5)
    assert found.mass_lost == pytest.approx(sum(hidden) / len(hidden), abs=1e-5) and found.mass_lost > 0.01


def test_pieces_of_attention_add_up(llama: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = only(run(llama, "window=40")).mass_lost
    monkeypatch.setattr("kvine.evidence.quality.mass.SCORES", 1000)
    assert only(run(llama, "window=40")).mass_lost == pytest.approx(whole, rel=1e-6)


# -- bytes -------------------------------------------------------------------------------------------------------------


def test_bytes_are_those_of_the_blocks_that_are_held(llama: LLM) -> None:
    outcome = run(llama, "window=32; window=32,sinks=4; kv-dtype=fp16", ids=IDS[:257])
    block = 3 * 2 * 32 * 16 * 2 * 4  # layers, KV heads, tokens, head_dim, K and V, fp32
    held = {one.name: one.bytes for one in outcome.policies}
    # 256 tokens have been read. The next query sees 225 and later: block 7, and nothing of the one before.
    assert held == {
        "exact": 8 * block,
        "window=32": 1 * block,
        "window=32,sinks=4": 2 * block,
        "kv-dtype=fp16": 4 * block,
    }
    most = {one.name: one.peak_bytes for one in outcome.policies}
    assert most["exact"] == 8 * block
    # The second chunk, 128 … 239 but for the steps, is written beside the block that its first query sees.
    assert most["window=32"] == 5 * block


def test_policies_that_do_not_fit_memory_together_are_read_in_turns(llama: LLM) -> None:
    words = "window=40; kv-dtype=bf16; window=40,sinks=4"
    both = [memory_needed(llama.model, CacheConfig(), len(IDS))] * 2
    together, in_turns = run(llama, words), run(llama, words, kv_memory=sum(both))
    assert [one.perplexity for one in together.policies] == [one.perplexity for one in in_turns.policies]
    assert [one.mass_lost for one in together.policies] == [one.mass_lost for one in in_turns.policies]


def test_a_policy_that_memory_cannot_hold_is_refused_before_anything_is_read(llama: LLM) -> None:
    told: list[str] = []
    exact = memory_needed(llama.model, CacheConfig(), len(IDS))
    policies = [Policy("big", CacheConfig(block_size=256)), Policy("small", CacheConfig(window=8))]
    outcome = evaluate(llama, policies, IDS, kv_memory=2 * exact, on_refused=lambda one: told.append(one.name))
    assert told == ["big"] == [one.name for one in outcome.refused]
    assert [one.name for one in outcome.policies] == ["exact", "small"]
    with pytest.raises(ConfigError, match="raise --kv-memory"):
        evaluate(llama, policies, IDS, kv_memory=exact)


# -- texts that are longer than the context ----------------------------------------------------------------------------


def test_each_token_is_scored_once() -> None:
    ids = list(range(100, 150))
    for begin in ([], [1]):
        for context, stride in ((50, None), (20, None), (20, 7), (20, 1), (8, 7), (51, None)):
            parts = stretches(begin, ids, context, stride or min(context - len(begin), len(ids)))
            scored = [token for part in parts for token in part.ids[part.first :]]
            assert scored == (ids if begin else ids[1:]) or (stride is None and not begin)
            assert all(len(part.ids) <= context for part in parts)
            assert all(list(part.ids[: len(begin)]) == begin for part in parts)


def test_a_stretch_reads_what_stands_before_it_without_scoring_it() -> None:
    parts = stretches([], list(range(10)), 6, 3)
    assert [(part.ids, part.first) for part in parts] == [
        ((0, 1, 2, 3, 4, 5), 1),
        ((3, 4, 5, 6, 7, 8), 3),
        ((6, 7, 8, 9), 3),
    ]


@pytest.mark.parametrize("stride", [0, 7, -1])
def test_a_stride_that_skips_tokens_is_refused(stride: int) -> None:
    with pytest.raises(RequestError, match="--stride"):
        stretches([], list(range(10)), 6, stride)


def test_stretches_are_the_mean_over_all_their_tokens(llama: LLM) -> None:
    found = run(llama, "exact", context=100, stride=60).policies[0]
    seen = {}
    for start in range(0, 300, 60):
        rows = llama.logits(IDS[start : start + 100])[0].double().log_softmax(-1)
        for i, token in enumerate(IDS[start + 1 : start + 100]):
            seen.setdefault(start + 1 + i, float(rows[i, token]))
    assert len(seen) == found.tokens
    assert found.perplexity == pytest.approx(math.exp(-sum(seen.values()) / len(seen)), rel=1e-5)


def test_policies_without_end_read_on_past_the_context(llama: LLM) -> None:
    ids = random_prompt(600)  # the context is 512
    outcome = run(llama, "window=40,sinks=4; window=40,sinks=4,sink-rule=in-cache", ids=ids, decode_steps=0)
    exact, absolute, endless = outcome.policies
    assert outcome.context == 512 and exact.tokens == 511 + 87
    assert exact.endless_perplexity is None and absolute.endless_perplexity is None
    assert endless.endless_perplexity == pytest.approx(oracle(llama, endless.cache, ids), rel=1e-5)


@pytest.mark.parametrize(("option", "value"), [("context", 1), ("context", 513), ("stride", 0), ("decode_steps", -1)])
def test_numbers_out_of_range_are_a_sentence(llama: LLM, option: str, value: int) -> None:
    with pytest.raises(RequestError, match=f"--{option.replace('_', '-')} is "):
        run(llama, "exact", **{option: value})


# -- by hand -----------------------------------------------------------------------------------------------------------


def test_divergence_loss_and_agreement_by_hand() -> None:
    p, q = [[0.7, 0.2, 0.1], [0.5, 0.25, 0.25]], [[0.6, 0.3, 0.1], [0.2, 0.3, 0.5]]
    tally = Tally()
    tally.add(
        torch.tensor(q).log() + 3, logprobs(torch.tensor(p).log() - 1), [1, 2]
    )  # logits are known up to a constant
    kl = sum(a * math.log(a / b) for row, other in zip(p, q, strict=True) for a, b in zip(row, other, strict=True))
    assert tally.kl == pytest.approx(kl / 2, rel=1e-6)
    assert tally.perplexity == pytest.approx(math.exp(-(math.log(0.3) + math.log(0.5)) / 2), rel=1e-6)
    assert tally.top1 == 0.5 and tally.tokens == 2
    assert losses(torch.tensor(q).log(), [0, 0]) == pytest.approx([-math.log(0.6), -math.log(0.2)])


def test_more_rows_than_are_widened_at_a_time_add_up() -> None:
    ours, theirs = torch.randn(2, 100, 7, generator=torch.Generator().manual_seed(1))
    targets = [i % 7 for i in range(100)]
    whole, halves = Tally(), Tally()
    whole.add(ours, logprobs(theirs), targets)
    for rows in (slice(0, 33), slice(33, 100)):
        halves.add(ours[rows], logprobs(theirs[rows]), targets[rows])
    assert (whole.tokens, whole.agreeing) == (halves.tokens, halves.agreeing) == (100, whole.agreeing)
    assert whole.kl == pytest.approx(halves.kl, rel=1e-12) and whole.loss == pytest.approx(halves.loss, rel=1e-12)
    p, q = theirs.double().softmax(-1), ours.double().softmax(-1)
    assert whole.kl == pytest.approx(float((p * (p / q).log()).sum(-1).mean()), rel=1e-9)


def test_points_that_no_other_beats() -> None:
    points = [(4.0, 0.0), (1.0, 3.0), (2.0, 1.0), (2.0, 2.0), (3.0, 1.0), (2.0, 1.0)]
    assert non_dominated(points) == [1, 2, 5, 0]
