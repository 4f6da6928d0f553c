"""The options of a cache and an engine, checked where they are made: a wrong one never reaches a running step."""

import re
from dataclasses import dataclass
from os import PathLike
from typing import Literal

from kvine.errors import ConfigError
from kvine.spans import Spans, beyond_beginning, checked_spans, merged

SinkRule = Literal["absolute", "in_cache"]
ELEMENT_CODECS = ("exact", "fp32", "fp16", "bf16")
PACKED_CODECS = ("int8", "int4", "int2")
KV_DTYPES = (*ELEMENT_CODECS, *PACKED_CODECS)
PER_TOKEN = "-token"
BACKENDS = ("auto", "native", "sdpa", "reference")
DEVICES = ("auto", "cpu", "cuda", "mps")
COMPUTE_DTYPES = ("fp32", "bf16", "fp16")

LEAST_CACHE_SIZE = 2**20  # of a folder of blocks
MOST_TOKENS = 2**31 - 1  # more than any text; positions and masks stay far from overflow
MOST_STEP_TOKENS = 2**62  # a cache-free step takes a text of any length at once

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def parse_bytes(size: int | str) -> int:
    """Reads a size in bytes: a positive integer, or a text such as `512MiB` or `2.5GB`.

    Raises:
        ConfigError: for anything else.
    """
    if isinstance(size, int) and not isinstance(size, bool):
        number = float(min(size, 2**63))
    else:
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?i?B?)\s*", str(size), re.IGNORECASE)
        unit = match.group(2).upper() if match else "?"
        if match is None or unit not in _UNITS:
            raise ConfigError(f"{size!r} is not a size in bytes: write a number such as 536870912, 512MiB or 2GB.")
        number = float(match.group(1)) * _UNITS[unit]
    if number > 2**62:
        raise ConfigError("No machine has that much memory: give a smaller size.")
    if number < 1:
        raise ConfigError(f"A size of {size!r} holds nothing: write at least 1 byte.")
    return int(number)


