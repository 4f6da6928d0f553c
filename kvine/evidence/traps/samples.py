"""Recorded samples: what SmolLM2 writes with each fault, beside what it writes without."""

import json
from dataclasses import dataclass
from importlib import resources


@dataclass(frozen=True)
class Sample:
    """One fault's symptom.

    Attributes:
        model: what generated it.
        what: how, in a few words.
        prompt: that it read.
        healthy: what the engine writes without the fault.
        broken: with it.
    """

    model: str
    what: str
    prompt: str
    healthy: str
    broken: str


def load_samples() -> dict[str, Sample]:
    """The samples by name of trap; `python -m kvine.evidence.traps.record_samples` records them."""
    text = resources.files("kvine.evidence.traps").joinpath("samples.json").read_text(encoding="utf-8")
    return {name: Sample(**values) for name, values in json.loads(text).items()}
