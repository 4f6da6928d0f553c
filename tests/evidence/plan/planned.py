"""What the tests of planning share: public configs, and a plan that measures nothing."""

from pathlib import Path
from typing import Any

from kvine.evidence.plan import Figures, Plan, Subject, plan

CONFIGS = Path(__file__).parent / "configs"
GIB = 2**30


def planned(model: str | Path | Figures | Subject, **options: Any) -> Plan:
    """A plan for the CPU, of a machine of 1 TB that reads 100 GB/s unless told otherwise."""
    options = {"memory": 10**12, "bandwidth": 10**11, "device": "cpu", **options}
    return plan(str(model) if isinstance(model, Path) else model, **options)


def public(name: str, **options: Any) -> Plan:
    """A plan of one of the public configs beside this file."""
    return planned(CONFIGS / f"{name}.json", **options)
