"""Packed weights: the very values of GGUF's blocks, and products that are exact but for fp32 sums over groups."""

import itertools

import pytest
import torch
from gguf_blocks import any_blocks, even_blocks, rounded_blocks
from torch import Tensor

from kvine import kernels
from kvine.kernels.packed import BLOCKS, GROUP, PackedLinear, PackedWeight, allocate, bytes_of

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
EPS32 = torch.finfo(torch.float32).eps

every_path = pytest.mark.parametrize("path", kernels.available())
every_packing = pytest.mark.parametrize("packing", BLOCKS)


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def widths_of(packing: str) -> tuple[int, ...]:
    """Numbers of inputs: one block, a few, many."""
    return tuple(BLOCKS[packing][0] * count for count in ((1, 3, 18) if BLOCKS[packing][0] == GROUP else (1, 2, 3)))


def rounded(x: Tensor) -> Tensor:
    """What the kernels multiply: groups of 32 as whole multiples of a 127th of their greatest, in float64."""
    groups = x.float().view(*x.shape[:-1], -1, GROUP)
    greatest = groups.abs().amax(-1, keepdim=True)
    whole = torch.where(greatest > 0, (groups * torch.div(torch.tensor(127.0), greatest)).round(), 0)
    return (whole.double() * (greatest / 127).double()).flatten(-2)


def check(y: Tensor, x: Tensor, values: Tensor, bias: Tensor | None = None) -> None:
    """Within fp32 sums of one product a group, and one rounding."""
    exact = rounded(x) @ values.double().T + (0 if bias is None else bias.double())
    magnitude = rounded(x).abs() @ values.double().abs().T + (0 if bias is None else bias.double().abs())
    # A group's sum of products without a sign lies apart from its least value, of the other sign perhaps, and as large.
    spread = x.double().abs().amax() * values.double().abs().amax() * GROUP
    limits = torch.finfo(y.dtype)
    bound = (x.shape[1] / GROUP + 6) * EPS32 * (magnitude + 2 * spread)
    bound = bound + exact.abs() * limits.eps / 2 + limits.smallest_normal
    error = (y.double() - exact).abs()
    assert bool((error <= bound).all()), f"{(error / bound).max():.2f} of the bound"


