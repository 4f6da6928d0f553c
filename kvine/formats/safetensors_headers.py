"""The headers of safetensors files: what tensors a checkpoint has, whole or sharded by an index. No torch.

All of them are checked before anything is read, because a shard cut short maps to zeros or leftovers and a model of
gibberish. Format: https://github.com/huggingface/safetensors#format
"""

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from kvine.errors import ModelLoadError
from kvine.formats.tensor import TensorInfo

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
BITS = {
    **dict.fromkeys(["BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"], 8),
    **dict.fromkeys(["I16", "U16", "F16", "BF16"], 16),
    **dict.fromkeys(["I32", "U32", "F32"], 32),
    **dict.fromkeys(["I64", "U64", "F64", "C64"], 64),
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
}

_MAX_HEADER_BYTES = 100_000_000  # the safetensors library's own limit
_MAX_DIMS = 8


@dataclass(frozen=True)
class SafetensorsHeaders:
    """The validated headers of a checkpoint.

    Attributes:
        files: its files, in the order of their names.
        tensors: names to `TensorInfo`.
        digest: SHA-256 of the headers, shard by shard.
    """

    files: tuple[Path, ...]
    tensors: Mapping[str, TensorInfo]
    digest: bytes


def read_headers(folder_or_file: Path) -> SafetensorsHeaders:
    """The headers of one file, or of a folder's: its model.safetensors, or the shards that its index names.

    Raises ModelLoadError, naming the file and the tensor, if a header contradicts the format, its file's size, another
    shard or the index.
    """
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
                raise damaged(path, f"tensor {info.name} is also in {tensors[info.name].path.name}")
            tensors[info.name] = info
    for name, shard in (index or {}).items():
        if name not in tensors or tensors[name].path.name != shard:
            raise damaged(folder_or_file / shard, f"it lacks tensor {name}, which {INDEX_FILE} says it holds")
    return SafetensorsHeaders(tuple(files), MappingProxyType(tensors), digest.digest())


def damaged(path: Path, what: str) -> ModelLoadError:
    """The complaint about a file that contradicts itself."""
    return ModelLoadError(f"{path}: {what}. The file is damaged or incomplete: fetch it again.")


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
        raise damaged(path, f"no weight_map can be read from it ({error})") from error
    if not isinstance(index, dict) or not index:
        raise damaged(path, "its weight_map is not a mapping of tensors to files")
    for name, shard in index.items():
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise damaged(path, f"tensor {name} is said to be in {shard!r}, which is no file's name in this folder")
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
                raise damaged(path, f"it has {size} bytes, too few for a safetensors file")
            if length > min(size - 8, _MAX_HEADER_BYTES):
                raise damaged(path, f"its header is said to take {length} bytes, but the file has {size}")
            header = file.read(length)
    except OSError as error:
        raise ModelLoadError(f"{path} cannot be read: {error.strerror}.") from error
    if len(header) != length:
        raise damaged(path, "it became shorter while it was read")
    return header


def _parse_header(path: Path, header: bytes) -> list[TensorInfo]:
    """The tensors that a header describes, in the order of their data: adjacent, from its first byte to its last."""
    try:
        entries = _parse_json(header)
    except (ValueError, RecursionError) as error:
        raise damaged(path, f"its header is not valid JSON ({error})") from error
    if not isinstance(entries, dict):
        raise damaged(path, "its header is not a JSON object")
    entries.pop("__metadata__", None)
    start = 8 + len(header)
    described = [_parse_entry(path, start, name, entry) for name, entry in entries.items()]
    tensors = sorted(described, key=lambda info: (info.offset, info.nbytes))  # an empty tensor before what starts there
    end = start
    for info in tensors:
        if info.offset != end:
            what = f"its data starts at byte {info.offset}, not at byte {end} where the tensor before it ends"
            raise damaged(path, f"tensor {info.name}: {what}")
        end += info.nbytes
    size = path.stat().st_size
    if end != size:
        last = tensors[-1].name if tensors else "none"
        raise damaged(path, f"its tensors (the last is {last}) end at byte {end}, but the file has {size}")
    return tensors


def _parse_entry(path: Path, start: int, name: str, entry: Any) -> TensorInfo:
    match entry:
        case {"dtype": str(type_name), "shape": list(shape), "data_offsets": [int(first), int(last)]}:
            pass
        case _:
            raise damaged(path, f"tensor {name} is described without a dtype, a shape and two data_offsets")
    if type_name not in BITS:
        raise damaged(path, f"tensor {name} has the unknown dtype {type_name}")
    if len(shape) > _MAX_DIMS or not all(type(dim) is int and 0 <= dim < 2**63 for dim in shape):
        raise damaged(path, f"tensor {name} has an impossible shape")
    nbytes, odd_bits = divmod(math.prod(shape) * BITS[type_name], 8)
    if odd_bits or not 0 <= first <= last or last - first != nbytes:
        raise damaged(path, f"tensor {name} takes {nbytes} bytes, but its data_offsets are {first} and {last}")
    return TensorInfo(name, tuple(shape), type_name, start + first, nbytes, path)
