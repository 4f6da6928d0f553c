"""Typed reading of a checkpoint's config: each complaint names the file and the key."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvine.config import MOST_TOKENS
from kvine.errors import ModelLoadError


@dataclass(frozen=True)
class Fields:
    """A mapping of a config file. `prefix` goes before keys in complaints only; null in the file means absent.

    Getters without a default raise ModelLoadError where the key is missing, all raise it for a wrong type.
    """

    values: Mapping[str, Any]
    file: str
    prefix: str = ""

    def error(self, key: str, complaint: str) -> ModelLoadError:
        """A ModelLoadError that names the file and the key."""
        return ModelLoadError(f"{self.file}: key {self.prefix + key!r} {complaint}.")

    def get(self, key: str) -> Any:
        """The raw value, or None."""
        return self.values.get(key)

    def nested(self, key: str) -> "Fields | None":
        """The mapping under `key`, or None."""
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise self.error(key, f"must be a mapping, not {_show(value)}")
        return Fields(value, self.file, f"{self.prefix}{key}.")

    def integer(self, key: str, default: int | None = None, *, minimum: int = 1, maximum: int = MOST_TOKENS) -> int:
        """A whole number from `minimum` to `maximum`: no size or count of a real model comes near the default."""
        value = self._present(key, default)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise self.error(key, f"must be a whole number of at least {minimum}, not {_show(value)}")
        if value > maximum:
            raise self.error(key, f"must be a whole number of at most {maximum}, not {_show(value)}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number above 0."""
        value = self._present(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= sys.float_info.max:
            raise self.error(key, f"must be a positive number, not {_show(value)}")
        return float(value)

    def optional_number(self, key: str) -> float | None:
        """A finite number above 0, or None where the key is absent."""
        return None if self.get(key) is None else self.number(key)

    def flag(self, key: str, default: bool) -> bool:
        """True or false."""
        value = self._present(key, default)
        if not isinstance(value, bool):
            raise self.error(key, f"must be true or false, not {_show(value)}")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        """A string."""
        value = self._present(key, default)
        if not isinstance(value, str):
            raise self.error(key, f"must be a string, not {_show(value)}")
        return value

    def numbers(self, key: str) -> tuple[float, ...]:
        """A list of numbers."""
        value = self._present(key, None)
        if not isinstance(value, Sequence) or isinstance(value, str):
            raise self.error(key, f"must be a list of numbers, not {_show(value)}")
        if any(isinstance(item, bool) or not isinstance(item, int | float) for item in value):
            raise self.error(key, "must be a list of numbers")
        if any(abs(item) > sys.float_info.max for item in value):
            raise self.error(key, "has a number that is too large")
        return tuple(float(item) for item in value)

    def token_ids(self, key: str) -> tuple[int, ...]:
        """One token id, a list of them, or () where the key is absent."""
        value = self.get(key)
        if value is None:
            return ()
        ids = value if isinstance(value, Sequence) and not isinstance(value, str) else [value]
        if any(isinstance(item, bool) or not isinstance(item, int) or item < 0 for item in ids):
            raise self.error(key, f"must be a token id or a list of token ids, not {_show(value)}")
        return tuple(ids)

    def _present(self, key: str, default: Any) -> Any:
        value = self.get(key)
        if value is None:
            value = default
        if value is None:
            raise self.error(key, "is missing")
        return value


def _show(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
