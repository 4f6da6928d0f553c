"""Safetensors checkpoints, one file or sharded by an index, memory-mapped.

The safetensors library reads the tensors; the headers are checked first, in `safetensors_headers`.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from kvine.errors import ModelLoadError
from kvine.formats.safetensors_headers import BITS, damaged, read_headers
from kvine.formats.tensor import TensorInfo

__all__ = ["SafetensorsFiles", "TensorInfo"]

# Integers and 8-bit floats are quantized weights whose scales lie elsewhere: read as numbers they would be nonsense.
_READABLE = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class SafetensorsFiles:
    """The tensors of one file, or of a folder: its model.safetensors, or the shards that its index names.

    `tensors` maps names to `TensorInfo`. `mapped` is true if `read` shares the file's pages for every tensor that is
    asked in its stored dtype; false only if a file's data lies askew, as no usual writer leaves it.

    Raises ModelLoadError, naming the file and the tensor, if a header contradicts the format, its file's size, another
    shard or the index; no tensor has been read or mapped by then.
    """

    tensors: Mapping[str, TensorInfo]
    mapped: bool

    def __init__(self, folder_or_file: Path) -> None:
        headers = read_headers(folder_or_file)
        self.tensors = headers.tensors
        self.mapped = all(info.offset * 8 % BITS[info.type] == 0 for info in self.tensors.values())
        self._digest = headers.digest
        self._open = {path: _open(path) for path in headers.files}

    def read(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """The tensor in its `TensorInfo.shape`, as `dtype` (any floating dtype).

        Shares the mapped file's pages if the stored dtype is `dtype` itself; writing to it never changes the file.
        Raises ModelLoadError for a stored type that Kvine cannot use, KeyError for a name not in `tensors`.
        """
        info = self.tensors[name]
        if info.type not in _READABLE:
            raise ModelLoadError(
                f"{info.path}: tensor {name} is stored as {info.type}, which Kvine cannot read. "
                f"Take a checkpoint of this model in one of: {', '.join(_READABLE)}."
            )
        tensor: torch.Tensor = self._open[info.path].get_tensor(name)
        if tensor.data_ptr() % tensor.element_size():
            tensor = tensor.clone()
        return tensor.to(dtype)

    def header_digest(self) -> bytes:
        """SHA-256 of the headers: the tensors' names, shapes, types and offsets, shard by shard."""
        return self._digest


def _open(path: Path) -> Any:
    try:
        return safe_open(str(path), framework="pt", device="cpu")
    except (SafetensorError, OSError, RuntimeError) as error:
        raise damaged(path, str(error)) from error
