"""Which layers of a model keep their past alike: the bridge from a model's config to the specs of its cache."""

from collections.abc import Sequence
from typing import Protocol

from kvine.cache.layout import Part, unpackable
from kvine.cache.spec import CacheSpec
from kvine.config import CacheConfig
from kvine.errors import ConfigError


class SeenLayer(Protocol):
    """A layer whose queries see the last `window` tokens, or all (None)."""

    @property
    def window(self) -> int | None: ...  # noqa: D102


class AttentionShape(Protocol):
    """What of a model decides how its past is kept: all that `ModelConfig` and the planner's subjects share."""

    @property
    def layers(self) -> Sequence[SeenLayer]: ...  # noqa: D102
    @property
    def num_kv_heads(self) -> int: ...  # noqa: D102
    @property
    def head_dim(self) -> int: ...  # noqa: D102


def cache_specs(model: AttentionShape, cache: CacheConfig) -> tuple[CacheSpec, ...]:
    """One spec for each group of layers that see alike, in order of their first layer.

    A layer sees the smaller of its own window and the cache's. Sinks belong to the cache's window: a layer that the
    model itself limits as tightly was trained without them.

    Raises:
        ConfigError: if a packed codec cannot keep blocks of this model's shape.
    """
    keys, values = cache.codecs
    parts: tuple[tuple[Part, str], ...] = (("key", keys), ("value", values))
    for part, codec in parts:
        if why := unpackable(part, codec, cache.block_size, model.head_dim):
            raise ConfigError(why)
    groups: dict[tuple[int | None, int], list[int]] = {}
    for number, layer in enumerate(model.layers):
        own, given = layer.window, cache.window
        if given is not None and (own is None or given < own):
            seen: tuple[int | None, int] = (given, cache.sink_tokens)
        else:
            seen = (own, 0)
        groups.setdefault(seen, []).append(number)
    return tuple(
        CacheSpec(
            layers=tuple(layers),
            num_kv_heads=model.num_kv_heads,
            head_dim=model.head_dim,
            block_size=cache.block_size,
            window=window,
            sink_tokens=sinks,
            sink_rule=cache.sink_rule,
            key_codec=keys,
            value_codec=values,
        )
        for (window, sinks), layers in groups.items()
    )
