"""GGUF's blocks for tests of what reads them: the package's own, and any bytes, also those that no quantizer makes."""

import gguf
import numpy as np
import torch
from torch import Tensor

# Where a block has numbers in fp16: its scale, and the scale of its least values.
FP16_AT = {"Q8_0": (0,), "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2)}
FP16_AT |= {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}


def any_blocks(packing: str, out: int, features: int, seed: int = 0, std: float = 1.0) -> tuple[Tensor, Tensor]:
    """Blocks [out, bytes of a row] of any bytes but for scales that are numbers, of this standard deviation; and the
    values that they stand for, by the gguf package.
    """
    kind = gguf.GGMLQuantizationType[packing]
    weights, size = gguf.constants.GGML_QUANT_SIZES[kind]
    generator = np.random.default_rng(seed)
    blocks = generator.integers(0, 256, (out, features // weights, size), dtype=np.uint8)
    for at in FP16_AT[packing]:
        scales = generator.normal(0, std, blocks.shape[:2]).astype(np.float16)
        blocks[:, :, at : at + 2] = scales.view(np.uint8).reshape(*blocks.shape[:2], 2)
    flat = blocks.reshape(out, -1)
    return torch.from_numpy(flat), torch.from_numpy(gguf.quants.dequantize(flat, kind))


def even_blocks(packing: str, out: int, features: int, byte: int) -> tuple[Tensor, Tensor]:
    """Blocks whose bytes are all the same, but for scales of 1; and their values."""
    kind = gguf.GGMLQuantizationType[packing]
    weights, size = gguf.constants.GGML_QUANT_SIZES[kind]
    blocks = np.full((out, features // weights, size), byte, np.uint8)
    for at in FP16_AT[packing]:
        blocks[:, :, at : at + 2] = np.array([1.0], np.float16).view(np.uint8)
    flat = blocks.reshape(out, -1)
    return torch.from_numpy(flat), torch.from_numpy(gguf.quants.dequantize(flat, kind))


def rounded_blocks(weight: Tensor, packing: str) -> tuple[Tensor, Tensor]:
    """The gguf package's blocks of a weight, and their values. Of K types, which it cannot make, any blocks; values are
    about 0.2.
    """
    if packing.endswith("_K"):
        return any_blocks(packing, weight.shape[0], weight.shape[1], std=2.0 ** -(7 + int(packing[1])))
    kind = gguf.GGMLQuantizationType[packing]
    blocks = gguf.quants.quantize(np.ascontiguousarray(weight.numpy()), kind)
    return torch.from_numpy(blocks.copy()), torch.from_numpy(gguf.quants.dequantize(blocks, kind))
