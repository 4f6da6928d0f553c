"""What is planned: the few figures of a model that decide its memory, wherever they come from.

A model that Kvine runs brings its `ModelConfig` along; of others, and of bare figures, less is known.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from kvine.cache.layout import ITEM_BYTES
from kvine.config import MOST_TOKENS
from kvine.errors import ConfigError
from kvine.evidence.plan.weights import Weights
from kvine.models.config import MOST_LAYERS, ModelConfig

MOST_PARAMETERS = 10**18
_COUNT_UNITS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}


@dataclass(frozen=True)
class PlannedLayer:
    """A layer that keeps K and V; its queries see the last `window` tokens, or all (None)."""

    window: int | None


@dataclass(frozen=True)
class Subject:
    """A model as the planner sees it.

    Attributes:
        name, architecture: what it is called; a model of bare figures has no architecture.
        layers, num_kv_heads, head_dim: what decides K and V.
        dtype: compute dtype, in which K and V are kept unless the cache says otherwise.
        weights: None where nothing is known of them.
        num_heads: query heads; None where unknown.
        max_context: the trained context in tokens; None where unknown.
        model: its config, if Kvine runs it.
        not_run: why Kvine does not run it, in a sentence.
        packings: type of each weight that is held packed, by role.
        dtype_reason: why that dtype, and what becomes of packed weights, in sentences.
        notes: what was assumed, or is not known.
        recount: the weights it would have with another number of KV heads; None where that cannot be known.
    """

    name: str
    architecture: str | None
    layers: tuple[PlannedLayer, ...]
    num_kv_heads: int
    head_dim: int
    dtype: str
    weights: Weights | None
    num_heads: int | None = None
    max_context: int | None = None
    model: ModelConfig | None = None
    not_run: str | None = None
    packings: Mapping[str, str] = field(default_factory=dict)
    dtype_reason: str | None = None
    notes: tuple[str, ...] = ()
    recount: Callable[[int], Weights] | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Figures:
    """A model given by its figures alone.

    Attributes:
        layers: layers that keep K and V.
        heads: query heads; as many KV heads where nothing else says how many (MHA).
        kv_heads, head_dim: shape of one token's K in one layer; V has the same.
        kv_width: their product, the width of K alone. Two of the three are enough, and so is kv_width.
        params: parameters of the whole model.
    """

    layers: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    kv_width: int | None = None
    params: int | None = None

    @property
    def given(self) -> bool:
        """Whether there is any figure."""
        return any(value is not None for value in vars(self).values())

    def subject(self, dtype: str) -> Subject:
        """The subject that they describe, its weights and its K and V in `dtype` (auto: fp16).

        Raises:
            ConfigError: if a figure is missing, no positive whole number, or contradicts another.
        """
        dtype = "fp16" if dtype == "auto" else dtype
        for name, value in vars(self).items():
            most = {"layers": MOST_LAYERS, "params": MOST_PARAMETERS}.get(name, MOST_TOKENS)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most):
                raise ConfigError(f"{_flag(name)} is {value!r}: give a whole number from 1 to {most}.")
        if self.layers is None:
            raise ConfigError("How many layers? Give --layers, or name a model.")
        kv_heads, head_dim = self._kv_shape()
        if self.heads is not None and self.heads % kv_heads:
            raise ConfigError(f"{self.heads} query heads cannot share {kv_heads} KV heads evenly.")
        weights = None
        if self.params is not None:
            source = f"{self.params:,} parameters in {dtype}"
            weights = Weights(self.params * ITEM_BYTES[dtype], self.params, source)
        return Subject(
            name="these figures",
            architecture=None,
            layers=(PlannedLayer(None),) * self.layers,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            dtype=dtype,
            weights=weights,
            num_heads=self.heads,
        )

    def _kv_shape(self) -> tuple[int, int]:
        width, heads, dim = self.kv_width, self.kv_heads, self.head_dim
        if heads is None and (width is None or dim is None):
            heads = self.heads
        if width is None:
            if heads is None or dim is None:
                raise ConfigError("How wide is K? Give --kv-width, or --kv-heads and --head-dim.")
            return heads, dim
        if heads is None and dim is None:
            return 1, width
        if heads is None:
            assert dim is not None
            if width % dim:
                raise ConfigError(f"K of width {width} does not divide into heads of {dim}.")
            return width // dim, dim
        if width % heads or dim not in (None, width // heads):
            shape = f"{heads} KV head{'' if heads == 1 else 's'}" + ("" if dim is None else f" of {dim}")
            raise ConfigError(f"K of width {width} does not divide into {shape}.")
        return heads, width // heads


def parse_count(text: str) -> int:
    """A number of parameters such as `27e9`, `27B`, `270M` or `134,515,008`.

    Raises:
        ConfigError: for anything else.
    """
    whole = r"\d{1,3}(?:,\d{3})+|\d{1,3}(?:_\d{3})+|\d*"
    match = re.fullmatch(rf"((?:{whole})(?:(?<=\d)|\.\d+)(?:e\+?\d{{1,2}})?)\s*([kmbt]?)", text.strip().lower())
    value = float(match[1].replace(",", "").replace("_", "")) * _COUNT_UNITS[match[2]] if match else 0.0
    if not 1 <= value <= MOST_PARAMETERS:
        raise ConfigError(f"{text!r} is no number of parameters: write one such as 27e9, 27B or 270M.")
    return int(value)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
