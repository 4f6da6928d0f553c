"""Fixtures for all tests."""

import os

# Tiny models are quickest on one thread: with two, torch spends its time waiting at barriers, above all beside another
# test run. Child processes inherit this; it must be set before torch is imported.
os.environ["OMP_NUM_THREADS"] = "1"

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def tiny() -> Callable[..., tuple[Any, Path]]:
    """`tiny_model`, each checkpoint made once: do not change the model, nor its files."""
    from checkpoints import tiny_model  # imports transformers, which takes seconds

    made: dict[str, tuple[Any, Path]] = {}

    def make(arch: str, **overrides: Any) -> tuple[Any, Path]:
        key = repr((arch, sorted(overrides.items())))
        if key not in made:
            made[key] = tiny_model(arch, **overrides)
        return made[key]

    return make
