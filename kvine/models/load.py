"""From a checkpoint on disk to a `LoadedModel`: config, checks of every tensor, then weights. All or nothing."""

import dataclasses
import hashlib
import json
import os
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from kvine import kernels
from kvine.errors import ModelLoadError
from kvine.formats.gguf import GGUFFile
from kvine.formats.safetensors import SafetensorsFiles
from kvine.formats.tensor import TensorInfo
from kvine.hub import ModelSource
from kvine.kernels.packed import PackedWeight, allocate, bytes_of
from kvine.models.build import build_decoder
from kvine.models.config import ModelConfig
from kvine.models.config_gguf import config_from_gguf
from kvine.models.config_hf import config_from_hf
from kvine.models.decoder import Decoder
from kvine.models.fields import Fields
from kvine.models.names import check_tensors, gguf_names, hf_names, is_norm
from kvine.models.packing import choose_packings
from kvine.models.placement import STORED_DTYPES, choose_device, choose_dtype, product_note

_ROPE_DIVISORS = "rope_freqs.weight"
# Decoding block formats is numpy's work, which lets two threads run at once; more than a few only compete for memory.
_READERS = min(4, os.cpu_count() or 1)


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to run, read from `path`, a GGUF file or a safetensors folder.

    `dtype` is what activations are in, and weights but for norms (fp32) and packed ones; `dtype_reason` why, and what
    became of weights that the checkpoint has packed, in a sentence.
    `unused_tensors` are stored but have no use in the decoder: an image tower, a stored copy of a tied head, RoPE
    buffers. `weight_bytes` is what all tensors take, `mapped_bytes` the part of it that shares the checkpoint's pages.
    `packings` names GGUF's type of each weight that is packed, by role; the others are exact. `rounds_weights` tells
    whether packing has changed any, which the checkpoint has in more bits.

    `fingerprint` is SHA-256 over the config, the files' headers (names, shapes, types, offsets of all tensors, and
    for GGUF all metadata) and the first, middle and last 256 stored bytes of each tensor: it tells fine-tunes apart
    without reading the weights. It includes which weights are packed to what, but not the compute dtype.
    """

    path: Path
    config: ModelConfig
    decoder: Decoder
    dtype: torch.dtype
    device: torch.device
    dtype_reason: str
    unused_tensors: tuple[str, ...]
    fingerprint: bytes
    weight_bytes: int
    mapped_bytes: int
    packings: Mapping[str, str]
    rounds_weights: bool

    @property
    def step_bytes(self) -> int:
        """Weights that a call reads: of an embedding that is not the head too it reads a few rows only."""
        return self.weight_bytes - (0 if self.config.tie_embeddings else self.decoder.embedding.weight.nbytes)


class TensorFiles(Protocol):
    """What both formats offer."""

    @property
    def tensors(self) -> Mapping[str, TensorInfo]: ...  # noqa: D102
    def read(self, name: str, dtype: torch.dtype) -> Tensor: ...  # noqa: D102
    def header_digest(self) -> bytes: ...  # noqa: D102


@dataclass(frozen=True)
class _Checkpoint:
    """An opened checkpoint whose tensors have been checked against its config and not yet read."""

    config: ModelConfig
    files: TensorFiles
    names: Mapping[str, str]  # role -> stored name
    unused: tuple[str, ...]
    is_mapped: bool
    has_interleaved_heads: bool  # GGUF's llama: rows of q and k lie as llama.cpp rotates them

    def stored(self, role: str) -> TensorInfo:
        return self.files.tensors[self.names[role]]


def load_model(
    source: ModelSource,
    *,
    dtype: str = "auto",
    device: str = "auto",
    weights: str = "auto",
    file: GGUFFile | None = None,
) -> LoadedModel:
    """Load a safetensors folder or a GGUF file.

    `dtype` is fp32, bf16, fp16 or auto, `device` cpu, cuda, mps or auto (cuda where there is one, otherwise cpu); see
    `choose_dtype` for what auto takes. On a CPU, safetensors weights stored in the chosen dtype are memory-mapped
    and not copied. `weights` is exact, decoded to that dtype; packed, as a GGUF file has them; auto, which is packed
    where compiled kernels multiply that and the dtype is not fp32; or q8 or q4, which round the rest to 8 or 4 bits:
    see `choose_packings`. `file` is the source's where that is open already: a GGUF header takes long to read.

    Raises ModelLoadError, naming file and tensor or key, for a checkpoint that is damaged, incomplete, contradictory or
    of an unknown kind, and ConfigError for a device, a dtype or a way to keep weights that this machine does not have.
    """
    place = choose_device(device)
    checkpoint = (
        _open_gguf(file or GGUFFile(source.path)) if source.format == "gguf" else _open_safetensors(source.path)
    )
    stored = {role: checkpoint.stored(role) for role in checkpoint.names}
    stored_bytes: Counter[str] = Counter()
    for info in stored.values():
        stored_bytes[info.type] += info.nbytes
    compute, reason = choose_dtype(dtype, stored_bytes.most_common(1)[0][0], place)
    decided = choose_packings(
        stored,
        weights,
        is_fp32=compute is torch.float32,
        device=place.type,
        has_kernels=place.type == "cpu" and kernels.chosen() is not None,
    )
    packings = decided.types
    note = product_note(compute, place, any(_multiplies_exact(checkpoint, role, packings) for role in stored))
    memory = _packed_memory(checkpoint, packings)

    def read(role: str) -> Tensor | PackedWeight:
        if role in packings:
            return _pack(checkpoint, role, packings[role], memory[role])
        return _read(checkpoint, role, compute, place)

    with ThreadPoolExecutor(_READERS) as pool:
        loaded = dict(zip(checkpoint.names, pool.map(read, checkpoint.names), strict=True))
    mapped = [role for role in loaded if role not in packings and _is_mapped(checkpoint, role, compute, place)]
    return LoadedModel(
        path=source.path,
        config=checkpoint.config,
        decoder=build_decoder(checkpoint.config, loaded, compute, place),
        dtype=compute,
        device=place,
        dtype_reason="; ".join(filter(None, (reason, note, decided.reason))),
        unused_tensors=checkpoint.unused,
        fingerprint=_fingerprint(checkpoint, packings),
        weight_bytes=sum(weight.nbytes for weight in loaded.values()),
        mapped_bytes=sum(loaded[role].nbytes for role in mapped),
        packings=packings,
        rounds_weights=any(stored[role].type != packing for role, packing in packings.items()),
    )


def _open_safetensors(folder: Path) -> _Checkpoint:
    path = folder / "config.json"
    values = _read_json(path)
    generation_path = folder / "generation_config.json"
    config = config_from_hf(values, str(path))
    if generation_path.is_file():  # chat models add the end of a turn here
        extra = Fields(_read_json(generation_path), str(generation_path)).token_ids("eos_token_id")
        eos = tuple(dict.fromkeys((*config.eos_token_ids, *extra)))
        config = dataclasses.replace(config, eos_token_ids=eos).check(str(generation_path))
    files = SafetensorsFiles(folder)
    names = hf_names(config, files.tensors)
    unused = check_tensors(config, names, _shapes(files), str(folder))
    return _Checkpoint(config, files, names, unused, files.mapped, has_interleaved_heads=False)


def _open_gguf(files: GGUFFile) -> _Checkpoint:
    path, shapes = files.path, _shapes(files)
    divisors: tuple[float, ...] = ()
    if _ROPE_DIVISORS in shapes:
        if len(shapes[_ROPE_DIVISORS]) != 1:
            raise ModelLoadError(
                f"{path}: tensor {_ROPE_DIVISORS} has {len(shapes[_ROPE_DIVISORS])} dimensions, not 1."
            )
        divisors = tuple(files.read(_ROPE_DIVISORS, torch.float64).tolist())
    config = config_from_gguf(files.metadata, shapes, str(path), rope_divisors=divisors)
    names = gguf_names(config)
    unused = check_tensors(config, names, shapes, str(path))
    return _Checkpoint(
        config,
        files,
        names,
        unused=tuple(name for name in unused if name != _ROPE_DIVISORS),
        is_mapped=True,
        has_interleaved_heads=files.metadata["general.architecture"] == "llama",
    )


def _shapes(files: TensorFiles) -> dict[str, tuple[int, ...]]:
    return {name: info.shape for name, info in files.tensors.items()}


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ModelLoadError(f"{path} is missing. Fetch the whole checkpoint, not only its weights.") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ModelLoadError(f"{path} is not readable JSON: {error}.") from error
    if not isinstance(values, dict):
        raise ModelLoadError(f"{path} is not a JSON object.")
    return values


def _is_interleaved(checkpoint: _Checkpoint, role: str) -> bool:
    return checkpoint.has_interleaved_heads and role.split(".")[-2] in ("q", "k")


def _is_mapped(checkpoint: _Checkpoint, role: str, dtype: torch.dtype, device: torch.device) -> bool:
    """Does `_read` return the file's own pages?"""
    changed = _is_interleaved(checkpoint, role) or (is_norm(role) and checkpoint.config.norm_offset != 0)
    stored = STORED_DTYPES.get(checkpoint.stored(role).type)
    wanted = torch.float32 if is_norm(role) else dtype
    return checkpoint.is_mapped and device.type == "cpu" and stored == wanted and not changed


