"""Attention written out, masked by each layer's window: for decoders that should have no cache."""

import torch
from torch import Tensor

from kvine.models.config import ModelConfig
from kvine.models.decoder import Attend, Decoder
from kvine.rope import RotaryEmbedding, rotate


def dense_attend(config: ModelConfig, positions: Tensor) -> Attend:
    """One sequence, every key at hand: softmax(q k / scale) v in the inputs' own dtype, heads grouped by repeating."""
    distance = positions[:, None] - positions[None, :]

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        own = config.layers[layer]
        cos, sin = RotaryEmbedding(own.rope, q.device).cos_sin(positions)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        repeats = config.num_heads // config.num_kv_heads
        k, v = k.repeat_interleave(repeats, dim=1), v.repeat_interleave(repeats, dim=1)
        scores = torch.einsum("qhd,khd->hqk", q.float(), k.float()) * config.attention_scale
        if config.attention_softcap is not None:
            scores = torch.tanh(scores / config.attention_softcap) * config.attention_softcap
        seen = distance >= 0
        if own.window is not None:
            seen &= distance < own.window
        scores = scores.masked_fill(~seen, -torch.inf)
        return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v.float()).to(q.dtype)

    return attend


def dense_logits(decoder: Decoder, input_ids: Tensor, *, start: int = 0) -> Tensor:
    """Logits [N, vocab] of one sequence whose first token is at position `start`."""
    positions = torch.arange(start, start + len(input_ids))
    with torch.no_grad():
        hidden = decoder.forward(input_ids, positions, dense_attend(decoder.config, positions))
        return decoder.logits(hidden)
