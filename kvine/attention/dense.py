"""Attention without a cache: the oracle that the cached engine is checked against.

It shares no code with the cache or its backends, not even the mask, so that it cannot share their faults.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from kvine.rope import RotaryEmbedding, rotate


@dataclass(frozen=True)
class DenseLayer:
    """What one layer's queries see.

    Attributes:
        rope: the layer's rotation.
        window: a query sees this many tokens up to itself; None sees all.
        sink_tokens: first tokens that it sees beside them.
        sinks_in_cache: whether positions are counted inside the cache of sinks and window, as StreamingLLM does.
        kept: other runs of positions that it sees beside them, `(first, end)` with the end outside.
        trained: whether the window is the model's own, so that nothing is pinned in it.
    """

    rope: RotaryEmbedding
    window: int | None = None
    sink_tokens: int = 0
    sinks_in_cache: bool = False
    kept: tuple[tuple[int, int], ...] = ()
    trained: bool = False

    def pinning(self, pinned: Sequence[tuple[int, int]]) -> "DenseLayer":
        """The same where these positions stay visible too; among sinks inside the cache only the beginning can."""
        if self.window is None or self.trained:
            return self
        if not self.sinks_in_cache:
            return replace(self, kept=(*self.kept, *pinned))
        sinks = self.sink_tokens
        for first, end in sorted(pinned):
            assert first <= sinks, "pinned apart from the sinks"
            sinks = max(sinks, end)
        return replace(self, sink_tokens=sinks)


@dataclass(frozen=True)
class BlockLoss:
    """What a cache that packs full blocks makes of them.

    Attributes:
        block_size: tokens of a block. A query reads its own block exactly, and earlier ones as they were kept.
        keys: of rotated keys of whole blocks, `[blocks, Hkv, block_size, D]` to the same.
        values: of values, alike.
        open_keys, open_values: of those `[N, Hkv, D]` that a query reads in its own block.
    """

    block_size: int
    keys: Callable[[Tensor], Tensor]
    values: Callable[[Tensor], Tensor]
    open_keys: Callable[[Tensor], Tensor] = lambda exact: exact
    open_values: Callable[[Tensor], Tensor] = lambda exact: exact


class DenseAttention:
    """`attend` over one whole sequence, positions 0 … N - 1, computed anew in every call.

    Args:
        layers: one for each layer of the model.
        scale: factor on the scores.
        softcap: soft cap of the scores, if the model has one.
        keep: what becomes of rotated keys and of values in a cache that loses something of each number; not for sinks
            in the cache.
        loss: what becomes of them in one that packs full blocks.
    """

    def __init__(
        self,
        layers: Sequence[DenseLayer],
        *,
        scale: float,
        softcap: float | None = None,
        keep: Callable[[Tensor], Tensor] | None = None,
        loss: BlockLoss | None = None,
    ) -> None:
        self.layers = tuple(layers)
        self._scale = scale
        self._softcap = softcap
        self._keep = keep
        self._loss = loss

    def pinning(self, pinned: Sequence[tuple[int, int]]) -> "DenseAttention":
        """The same of a sequence in which these runs of positions stay visible whatever the windows."""
        layers = [layer.pinning(pinned) for layer in self.layers]
        return DenseAttention(layers, scale=self._scale, softcap=self._softcap, keep=self._keep, loss=self._loss)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q `[N, Hq, D]`, k and v `[N, Hkv, D]`, q and k not yet rotated → `[N, Hq, D]`."""
        what = self.layers[layer]
        n, group = q.shape[0], q.shape[1] // k.shape[1]
        if self._loss is not None:
            return self._lossy(what, self._loss, q, k, v)
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)  # [N, Hq, D]
        if what.window is not None and what.sinks_in_cache and what.sink_tokens and n > what.window:
            return self._streaming(what, what.window, q, k, v)
        cos, sin = what.rope.cos_sin(torch.arange(n, device=q.device))
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        if self._keep is not None:
            k, v = self._keep(k), self._keep(v)
        mask = None if what.window is None or what.window >= n else self._mask(n, what, q.device)
        if self._softcap is None:
            q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))  # [1, Hq, N, D]
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, scale=self._scale)
            return out[0].transpose(0, 1)
        if mask is None:
            mask = self._mask(n, replace(what, window=None), q.device)
        wide = torch.promote_types(q.dtype, torch.float32)
        scores = torch.einsum("qhd,khd->hqk", q.to(wide), k.to(wide)) * self._scale
        scores = self._softcap * torch.tanh(scores / self._softcap)
        weights = scores.masked_fill(~mask, -torch.inf).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, v.to(wide)).to(q.dtype)

    def _lossy(self, what: DenseLayer, loss: BlockLoss, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Scores with what each query reads of each key: the exact one in its own block, elsewhere what was kept."""
        n, heads, size = q.shape[0], k.shape[1], loss.block_size
        full = n // size * size
        wide = torch.promote_types(q.dtype, torch.float32)
        positions = torch.arange(n, device=q.device)

        def kept(x: Tensor, lose: Callable[[Tensor], Tensor]) -> Tensor:  # [N, Hkv, D] → the same
            blocks = x[:full].reshape(-1, size, *x.shape[1:]).transpose(1, 2)  # [blocks, Hkv, T, D]
            return torch.cat((lose(blocks).transpose(1, 2).reshape(full, *x.shape[1:]).to(wide), x[full:].to(wide)))

        def scores(queries: Tensor, keys: Tensor) -> Tensor:  # [N, Hq, D], [N, Hkv, D] → [Hkv, g, N, N]
            grouped = queries.to(wide).view(n, heads, -1, q.shape[-1])
            return torch.einsum("qhgd,khd->hgqk", grouped, keys.to(wide)) * self._scale

        rotations = what.rope.cos_sin(positions)
        turned, k = rotate(q, *rotations), rotate(k, *rotations)
        kept_k, kept_v = kept(k, loss.keys), kept(v, loss.values)
        k, v = loss.open_keys(k), loss.open_values(v)
        own = positions[:, None] // size == positions // size
        all_scores = torch.where(own, scores(turned, k), scores(turned, kept_k))
        if what.sinks_in_cache and what.window is not None:
            last = what.sink_tokens + what.window - 1  # where a query stands in a full cache of sinks and window
            to_sinks = rotate(q, *what.rope.cos_sin(positions.clamp(max=last)))
            moved = torch.where(own, scores(to_sinks, k), scores(to_sinks, kept_k))
            all_scores[..., : what.sink_tokens] = moved[..., : what.sink_tokens]
        if self._softcap is not None:
            all_scores = self._softcap * torch.tanh(all_scores / self._softcap)
        mask = self._mask(n, what, q.device)
        weights = all_scores.masked_fill(~mask, -torch.inf).softmax(-1)
        out = torch.einsum("hgqk,khd->qhgd", weights * own, v.to(wide))
        out += torch.einsum("hgqk,khd->qhgd", weights * ~own, kept_v)
        return out.reshape(q.shape).to(q.dtype)

    @staticmethod
    def _mask(n: int, what: DenseLayer, device: torch.device) -> Tensor:
        """[N, N], true where a query (row) sees a key (column)."""
        before = torch.ones(n, n, dtype=torch.bool, device=device).tril()
        band = before.triu(1 - (what.window or n))
        for first, end in ((0, what.sink_tokens), *what.kept):
            band[:, first:end] = before[:, first:end]
        return band

    def _streaming(self, what: DenseLayer, window: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """For each query, builds the rolling cache that StreamingLLM would hold and numbers it from 0."""
        out = torch.empty_like(q)
        wide = torch.promote_types(q.dtype, torch.float32)
        for i in range(q.shape[0]):
            first = max(0, i + 1 - window)
            kept = torch.tensor([*range(min(what.sink_tokens, first)), *range(first, i + 1)], device=q.device)
            cos, sin = what.rope.cos_sin(torch.arange(len(kept), device=q.device))
            keys = rotate(k[kept], cos, sin).to(wide)  # [L, Hq, D]
            query = rotate(q[i : i + 1], cos[-1:], sin[-1:])[0].to(wide)  # [Hq, D]
            scores = torch.einsum("hd,khd->hk", query, keys) * self._scale
            if self._softcap is not None:
                scores = self._softcap * torch.tanh(scores / self._softcap)
            out[i] = torch.einsum("hk,khd->hd", scores.softmax(-1), v[kept].to(wide)).to(q.dtype)
        return out
