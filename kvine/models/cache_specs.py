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
    model itself limits as tightly was trained without them. Global tokens likewise.

    Raises:
        ConfigError: if a packed codec cannot keep blocks of this model's shape.
    """
    keys, values = cache.codecs
    parts: tuple[tuple[Part, str], ...] = (("key", keys), ("value", values))
    for part, codec in parts:
        if why := unpackable(part, codec, cache.block_size, model.head_dim):
            raise ConfigError(why)
    groups: dict[tuple[int | None, bool], list[int]] = {}
    for number, layer in enumerate(model.layers):
        own, given = layer.window, cache.window
        trained = own is not None and (given is None or own <= given)
        groups.setdefault((own if trained else given, trained), []).append(number)
    return tuple(
        CacheSpec(
            layers=tuple(layers),
            num_kv_heads=model.num_kv_heads,
            head_dim=model.head_dim,
            block_size=cache.block_size,
            window=window,
            sink_tokens=0 if trained or window is None else cache.sink_tokens,
            sink_rule=cache.sink_rule,
            trained=trained,
            key_codec=keys,
            value_codec=values,
        ).keeping(cache.global_tokens)
        for (window, trained), layers in groups.items()
    )
