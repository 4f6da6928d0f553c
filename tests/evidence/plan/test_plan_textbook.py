"""Figures that textbooks and model cards give, worked out by hand."""

import pytest
from planned import GIB, planned, public

from kvine.config import CacheConfig
from kvine.evidence.plan import Figures, compare

TEXTBOOK = Figures(layers=46, kv_width=4096, params=27 * 10**9)


@pytest.mark.parametrize(("context", "gib"), [(8_000, "5.6"), (30_000, "21.1"), (80_000, "56.2")])
def test_46_layers_of_width_4096(context: int, gib: str) -> None:
    plan = planned(TEXTBOOK, context=context, cache=CacheConfig(kv_dtype="fp16"))
    assert plan.kv_bytes_per_token == 753_664 == 46 * (4096 + 4096) * 2
    assert f"{plan.kv_bytes_per_token / 2**20:.2f}" == "0.72"
    assert plan.kv_bytes == -(-context // 32) * 32 * 753_664
    assert f"{plan.kv_bytes / GIB:.1f}" == gib
    assert plan.weight_bytes == 54 * 10**9
    assert f"{plan.weight_bytes / GIB:.1f}" == "50.3"


def test_an_eighth_of_the_heads_takes_an_eighth() -> None:
    own = planned(Figures(layers=46, heads=32, head_dim=128), context=8000)
    fewer = planned(Figures(layers=46, heads=32, kv_heads=4, head_dim=128), context=8000)
    assert own.kv_bytes_per_token == 753_664 == 8 * fewer.kv_bytes_per_token
    assert f"{fewer.kv_bytes_per_token / 2**20:.2f}" == "0.09"
    names = {v.name: v.plan.kv_bytes_per_token for v in compare(own, "attention")}
    assert names["MHA, 32 KV heads (as it is)"] == 753_664
    assert names["GQA, 4 KV heads"] == 94_208
    assert names["MQA, 1 KV head"] == 753_664 // 32


def test_llama_2_7b_at_131072_tokens() -> None:
    for plan in (
        planned(Figures(layers=32, heads=32, head_dim=128), context=131_072),
        public("llama-2-7b", context=131_072, dtype="fp16"),
    ):
        assert plan.kv_bytes == 68_719_476_736
        assert plan.kv_bytes / GIB == 64.0
    assert plan.subject.weights.parameters == 6_738_415_616
    norms = (2 * 32 + 1) * 4096
    assert plan.weight_bytes == 2 * 6_738_415_616 + 2 * norms  # norms are held in fp32
    assert any("4,096" in warning for warning in plan.warnings), "beyond the trained context"


def test_llama_3_1_8b() -> None:
    plan = public("llama-3.1-8b", context=131_072)
    assert plan.subject.dtype == "bf16"
    assert plan.kv_bytes_per_token == 131_072  # 32 × 8 × 128 × 2 × 2
    assert plan.kv_bytes == 16 * GIB
    assert plan.subject.weights.parameters == 8_030_261_248
    # A step reads all but the embedding, of which it looks up one row.
    assert plan.weight_bytes - plan.walls.weight_bytes_per_step == (128_256 - 1) * 4096 * 2
    assert plan.warnings == ()


def test_qwen3_4b() -> None:
    plan = public("qwen3-4b")
    assert plan.kv_bytes_per_token == 147_456  # 36 × 8 × 128 × 2 × 2
    assert plan.subject.weights.parameters == 4_022_468_096
    assert plan.walls.weight_bytes_per_step == plan.weight_bytes, "the tied head reads the whole table"


def test_gemma_3_27b_keeps_its_sliding_layers_short() -> None:
    plan = public("gemma-3-27b", context=131_072)
    sliding, full = plan.groups
    assert (len(sliding.layers), sliding.window, sliding.bytes_per_token) == (52, 1024, 425_984)
    assert (len(full.layers), full.window, full.bytes_per_token) == (10, None, 81_920)
    assert full.layers == tuple(range(5, 62, 6))
    assert sliding.held_bytes == 1024 * 425_984
    assert full.held_bytes == 10 * GIB  # 131,072 × 81,920
    assert plan.kv_bytes == sliding.held_bytes + full.held_bytes
    assert 131_072 * plan.kv_bytes_per_token / plan.kv_bytes > 5.9, "what counting all layers in full would say"
    assert plan.subject.weights.parameters == 27_009_346_304


def test_gpt_oss_20b_is_planned_though_kvine_does_not_run_it() -> None:
    plan = public("gpt-oss-20b", context=131_072)
    sliding, full = plan.groups
    assert (len(sliding.layers), sliding.window, sliding.bytes_per_token) == (12, 128, 24_576)  # 12 × 8 × 64 × 2 × 2
    assert (len(full.layers), full.window, full.bytes_per_token) == (12, None, 24_576)
    assert plan.kv_bytes == 131_072 * 24_576 + 128 * 24_576
    assert plan.subject.weights.parameters == 20_914_757_184
    assert plan.weight_bytes == 13_761_264_768, "what the published index says all tensors take"
    assert plan.subject.model is None and plan.workspace is None
    assert "does not run 'GptOssForCausalLM'" in plan.subject.not_run


def test_a_mixture_reads_the_experts_of_its_tokens() -> None:
    expert = 3 * 2880 * 2880 * 24 * 17 // 32  # one of 32 in every layer, 4.25 bits a number
    dense = 13_761_264_768 - 32 * expert - 201_088 * 2880 * 2
    row = 2880 * 2
    one = public("gpt-oss-20b").walls.weight_bytes_per_step
    assert one == dense + row + 4 * expert
    assert public("gpt-oss-20b", batch=2).walls.weight_bytes_per_step == dense + 2 * row + (4 + 4 - 4 * 4 / 32) * expert
    many = public("gpt-oss-20b", batch=1000).walls.weight_bytes_per_step
    assert many == dense + 1000 * row + 32 * expert


def test_the_two_walls() -> None:
    plan = planned(TEXTBOOK, context=8000, batch=4, bandwidth="900GB/s")
    walls = plan.walls
    assert walls.weight_bytes_per_step == 54 * 10**9, "shared by the batch"
    assert walls.kv_bytes_per_step == 4 * 8000 * 753_664, "each request reads its own"
    assert walls.ms_per_token == pytest.approx((54e9 + 4 * 8000 * 753_664) / 900e9 * 1e3)
    assert walls.tokens_per_second == pytest.approx(4e3 / walls.ms_per_token)
    first = walls.crossover_context
    assert 4 * first * 753_664 > 54e9 >= 4 * (first - 1) * 753_664
    requests = walls.crossover_batch
    assert requests * 8000 * 753_664 > 54e9 >= (requests - 1) * 8000 * 753_664


def test_behind_a_window_k_and_v_may_never_outweigh_the_weights() -> None:
    plan = planned(TEXTBOOK, cache=CacheConfig(window=1000, sink_tokens=4))
    assert plan.walls.kv_bytes_per_step == 1004 * 753_664
    assert plan.walls.crossover_context is None
    assert plan.fits.max_context is None, "no context is too long"
    assert plan.groups[0].sink_tokens == 4
