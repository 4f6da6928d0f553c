"""Quality: what a lossy cache costs on one's own model and text, beside the exact cache on the same tokens.

`evaluate` scores policies, `find_needles` hides facts, `compare_streaming` reads past the context. The names below load
their modules on first use, so that policies are read and refused without waiting for torch.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvine.evidence.quality.needle import Cell as Cell
    from kvine.evidence.quality.needle import Fact as Fact
    from kvine.evidence.quality.needle import find_needles as find_needles
    from kvine.evidence.quality.policies import Policy as Policy
    from kvine.evidence.quality.policies import Refused as Refused
    from kvine.evidence.quality.policies import parse_policies as parse_policies
    from kvine.evidence.quality.policies import sweep_policies as sweep_policies
    from kvine.evidence.quality.scoring import Evaluation as Evaluation
    from kvine.evidence.quality.scoring import Scored as Scored
    from kvine.evidence.quality.scoring import evaluate as evaluate
    from kvine.evidence.quality.streaming import Stream as Stream
    from kvine.evidence.quality.streaming import Streaming as Streaming
    from kvine.evidence.quality.streaming import compare_streaming as compare_streaming

_HOMES = {
    "Evaluation": "scoring",
    "Scored": "scoring",
    "evaluate": "scoring",
    "Cell": "needle",
    "Fact": "needle",
    "find_needles": "needle",
    "Policy": "policies",
    "Refused": "policies",
    "parse_policies": "policies",
    "sweep_policies": "policies",
    "Stream": "streaming",
    "Streaming": "streaming",
    "compare_streaming": "streaming",
}
__all__ = [
    "Cell",
    "Evaluation",
    "Fact",
    "Policy",
    "Refused",
    "Scored",
    "Stream",
    "Streaming",
    "compare_streaming",
    "evaluate",
    "find_needles",
    "parse_policies",
    "sweep_policies",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
