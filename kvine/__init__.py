"""Kvine: an inference engine for decoder language models, built around its KV cache.

The names below load their modules on first use, so that `import kvine` and `kvine --help` do not wait for torch.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvine.config import CacheConfig as CacheConfig
    from kvine.explain.explanation import Explanation as Explanation
    from kvine.llm import LLM as LLM
    from kvine.sampling.params import SamplingParams as SamplingParams

__version__ = "0.1.0"
__all__ = ["LLM", "CacheConfig", "Explanation", "SamplingParams"]

_HOMES = {
    "LLM": "kvine.llm",
    "CacheConfig": "kvine.config",
    "Explanation": "kvine.explain.explanation",
    "SamplingParams": "kvine.sampling.params",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'kvine' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