@every_packing
def test_a_packed_weight_has_the_values_of_its_blocks(packing: str) -> None:
    for out, features in itertools.product((1, 15, 16, 33), widths_of(packing)):
        for blocks, values in (rounded_blocks(randn(out, features), packing), any_blocks(packing, out, features)):
            weight = PackedWeight.from_blocks(blocks, packing)
            assert weight.shape == (out, features)
            in_file = -(-out // 16) * 16 * blocks.shape[1]
            more = in_file // 36 if packing == "Q4_K" else in_file // 44 if packing == "Q5_K" else 0  # 6 bits in 8
            assert weight.nbytes == bytes_of(packing, weight.shape) == in_file + more
            for dtype in DTYPES:
                assert torch.equal(weight.unpacked(dtype), values.to(dtype))
            ids = torch.tensor([out - 1, 0, out // 2, 0])
            assert torch.equal(weight.rows(ids, torch.float32), values[ids])
            with pytest.raises(IndexError):
                weight.rows(torch.tensor([out]), torch.float32)
            with pytest.raises(IndexError):
                weight.rows(torch.tensor([-1]), torch.float32)


@every_packing
def test_rows_are_packed_in_the_order_that_is_asked_for(packing: str) -> None:
    blocks, values = rounded_blocks(randn(40, 256), packing)
    order = torch.randperm(40, generator=torch.Generator().manual_seed(3))
    for threads in (1, 3):
        weight = PackedWeight.from_blocks(blocks, packing, order, num_threads=threads)
        assert torch.equal(weight.unpacked(torch.float32), values[order])


@every_path
@every_packing
@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16", "fp16"])
def test_every_shape(path: str, packing: str, dtype: torch.dtype) -> None:
    native = kernels.load(path)
    for features, out, rows in itertools.product(widths_of(packing), (1, 16, 75), (1, 2, 5, 63, 64, 65)):
        if rows % 2:
            std = 1.0 if BLOCKS[packing][0] == GROUP else 1 / 64  # K types multiply it; the sums are for fp16 too
            blocks, values = any_blocks(packing, out, features, std=std)
        else:
            blocks, values = rounded_blocks(randn(out, features), packing)
        bias = randn(out, dtype=dtype, seed=2) if out % 2 else None
        x = randn(rows, features, dtype=dtype, seed=1)
        y = PackedLinear(native, PackedWeight.from_blocks(blocks, packing), bias, dtype)(x)
        assert y.dtype == dtype and y.shape == (rows, out) and y.is_contiguous()
        check(y, x, values, bias)


@every_path
@every_packing
def test_a_row_depends_on_itself_alone(path: str, packing: str) -> None:
    """Neither on how many rows there are, nor on the number of threads."""
    product = PackedLinear(
        kernels.load(path),
        PackedWeight.from_blocks(rounded_blocks(randn(300, 768), packing)[0], packing),
        None,
        torch.bfloat16,
    )
    x, before = randn(150, 768, dtype=torch.bfloat16, seed=1), torch.get_num_threads()
    whole = product(x)
    try:
        for threads in (1, 2, 3, 7):
            torch.set_num_threads(threads)
            assert torch.equal(product(x), whole)
    finally:
        torch.set_num_threads(before)
    for rows in (slice(0, 1), slice(3, 5), slice(10, 74), slice(63, 130), slice(149, 150)):
        assert torch.equal(product(x[rows]), whole[rows])
    assert product(x[:0]).shape == (0, 300)


@every_packing
def test_instruction_sets_differ_in_no_bit(packing: str) -> None:
    """But for plain C++, which rounds a product before it adds it."""
    weight = PackedWeight.from_blocks(rounded_blocks(randn(75, 768), packing)[0], packing)
    x = randn(66, 768, seed=1)
    results = [PackedLinear(kernels.load(name), weight, None, torch.float32)(x) for name in kernels.available()[:-1]]
    assert all(torch.equal(y, results[0]) for y in results)


@every_path
@every_packing
def test_extremes(path: str, packing: str) -> None:
    blocks, values = rounded_blocks(randn(20, 256), packing)
    product = PackedLinear(kernels.load(path), PackedWeight.from_blocks(blocks, packing), None, torch.float32)
    for scale in (1e-25, 1e20, 1e30):
        x = randn(3, 256, seed=1) * scale
        check(product(x), x, values)
    assert torch.equal(product(torch.zeros(2, 256)), torch.zeros(2, 20))
    assert torch.equal(product(torch.full((1, 256), 1e-38)), torch.zeros(1, 20))  # too little to be scaled: nothing
    for broken in (torch.nan, torch.inf, -torch.inf):
        x = randn(2, 256, seed=1)
        x[0, 40] = broken
        y = product(x)
        assert y[0].isnan().all() and torch.equal(y[1], product(x[1:])[0])


@every_path
def test_the_largest_sums_do_not_overflow(path: str) -> None:
    """All quants and all of x at their ends, of one sign."""
    for packing, byte in itertools.product(BLOCKS, (0x00, 0x80, 0x7F, 0xFF)):
        blocks, values = even_blocks(packing, 16, 512, byte)
        product = PackedLinear(kernels.load(path), PackedWeight.from_blocks(blocks, packing), None, torch.float32)
        for sign in (1.0, -1.0):
            x = torch.full((1, 512), sign * 127)
            torch.testing.assert_close(product(x), x @ values.T, rtol=1e-5, atol=0)


@every_path
def test_a_strided_or_differentiable_x_is_taken_too(path: str) -> None:
    product = PackedLinear(
        kernels.load(path),
        PackedWeight.from_blocks(rounded_blocks(randn(16, 64), "Q8_0")[0], "Q8_0"),
        None,
        torch.float32,
    )
    x = randn(2, 128)[:, ::2]
    assert torch.equal(product(x), product(x.contiguous()))
    assert torch.equal(product(x.clone().requires_grad_()), product(x.contiguous()))


@every_path
def test_it_keeps_its_weight_alive(path: str) -> None:
    blocks, values = rounded_blocks(randn(160, 320), "Q4_1")
    product = PackedLinear(kernels.load(path), PackedWeight.from_blocks(blocks, "Q4_1"), None, torch.float32)
    filled = [torch.zeros_like(blocks) for _ in range(20)]  # would take the weight's memory, were it free
    check(product(randn(1, 320, seed=1)), randn(1, 320, seed=1), values)
    assert len(filled) == 20


def test_memory_of_a_model_is_one_piece_of_whole_lines() -> None:
    sizes = [100, 1, 64, 3 << 20]
    parts = allocate(sizes)
    assert [len(part) for part in parts] == sizes
    addresses = [part.data_ptr() for part in parts]
    assert addresses[0] % (2 << 20) == 0
    assert addresses == [addresses[0] + offset for offset in (0, 128, 192, 256)]
    for value, part in enumerate(parts):
        part.fill_(value)
    assert all(int(part.min()) == int(part.max()) == value for value, part in enumerate(parts))
    assert [len(part) for part in allocate([0, 0])] == [0, 0]
    assert allocate([]) == []
