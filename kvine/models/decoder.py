"""The decoder of every supported architecture: token ids to hidden states to logits, with attention handed to it.

It knows no cache, no batch and no mask. A sequence is N rows; what belongs to which request is `attend`'s business.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kvine.models.config import ModelConfig
from kvine.models.layers import MLP, Embedding, Linear, RMSNorm


class Attend(Protocol):
    """Rotates `q` [N, Hq, D] and `k` [N, Hkv, D], keeps `k` and `v` [N, Hkv, D], and returns attention [N, Hq, D]."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor: ...  # noqa: D102


class Observer(Protocol):
    """Sees a named tensor of a layer (-1: before the first or after the last). It must not change the tensor."""

    def __call__(self, name: str, layer: int, tensor: Tensor) -> None: ...  # noqa: D102


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """One layer's parts; the optional ones are None where the architecture has none."""

    attn_norm: RMSNorm
    q_proj: Linear
    k_proj: Linear
    v_proj: Linear
    o_proj: Linear
    q_norm: RMSNorm | None
    k_norm: RMSNorm | None
    post_attn_norm: RMSNorm | None
    mlp_norm: RMSNorm
    mlp: MLP
    post_mlp_norm: RMSNorm | None


class Decoder:
    """A loaded model. Its tensors need no gradient; calls change nothing in it, so threads may share it."""

    def __init__(
        self,
        config: ModelConfig,
        embedding: Embedding,
        layers: Sequence[DecoderLayer],
        final_norm: RMSNorm,
        head: Linear,
    ):
        self.config = config
        self.embedding = embedding
        self.layers = tuple(layers)
        self.final_norm = final_norm
        self.head = head

    def forward(self, input_ids: Tensor, positions: Tensor, attend: Attend, observer: Observer | None = None) -> Tensor:
        """Hidden states [N, hidden], normed, of `input_ids` [N]; `attend` is called once per layer, in order.

        `positions` [N] are the tokens' absolute positions: the decoder has no use for them where, as in all supported
        architectures, position enters through attention only. `observer` is called with embedding, attn_norm, q, k, v
        (q and k normed, not rotated), attn_out (attention's result, projected and post-normed), attn_residual,
        mlp_out, layer_out and final_norm.
        """
        hidden = self.embedding(input_ids)  # [N, hidden]
        if observer is not None:
            observer("embedding", -1, hidden)
        for index, layer in enumerate(self.layers):
            attn_out = self._attention(index, layer, hidden, attend, observer)
            hidden = hidden + attn_out
            if observer is not None:
                observer("attn_residual", index, hidden)
            mlp_out = layer.mlp(layer.mlp_norm(hidden))
            if layer.post_mlp_norm is not None:
                mlp_out = layer.post_mlp_norm(mlp_out)
            hidden = hidden + mlp_out
            if observer is not None:
                observer("mlp_out", index, mlp_out)
                observer("layer_out", index, hidden)
        hidden = self.final_norm(hidden)
        if observer is not None:
            observer("final_norm", -1, hidden)
        return hidden

    def _attention(
        self, index: int, layer: DecoderLayer, hidden: Tensor, attend: Attend, observer: Observer | None
    ) -> Tensor:
        config = self.config
        num_rows = hidden.shape[0]
        x = layer.attn_norm(hidden)
        q = layer.q_proj(x).view(num_rows, config.num_heads, config.head_dim)  # [N, Hq, D]
        k = layer.k_proj(x).view(num_rows, config.num_kv_heads, config.head_dim)  # [N, Hkv, D]
        v = layer.v_proj(x).view(num_rows, config.num_kv_heads, config.head_dim)
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = layer.q_norm(q), layer.k_norm(k)
        if observer is not None:
            for name, tensor in (("attn_norm", x), ("q", q), ("k", k), ("v", v)):
                observer(name, index, tensor)
        out = layer.o_proj(attend(index, q, k, v).reshape(num_rows, -1))  # [N, hidden]
        if layer.post_attn_norm is not None:
            out = layer.post_attn_norm(out)
        if observer is not None:
            observer("attn_out", index, out)
        return out

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [M, vocab_size] in fp32, soft-capped where the config says so, of `hidden` [M, hidden]."""
        logits = self.head(hidden).float()
        cap = self.config.logit_softcap
        return logits if cap is None else torch.tanh(logits / cap) * cap
