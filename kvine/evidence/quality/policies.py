"""Ways of keeping the past, as a user names them: `window=256,sinks=4`, with the names of the command line's options.

Knows no model and imports no torch: what is refused is refused before anything is loaded.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any, get_args, get_type_hints

from kvine.config import CacheConfig
from kvine.errors import ConfigError, RequestError
from kvine.spans import parse_spans

EXACT = "exact"
SINKS = 4  # as many as StreamingLLM keeps (arXiv:2309.17453)
SWEEP_SHARES = (2, 4, 8)  # a window is the context over one of these
SWEEP_CODECS = ("bf16", "int8", "k8v4", "int4", "int2")
# Options whose names on the command line are not those of `CacheConfig` with hyphens.
_FIELDS: Mapping[str, str] = MappingProxyType({"sinks": "sink_tokens"})
# What belongs to a run as a whole, or changes no result.
_ELSEWHERE = frozenset({"kv_memory", "prefix_caching", "cache_dir", "cache_size"})


@dataclass(frozen=True)
class Policy:
    """A way of keeping the past, and what it is called."""

    name: str
    cache: CacheConfig

    @property
    def is_exact(self) -> bool:
        """Whether it keeps everything, as computed."""
        return self.cache.window is None and self.cache.kv_dtype == CacheConfig.kv_dtype


@dataclass(frozen=True)
class Refused:
    """A policy that cannot be, and why, in a sentence."""

    name: str
    reason: str


def option_names() -> tuple[str, ...]:
    """What a policy may set, as the command line writes it."""
    given = {field: option for option, field in _FIELDS.items()}
    names = [field.name for field in fields(CacheConfig) if field.name not in _ELSEWHERE]
    return tuple(given.get(name, name.replace("_", "-")) for name in names)


def parse_policies(text: str) -> tuple[list[Policy], list[Refused]]:
    """Reads policies with semicolons between, each `exact` or NAME=VALUE pairs with commas between.

    Args:
        text: such as `exact; window=256,sinks=4; kv-dtype=fp16`.

    Returns:
        The policies in their order, equal ones once, and those that `CacheConfig` refuses.

    Raises:
        RequestError: for what is no such list: no policy, an option that is unknown or given twice, a missing value.
    """
    policies: list[Policy] = []
    refused: list[Refused] = []
    for part in text.split(";"):
        words = part.strip()
        if not words:
            continue
        values = {} if words == EXACT else _values(words)
        try:
            policy = Policy(policy_name(values), CacheConfig(**_typed(values)))
        except ConfigError as error:
            refused.append(Refused(policy_name(values), str(error)))
            continue
        if policy not in policies:
            policies.append(policy)
    if not policies and not refused:
        raise RequestError(f"--policies {text!r} names none: write for example 'exact; window=256,sinks=4'.")
    return policies, refused


def sweep_policies(context: int, dtype: str) -> tuple[list[Policy], list[Refused]]:
    """A grid over what can be chosen: codecs, windows with and without sinks, and both together.

    Args:
        context: tokens that are read from an empty cache.
        dtype: what the model computes in; storing in the same is exact.
    """
    codecs = [codec for codec in SWEEP_CODECS if codec != dtype]
    windows = [max(1, context // share) for share in SWEEP_SHARES]
    kept = [f"window={window},sinks={SINKS},sink-rule=in_cache" for window in windows]
    lines = [EXACT]
    lines += [f"kv-dtype={codec}" for codec in codecs]
    lines += [f"window={window}" for window in windows]
    lines += kept
    lines += [f"{keeping},kv-dtype={codec}" for keeping in kept[:2] for codec in codecs]
    return parse_policies("; ".join(lines))


def policy_name(values: Mapping[str, str]) -> str:
    """How a policy is shown, and could be typed again."""
    return ",".join(f"{option}={value}" for option, value in values.items()) or EXACT


def _values(words: str) -> dict[str, str]:
    """NAME=VALUE pairs; names and the values of rules may be written with - or _."""
    known = option_names()
    values: dict[str, str] = {}
    for pair in words.split(","):
        left, equals, right = (piece.strip() for piece in pair.partition("="))
        option = left.removeprefix("--").replace("_", "-")
        if not equals or not right:
            raise RequestError(
                f"The policy {words!r} has {pair.strip()!r}, which is not NAME=VALUE: write exact, or pairs such as "
                "window=256,sinks=4; runs of global-tokens have a + between them."
            )
        if option not in known:
            raise RequestError(f"The policy {words!r} sets {left!r}: choose among {', '.join(known)}.")
        if option in values:
            raise RequestError(f"The policy {words!r} sets {option} twice: give it once.")
        values[option] = right.replace("-", "_") if option.endswith("-rule") else right
    return values


def _typed(values: Mapping[str, str]) -> dict[str, Any]:
    """Arguments of `CacheConfig`; it says itself what is out of range."""
    hints = get_type_hints(CacheConfig)
    typed: dict[str, Any] = {}
    for option, value in values.items():
        name = _FIELDS.get(option, option.replace("-", "_"))
        is_number = hints[name] is int or int in get_args(hints[name])
        typed[name] = int(value) if is_number and value.isdecimal() else value
    if (runs := typed.get("global_tokens")) is not None:
        try:
            typed["global_tokens"] = parse_spans(runs)
        except ValueError:
            raise RequestError(f"global-tokens={runs} names no positions: write runs such as 0:4+100:108.") from None
    return typed


def with_exact(policies: Sequence[Policy]) -> list[Policy]:
    """The policies behind the exact one, which all are compared with; it stands first whether it was named or not."""
    exact = Policy(EXACT, CacheConfig())
    return [exact, *(policy for policy in policies if policy.cache != exact.cache)]
