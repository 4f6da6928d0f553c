"""Fixtures for all tests."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def two_threads() -> None:
    """Tests share a small machine."""
    torch.set_num_threads(2)


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
