"""What is computed row by row or number by number, in each instruction set, and rows that are copied."""

import itertools

import pytest
import torch
from torch import Tensor

from kvine import kernels
from kvine.cache.codec import encode
from kvine.rope import RopeConfig, RotaryEmbedding, rotate

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
EPS32 = torch.finfo(torch.float32).eps
CPU = torch.device("cpu")

every_path = pytest.mark.parametrize("path", kernels.available())
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16", "fp16"])


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(y: Tensor, exact: Tensor, error: Tensor | float) -> bool:
    """Within `error` and one rounding to y's dtype."""
    limits = torch.finfo(y.dtype)
    bound = error + exact.abs() * limits.eps / 2 + limits.smallest_normal * limits.eps
    return bool(((y.double() - exact).abs() <= bound).all())


@every_path
@every_dtype
def test_rms_norm_of_every_width(path: str, dtype: torch.dtype) -> None:
    native = kernels.load(path)
    for width, rows in itertools.product((1, 7, 16, 31, 33, 64, 576, 2049), (0, 1, 2, 9, 300)):
        x, weight = randn(rows, width, dtype=dtype), randn(width, seed=1)
        y = native.rms_norm(x, weight, 1e-5)
        exact = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
        assert y.dtype == dtype and y.shape == x.shape
        assert close(y, exact, exact.abs() * EPS32 * (4 + width / 32)), (width, rows)


@every_path
@every_dtype
def test_a_norm_depends_on_its_own_row_alone(path: str, dtype: torch.dtype) -> None:
    native, before = kernels.load(path), torch.get_num_threads()
    x, weight = randn(400, 3, 100, dtype=dtype), randn(100, seed=1)
    whole = native.rms_norm(x, weight, 1e-6)
    try:
        for threads in (1, 2, 7):
            torch.set_num_threads(threads)
            assert torch.equal(native.rms_norm(x, weight, 1e-6), whole)
    finally:
        torch.set_num_threads(before)
    for row in (0, 17, 399):
        assert torch.equal(native.rms_norm(x[row], weight, 1e-6), whole[row])
    x[5] = torch.nan
    broken = native.rms_norm(x, weight, 1e-6)
    assert broken[5].isnan().all() and torch.equal(broken[6:], whole[6:])


