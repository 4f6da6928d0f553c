"""What both checkpoint formats say of a tensor before it is read."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class TensorInfo:
    """One stored tensor. `shape` is in torch order (rows first), `type` is the format's own name of the stored type
    ("F32", "BF16", "Q4_1", ...), `offset` and `nbytes` are in bytes, the offset from the start of `path`.
    """

    name: str
    shape: tuple[int, ...]
    type: str
    offset: int
    nbytes: int
    path: Path