def _read(checkpoint: _Checkpoint, role: str, dtype: torch.dtype, device: torch.device) -> Tensor:
    config = checkpoint.config
    weight = checkpoint.files.read(checkpoint.names[role], torch.float32 if is_norm(role) else dtype)
    if is_norm(role) and config.norm_offset:
        weight = weight + config.norm_offset
    if _is_interleaved(checkpoint, role):
        is_q = role.split(".")[-2] == "q"
        weight = _split_halves(weight, config.num_heads if is_q else config.num_kv_heads)
    return weight.to(device)


def _multiplies_exact(checkpoint: _Checkpoint, role: str, packings: Mapping[str, str]) -> bool:
    """Is this a matrix that is multiplied, and not packed?"""
    is_table = role == "embedding.weight" and not checkpoint.config.tie_embeddings
    return role not in packings and len(checkpoint.stored(role).shape) == 2 and not is_table


def _packed_memory(checkpoint: _Checkpoint, packings: Mapping[str, str]) -> dict[str, Tensor]:
    """Where each packed weight goes; in the order of the layers, in which a step reads them."""
    shapes = [checkpoint.stored(role).shape for role in packings]
    sizes = [bytes_of(packing, (out, width)) for packing, (out, width) in zip(packings.values(), shapes, strict=True)]
    return dict(zip(packings, allocate(sizes), strict=True)) if packings else {}


