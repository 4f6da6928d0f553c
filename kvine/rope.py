"""Rotary position embeddings: angles from absolute positions, and the rotation itself.

Keys are stored rotated, so an error of one angle would stay in the cache: angles are computed in double precision.
"""

import torch
from torch import Tensor

from kvine.kernels import Kernels, cos_sin, is_plain
from kvine.rope_scaling import RopeConfig, RopeKind, attention_scaling, inverse_frequencies

__all__ = ["RopeConfig", "RopeKind", "RotaryEmbedding", "rotate"]


class RotaryEmbedding:
    """Cosines and sines of one `RopeConfig`; holds one small table and nothing that depends on a request.

    `frequencies` are radians a position, fp64 [R / 2]. `length` is the number of tokens to serve, for the two kinds
    whose table depends on it (`dynamic`, `longrope`).
    `native` are the kernels that rotate, where they can.
    """

    def __init__(
        self, config: RopeConfig, device: torch.device, *, length: int | None = None, native: Kernels | None = None
    ):
        self.config = config
        self.native = native
        self.scaling = attention_scaling(config)
        self._device = device
        # MPS has no float64; there the angles, a few per step, are computed on the CPU.
        where = torch.device("cpu") if device.type == "mps" else device
        self.frequencies = torch.tensor(inverse_frequencies(config, length), dtype=torch.float64, device=where)

    def cos_sin(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """What `rotate` needs at `positions` [N] (integers): two fp32 tensors [N, 1, rotary_dim].

        The cosines stand there twice, once for each half; the sines with a minus for the first half and a plus for the
        second. Both are times the kind's scaling.
        """
        if self.native is not None and positions.dtype is torch.long and is_plain(positions):
            return cos_sin(self.frequencies, self.scaling, positions)
        angles = torch.outer(positions.to(self.frequencies), self.frequencies)  # [N, rotary_dim // 2]
        cos, sin = angles.cos(), angles.sin()
        if self.scaling != 1.0:
            cos, sin = cos * self.scaling, sin * self.scaling
        both = torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)
        cos, sin = (half.to(self._device, torch.float32).unsqueeze(1) for half in both)
        return cos, sin

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """What the function `rotate` computes, by the kernels if they can."""
        if self.native is not None and self.native.takes(x):
            return self.native.rotate(x, cos, sin)
        return rotate(x, cos, sin)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the heads of `x` [N, H, D] by the `cos` and `sin` of `cos_sin`; returns a new tensor of x's dtype.

    Dimension i is paired with i + R // 2 (half-split pairs, as transformers and GPT-NeoX do); dimensions from R on
    pass through. Computed in fp32 whatever the dtype of `x`.
    """
    rotary = cos.shape[-1]
    if rotary < x.shape[-1]:
        return torch.cat((rotate(x[..., :rotary], cos, sin), x[..., rotary:]), dim=-1)
    x32 = x.float()
    return torch.addcmul(x32 * cos, x32.roll(rotary // 2, -1), sin).to(x.dtype)
