"""What a model call shows of itself, and the attention weights that follow from it and from the cached keys."""

import torch
from torch import Tensor

from kvine.attention.cached import CachedAttention
from kvine.rope import rotate


class StepObserver:
    """Keeps the last row's query and key of each layer that a decoder shows, and counts the numbers of q, k and v."""

    def __init__(self) -> None:
        self.queries: dict[int, Tensor] = {}  # by layer: [Hq, D], normed, not rotated
        self.keys: dict[int, Tensor] = {}  # by layer: [Hkv, D], likewise
        self.numbers = {"q": 0, "k": 0, "v": 0}  # over all layers and rows

    def __call__(self, name: str, layer: int, tensor: Tensor) -> None:
        """See `kvine.models.decoder.Observer`."""
        if name in self.numbers:
            self.numbers[name] += tensor.numel()
        if name == "q":
            self.queries[layer] = tensor[-1].clone()
        elif name == "k":
            self.keys[layer] = tensor[-1].clone()


def attention_weights(
    attention: CachedAttention, layer: int, query: Tensor, keys: Tensor, key_positions: list[int], position: int
) -> Tensor:
    """How much the query at `position` takes from each position, by each of its heads: arXiv:1706.03762, in fp32.

    Args:
        attention: whose layer it is: rotation, scale, soft cap and what may be seen.
        layer: its number.
        query: [Hq, D], not rotated.
        keys: [Hkv, L, D] as the cache lends them: rotated, in the dtype that they are stored in.
        key_positions: [L] where they belong.
        position: the query's.

    Returns:
        [Hq, position + 1]; 0 for what the query does not see. Each row adds up to 1.
    """
    place = attention.layers[layer]
    spec = attention.pools[place.group].spec
    at = torch.tensor(key_positions, device=query.device)

    def scores(seen_from: int) -> Tensor:
        rotation = place.rope.cos_sin(torch.tensor([seen_from], device=query.device))
        grouped = rotate(query[None], *rotation).float().view(spec.num_kv_heads, -1, spec.head_dim)  # [Hkv, g, D]
        return torch.einsum("hgd,hld->hgl", grouped, keys.float()).flatten(0, 1) * attention.scale  # [Hq, L]

    found = scores(position)
    limit = spec.sinks_move_from
    if limit is not None and position >= limit:
        found = torch.where(at < spec.sink_tokens, scores(limit - 1), found)
    if attention.softcap is not None:
        found = attention.softcap * torch.tanh(found / attention.softcap)
    seen = spec.visible(position, at)
    assert int(seen.sum()) == int(spec.visible(position, torch.arange(position + 1)).sum()), "a visible key is gone"
    weights = found.new_zeros(query.shape[0], position + 1)
    weights[:, at] = found.masked_fill(~seen, -torch.inf).softmax(-1)
    return weights
