"""Attention as the textbook has it, written apart from the engine: right by default, wrong where a hypothesis says so.

It shares neither rotation, mask, head map nor codec with the engine, so that it can judge all of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvine.config import CacheConfig, is_packed
from kvine.evidence.exact_products import with_exact_product
from kvine.evidence.traps.packing import Packing
from kvine.models.load import LoadedModel
from kvine.rope_scaling import attention_scaling, inverse_frequencies

# What an engine holds of a layer's keys and values, [N, Hkv, D] each, NaN where that is not known, and their bounds.
Held = tuple[Tensor, Tensor, float, float]
STORED = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class LayerRule:
    """What one layer's queries may see, and how it is rotated."""

    window: int | None
    sinks: int
    moves_sinks: bool
    frequencies: Tensor  # [R / 2], fp64, radians per position
    magnitude: float
    kept: tuple[tuple[int, int], ...] = ()  # runs of positions that stay in sight too

    def visible(self, position: int) -> list[int]:
        """The positions that a query sees."""
        if self.window is None:
            return list(range(position + 1))
        first = max(0, position + 1 - self.window)
        always = {*range(self.sinks), *(key for run in self.kept for key in range(*run))}
        return [*sorted(key for key in always if key < first), *range(first, position + 1)]

    def sink_position(self, position: int) -> int:
        """The position from which a query reads the sinks."""
        if not self.moves_sinks or self.window is None:
            return position
        return min(position, self.sinks + self.window - 1)


@dataclass(frozen=True)
class Reading:
    """What one query reads and how: the right one, or one that a hypothesis has changed.

    Attributes:
        query: [Hq, D], not rotated.
        position, sink_position: by which it is rotated, for the sinks apart.
        keys: [L, Hkv, D], rotated, as attention finds them.
        values: [L, Hkv, D].
        is_sink: [L], which of them are sinks.
        heads: [Hq], the KV head of each query head.
        scale: factor on the scores.
        softcap: bound of the scores, or None.
    """

    query: Tensor
    position: int
    sink_position: int
    keys: Tensor
    values: Tensor
    is_sink: Tensor
    heads: Tensor
    scale: float
    softcap: float | None

    def keep(self, which: Tensor) -> "Reading":
        """The same with only the keys that `which`, [L] or indices, takes."""
        return self.with_keys(self.keys[which], self.values[which], self.is_sink[which])

    def with_keys(self, keys: Tensor, values: Tensor, is_sink: Tensor | None = None) -> "Reading":
        """The same query over other keys; none of them are sinks unless said."""
        if is_sink is None:
            is_sink = torch.zeros(len(keys), dtype=torch.bool)
        given = {**vars(self), "keys": keys, "values": values, "is_sink": is_sink}
        return Reading(**given)


@dataclass(frozen=True)
class Pass:
    """One text as it should go through the attention of every layer.

    Attributes:
        queries, keys, values: for each layer [N, H, D], not rotated: what attention was given.
        stored_keys, stored_values: for each layer [N, Hkv, D], as a cache has to hold them; of packed blocks, before
            they are full.
        kept_keys, kept_values: the same for those who read full blocks; other than those only where these are packed.
        outputs: for each layer the attention block's output, [N, hidden].
    """

    queries: list[Tensor]
    keys: list[Tensor]
    values: list[Tensor]
    stored_keys: list[Tensor]
    stored_values: list[Tensor]
    kept_keys: list[Tensor]
    kept_values: list[Tensor]
    outputs: list[Tensor]

    def __len__(self) -> int:
        return len(self.queries[0])