def human_bytes(count: int) -> str:
    """A number of bytes in binary units, such as `84.4 MiB`."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.4g} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def is_packed(codec: str) -> bool:
    """Whether a codec packs whole blocks."""
    return codec.removesuffix(PER_TOKEN) in PACKED_CODECS


def split_codecs(name: str) -> tuple[str, str]:
    """The codecs of keys and values that a `kv_dtype` names: one for both (`int4`), `KEYS/VALUES`, or `k8v4` for short.

    `int4-token` alone means keys by token too. ValueError for anything else.
    """
    short = re.fullmatch(r"k([248])v([248])", name)
    if short:
        return f"int{short[1]}", f"int{short[2]}"
    keys, slash, values = name.partition("/")
    if not slash:
        values = keys.removesuffix(PER_TOKEN) if is_packed(keys) else keys
    if keys.removesuffix(PER_TOKEN if is_packed(keys) else "") not in KV_DTYPES or values not in KV_DTYPES:
        raise ValueError(name)
    return keys, values


def check_device(name: str) -> None:
    """Raises ConfigError for what is no kind of device; whether it is there only torch knows."""
    if name not in DEVICES:
        raise ConfigError(f"Device {name!r} is unknown. Choose one of {', '.join(DEVICES)}.")


def check_dtype(name: str) -> None:
    """Raises ConfigError for what is neither a compute dtype nor `auto`."""
    if name != "auto" and name not in COMPUTE_DTYPES:
        raise ConfigError(f"dtype {name!r} is unknown. Choose one of auto, {', '.join(COMPUTE_DTYPES)}.")


def _check_whole(name: str, value: object, least: int, most: int = MOST_TOKENS) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise ConfigError(f"{name} is {value!r}: give a whole number from {least} to {most}.")


def _written(spans: Spans) -> str:
    return ", ".join(f"{first}:{end}" for first, end in spans)


@dataclass(frozen=True)
class CacheConfig:
    """How the past is kept.

    Attributes:
        block_size: tokens in a block, the unit of allocation, sharing and eviction.
        kv_memory: budget for K and V in bytes, or a text such as `2GiB`; None takes the smaller of a quarter of the
            free memory and four times the model's context.
        kv_dtype: what K and V are stored as: `exact` is the compute dtype; `fp32`, `fp16` and `bf16` convert each
            value as it is written; `int8`, `int4` and `int2` pack each block once it is full, keys by channel and
            values by token. `KEYS/VALUES` names two (`int8/int4`, or `k8v4` for short), and `int4-token` packs keys
            by token too. See `kvine.cache.layout`.
        window: if given, a query sees only its last `window` tokens (itself included) and the sinks, in every layer
            that the model does not limit more tightly itself.
        sink_tokens: first tokens that stay visible past the window (attention sinks, arXiv:2309.17453).
        sink_rule: `absolute` keeps the sinks at their true distance; `in_cache` counts distances inside the cache, as
            StreamingLLM does, so that generation may go on past the model's context.
        global_tokens: positions that every later query sees past the window, as runs `(first, end)` with the end
            outside (the static global tokens of arXiv:2004.05150; queries at these positions see no more than others).
        prefix_caching: whether finished blocks are kept for later requests that begin with the same tokens.
        cache_dir: a folder in which full blocks are kept on disk too, for when memory is short and for later processes.
        cache_size: most bytes that the folder takes, or a text such as `2GiB`; at least 1 MiB. None: what was last said
            of that folder, and of a new one 2 GiB.
    """

    block_size: int = 32
    kv_memory: int | str | None = None
    kv_dtype: str = "exact"
    window: int | None = None
    sink_tokens: int = 0
    sink_rule: SinkRule = "absolute"
    global_tokens: Spans = ()
    prefix_caching: bool = True
    cache_dir: str | PathLike[str] | None = None
    cache_size: int | str | None = None

    def __post_init__(self) -> None:
        _check_whole("block_size", self.block_size, 1)
        _check_whole("sink_tokens", self.sink_tokens, 0)
        if self.window is not None:
            _check_whole("window", self.window, 1)
        if not isinstance(self.prefix_caching, bool):
            raise ConfigError(f"prefix_caching is {self.prefix_caching!r}: give True or False.")
        if self.kv_memory is not None:
            parse_bytes(self.kv_memory)
        if self.cache_size is not None and parse_bytes(self.cache_size) < LEAST_CACHE_SIZE:
            raise ConfigError(f"A cache_size of {self.cache_size!r} is too small to be of use: give at least 1MiB.")
        if self.cache_dir is not None:
            if not isinstance(self.cache_dir, str | PathLike) or not str(self.cache_dir):
                raise ConfigError(f"cache_dir is {self.cache_dir!r}: give the path of a folder.")
            if not self.prefix_caching:
                raise ConfigError("A cache_dir keeps blocks for later requests: leave prefix_caching on, or it out.")
        self.codecs  # noqa: B018  # refuses unknown ones
        if self.sink_tokens and self.window is None:
            raise ConfigError("Sinks need a window: without one every token stays visible. Give window as well.")
        if self.sink_rule not in ("absolute", "in_cache"):
            raise ConfigError(f"sink_rule {self.sink_rule!r} is unknown: choose absolute or in_cache.")
        self._check_global_tokens()

    def _check_global_tokens(self) -> None:
        try:
            spans = merged(checked_spans(self.global_tokens))
        except ValueError:
            raise ConfigError(
                f"global_tokens is {self.global_tokens!r}: give runs of positions such as ((0, 4), (100, 108))."
            ) from None
        object.__setattr__(self, "global_tokens", spans)
        if spans and spans[-1][1] > MOST_TOKENS:
            raise ConfigError(f"global_tokens end at {spans[-1][1]:,}: no text has more than {MOST_TOKENS:,} tokens.")
        if spans and self.window is None:
            raise ConfigError(
                "Global tokens need a window: without one every token stays visible. Give window as well."
            )
        if self.sink_rule == "in_cache" and (apart := beyond_beginning(spans, self.sink_tokens)):
            raise ConfigError(
                f"With in_cache sinks, distances are counted inside the cache, where global tokens {_written(apart)} "
                "have no place: let them touch the sinks at the beginning, or take sink_rule absolute."
            )

    @property
    def codecs(self) -> tuple[str, str]:
        """The codecs of keys and of values."""
        try:
            return split_codecs(self.kv_dtype)
        except (ValueError, AttributeError, TypeError):
            raise ConfigError(
                f"kv_dtype {self.kv_dtype!r} is unknown: choose one of {', '.join(KV_DTYPES)}, or two of them for keys "
                "and values, such as int8/int4 or k8v4."
            ) from None


@dataclass(frozen=True)
class EngineConfig:
    """How requests share the model.

    Attributes:
        max_step_tokens: tokens computed in one model call, over all requests; longer prompts are read in chunks.
        max_running: requests that may hold cache memory at once; the rest wait in order of arrival.
        backend: attention backend: `native` (compiled kernels on the CPU), `sdpa` (torch), `reference`, or `auto`, the
            first of these that can serve the model.
    """

    max_step_tokens: int = 2048
    max_running: int = 256
    backend: str = "auto"

    def __post_init__(self) -> None:
        _check_whole("max_step_tokens", self.max_step_tokens, 1, MOST_STEP_TOKENS)
        _check_whole("max_running", self.max_running, 1)
        if self.backend not in BACKENDS:
            raise ConfigError(
                f"The attention backend {self.backend!r} is unknown: choose one of {', '.join(BACKENDS)}."
            )
