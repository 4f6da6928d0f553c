"""Each way to compute a product gives the product, at each row count."""

import pytest
import torch

from kvine import kernels
from kvine.models import matmul

CPU = torch.device("cpu")


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_strategy_is_the_product_at_every_row_count(dtype: torch.dtype, with_bias: bool, monkeypatch):
    monkeypatch.setattr(matmul, "_MAX_CONVERTED_WEIGHTS", 48 * 20)  # pieces of 20 rows: 70 make 4
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(70, 48, generator=generator).to(dtype)
    bias = torch.randn(70, generator=generator).to(dtype) if with_bias else None
    slow = matmul.fp32_small_batches if dtype == torch.float32 else matmul.through_fp32
    strategies = [
        matmul.choose_product(dtype, CPU, kernels.chosen()),
        matmul.choose_product(dtype, CPU, None),
        matmul.with_torch(slow),
    ]
    for rows in (1, 2, 4, 5, 12, 32, 33, 70):
        x = torch.randn(rows, 48, generator=generator).to(dtype)
        before = x.clone()
        expected = x.double() @ weight.double().T + (0 if bias is None else bias.double())
        for strategy in strategies:
            out = strategy(weight, bias)(x)
            assert out.dtype == dtype and out.shape == (rows, 70) and out.is_contiguous()
            error = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype]
            torch.testing.assert_close(out.double(), expected, atol=error * 10, rtol=error)
            assert torch.equal(x, before)


def test_rows_in_low_precision_are_rounded_once():
    """Beyond the threshold the sum is in fp32: 4,097 ones do not stall at 256, where bf16 has no next whole number."""
    weight, x = torch.ones(1, 4097, dtype=torch.bfloat16), torch.ones(8, 4097, dtype=torch.bfloat16)
    assert torch.equal(matmul.through_fp32(x, weight, None), torch.full((8, 1), 4096.0, dtype=torch.bfloat16))


def test_strategy_of_torch_follows_the_machine(monkeypatch):
    linear = torch.nn.functional.linear
    by_machine = (  # of bf16 and fp16 alike: instructions for it, AMX for it, what multiplies them fastest
        ("x86_64", True, True, linear, linear),
        ("x86_64", True, False, matmul.through_fp32, linear),
        ("x86_64", False, False, matmul.through_fp32, matmul.through_fp32),
        ("aarch64", True, False, linear, linear),
        ("aarch64", False, False, matmul.through_fp32, matmul.through_fp32),
    )
    for machine, instructions, amx, bf16, fp16 in by_machine:
        monkeypatch.setattr("platform.machine", lambda answer=machine: answer)
        monkeypatch.setattr(matmul, "_multiplies", lambda dtype, answer=instructions: answer)
        monkeypatch.setattr("torch.cpu._is_amx_tile_supported", lambda answer=amx: answer)
        monkeypatch.setattr("torch.cpu._is_amx_fp16_supported", lambda answer=amx: answer)
        assert matmul.choose_torch_matmul(torch.bfloat16) is bf16
        assert matmul.choose_torch_matmul(torch.float16) is fp16
    for capability, expected in (("AVX2", matmul.fp32_small_batches), ("AVX512", linear), ("DEFAULT", linear)):
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda answer=capability: answer)
        assert matmul.choose_torch_matmul(torch.float32) is expected


def test_kernels_take_few_rows_and_torch_the_rest(monkeypatch):
    """Which of the two computed a product is told by bits of a sum that depends on its order."""
    native = kernels.load(kernels.available()[0])
    by_torch = matmul.choose_torch_matmul(torch.float32)
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(700, 1536, generator=generator)
    few, chosen = native.bind(weight), matmul.with_kernels(native, 4, by_torch)(weight, None)
    assert few is not None
    for rows in (0, 1, 4, 5):
        x = torch.randn(rows, 1536, generator=generator)
        assert rows == 0 or not torch.equal(few(x), by_torch(x, weight, None)), "nothing tells the two apart"
        expected = few(x) if 1 <= rows <= 4 else by_torch(x, weight, None)
        assert torch.equal(chosen(x), expected)
    strided = torch.randn(2, 3072, generator=generator)[:, ::2]
    assert torch.equal(chosen(strided), by_torch(strided, weight, None))
    columns = weight.T  # not as the kernels need a weight
    chosen = matmul.with_kernels(native, 4, by_torch)(columns, None)
    assert torch.equal(chosen(weight[:, :700][:2]), by_torch(weight[:, :700][:2], columns, None))


def test_how_many_rows_go_to_the_kernels(monkeypatch):
    monkeypatch.setattr(matmul, "has_matrix_units", lambda dtype: False)
    assert matmul.max_native_rows("avx2", torch.bfloat16) == 96
    assert matmul.max_native_rows("avx2", torch.float32) == 48
    assert matmul.max_native_rows("portable", torch.bfloat16) == 1
    monkeypatch.setattr(matmul, "has_matrix_units", lambda dtype: dtype != torch.float32)
    assert matmul.max_native_rows("avx512", torch.bfloat16) == 4
    assert matmul.max_native_rows("avx512", torch.float32) == 48


def test_on_another_device_torch_chooses():
    x, weight = torch.empty(3, 8, device="meta"), torch.empty(4, 8, device="meta")
    product = matmul.choose_product(torch.float32, torch.device("meta"), kernels.load("portable"))(weight, None)
    assert product(x).shape == (3, 4)
