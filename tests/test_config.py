"""Options are checked where they are made."""

from typing import Any

import pytest

from kvine.config import CacheConfig, EngineConfig, parse_bytes
from kvine.errors import ConfigError


@pytest.mark.parametrize(
    "options",
    [
        {"block_size": 0},
        {"block_size": "4"},
        {"block_size": 1.5},
        {"block_size": None},
        {"window": 0},
        {"window": 1.5},
        {"window": float("nan")},
        {"window": 2**63},
        {"window": True},
        {"sink_tokens": -1, "window": 8},
        {"sink_tokens": 2**64, "window": 8},
        {"sink_tokens": 4},
        {"sink_rule": "cached", "window": 8},
        {"kv_dtype": "int3"},
        {"kv_memory": "much"},
        {"kv_memory": 10**400},
        {"kv_memory": "9" * 400},
        {"kv_memory": 0},
        {"prefix_caching": "no"},
    ],
)
def test_a_cache_that_cannot_be_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        CacheConfig(**options)


@pytest.mark.parametrize(
    "options", [{"max_step_tokens": 0}, {"max_step_tokens": "3"}, {"max_running": 1.5}, {"backend": "fast"}]
)
def test_an_engine_that_cannot_be_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        EngineConfig(**options)


def test_sizes_in_bytes() -> None:
    assert parse_bytes(536_870_912) == parse_bytes("512MiB") == parse_bytes(" 0.5 GiB ") == 2**29
    assert parse_bytes("2GB") == 2 * 10**9 and parse_bytes("7") == 7
