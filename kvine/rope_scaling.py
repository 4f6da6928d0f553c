"""Rotary frequencies without torch: what a checkpoint says about RoPE, and the table that follows from it.

Kept apart from `kvine.rope` so that model configs can be read, and memory planned, without loading torch.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

RopeKind = Literal["default", "linear", "dynamic", "yarn", "llama3", "longrope"]
ROPE_KINDS: tuple[RopeKind, ...] = get_args(RopeKind)


@dataclass(frozen=True)
class RopeConfig:
    """The rotary embedding of one kind of layer: base, width and scaling.

    Lengths are in tokens. `theta` is the base, `rotary_dim` the number of leading dimensions of a head that are
    rotated, `max_context` the length the model was trained for (dynamic, longrope), `original_context` the length
    before its context was extended (yarn, llama3, longrope), `attention_factor` what multiplies cosine and sine (None:
    the kind's own rule), `divisors` one more divisor for each frequency (GGUF's `rope_freqs.weight`).
    Raises ValueError for parameters that make no table.
    """

    theta: float
    rotary_dim: int
    kind: RopeKind = "default"
    factor: float = 1.0
    max_context: int = 0
    original_context: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    divisors: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        pairs = self.rotary_dim // 2
        if self.rotary_dim < 2 or self.rotary_dim % 2:
            raise ValueError(f"RoPE needs an even number of rotated dimensions, not {self.rotary_dim}.")
        if self.kind not in ROPE_KINDS:
            raise ValueError(f"RoPE kind {self.kind!r} is unknown; known are {', '.join(ROPE_KINDS)}.")
        if not (math.isfinite(self.theta) and self.theta > 1):
            raise ValueError(f"RoPE needs a base above 1, not {self.theta}.")
        if not (math.isfinite(self.factor) and self.factor > 0):
            raise ValueError(f"RoPE needs a positive scaling factor, not {self.factor}.")
        if self.kind in ("yarn", "llama3", "longrope") and self.original_context < 2:
            raise ValueError(f"{self.kind} RoPE needs the context length before scaling.")
        if self.kind in ("dynamic", "longrope") and self.max_context < 1:
            raise ValueError(f"{self.kind} RoPE needs the trained context length.")
        if self.kind == "dynamic" and self.rotary_dim < 4:
            raise ValueError("dynamic RoPE needs at least four rotated dimensions.")
        if self.kind == "llama3" and not 0 < self.low_freq_factor < self.high_freq_factor:
            raise ValueError("llama3 RoPE needs 0 < low_freq_factor < high_freq_factor.")
        if self.kind == "yarn" and not 0 < self.beta_slow <= self.beta_fast:
            raise ValueError("yarn RoPE needs 0 < beta_slow <= beta_fast.")
        if self.kind == "longrope":
            self._check_list("short_factor", self.short_factor, pairs)
            self._check_list("long_factor", self.long_factor, pairs)
        if self.divisors:
            self._check_list("divisors", self.divisors, pairs)

    @staticmethod
    def _check_list(name: str, values: tuple[float, ...], expected: int) -> None:
        if len(values) != expected:
            raise ValueError(f"RoPE's {name} has {len(values)} entries where {expected} are needed.")
        if not all(math.isfinite(value) and value > 0 for value in values):
            raise ValueError(f"RoPE's {name} must be positive numbers.")


def inverse_frequencies(config: RopeConfig, length: int | None = None) -> list[float]:
    """Radians per position for each of the `rotary_dim // 2` pairs, in double precision.

    `length` is the number of tokens the table has to serve. Only `dynamic` and `longrope` depend on it; None means
    no more than the trained length (`dynamic`) or the original one (`longrope`).
    """
    frequencies = _TABLES[config.kind](config, length)
    if config.divisors:
        return [frequency / divisor for frequency, divisor in zip(frequencies, config.divisors, strict=True)]
    return frequencies


def attention_scaling(config: RopeConfig) -> float:
    """The factor on cosine and sine: 1, or for yarn and longrope a growing function of the context's extension."""
    if config.attention_factor is not None:
        return config.attention_factor
    if config.kind == "yarn":
        if config.mscale and config.mscale_all_dim:
            return _yarn_mscale(config.factor, config.mscale) / _yarn_mscale(config.factor, config.mscale_all_dim)
        return _yarn_mscale(config.factor, 1.0)
    if config.kind == "longrope" and config.factor > 1:
        return math.sqrt(1 + math.log(config.factor) / math.log(config.original_context))
    return 1.0


def _unscaled(theta: float, rotary_dim: int) -> list[float]:
    """The table of Su et al., RoFormer (arXiv:2104.09864)."""
    return [theta ** (-2 * pair / rotary_dim) for pair in range(rotary_dim // 2)]


def _default(config: RopeConfig, length: int | None) -> list[float]:
    return _unscaled(config.theta, config.rotary_dim)


def _linear(config: RopeConfig, length: int | None) -> list[float]:
    """Position interpolation, Chen et al. (arXiv:2306.15595)."""
    return [frequency / config.factor for frequency in _unscaled(config.theta, config.rotary_dim)]


def _dynamic(config: RopeConfig, length: int | None) -> list[float]:
    """NTK-aware base that grows with the length once it exceeds the trained one."""
    stretch = config.factor * max(length or 0, config.max_context) / config.max_context - (config.factor - 1)
    theta = config.theta * stretch ** (config.rotary_dim / (config.rotary_dim - 2))
    return _unscaled(theta, config.rotary_dim)


def _yarn(config: RopeConfig, length: int | None) -> list[float]:
    """NTK by parts, Peng et al. (arXiv:2309.00071): interpolate slow pairs, leave fast ones, blend in between."""

    def pair_that_turns(rotations: float) -> float:
        """The (fractional) pair that makes this many turns over the original context."""
        ratio = config.original_context / (rotations * 2 * math.pi)
        return config.rotary_dim * math.log(ratio) / (2 * math.log(config.theta))

    low, high = pair_that_turns(config.beta_fast), pair_that_turns(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, config.rotary_dim - 1)
    if low == high:
        high += 0.001
    table = []
    for pair, frequency in enumerate(_unscaled(config.theta, config.rotary_dim)):
        interpolated = min(max((pair - low) / (high - low), 0.0), 1.0)
        table.append(frequency / config.factor * interpolated + frequency * (1 - interpolated))
    return table


def _yarn_mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _llama3(config: RopeConfig, length: int | None) -> list[float]:
    """Llama 3.1's rule: long wavelengths are divided by the factor, short ones kept, those between blended."""
    table = []
    for frequency in _unscaled(config.theta, config.rotary_dim):
        turns = config.original_context * frequency / (2 * math.pi)
        kept = (turns - config.low_freq_factor) / (config.high_freq_factor - config.low_freq_factor)
        kept = min(max(kept, 0.0), 1.0)
        table.append(frequency / config.factor * (1 - kept) + frequency * kept)
    return table


def _longrope(config: RopeConfig, length: int | None) -> list[float]:
    """Ding et al. (arXiv:2402.13753): searched factors for each pair, one set for short and one for long lengths."""
    is_long = length is not None and length > config.original_context
    factors = config.long_factor if is_long else config.short_factor
    table = _unscaled(config.theta, config.rotary_dim)
    return [frequency / factor for frequency, factor in zip(table, factors, strict=True)]


_TABLES: Mapping[RopeKind, Callable[[RopeConfig, int | None], list[float]]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "yarn": _yarn,
    "llama3": _llama3,
    "longrope": _longrope,
}
