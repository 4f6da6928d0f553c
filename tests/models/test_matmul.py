"""Each way to compute a product gives the product, at each row count."""

import pytest
import torch

from kvine.models import matmul

CPU = torch.device("cpu")


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_strategy_is_the_product_at_every_row_count(dtype: torch.dtype, with_bias: bool, monkeypatch):
    monkeypatch.setattr(matmul, "_MAX_CONVERTED_WEIGHTS", 48 * 20)  # pieces of 20 rows: 70 make 4
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(70, 48, generator=generator).to(dtype)
    bias = torch.randn(70, generator=generator).to(dtype) if with_bias else None
    strategies = [matmul.choose_matmul(dtype, CPU), matmul.through_fp32]
    if dtype == torch.float32:
        strategies = [matmul.choose_matmul(dtype, CPU), matmul.fp32_small_batches]
    for rows in (1, 2, 4, 5, 12, 32, 33, 70):
        x = torch.randn(rows, 48, generator=generator).to(dtype)
        before = x.clone()
        expected = x.double() @ weight.double().T + (0 if bias is None else bias.double())
        for strategy in strategies:
            out = strategy(x, weight, bias)
            assert out.dtype == dtype and out.shape == (rows, 70) and out.is_contiguous()
            error = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype]
            torch.testing.assert_close(out.double(), expected, atol=error * 10, rtol=error)
            assert torch.equal(x, before)


def test_rows_in_low_precision_are_rounded_once():
    """Beyond the threshold the sum is in fp32: 4,097 ones do not stall at 256, where bf16 has no next whole number."""
    weight, x = torch.ones(1, 4097, dtype=torch.bfloat16), torch.ones(8, 4097, dtype=torch.bfloat16)
    assert torch.equal(matmul.through_fp32(x, weight, None), torch.full((8, 1), 4096.0, dtype=torch.bfloat16))


def test_strategy_follows_the_machine(monkeypatch):
    linear = torch.nn.functional.linear
    assert matmul.choose_matmul(torch.bfloat16, torch.device("cuda")) is linear
    for has_hardware, expected in ((True, linear), (False, matmul.through_fp32)):
        monkeypatch.setattr(matmul, "has_matrix_hardware", lambda dtype, answer=has_hardware: answer)
        assert matmul.choose_matmul(torch.bfloat16, CPU) is expected
        assert matmul.choose_matmul(torch.float16, CPU) is expected
    for capability, expected in (("AVX2", matmul.fp32_small_batches), ("AVX512", linear), ("DEFAULT", linear)):
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda answer=capability: answer)
        assert matmul.choose_matmul(torch.float32, CPU) is expected
