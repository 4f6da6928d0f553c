"""Each instruction set that this CPU runs gives the product, within what fp32 sums and one rounding may lose."""

import itertools

import pytest
import torch
from torch import Tensor

from kvine import kernels
from kvine.kernels import Kernels

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
EPS32 = torch.finfo(torch.float32).eps
INPUTS, OUTPUTS, ROWS = (1, 7, 31, 33, 576, 1536), (1, 3, 960), (1, 2, 3, 4, 5, 8, 16)

every_path = pytest.mark.parametrize("path", kernels.available())
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16", "fp16"])


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def linear(native: Kernels, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    product = native.bind(weight, bias)
    assert product is not None and product.takes(x)
    return product(x)


def check(y: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
    """Against float64: `in` additions and the bias in fp32, each rounded, and the result rounded to its dtype."""
    exact = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    magnitude = x.double().abs() @ weight.double().abs().T + (0 if bias is None else bias.double().abs())
    limits = torch.finfo(y.dtype)
    bound = (x.shape[1] + 2) * EPS32 * magnitude + exact.abs() * limits.eps / 2 + limits.smallest_normal * limits.eps
    assert y.dtype == x.dtype and y.shape == exact.shape and y.is_contiguous()
    error = (y.double() - exact).abs()
    assert bool((error <= bound).all()), f"{(error / bound).max():.2f} of the bound"


def test_something_is_compiled_and_the_portable_path_runs_everywhere() -> None:
    assert kernels.available()[-1] == "portable"
    assert set(kernels.available()) <= set(kernels.INSTRUCTION_SETS)


@every_path
@every_dtype
def test_every_shape(path: str, dtype: torch.dtype) -> None:
    native = kernels.load(path)
    for features, out_features, rows in itertools.product(INPUTS, OUTPUTS, ROWS):
        x, weight = randn(rows, features, dtype=dtype), randn(out_features, features, dtype=dtype, seed=1)
        bias = randn(out_features, dtype=dtype, seed=2) if features % 2 else None
        check(linear(native, x, weight, bias), x, weight, bias)


@every_path
@every_dtype
def test_a_row_does_not_depend_on_its_neighbours(path: str, dtype: torch.dtype) -> None:
    native = kernels.load(path)
    for features in INPUTS:
        x, weight = randn(16, features, dtype=dtype), randn(75, features, dtype=dtype, seed=1)
        whole = linear(native, x, weight)
        for rows in range(1, 16):
            for start in (0, 16 - rows):
                part = linear(native, x[start : start + rows], weight)
                assert torch.equal(part, whole[start : start + rows]), (features, rows, start)


@every_path
@every_dtype
def test_nothing_depends_on_the_number_of_threads(path: str, dtype: torch.dtype) -> None:
    native, before = kernels.load(path), torch.get_num_threads()
    x, weight = randn(2, 576, dtype=dtype), randn(1000, 576, dtype=dtype, seed=1)
    try:
        results = []
        for threads in (1, 2, 3, 7):
            torch.set_num_threads(threads)
            results.append(linear(native, x, weight))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(result, results[0]) for result in results)


@every_path
@every_dtype
def test_weights_at_any_address(path: str, dtype: torch.dtype) -> None:
    """A mapped file starts its tensors wherever its header ends."""
    native = kernels.load(path)
    x, weight = randn(3, 77, dtype=dtype), randn(13, 77, dtype=dtype, seed=1)
    expected = linear(native, x, weight)
    stored = weight.view(torch.uint8).flatten()
    for offset in (1, 2, 3, 5):
        room = torch.zeros(stored.numel() + 8, dtype=torch.uint8)
        room[offset : offset + stored.numel()] = stored
        y = torch.empty_like(expected)
        native.path.linear(native.dtypes[dtype], room.data_ptr() + offset, 0, 77, 13)(x.data_ptr(), y.data_ptr(), 3, 1)
        assert torch.equal(y, expected)


@every_path
@every_dtype
def test_what_lies_behind_a_row_is_not_read(path: str, dtype: torch.dtype) -> None:
    native = kernels.load(path)
    for features in (1, 7, 31, 33):
        weight = torch.full((9, features), torch.nan, dtype=dtype)
        weight[4] = 1
        y = linear(native, torch.ones(1, features, dtype=dtype), weight)
        assert y[0, 4] == features and y.isnan().sum() == 8


@every_path
@every_dtype
def test_infinity_and_nan_go_through(path: str, dtype: torch.dtype) -> None:
    native, inf, nan = kernels.load(path), torch.inf, torch.nan
    for features in (3, 40):
        x, weight = torch.ones(1, features, dtype=dtype), torch.ones(6, features, dtype=dtype)
        weight[0, 1], weight[1, 2], weight[2, 0] = inf, -inf, nan
        weight[3, 0], weight[3, 1] = inf, -inf
        weight[4] = 0
        plain = torch.tensor([inf, -inf, nan, nan, 0, features], dtype=dtype)
        torch.testing.assert_close(linear(native, x, weight)[0], plain, rtol=0, atol=0, equal_nan=True)
        x[0, -1] = inf
        signs = torch.tensor([inf, nan, nan, nan, nan, inf], dtype=dtype)
        torch.testing.assert_close(linear(native, x, weight)[0, 2:], signs[2:], rtol=0, atol=0, equal_nan=True)


@every_path
@every_dtype
def test_extremes(path: str, dtype: torch.dtype) -> None:
    """Denormals count, what is beyond the largest number is infinite, and what ends within it was never infinite."""
    native, limits = kernels.load(path), torch.finfo(dtype)
    least = limits.smallest_normal * limits.eps
    weight = torch.full((1, 20), least, dtype=dtype)
    assert linear(native, torch.ones(1, 20, dtype=dtype), weight).item() == 20 * least
    large = torch.full((1, 1), limits.max, dtype=dtype)
    one, two = torch.ones(1, 1, dtype=dtype), torch.full((1, 1), 2, dtype=dtype)
    assert linear(native, one, large).item() == limits.max
    assert linear(native, two, large).item() == torch.inf
    if dtype == torch.float16:  # fp32 holds the sum on its way
        pair = torch.full((1, 2), limits.max, dtype=dtype)
        assert linear(native, torch.tensor([[2.0, -1.0]], dtype=dtype), pair).item() == limits.max


@every_path
def test_every_fp16_and_bf16_is_widened_and_rounded_as_torch_does(path: str) -> None:
    """All 65,536 numbers of a format; and every kind of tie, by fp32 sums of two of them."""
    native = kernels.load(path)
    for dtype in (torch.bfloat16, torch.float16):
        every = torch.arange(-32768, 32768).to(torch.int16).view(dtype).reshape(-1, 1)
        y = linear(native, torch.ones(1, 1, dtype=dtype), every)
        torch.testing.assert_close(y[0], every[:, 0] + 0, rtol=0, atol=0, equal_nan=True)
        halves = torch.cat([every, every.roll(1, 0)], dim=1)
        finite = halves[halves.isfinite().all(1)]
        y = linear(native, torch.full((1, 2), 0.5, dtype=dtype), finite)
        expected = finite.float().mul(0.5).sum(1).to(dtype)
        torch.testing.assert_close(y[0], expected, rtol=0, atol=0)


@every_path
def test_the_sum_is_in_fp32_and_rounded_once(path: str) -> None:
    """bf16 has no whole number after 256: sums in it stall there."""
    ones = torch.ones(1, 4097, dtype=torch.bfloat16)
    assert linear(kernels.load(path), ones, ones, torch.ones(1, dtype=torch.bfloat16)).item() == 4096


@every_path
def test_what_the_kernels_do_not_take(path: str) -> None:
    native = kernels.load(path)
    x, weight, bias = randn(2, 8), randn(4, 8), randn(4)
    product = native.bind(weight)
    assert product is not None and product.takes(x) and native.bind(weight, bias) is not None
    assert not product.takes(x.double())
    assert not product.takes(x.bfloat16())
    assert not product.takes(randn(2, 16)[:, ::2])
    assert not product.takes(randn(2, 7))
    assert not product.takes(x[0])
    assert not product.takes(x.clone().requires_grad_())
    assert not product.takes(torch._neg_view(x))
    assert not product.takes(x.to("meta"))
    assert native.bind(weight.double()) is None
    assert native.bind(randn(8, 4).T) is None
    assert native.bind(weight[0]) is None
    assert native.bind(weight.clone().requires_grad_()) is None
    assert native.bind(weight.to("meta")) is None
    assert native.bind(weight, randn(5)) is None
    assert native.bind(weight, bias.bfloat16()) is None
    assert native.bind(weight, randn(8)[::2]) is None


@every_path
def test_a_bound_product_keeps_its_weight_alive(path: str) -> None:
    product = kernels.load(path).bind(torch.full((300, 300), 2.0))
    assert product is not None
    filled = [torch.zeros(300, 300) for _ in range(20)]  # would take the weight's memory, were it free
    assert bool((product(torch.ones(1, 300)) == 600).all()) and len(filled) == 20
