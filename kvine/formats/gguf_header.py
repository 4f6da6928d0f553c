"""The header of a GGUF file (v2 and v3, little-endian): metadata, vocabulary, and what tensors there are. No torch.

It is parsed here because a reader must not trust it: every count, length, type and offset is held against the file's
size before it is used. Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import math
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from kvine.errors import ModelLoadError
from kvine.formats.tensor import TensorInfo

_MAX_DIMS = 4  # ggml's GGML_MAX_DIMS
_MIN_KEY_VALUE_BYTES = 8 + 1 + 4 + 1  # key length, one byte of key, value type, one byte of value
_MIN_TENSOR_BYTES = 8 + 1 + 4 + 8 + 4 + 8  # name length, one byte of name, dims, one dim, type, offset
_BOOL, _STRING, _ARRAY = 7, 8, 9
_NUMBERS: Mapping[int, np.dtype[Any]] = {  # value type id -> little-endian numpy type
    0: np.dtype("u1"),
    1: np.dtype("i1"),
    2: np.dtype("<u2"),
    3: np.dtype("<i2"),
    4: np.dtype("<u4"),
    5: np.dtype("<i4"),
    6: np.dtype("<f4"),
    _BOOL: np.dtype("?"),
    10: np.dtype("<u8"),
    11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_strings(value: Any) -> bool:
    return isinstance(value, list)


def _is_array_of(*dtypes: str) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, np.ndarray) and value.dtype in [np.dtype(d) for d in dtypes]


# Keys whose stored type every reader relies on; a narrower array there is how crafted files get read out of bounds.
_REQUIRED_TYPES: Mapping[str, tuple[str, Callable[[Any], bool]]] = {
    "general.architecture": ("a string", lambda value: isinstance(value, str)),
    "general.alignment": ("an integer", _is_integer),
    "split.count": ("an integer", _is_integer),
    "tokenizer.ggml.model": ("a string", lambda value: isinstance(value, str)),
    "tokenizer.ggml.tokens": ("an array of strings", _is_strings),
    "tokenizer.ggml.merges": ("an array of strings", _is_strings),
    "tokenizer.ggml.scores": ("an array of 32-bit floats", _is_array_of("<f4")),
    "tokenizer.ggml.token_type": ("an array of 32-bit integers", _is_array_of("<i4", "<u4")),
}


class _Cursor:
    """Reads a header from front to back; never past the file's end."""

    def __init__(self, path: Path, data: memoryview) -> None:
        self.path = path
        self.data = data
        self.position = 0

    @property
    def left(self) -> int:
        return len(self.data) - self.position

    def fail(self, what: str) -> NoReturn:
        raise ModelLoadError(f"{self.path}: {what}. The file is damaged or incomplete: fetch it again.")

    def take(self, nbytes: int, what: str) -> memoryview:
        if nbytes > self.left:
            self.fail(f"{what} needs {nbytes} bytes at byte {self.position}, but the file has {len(self.data)}")
        self.position += nbytes
        return self.data[self.position - nbytes : self.position]

    def u32(self, what: str) -> int:
        return int.from_bytes(self.take(4, what), "little")

    def u64(self, what: str) -> int:
        return int.from_bytes(self.take(8, what), "little")

    def count(self, what: str, min_bytes_each: int) -> int:
        """A count of things of which each takes at least so many bytes: refused when the file cannot hold them."""
        count = self.u64(what)
        if count * min_bytes_each > self.left:
            self.fail(f"{what} is {count}, more than the file can hold")
        return count

    def string(self, what: str) -> str:
        raw = self.take(self.u64(f"the length of {what}"), what)
        try:
            return str(raw, "utf-8")
        except UnicodeDecodeError:
            self.fail(f"{what} is not valid UTF-8")

    def strings(self, count: int, what: str) -> list[str]:
        # One call for each of 262,144 tokens would take most of the time to open the file: a flat loop instead.
        data, position, size = self.data, self.position, len(self.data)
        length_at = struct.Struct("<Q").unpack_from
        items: list[str] = []
        try:
            for _ in range(count):
                (length,) = length_at(data, position)
                end = position + 8 + length
                if end > size:
                    self.fail(f"{what}: string {len(items)} of {count} runs past the end of the file")
                items.append(str(data[position + 8 : end], "utf-8"))
                position = end
        except struct.error:
            self.fail(f"{what}: the file ends within string {len(items)} of {count}")
        except UnicodeDecodeError:
            self.fail(f"{what}: string {len(items)} is not valid UTF-8")
        self.position = position
        return items

    def value(self, what: str) -> Any:
        kind = self.u32(f"the type of {what}")
        if kind == _STRING:
            return self.string(what)
        if kind == _ARRAY:
            return self._array(what)
        return self._numbers(kind, 1, what)[0].item()

    def _array(self, what: str) -> Any:
        kind = self.u32(f"the element type of {what}")
        if kind == _STRING:
            return self.strings(self.count(f"the length of {what}", 8), what)
        if kind == _ARRAY:
            self.fail(f"{what} is an array of arrays, which no known key is")
        width = _NUMBERS[kind].itemsize if kind in _NUMBERS else 1
        return self._numbers(kind, self.count(f"the length of {what}", width), what)

    def _numbers(self, kind: int, count: int, what: str) -> np.ndarray[Any, Any]:
        if kind not in _NUMBERS:
            self.fail(f"{what} has the unknown value type {kind}")
        raw = self.take(count * _NUMBERS[kind].itemsize, what)
        if kind == _BOOL and count and int(np.frombuffer(raw, np.uint8).max()) > 1:
            self.fail(f"{what} holds a boolean that is neither 0 nor 1")
        return np.frombuffer(raw, _NUMBERS[kind]).copy()