class Textbook:
    """The right answers for one model and one way of caching.

    Args:
        model: whose decoder computes everything but attention.
        cache: what a query sees, and what K and V are stored as.
    """

    def __init__(self, model: LoadedModel, cache: CacheConfig) -> None:
        self.model = model
        self.config = config = model.config
        self.packing = Packing(cache) if is_packed(cache.codecs[0]) else None
        self.storage = STORED.get(cache.kv_dtype, model.dtype)
        self.rules: list[LayerRule] = []
        for layer in config.layers:
            given = cache.window is not None and (layer.window is None or cache.window < layer.window)
            window = cache.window if given else layer.window
            sinks, kept = (cache.sink_tokens, cache.global_tokens) if given else (0, ())
            table = torch.tensor(inverse_frequencies(layer.rope), dtype=torch.float64)
            moves = sinks > 0 and cache.sink_rule == "in_cache"
            self.rules.append(LayerRule(window, sinks, moves, table, attention_scaling(layer.rope), kept))
        self.heads = torch.arange(config.num_heads) // (config.num_heads // config.num_kv_heads)

    @torch.inference_mode()
    def inputs(self, token_ids: Sequence[int]) -> list[tuple[Tensor, Tensor, Tensor]]:
        """q, k and v of each layer, [N, H, D] and not rotated, of a whole text computed at once."""
        given: list[tuple[Tensor, Tensor, Tensor]] = []

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            given.append((q, k, v))
            stored = self.stored(layer, k, v, torch.arange(len(k)))
            return self._attend_all(layer, q, stored, self._kept(stored, None), torch.float64)

        ids = torch.tensor(token_ids)
        self.model.decoder.forward(ids, torch.arange(len(ids)), attend)
        return given

    @torch.inference_mode()
    def judge(
        self,
        given: Sequence[tuple[Tensor, Tensor, Tensor]],
        arithmetic: torch.dtype = torch.float64,
        held: Sequence[Held] | None = None,
    ) -> Pass:
        """What each layer's attention has to make of the q, k and v that it was given.

        Args:
            given: q, k and v of each layer, [N, H, D] and not rotated.
            arithmetic: dtype of scores and sums.
            held: for each layer what the engine holds of packed blocks.
        """
        stored = [self.stored(layer, k, v, torch.arange(len(k))) for layer, (_, k, v) in enumerate(given)]
        kept = [self._kept(both, held[layer] if held else None) for layer, both in enumerate(stored)]
        outputs = [
            self.block_output(layer, self._attend_all(layer, q, stored[layer], kept[layer], arithmetic))
            for layer, (q, _, _) in enumerate(given)
        ]
        qs, ks, vs = (list(column) for column in zip(*given, strict=True))
        stored_k, stored_v = (list(column) for column in zip(*stored, strict=True))
        kept_k, kept_v = (list(column) for column in zip(*kept, strict=True))
        return Pass(qs, ks, vs, stored_k, stored_v, kept_k, kept_v, outputs)

    def rotate(self, layer: int, x: Tensor, positions: Tensor) -> Tensor:
        """`x` [N, H, D] at `positions` [N], as complex numbers of dimension i and i + R / 2; fp64."""
        rule = self.rules[layer]
        half = len(rule.frequencies)
        angles = torch.outer(positions.double(), rule.frequencies)[:, None]  # [N, 1, R / 2]
        turned = torch.complex(x[..., :half].double(), x[..., half : 2 * half].double())
        turned = turned * torch.polar(torch.full_like(angles, rule.magnitude), angles)
        return torch.cat((turned.real, turned.imag, x[..., 2 * half :].double()), -1)

    def stored(self, layer: int, k: Tensor, v: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """K and V [N, Hkv, D] as a cache has to hold them: K rotated, both in the storage dtype."""
        return self._encode(self.rotate(layer, k, positions).to(k.dtype)), self._encode(v)

    def reading(self, layer: int, query: Tensor, position: int, keys: Tensor, values: Tensor) -> Reading:
        """What a query [Hq, D] at `position` has to read of stored keys and values [≥ position + 1, Hkv, D]."""
        rule = self.rules[layer]
        seen = torch.tensor(rule.visible(position))
        return Reading(
            query,
            position,
            rule.sink_position(position),
            keys[seen],
            values[seen],
            seen < rule.sinks,
            self.heads,
            self.config.attention_scale,
            self.config.attention_softcap,
        )

    def attend(self, layer: int, reading: Reading) -> Tensor:
        """Attention of one query, [Hq, D] in fp64."""
        both = self.rotate(
            layer, reading.query.expand(2, -1, -1), torch.tensor([reading.position, reading.sink_position])
        )  # [2, Hq, D]
        dtype = reading.query.dtype
        own, to_sinks = both.to(dtype).double()
        keys, values = (x.to(dtype).double()[:, reading.heads] for x in (reading.keys, reading.values))  # [L, Hq, D]
        scores = torch.einsum("hd,lhd->hl", own, keys)
        if reading.sink_position != reading.position:
            scores = torch.where(reading.is_sink, torch.einsum("hd,lhd->hl", to_sinks, keys), scores)
        scores = scores * reading.scale
        if reading.softcap is not None:
            scores = reading.softcap * torch.tanh(scores / reading.softcap)
        return torch.einsum("hl,lhd->hd", scores.softmax(-1), values)

    @torch.inference_mode()
    def block_output(self, layer: int, heads: Tensor, *, exact: bool = False) -> Tensor:
        """Attention of n queries, [n, Hq, D], through the output projection: [n, hidden].

        `exact` leaves out that a product with a packed weight rounds what it multiplies.
        """
        block = self.model.decoder.layers[layer]
        o_proj = with_exact_product(block.o_proj) if exact else block.o_proj
        out = o_proj(heads.to(self.model.dtype).flatten(1))
        return out if block.post_attn_norm is None else block.post_attn_norm(out)

    def _encode(self, x: Tensor) -> Tensor:
        if self.storage == torch.float16 and x.dtype != torch.float16:
            x = x.float().clamp(-65504.0, 65504.0)
        return x.to(self.storage)

    def _kept(self, stored: tuple[Tensor, Tensor], held: Held | None) -> tuple[Tensor, Tensor]:
        """What later blocks read of stored keys and values."""
        if self.packing is None:
            return stored
        keys, values, key_bound, value_bound = held or (None, None, 0.0, 0.0)
        return (
            self.packing.kept(stored[0], keys, key_bound, keys=True),
            self.packing.kept(stored[1], values, value_bound, keys=False),
        )

    def _attend_all(
        self,
        layer: int,
        q: Tensor,
        stored: tuple[Tensor, Tensor],
        kept: tuple[Tensor, Tensor],
        arithmetic: torch.dtype,
    ) -> Tensor:
        """Every row of one text over keys and values, all at once; [N, Hq, D] in q's dtype.

        A row reads its own block as `stored` has it, and earlier ones as `kept` does.
        """
        rule, n = self.rules[layer], len(q)
        positions = torch.arange(n)
        k, v = (x.to(q.dtype).to(arithmetic)[:, self.heads] for x in stored)  # [N, Hq, D]
        if self.packing is not None:
            kept_k, kept_v = (x.to(arithmetic)[:, self.heads] for x in kept)
            own = positions[:, None] // self.packing.size == positions // self.packing.size  # [N, N]

        def scores_at(places: Tensor) -> Tensor:  # [Hq, N, N]
            rotated = self.rotate(layer, q, places).to(q.dtype).to(arithmetic)
            scores = torch.einsum("qhd,khd->hqk", rotated, k)
            if self.packing is None:
                return scores
            return torch.where(own, scores, torch.einsum("qhd,khd->hqk", rotated, kept_k))

        scores = scores_at(positions)
        if rule.moves_sinks:
            places = torch.tensor([rule.sink_position(p) for p in range(n)])
            scores = torch.where(positions < rule.sinks, scores_at(places), scores)
        scores = scores * self.config.attention_scale
        cap = self.config.attention_softcap
        if cap is not None:
            scores = cap * torch.tanh(scores / cap)
        seen = torch.zeros(n, n, dtype=torch.bool)
        for p in range(n):
            seen[p, rule.visible(p)] = True
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        if self.packing is None:
            return torch.einsum("hqk,khd->qhd", weights, v).to(q.dtype)
        out = torch.einsum("hqk,khd->qhd", weights * own, v) + torch.einsum("hqk,khd->qhd", weights * ~own, kept_v)
        return out.to(q.dtype)
