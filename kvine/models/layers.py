"""The decoder's parts: plain objects that hold tensors. At one row a torch call costs as much as its arithmetic, so
each part makes as few of them as it can; nothing here has state that a call changes.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kvine.kernels import Kernels
from kvine.kernels.packed import PackedWeight
from kvine.models.config import Activation
from kvine.models.matmul import Product


@dataclass(frozen=True, slots=True)
class Linear:
    """A product with a weight, exact or packed, and a bias where there is one."""

    weight: Tensor | PackedWeight  # [out, in]
    bias: Tensor | None
    product: Product  # with these two

    def __call__(self, x: Tensor) -> Tensor:
        """[N, in] -> [N, out]."""
        return self.product(x)


@dataclass(frozen=True, slots=True)
class RMSNorm:
    """Root-mean-square norm over the last dimension (arXiv:1910.07467), in fp32 up to its result.

    `weight` is fp32 and includes the architecture's offset (Gemma's 1). `native` computes it where it can.
    """

    weight: Tensor  # [D], fp32
    eps: float
    native: Kernels | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """Any [..., D] -> the same shape and dtype."""
        if self.native is not None and self.native.takes(x):
            return self.native.rms_norm(x, self.weight, self.eps)
        x32 = x.float()
        # torch.rms_norm is made of more operations than these, and at one row each counts.
        norm: Tensor = torch.linalg.vector_norm(x32, dim=-1, keepdim=True)
        scale = norm.square_().mul_(1 / x.shape[-1]).add_(self.eps).rsqrt_()
        return (x32 * scale).mul_(self.weight).to(x.dtype)


@dataclass(frozen=True, slots=True)
class Embedding:
    """Rows of a table in `dtype`, times `scale`: a scalar of that dtype (Gemma rounds it so) or None."""

    weight: Tensor | PackedWeight  # [vocab, hidden]
    scale: Tensor | None
    dtype: torch.dtype

    def __call__(self, input_ids: Tensor) -> Tensor:
        """Token ids [N] -> [N, hidden]."""
        if isinstance(self.weight, PackedWeight):
            rows = self.weight.rows(input_ids, self.dtype)
        else:
            rows = F.embedding(input_ids, self.weight)
        return rows if self.scale is None else rows * self.scale


@dataclass(frozen=True, slots=True)
class MLP:
    """Gated feed-forward layer (arXiv:2002.05202): down(act(gate(x)) * up(x)). `native` gates where it can."""

    gate: Linear
    up: Linear
    down: Linear
    activation: Activation
    native: Kernels | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """[N, hidden] -> [N, hidden]."""
        gate = self.gate(x)  # [N, intermediate]
        if self.native is not None and self.native.takes(gate):
            return self.down(self.native.gate(gate, self.up(x), self.activation))
        gate = F.silu(gate, inplace=True) if self.activation == "silu" else F.gelu(gate, approximate="tanh")
        return self.down(gate.mul_(self.up(x)))
