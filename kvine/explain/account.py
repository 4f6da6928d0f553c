"""What a step computes and reads, counted: through the cache, and where all tokens are computed anew."""

from collections.abc import Mapping

import torch

from kvine.attention.cached import CachedAttention
from kvine.cache.spec import CacheSpec
from kvine.explain.explanation import Amount, Read, Work
from kvine.models.config import ModelConfig

FLOPS_PER_PRODUCT = 2  # a multiplication and an addition


def keys_seen(attention: CachedAttention, position: int) -> int:
    """Keys that the query at `position` sees, added up over all layers."""
    specs = [attention.pools[group].spec for group in range(len(attention.backends))]
    return sum(spec.num_layers * _seen(spec, position) for spec in specs)


def work(config: ModelConfig, item_bytes: int, tokens: int, numbers: Mapping[str, int], keys: int) -> Work:
    """What a model call computes.

    Args:
        config: the model's sizes.
        item_bytes: of one number in the compute dtype.
        tokens: rows of the call.
        numbers: of `q`, `k` and `v`, over all layers.
        keys: seen by the call's queries, over all queries and layers.
    """
    hidden, width = config.hidden_size, config.num_heads * config.head_dim
    q, k, v = (
        Amount(numbers[name], numbers[name] * item_bytes, FLOPS_PER_PRODUCT * hidden * numbers[name]) for name in "qkv"
    )
    scores = keys * config.num_heads
    attention = 2 * FLOPS_PER_PRODUCT * config.head_dim * scores  # query · key, then weight × value
    weights = hidden * width + 3 * hidden * config.intermediate_size  # of o_proj, gate, up and down
    other = FLOPS_PER_PRODUCT * weights * tokens * config.num_layers
    return Work(tokens, q, k, v, scores, attention, other, q.flops + k.flops + v.flops + attention + other)


def read(attention: CachedAttention, position: int) -> Read:
    """What the query at `position` reads of the cache. Heads that share a K and V read it once.

    Of packed blocks each token counts with its share of its block's scales.
    """
    numbers = k_bytes = v_bytes = 0
    for group in range(len(attention.backends)):
        pool, shelf = attention.pools[group], attention.open_shelf.get(group)
        spec = pool.spec
        heads = spec.num_layers * spec.num_kv_heads
        seen = _seen(spec, position)
        numbers += heads * seen * spec.head_dim
        exact = pool if shelf is None else attention.pools[shelf]
        own = seen
        if shelf is not None:
            own = min(seen, position % spec.block_size + 1)
            k_bytes += heads * (seen - own) * pool.k.shape[-1] // spec.block_size
            v_bytes += heads * (seen - own) * pool.v.shape[-1] // spec.block_size
        k_bytes += heads * own * spec.head_dim * exact.k.element_size()
        v_bytes += heads * own * spec.head_dim * exact.v.element_size()
    return Read(numbers, k_bytes, v_bytes)


def _seen(spec: CacheSpec, position: int) -> int:
    return int(spec.visible(position, torch.arange(position + 1)).sum())