@dataclass(frozen=True)
class GGUFHeader:
    """A validated header.

    Attributes:
        metadata: keys to bool, int, float, str, list[str] (string arrays) or a one-dimensional numpy array (number
            arrays, in their stored type).
        tensors: names to `TensorInfo`, in the file's order.
        nbytes: what the header takes.
    """

    metadata: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]
    nbytes: int


def read_header(path: Path) -> GGUFHeader:
    """The header alone: of the weights no byte is read. Raises ModelLoadError as `parse_header` does."""
    check_is_file(path)
    try:
        return parse_header(path, np.memmap(path, np.uint8, mode="r").data)
    except OSError as error:
        raise ModelLoadError(f"{path} cannot be opened: {error}.") from error


def check_is_file(path: Path) -> None:
    """Raises ModelLoadError for a folder, and for an empty file, which cannot be mapped."""
    if path.exists() and not path.is_file():
        raise ModelLoadError(f"{path} is not a file. Name the .gguf file itself.")
    if path.exists() and path.stat().st_size == 0:
        raise ModelLoadError(f"{path} is empty. The file is damaged or incomplete: fetch it again.")


def parse_header(path: Path, data: memoryview) -> GGUFHeader:
    """The header of the file at `path`, whose bytes are `data`.

    Raises ModelLoadError, naming the file and the key or tensor, if anything in it contradicts the format, the file's
    size or itself.
    """
    cursor = _Cursor(path, data)
    _check_version(cursor)
    num_tensors = cursor.count("the number of tensors", _MIN_TENSOR_BYTES)
    num_keys = cursor.count("the number of metadata keys", _MIN_KEY_VALUE_BYTES)
    metadata = _read_metadata(cursor, num_keys)
    tensors = _read_tensors(cursor, num_tensors, _alignment(cursor, metadata))
    return GGUFHeader(MappingProxyType(metadata), MappingProxyType(tensors), cursor.position)


def _check_version(cursor: _Cursor) -> None:
    if bytes(cursor.take(4, "the magic number")) != b"GGUF":
        raise ModelLoadError(f"{cursor.path} is not a GGUF file: it does not begin with the letters GGUF.")
    version = cursor.u32("the format's version")
    if version & 0xFFFF == 0 and version:
        raise ModelLoadError(
            f"{cursor.path} is a big-endian GGUF file, which Kvine does not read. Convert it to little-endian "
            "(gguf-convert-endian of the gguf package)."
        )
    if version not in (2, 3):
        raise ModelLoadError(
            f"{cursor.path} is a GGUF file of version {version}; Kvine reads 2 and 3. Convert the model again with a "
            "current llama.cpp."
        )


