"""The experiment on bits: by hand, by loops over an independent quantizer, by transformers' weights, and on SmolLM2."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from tiny_models import random_prompt, write_checkpoint, write_tokenizer

from kvine.cache.layout import PackedLayout, Part
from kvine.errors import ContextLengthError, RequestError
from kvine.evidence.cells.quantizer import kept_by
from kvine.evidence.experiments.bits import Attended, Bits, Quantized, check_bits, layer_errors, run_bits
from kvine.evidence.quality.texts import first_tokens, prose
from kvine.hub import ModelSource
from kvine.llm import LLM

BLOCK = 8


def layout(part: Part, bits: int, by_channel: bool, width: int, block: int = BLOCK) -> PackedLayout:
    return PackedLayout(part, bits, by_channel, block, width)


def find(outcome: Bits, part: Part, grouping: str, bits: int) -> Quantized:
    (row,) = (r for r in outcome.rows if (r.part, r.grouping, r.bits) == (part, grouping, bits))
    return row


# -- one layer ---------------------------------------------------------------------------------------------------------


def test_an_outlying_channel_costs_keys_by_token_and_nothing_by_channel() -> None:
    """Every token has 99 in channel 0, and 0s and 1s by turns elsewhere: by token, steps of 33 lose all of the 1s."""
    keys = torch.tensor([[99.0, 0, 1, 0], [99, 1, 0, 1]]).repeat(4, 1)[None]  # [1, 8, 4]
    causal = torch.ones(8, 8, dtype=torch.bool).tril()
    one = Attended(torch.zeros(1, 8, 4), keys, torch.ones(1, 8, 4), causal)
    by_channel, by_token = layer_errors(one, [layout("key", 2, by, 4, block=4) for by in (True, False)])
    assert by_channel.numbers < 1e-5  # scales are rounded to fp16
    assert by_token.scores == 0, "where nothing is asked, nothing is lost"
    assert by_token.numbers == pytest.approx(math.sqrt(3 / (2 * 99**2 + 3)), rel=1e-3)


def test_a_value_that_is_read_alone_shows_what_its_channel_has_lost() -> None:
    """Each query reads the first token alone, whose values are small beside another token's of its block."""
    values = torch.ones(1, 8, 4)
    values[0, 1] = 10
    keys = torch.zeros(1, 8, 4)
    keys[0, 0] = 100
    causal = torch.ones(8, 8, dtype=torch.bool).tril()
    values[0, 0] = torch.tensor([0.0, 1, 2, 3])
    one = Attended(torch.ones(1, 8, 4), keys, values, causal)
    by_channel, by_token = layer_errors(one, [layout("value", 2, by, 4, block=4) for by in (True, False)])
    assert by_token.outputs < 1e-5 and by_token.scores is None and by_token.weights is None
    # By channel the steps are 10 / 3 and three times 9 / 3, from minima of 0, 1, 1 and 1: 2 becomes 1, and 3 becomes 4.
    # Four of eight queries read their own block, exactly.
    assert by_channel.outputs == pytest.approx(math.sqrt(4 * (1 + 1) / (8 * 14)), rel=1e-3)


@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("window", [100, 11])
def test_errors_are_those_of_loops_over_an_independent_quantizer(softcap: float | None, window: int) -> None:
    torch.manual_seed(3)
    n, width = 21, 8  # two full blocks, and one that is not
    q, k, v = torch.randn(4, n, width), torch.randn(2, n, width), torch.randn(2, n, width)
    at = torch.arange(n)
    seen = (at[:, None] >= at) & (at[:, None] - at < window)
    layouts = [layout(part, bits, by, width) for part in ("key", "value") for bits in (4, 2) for by in (True, False)]
    found = layer_errors(Attended(q, k, v, seen, softcap), layouts)
    for one, errors in zip(layouts, found, strict=True):
        of_keys = one.part == "key"
        exact = k if of_keys else v
        kept = exact.clone()
        blocks = exact[:, :16].reshape(2, 2, BLOCK, width)
        kept[:, :16] = kept_by(f"int{one.bits}", by_channel=one.by_channel)(blocks).reshape(2, 16, width)
        numbers = [float((kept[h, :16] - exact[h, :16]).norm() / exact[h, :16].norm()) for h in range(2)]
        assert errors.numbers == pytest.approx(np.mean(numbers), rel=1e-4)
        by_head = []
        for head in range(4):
            h = head // 2
            whole, lossy = (
                [
                    attend(q[head], k[h], v[h], kept[h] if lose else exact[h], of_keys, p, window, softcap)
                    for p in range(n)
                ]
                for lose in (False, True)
            )
            by_head.append([distance(lossy, whole, what) for what in range(3)])
        scores, weights, outputs = np.mean(by_head, axis=0)
        assert errors.outputs == pytest.approx(outputs, rel=1e-3)
        if of_keys:
            assert errors.scores == pytest.approx(scores, rel=1e-3)
            assert errors.weights == pytest.approx(weights, rel=1e-3)


Three = tuple[np.ndarray, np.ndarray, np.ndarray]


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    kept: torch.Tensor,
    of_keys: bool,
    p: int,
    window: int,
    cap: float | None,
) -> Three:
    """Scores, weights and output of the query at p, which reads its own block exactly."""
    scores, values = [], []
    for at in range(max(0, p - window + 1), p + 1):
        exact = at // BLOCK == p // BLOCK
        score = float(q[p] @ (kept[at] if of_keys and not exact else k[at]))
        scores.append(score if cap is None else cap * math.tanh(score / cap))
        values.append((v[at] if of_keys or exact else kept[at]).numpy())
    weights = np.exp(scores) / np.exp(scores).sum()
    return np.array(scores), weights, weights @ np.array(values)


