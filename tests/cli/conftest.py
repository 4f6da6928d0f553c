import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tiny_model import write_checkpoint
from typer.testing import CliRunner

from kvine.cli.app import app


@dataclass(frozen=True)
class Ended:
    """How a command has ended."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        assert self.code == 0, self.err
        assert self.out.count("\n") == 1, "one object on one line, and nothing else"
        return json.loads(self.out, parse_constant=lambda text: pytest.fail(f"{text} is no JSON"))


Kvine = Callable[..., Ended]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def kvine() -> Kvine:
    """Runs a command in this process."""

    def run(*arguments: object, stdin: str | bytes = "") -> Ended:
        result = CliRunner().invoke(app, list(map(str, arguments)), input=stdin)
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception  # a bug, not a user's mistake
        return Ended(result.exit_code, result.stdout, result.stderr)

    return run


@pytest.fixture
def generate(kvine: Kvine, tiny: Path) -> Kvine:
    return lambda *arguments, **more: kvine("generate", "-m", tiny, "--threads", 1, *arguments, **more)


@pytest.fixture
def chat(kvine: Kvine, tiny: Path) -> Kvine:
    """Has a conversation, one line of stdin a turn."""

    def run(*lines: str, options: tuple[object, ...] = ()) -> Ended:
        typed = "".join(f"{line}\n" for line in lines)
        return kvine("chat", "-m", tiny, "--threads", 1, "--max-tokens", 6, "--ignore-eos", *options, stdin=typed)

    return run
