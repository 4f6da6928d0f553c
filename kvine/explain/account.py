"""What a step computes and reads, counted: through the cache, and where all tokens are computed anew."""

from collections.abc import Mapping, Sequence

import torch

from kvine.cache.pool import KVPool
from kvine.explain.explanation import Amount, Read, Work
from kvine.models.config import ModelConfig

FLOPS_PER_PRODUCT = 2  # a multiplication and an addition


def keys_seen(pools: Sequence[KVPool], position: int) -> int:
    """Keys that the query at `position` sees, added up over all layers."""
    return sum(pool.spec.num_layers * _seen(pool, position) for pool in pools)


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


def read(pools: Sequence[KVPool], position: int) -> Read:
    """What the query at `position` reads of the cache. Heads that share a K and V read it once."""
    numbers = k_bytes = v_bytes = 0
    for pool in pools:
        spec = pool.spec
        count = spec.num_layers * _seen(pool, position) * spec.num_kv_heads * spec.head_dim
        numbers += count
        k_bytes += count * pool.k.element_size()
        v_bytes += count * pool.v.element_size()
    return Read(numbers, k_bytes, v_bytes)


def _seen(pool: KVPool, position: int) -> int:
    return int(pool.spec.visible(position, torch.arange(position + 1)).sum())