def distance(lossy: list[Three], whole: list[Three], what: int) -> float:
    a, b = (np.concatenate([row[what] for row in rows]) for rows in (lossy, whole))
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


# -- a whole model -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["llama", "gemma3"])  # whose first layer has a window of 8
def test_what_values_lose_is_what_transformers_weights_say(tmp_path: Path, kind: str) -> None:
    write_checkpoint(tmp_path, kind)
    write_tokenizer(tmp_path)
    llm = LLM(ModelSource("tiny", tmp_path, "safetensors", None), dtype="fp32", device="cpu", threads=1)
    ids = random_prompt(60)
    outcome = run_bits(llm, ids, widths=(4, 2), block_size=BLOCK)
    assert (outcome.tokens, len(outcome.rows), len(outcome.rows[0].layers)) == (60, 8, 3)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, attn_implementation="eager"
    )
    values: list[torch.Tensor] = []
    for layer in model.model.layers:
        layer.self_attn.v_proj.register_forward_hook(lambda m, i, out: values.append(out[0]))
    with torch.no_grad():
        weights = model(torch.tensor([ids]), output_attentions=True).attentions
    at = torch.arange(60)
    own = at[:, None] // BLOCK == at // BLOCK
    causes = outcome.causes
    firsts = [float(weights[n][0][:, BLOCK:, 0].mean()) for n in range(3)]
    assert causes.first_weight == pytest.approx(np.mean(firsts), rel=1e-2)
    sizes = [v.view(60, 2, 16).abs().mean(0).numpy() for v in values]  # [Hkv, D]
    middle = [np.sort(of)[:, (16 - 1) // 2] for of in sizes]
    assert causes.value_outlier == pytest.approx(
        np.mean([of.max(-1) / m for of, m in zip(sizes, middle, strict=True)]), rel=1e-3
    )
    lengths = [v.view(60, 2, 16).norm(dim=-1).numpy() for v in values]  # [N, Hkv]
    assert causes.first_value == pytest.approx(np.mean([of[0] / np.sort(of, 0)[29] for of in lengths]), rel=1e-3)
    for row in outcome.rows:
        if row.part == "value":
            for number, errors in enumerate(row.layers):
                v = values[number].view(60, 2, 16).transpose(0, 1)  # [Hkv, N, D]
                kept = v.clone()
                blocks = v[:, :56].reshape(2, 7, BLOCK, 16)
                kept[:, :56] = kept_by(f"int{row.bits}", by_channel=row.grouping == "channel")(blocks).reshape(
                    2, 56, 16
                )
                a = weights[number][0].view(2, 2, 60, 60)
                lost = ((a * ~own) @ (kept - v)[:, None]).norm(dim=(-1, -2)) / (a @ v[:, None]).norm(dim=(-1, -2))
                assert errors.outputs == pytest.approx(float(lost.mean()), rel=2e-2)
            assert row.errors.outputs == pytest.approx(np.mean([one.outputs for one in row.layers]))


def test_smollm2_keys_want_channels_and_values_want_tokens() -> None:
    """KIVI's finding, on our own model: docs/experiments.md has the table over more tokens."""
    llm = LLM("smollm2-135m", dtype="fp32", threads=1)
    outcome = run_bits(llm, first_tokens(llm.tokenizer, prose(192), 192), widths=(4, 2))
    for bits in (4, 2):
        channel, token = (find(outcome, "key", grouping, bits).errors for grouping in ("channel", "token"))
        assert channel.numbers < 0.6 * token.numbers and channel.outputs < 0.8 * token.outputs
        assert channel.scores is not None and token.scores is not None and channel.scores < 0.7 * token.scores
        channel, token = (find(outcome, "value", grouping, bits).errors for grouping in ("channel", "token"))
        assert channel.numbers < token.numbers, "by channel the numbers themselves lose less"
        assert token.outputs < 0.6 * channel.outputs, "and what attention makes of them more"
    causes = outcome.causes
    assert causes.key_outlier > 2 * causes.value_outlier, "keys have channels that stand out"
    assert causes.first_weight > 0.2 and causes.first_value < 0.5, (
        "queries read the first token, whose values are small"
    )


# -- mistakes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "block", "widths", "said"),
    [
        (1024, 30, (4,), "--block-size is 30: give a multiple of 4"),
        (1024, 0, (4,), "--block-size is 0"),
        (63, 32, (4,), "--tokens is 63: give 64 or more"),
        (1024, 32, (3,), "--bits takes 8, 4, 2"),
        (1024, 32, (), "--bits takes 8, 4, 2"),
    ],
)
def test_what_cannot_be_is_a_sentence(tokens: int, block: int, widths: tuple[int, ...], said: str) -> None:
    with pytest.raises(RequestError, match=said):
        check_bits(tokens, block, widths)


def test_a_text_past_the_context_is_a_sentence(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "llama")
    write_tokenizer(tmp_path)
    llm = LLM(ModelSource("tiny", tmp_path, "safetensors", None), dtype="fp32", device="cpu", threads=1)
    with pytest.raises(ContextLengthError, match="513 tokens do not fit the model's context of 512: lower --tokens"):
        run_bits(llm, random_prompt(513))
