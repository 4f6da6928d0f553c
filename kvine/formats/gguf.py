"""GGUF v2 and v3, little-endian: the single-file checkpoints of llama.cpp, metadata, vocabulary and weights in one.

The header is parsed and checked in `gguf_header`; here its tensors are read. Format:
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from kvine.errors import ModelLoadError
from kvine.formats.gguf_header import check_is_file, parse_header
from kvine.formats.quants import BLOCK_TYPES, decode
from kvine.formats.tensor import TensorInfo

__all__ = ["GGUFFile", "TensorInfo"]

_PLAIN_TYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class GGUFFile:
    """A memory-mapped GGUF file whose whole header has been validated.

    `metadata` maps keys to bool, int, float, str, list[str] (string arrays) or a one-dimensional numpy array (number
    arrays, in their stored type). `tensors` maps names to `TensorInfo`, in the file's order.

    Raises ModelLoadError, naming the file and the key or tensor, if anything in the header contradicts the format, the
    file's size or itself.
    """

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]

    def __init__(self, path: Path) -> None:
        self.path = path
        self._map = _map_file(path)
        header = parse_header(path, memoryview(self._map.numpy().data))
        self.metadata = header.metadata
        self.tensors = header.tensors
        self._header_bytes = header.nbytes

    def read(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """The tensor in its `TensorInfo.shape`, decoded to `dtype` (any floating dtype).

        Shares the mapped file's pages if the stored type is `dtype` itself; writing to it never changes the file.
        Raises ModelLoadError for a stored type that Kvine cannot decode, KeyError for a name not in `tensors`.
        """
        info = self.tensors[name]
        raw = self._map[info.offset : info.offset + info.nbytes]
        if info.type in _PLAIN_TYPES:
            return raw.view(_PLAIN_TYPES[info.type]).view(info.shape).to(dtype)
        if info.type not in BLOCK_TYPES:
            readable = ", ".join([*_PLAIN_TYPES, *sorted(BLOCK_TYPES)])
            raise ModelLoadError(
                f"{self.path}: tensor {name} is stored as {info.type}, which Kvine cannot read. "
                f"Take a file of this model in one of: {readable}."
            )
        block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[info.type]]
        out = torch.empty(info.shape, dtype=dtype)
        decode(raw.view(-1, block_bytes), info.type, out.view(-1, block))
        return out

    def blocks(self, name: str) -> torch.Tensor:
        """A matrix's blocks as they are stored: uint8 [rows, bytes of a row], in the mapped file's pages."""
        info = self.tensors[name]
        return self._map[info.offset : info.offset + info.nbytes].view(info.shape[0], -1)

    def header_digest(self) -> bytes:
        """SHA-256 of the header: metadata, vocabulary, and the tensors' names, shapes, types and offsets."""
        return hashlib.sha256(self._map[: self._header_bytes].numpy().data).digest()


def _map_file(path: Path) -> torch.Tensor:
    try:
        check_is_file(path)
        # Private: what a caller writes into a tensor stays in this process and never reaches the file.
        return torch.from_file(str(path), shared=False, size=path.stat().st_size, dtype=torch.uint8)
    except (OSError, RuntimeError) as error:
        raise ModelLoadError(f"{path} cannot be opened: {error}.") from error