@every_path
@every_dtype
def test_rotation_is_two_products_and_a_sum_each_rounded(path: str, dtype: torch.dtype) -> None:
    """Nothing is summed over a row, so that all instruction sets give the same bits."""
    native = kernels.load(path)
    for width, rotary in ((8, 8), (64, 64), (66, 66), (20, 12), (128, 32), (256, 256)):
        rope = RotaryEmbedding(RopeConfig(10_000.0, rotary), CPU)
        for rows, heads in ((0, 2), (1, 1), (1, 9), (5, 3), (200, 4)):
            x = randn(rows, heads, width, dtype=dtype)
            cos, sin = rope.cos_sin(torch.arange(rows) * 3 + 1)
            y, turned = native.rotate(x, cos, sin), x[..., :rotary].float()
            expected = turned * cos + turned.roll(rotary // 2, -1) * sin
            assert torch.equal(y[..., :rotary], expected.to(dtype)) and torch.equal(y[..., rotary:], x[..., rotary:])
            # torch may round once less, which can decide the rounding to a narrower dtype
            torch.testing.assert_close(y, rotate(x, cos, sin), rtol=torch.finfo(dtype).eps, atol=1e-6)


@every_path
def test_a_rotary_embedding_uses_the_kernels_where_they_can_read(path: str) -> None:
    rope = RotaryEmbedding(RopeConfig(10_000.0, 16), CPU, native=kernels.load(path))
    cos, sin = rope.cos_sin(torch.arange(4))
    for x in (randn(4, 2, 16), randn(4, 16, 2).transpose(1, 2), randn(4, 2, 16).double()):
        torch.testing.assert_close(rope.rotate(x, cos, sin), rotate(x, cos, sin), rtol=0, atol=1e-6)


@every_path
@every_dtype
def test_gating_is_what_torch_makes_of_it(path: str, dtype: torch.dtype) -> None:
    native = kernels.load(path)
    for activation, reference in (
        ("silu", torch.nn.functional.silu),
        ("gelu_tanh", lambda x: torch.nn.functional.gelu(x, approximate="tanh")),
    ):
        for shape in ((0, 8), (1, 1), (3, 100), (5, 40_000)):
            gate, up = randn(*shape, dtype=dtype) * 4, randn(*shape, dtype=dtype, seed=1)
            exact = reference(gate.double())
            y = native.gate(gate.clone(), up, activation)
            # one rounding between the two, one behind them, and fp32 on the way
            limits = torch.finfo(dtype)
            error = exact.abs() * (limits.eps / 2 + 8 * EPS32) + 4 * EPS32 + limits.smallest_normal * limits.eps
            error = error * up.double().abs()
            assert y.dtype == dtype and close(y, exact * up.double(), error), (activation, shape)
        ends = torch.tensor([[0.0, -0.0, 100.0, -100.0, torch.inf, torch.nan]]).to(dtype)
        y = native.gate(ends.clone(), torch.ones_like(ends), activation)
        assert y[0, :3].tolist() == [0, 0, 100] and abs(y[0, 3].item()) < 1e-30
        assert y[0, 4] == torch.inf and y[0, 5].isnan()


@every_dtype
def test_what_is_not_summed_has_the_same_bits_on_every_path(dtype: torch.dtype) -> None:
    gate, up = randn(3, 1_001, dtype=dtype) * 4, randn(3, 1_001, dtype=dtype, seed=1)
    x, rope = randn(7, 3, 66, dtype=dtype), RotaryEmbedding(RopeConfig(10_000.0, 66), CPU)
    cos, sin = rope.cos_sin(torch.arange(7))
    for activation in ("silu", "gelu_tanh"):
        gated = [kernels.load(path).gate(gate.clone(), up, activation) for path in kernels.available()]
        assert all(torch.equal(one, gated[0]) for one in gated)
    rotated = [kernels.load(path).rotate(x, cos, sin) for path in kernels.available()]
    assert all(torch.equal(one, rotated[0]) for one in rotated)


@pytest.mark.parametrize("kept", DTYPES, ids=["fp32", "bf16", "fp16"])
@every_dtype
def test_rows_are_written_as_the_codec_converts_them(dtype: torch.dtype, kept: torch.dtype) -> None:
    keys, values = torch.full((50, 24), 7).to(kept), torch.full((50, 24), 7).to(torch.float32)
    k, v = randn(6, 24, dtype=dtype), randn(6, 24, dtype=dtype, seed=1)
    k[0, :4] = torch.tensor([torch.inf, -torch.inf, torch.nan, 6e4])
    if dtype != torch.float16:
        k[1, :2] = torch.tensor([1e5, -65_510.0])
    rows = torch.tensor([3, 49, 0, 20, 21, 7])
    kernels.write_rows(k, v, rows, keys, values)
    torch.testing.assert_close(keys[rows], encode(k, kept), rtol=0, atol=0, equal_nan=True)
    assert torch.equal(values[rows], v.float())
    others = [row for row in range(50) if row not in rows]
    assert bool((keys[others] == 7).all()) and bool((values[others] == 7).all())


def test_a_row_that_there_is_not_is_refused_before_anything_is_written() -> None:
    for row in (-1, 4):
        keys, values = torch.zeros(4, 8), torch.zeros(4, 8)
        with pytest.raises(IndexError):
            kernels.write_rows(torch.ones(2, 8), torch.ones(2, 8), torch.tensor([0, row]), keys, values)
        assert not keys.any() and not values.any()
