"""Rotary position embeddings: angles from absolute positions, and the rotation itself.

Keys are stored rotated, so an error of one angle would stay in the cache: angles are computed in double precision.
"""

import torch
from torch import Tensor

from kvine.rope_scaling import RopeConfig, RopeKind, attention_scaling, inverse_frequencies

__all__ = ["RopeConfig", "RopeKind", "RotaryEmbedding", "rotate"]


class RotaryEmbedding:
    """Cosines and sines of one `RopeConfig`; holds one small table and nothing that depends on a request.

    `length` is the number of tokens to serve, for the two kinds whose table depends on it (`dynamic`, `longrope`).
    """

    def __init__(self, config: RopeConfig, device: torch.device, *, length: int | None = None):
        self.config = config
        self.scaling = attention_scaling(config)
        self._device = device
        # MPS has no float64; there the angles, a few per step, are computed on the CPU.
        where = torch.device("cpu") if device.type == "mps" else device
        self._frequencies = torch.tensor(inverse_frequencies(config, length), dtype=torch.float64, device=where)

    def cos_sin(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosine and sine at `positions` [N] (integers), each fp32 [N, rotary_dim // 2], times the kind's scaling."""
        angles = torch.outer(positions.to(self._frequencies), self._frequencies)  # [N, rotary_dim // 2]
        cos, sin = angles.cos(), angles.sin()
        if self.scaling != 1.0:
            cos, sin = cos * self.scaling, sin * self.scaling
        return cos.to(self._device, torch.float32), sin.to(self._device, torch.float32)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the heads of `x` [N, H, D] by `cos` and `sin` (fp32 [N, R // 2]); returns a new tensor of x's dtype.

    Dimension i is paired with i + R // 2 (half-split pairs, as transformers and GPT-NeoX do); dimensions from R on
    pass through. Computed in fp32 whatever the dtype of `x`.
    """
    pairs = cos.shape[-1]
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)  # [N, 1, R // 2]
    x32 = x.float()
    first, second = x32[..., :pairs], x32[..., pairs : 2 * pairs]
    parts = [
        torch.addcmul(first * cos, second, sin, value=-1),
        torch.addcmul(second * cos, first, sin),
    ]
    if 2 * pairs < x.shape[-1]:
        parts.append(x32[..., 2 * pairs :])
    return torch.cat(parts, dim=-1).to(x.dtype)
