"""How much of the exact run's attention falls on keys that a policy's queries no longer see."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from kvine.attention.cached import CachedAttention
from kvine.cache.spec import CacheSpec
from kvine.engine.stepped import SteppedCache
from kvine.rope import rotate

SCORES = 1 << 24  # attention scores that are held at once, over all heads: 64 MiB


class LostMass:
    """Watches an exact run layer by layer, and adds up what each policy would lose of it.

    Set it as the observer of the exact cache's runner while that reads; each chunk's weights are computed again from
    its queries and from the keys in the cache, in pieces, and forgotten.

    Args:
        cache: the exact one.
        specs: of each policy, its cache's layer groups.

    Attributes:
        lost: [policies, layers] weights on keys that the policy does not show, added up over heads and queries.
        rows: queries times heads seen, in each layer.
    """

    def __init__(self, cache: SteppedCache, specs: Sequence[Sequence[CacheSpec]]) -> None:
        self._cache = cache
        self._attention: CachedAttention = cache.runner.attention
        seen = [{layer: _visibility(spec) for spec in groups for layer in spec.layers} for groups in specs]
        self._query: Tensor | None = None
        num_layers = len(self._attention.layers)
        # Policies that see alike lose alike: of each layer the different ways of seeing, and who sees so.
        self._views: list[dict[CacheSpec, list[int]]] = [{} for _ in range(num_layers)]
        for policy, layers in enumerate(seen):
            for layer, spec in layers.items():
                self._views[layer].setdefault(spec, []).append(policy)
        self.lost = torch.zeros(len(specs), num_layers, dtype=torch.float64)
        self.rows = torch.zeros(num_layers, dtype=torch.float64)

    def __call__(self, name: str, layer: int, tensor: Tensor) -> None:
        """See `kvine.models.decoder.Observer`."""
        if name == "q":
            self._query = tensor
        elif name == "k":
            assert self._query is not None
            self._watch(layer, self._query, tensor)

    def _watch(self, layer: int, query: Tensor, key: Tensor) -> None:
        """One layer of one chunk: query [n, Hq, D] and key [n, Hkv, D], not rotated; the past is in the cache still."""
        place = self._attention.layers[layer]
        own = self._attention.pools[place.group].spec
        start = len(self._cache)
        positions = torch.arange(start, start + len(query), device=query.device)
        at = torch.cat((torch.tensor(self._cache.positions(layer), dtype=torch.long, device=query.device), positions))
        rotation = place.rope.cos_sin(positions)
        past = self._cache.layer(layer)[0][0].float()  # [Hkv, L, D]
        keys = torch.cat((past, rotate(key, *rotation).float().transpose(0, 1)), dim=1)
        queries = rotate(query, *rotation).float().transpose(0, 1)  # [Hq, n, D]
        grouped = queries.reshape(own.num_kv_heads, -1, *queries.shape[1:])  # [Hkv, g, n, D]
        step = max(1, SCORES // (len(queries) * len(at)))
        for first in range(0, len(query), step):
            rows = positions[first : first + step, None]
            scores = torch.einsum("hgnd,hld->hgnl", grouped[:, :, first : first + step], keys) * self._attention.scale
            if self._attention.softcap is not None:
                scores = self._attention.softcap * torch.tanh(scores / self._attention.softcap)
            weights = scores.masked_fill_(~own.visible(rows, at), -torch.inf).softmax(-1).sum((0, 1))  # [n, L]
            for spec, policies in self._views[layer].items():
                hidden = ~spec.visible(rows, at)
                self.lost[policies, layer] += float((weights * hidden).sum(dtype=torch.float64))
        self.rows[layer] += len(query) * len(queries)

    def share(self, policy: int) -> float:
        """Over all layers, heads and queries, between 0 and 1."""
        return float(self.lost[policy].sum() / self.rows.sum())

    def by_layer(self, policy: int) -> list[float]:
        """The same for each layer by itself."""
        return (self.lost[policy] / self.rows).tolist()


def _visibility(spec: CacheSpec) -> CacheSpec:
    """A spec without what has no part in what is seen."""
    return replace(spec, block_size=1, sink_rule="absolute", key_codec="exact", value_codec="exact")


def sees_less(specs: Sequence[CacheSpec], exact: Sequence[CacheSpec]) -> bool:
    """Whether a policy hides from some layer's queries what the exact cache shows them."""
    windows = {layer: spec.window for spec in exact for layer in spec.layers}
    return any(spec.window != windows[layer] for spec in specs for layer in spec.layers)