def _read_metadata(cursor: _Cursor, num_keys: int) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    for index in range(num_keys):
        key = cursor.string(f"metadata key {index}")
        if not key:
            cursor.fail(f"metadata key {index} is empty")
        if key in metadata:
            cursor.fail(f"metadata key {key!r} is given twice")
        value = cursor.value(f"metadata key {key!r}")
        expected, holds = _REQUIRED_TYPES.get(key, ("", None))
        if holds is not None and not holds(value):
            cursor.fail(f"metadata key {key!r} is not {expected}")
        metadata[key] = value
    if metadata.get("split.count", 0) > 1:
        raise ModelLoadError(
            f"{cursor.path} is one part of a model split into {metadata['split.count']} files. Merge them first: "
            "llama-gguf-split --merge."
        )
    return metadata


def _alignment(cursor: _Cursor, metadata: Mapping[str, Any]) -> int:
    alignment: int = metadata.get("general.alignment", 32)
    # The format asks for a multiple of 8, ggml for a power of two: both, so that no tensor lies askew in memory.
    if alignment < 8 or alignment & (alignment - 1):
        cursor.fail(f"general.alignment is {alignment}, not a power of two from 8 up")
    return alignment


def _read_tensors(cursor: _Cursor, num_tensors: int, alignment: int) -> dict[str, TensorInfo]:
    """The tensors' descriptions, each held against the file's size and ggml's rule of packing.

    ggml writes tensors in the order of their descriptions, each at the next aligned byte, and nothing after the last:
    one rule that no overlapping, descending, unaligned or surplus data passes.
    """
    described = [_read_tensor(cursor, index) for index in range(num_tensors)]
    start = _align(cursor.position, alignment)
    end = start
    tensors: dict[str, TensorInfo] = {}
    for name, shape, type_name, nbytes, offset in described:
        where = _align(end, alignment)
        if name in tensors:
            cursor.fail(f"tensor {name} is given twice")
        if start + offset != where:
            cursor.fail(f"tensor {name} is said to start at byte {start + offset}, but its place is byte {where}")
        end = where + nbytes
        if end > len(cursor.data):
            cursor.fail(f"tensor {name} ends at byte {end}, but the file has {len(cursor.data)}")
        tensors[name] = TensorInfo(name, shape, type_name, where, nbytes, cursor.path)
    if len(cursor.data) > _align(end, alignment):
        cursor.fail(f"{len(cursor.data) - end} bytes follow the last tensor, {next(reversed(tensors), 'of none')}")
    return tensors


def _read_tensor(cursor: _Cursor, index: int) -> tuple[str, tuple[int, ...], str, int, int]:
    """One description: name, shape, type, bytes, offset into the data."""
    name = cursor.string(f"the name of tensor {index}")
    if not name:
        cursor.fail(f"tensor {index} has no name")
    num_dims = cursor.u32(f"the number of dimensions of tensor {name}")
    if not 1 <= num_dims <= _MAX_DIMS:
        cursor.fail(f"tensor {name} has {num_dims} dimensions; 1 to {_MAX_DIMS} are allowed")
    dims = [cursor.u64(f"the shape of tensor {name}") for _ in range(num_dims)]
    if 0 in dims:
        cursor.fail(f"tensor {name} has a dimension of 0")
    type_id = cursor.u32(f"the type of tensor {name}")
    offset = cursor.u64(f"the offset of tensor {name}")
    try:
        kind = GGMLQuantizationType(type_id)
    except ValueError:
        cursor.fail(f"tensor {name} has the unknown type {type_id}")
    block, block_bytes = GGML_QUANT_SIZES[kind]
    if dims[0] % block:
        cursor.fail(f"tensor {name}: rows of {dims[0]} are no multiple of {kind.name}'s block of {block}")
    nbytes = math.prod(dims) // block * block_bytes  # Python's integers: nothing wraps
    return name, tuple(reversed(dims)), str(kind.name), nbytes, offset


def _align(position: int, alignment: int) -> int:
    return -(-position // alignment) * alignment