def _pack(checkpoint: _Checkpoint, role: str, packing: str, memory: Tensor) -> PackedWeight:
    """The blocks of the file in another order if they are of this type, or else the weight rounded to it."""
    threads = max(1, torch.get_num_threads() // _READERS)  # for each of the readers
    info, files = checkpoint.stored(role), checkpoint.files
    if info.type != packing:
        exact = STORED_DTYPES.get(info.type, torch.float32)
        return PackedWeight.from_values(
            _read(checkpoint, role, exact, torch.device("cpu")), packing, memory=memory, num_threads=threads
        )
    assert isinstance(files, GGUFFile)
    order = None
    if _is_interleaved(checkpoint, role):
        config = checkpoint.config
        heads = config.num_heads if role.split(".")[-2] == "q" else config.num_kv_heads
        order = _split_halves(torch.arange(info.shape[0]), heads)
    return PackedWeight.from_blocks(files.blocks(info.name), packing, order, memory=memory, num_threads=threads)


def _split_halves(rows: Tensor, num_heads: int) -> Tensor:
    """Undo llama.cpp's order of a head's rows, in which the two of a rotated pair are neighbours.

    `rows` is [heads * D, in] or a bias [heads * D]; afterwards rows i and i + D // 2 of each head are a pair.
    """
    return rows.view(num_heads, -1, 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


def _fingerprint(checkpoint: _Checkpoint, packings: Mapping[str, str]) -> bytes:
    digest = hashlib.sha256(repr(checkpoint.config).encode())
    if packings:
        digest.update(repr(sorted(packings.items())).encode())
    digest.update(checkpoint.files.header_digest())
    by_file: dict[Path, list[TensorInfo]] = {}
    for info in checkpoint.files.tensors.values():
        by_file.setdefault(info.path, []).append(info)
    size = 256
    for path in sorted(by_file):
        with path.open("rb") as file:
            for info in sorted(by_file[path], key=lambda info: info.offset):
                for start in (0, max(0, info.nbytes // 2 - size // 2), max(0, info.nbytes - size)):
                    file.seek(info.offset + start)
                    digest.update(file.read(min(size, info.nbytes - start)))
    return digest.digest()
