"""Safetensors checkpoints, one file or sharded by an index, memory-mapped.

The safetensors library reads the tensors; the headers are checked here first, all of them, because a shard cut short
maps to zeros or leftovers and a model of gibberish. Format: https://github.com/huggingface/safetensors#format
"""

import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from kvine.errors import ModelLoadError
from kvine.formats.tensor import TensorInfo

__all__ = ["SafetensorsFiles", "TensorInfo"]

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

_MAX_HEADER_BYTES = 100_000_000  # the safetensors library's own limit
_MAX_DIMS = 8
_BITS = {
    **dict.fromkeys(["BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"], 8),
    **dict.fromkeys(["I16", "U16", "F16", "BF16"], 16),
    **dict.fromkeys(["I32", "U32", "F32"], 32),
    **dict.fromkeys(["I64", "U64", "F64", "C64"], 64),
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
}
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
        index = None
        if folder_or_file.is_dir():
            files, index = _checkpoint_files(folder_or_file)
        else:
            files = [folder_or_file]
        tensors: dict[str, TensorInfo] = {}
        digest = hashlib.sha256()
        for path in files:
            header = _read_header(path)
            digest.update(len(header).to_bytes(8, "little") + header)
            for info in _parse_header(path, header):
                if info.name in tensors:
                    raise _damaged(path, f"tensor {info.name} is also in {tensors[info.name].path.name}")
                tensors[info.name] = info
        for name, shard in (index or {}).items():
            if name not in tensors or tensors[name].path.name != shard:
                raise _damaged(folder_or_file / shard, f"it lacks tensor {name}, which {INDEX_FILE} says it holds")
        self.tensors = MappingProxyType(tensors)
        self.mapped = all(info.offset * 8 % _BITS[info.type] == 0 for info in tensors.values())
        self._digest = digest.digest()
        self._open = {path: _open(path) for path in files}

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


def _damaged(path: Path, what: str) -> ModelLoadError:
    return ModelLoadError(f"{path}: {what}. The file is damaged or incomplete: fetch it again.")


def _open(path: Path) -> Any:
    try:
        return safe_open(str(path), framework="pt", device="cpu")
    except (SafetensorError, OSError, RuntimeError) as error:
        raise _damaged(path, str(error)) from error


def _checkpoint_files(folder: Path) -> tuple[list[Path], dict[str, str] | None]:
    """The files to read, and for a sharded checkpoint its index, tensor name to file name."""
    if (folder / SINGLE_FILE).is_file():
        return [folder / SINGLE_FILE], None
    path = folder / INDEX_FILE
    if not path.is_file():
        raise ModelLoadError(
            f"{folder} holds neither {SINGLE_FILE} nor {INDEX_FILE}. Save the model as safetensors, for example with "
            "transformers' save_pretrained."
        )
    try:
        index = _parse_json(path.read_bytes())["weight_map"]
    except (OSError, ValueError, RecursionError, KeyError, TypeError) as error:
        raise _damaged(path, f"no weight_map can be read from it ({error})") from error
    if not isinstance(index, dict) or not index:
        raise _damaged(path, "its weight_map is not a mapping of tensors to files")
    for name, shard in index.items():
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise _damaged(path, f"tensor {name} is said to be in {shard!r}, which is no file's name in this folder")
        if not (folder / shard).is_file():
            raise ModelLoadError(f"{folder}: the shard {shard}, which holds tensor {name}, is missing. Fetch it too.")
    return [folder / shard for shard in sorted(set(index.values()))], index


def _parse_json(text: bytes) -> Any:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        items: dict[str, Any] = {}
        for key, value in pairs:
            if key in items:
                raise ValueError(f"{key} is given twice")
            items[key] = value
        return items

    return json.loads(text, object_pairs_hook=unique)


def _read_header(path: Path) -> bytes:
    """The JSON text of a file's header, its length held against the file's size before it is read."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8:
                raise _damaged(path, f"it has {size} bytes, too few for a safetensors file")
            if length > min(size - 8, _MAX_HEADER_BYTES):
                raise _damaged(path, f"its header is said to take {length} bytes, but the file has {size}")
            header = file.read(length)
    except OSError as error:
        raise ModelLoadError(f"{path} cannot be read: {error.strerror}.") from error
    if len(header) != length:
        raise _damaged(path, "it became shorter while it was read")
    return header


def _parse_header(path: Path, header: bytes) -> list[TensorInfo]:
    """The tensors that a header describes, in the order of their data: adjacent, from its first byte to its last."""
    try:
        entries = _parse_json(header)
    except (ValueError, RecursionError) as error:
        raise _damaged(path, f"its header is not valid JSON ({error})") from error
    if not isinstance(entries, dict):
        raise _damaged(path, "its header is not a JSON object")
    entries.pop("__metadata__", None)
    start = 8 + len(header)
    described = [_parse_entry(path, start, name, entry) for name, entry in entries.items()]
    tensors = sorted(described, key=lambda info: (info.offset, info.nbytes))  # an empty tensor before what starts there
    end = start
    for info in tensors:
        if info.offset != end:
            what = f"its data starts at byte {info.offset}, not at byte {end} where the tensor before it ends"
            raise _damaged(path, f"tensor {info.name}: {what}")
        end += info.nbytes
    size = path.stat().st_size
    if end != size:
        last = tensors[-1].name if tensors else "none"
        raise _damaged(path, f"its tensors (the last is {last}) end at byte {end}, but the file has {size}")
    return tensors


def _parse_entry(path: Path, start: int, name: str, entry: Any) -> TensorInfo:
    match entry:
        case {"dtype": str(type_name), "shape": list(shape), "data_offsets": [int(first), int(last)]}:
            pass
        case _:
            raise _damaged(path, f"tensor {name} is described without a dtype, a shape and two data_offsets")
    if type_name not in _BITS:
        raise _damaged(path, f"tensor {name} has the unknown dtype {type_name}")
    if len(shape) > _MAX_DIMS or not all(type(dim) is int and 0 <= dim < 2**63 for dim in shape):
        raise _damaged(path, f"tensor {name} has an impossible shape")
    nbytes, odd_bits = divmod(math.prod(shape) * _BITS[type_name], 8)
    if odd_bits or not 0 <= first <= last or last - first != nbytes:
        raise _damaged(path, f"tensor {name} takes {nbytes} bytes, but its data_offsets are {first} and {last}")
    return TensorInfo(name, tuple(shape), type_name, start + first, nbytes, path)
