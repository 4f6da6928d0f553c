"""Weights rounded to 8 and 4 bits on load: near what they were, nowhere worse than the format's own quantizer."""

import gguf
import pytest
import torch
from gguf_blocks import rounded_blocks
from torch import Tensor

from kvine.kernels.packed import ROUNDED, PackedWeight

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
STEPS = {"Q8_0": 254, "Q4_1": 15}  # from a group's least to its greatest

both = pytest.mark.parametrize("packing", ROUNDED)


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def unpacked(values: Tensor, packing: str, threads: int = 1) -> Tensor:
    return PackedWeight.from_values(values, packing, num_threads=threads).unpacked(torch.float32)


def loss(values: Tensor, packed: Tensor) -> float:
    return float((packed - values).double().square().mean().sqrt() / values.double().square().mean().sqrt())


@both
def test_the_loss_is_at_most_that_of_the_formats_own_quantizer(packing: str) -> None:
    """And of 4 bits 5% less, for weights of normal distribution as for some with a few large ones."""
    for values in (randn(64, 1024) * 0.02, randn(64, 1024, seed=1) ** 3):
        theirs = gguf.quants.quantize(values.numpy(), kind := gguf.GGMLQuantizationType[packing])
        ratio = loss(values, unpacked(values, packing)) / loss(
            values, torch.from_numpy(gguf.quants.dequantize(theirs, kind))
        )
        assert ratio < (1.005 if packing == "Q8_0" else 0.95)
    stated = loss(randn(512, 512), unpacked(randn(512, 512), packing))
    assert stated == pytest.approx({"Q8_0": 0.0053, "Q4_1": 0.073}[packing], rel=0.02)


@both
def test_each_weight_is_near(packing: str) -> None:
    """Within a step: half of one but for what the fit trades, and the rounding of scale and least value to fp16."""
    for out, features in ((1, 32), (17, 96), (40, 256)):
        values = randn(out, features, seed=features)
        groups = values.view(-1, 32)
        if packing == "Q8_0":
            span = 2 * groups.abs().amax(1, keepdim=True)
            limit = (0.5 / STEPS[packing] + 2**-10) * span
        else:
            span = groups.amax(1, keepdim=True) - groups.amin(1, keepdim=True)
            limit = (1.5 / STEPS[packing]) * span
        for threads in (1, 3):
            error = (unpacked(values, packing, threads).view(-1, 32) - groups).abs()
            assert bool((error <= limit).all())


@both
@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16", "fp16"])
def test_what_a_weight_is_stored_in_changes_nothing(packing: str, dtype: torch.dtype) -> None:
    values = randn(33, 160).to(dtype)
    assert torch.equal(unpacked(values, packing), unpacked(values.float(), packing))
    assert torch.equal(unpacked(values.T.contiguous().T, packing), unpacked(values, packing))


@both
def test_what_the_type_can_hold_is_kept(packing: str) -> None:
    """Its own values are: fitting does not move what has no error."""
    _, values = rounded_blocks(randn(20, 320), packing)
    torch.testing.assert_close(unpacked(values, packing), values, rtol=1e-3, atol=1e-3)
    assert torch.equal(unpacked(torch.zeros(5, 64), packing), torch.zeros(5, 64))
    assert torch.equal(unpacked(torch.full((5, 64), -127 / 512), packing), torch.full((5, 64), -127 / 512))
    ramp = torch.arange(32.0) % 16 * 0.5 - 3 if packing == "Q4_1" else torch.linspace(-1, 1, 255)[:32] * 127
    ramp = ramp.repeat(16, 2)
    torch.testing.assert_close(unpacked(ramp, packing), ramp, rtol=1e-3, atol=1e-6)


@both
def test_extremes(packing: str) -> None:
    for scale in (1e-7, 1e-4, 1e4):
        values = randn(16, 64) * scale
        packed = unpacked(values, packing)
        step = values.abs().amax() * 2 / STEPS[packing]
        assert bool(((packed - values).abs() <= 1.5 * step + 2**-24 * STEPS[packing]).all())
    for broken in (torch.nan, torch.inf, -torch.inf):
        values = randn(4, 64)
        values[1, 40] = broken
        packed = unpacked(values, packing)
        assert packed[1, 32:].isnan().all() and not packed[1, :32].isnan().any() and not packed[[0, 2, 3]].isnan().any()
