"""From a model's name to what is planned: its config and the headers of its files. No weight is read, and no torch."""

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvine.config import check_dtype
from kvine.errors import ConfigError, ModelLoadError
from kvine.evidence.plan.foreign import foreign_subject
from kvine.evidence.plan.machine import has_kernels
from kvine.evidence.plan.subject import PlannedLayer, Subject
from kvine.evidence.plan.weights import weights_of
from kvine.formats.safetensors_headers import INDEX_FILE, SINGLE_FILE, read_headers
from kvine.formats.tensor import TensorInfo
from kvine.hub import Progress, find_config
from kvine.models.config import ModelConfig
from kvine.models.config_gguf import config_from_gguf
from kvine.models.config_hf import ARCHITECTURES, config_from_hf
from kvine.models.dtypes import automatic_dtype
from kvine.models.fields import Fields
from kvine.models.names import check_tensors, gguf_names, hf_names, required_shapes
from kvine.models.packing import check_weights, choose_packings

MOST_BYTES = 2**62  # what a checkpoint may store, as the most that a machine may hold
_STORED = {"float32": "F32", "float64": "F64", "float16": "F16", "bfloat16": "BF16"}


def subject_of(
    name: str,
    *,
    dtype: str = "auto",
    device: str = "cpu",
    weights: str = "auto",
    params: int | None = None,
    progress: Progress | None = None,
) -> Subject:
    """The model called `name`: an alias, a hub id, a folder, a config.json or a .gguf file.

    Args:
        name: of a hub id that is not on this disk, the config and the index of the shards are fetched.
        dtype: compute dtype, or auto.
        device: the kind of device that it is planned for, which decides what auto means.
        weights: how they are kept, as `LLM` takes it.
        params: parameters, for a model that Kvine does not run.
        progress: hears of a fetch.

    Raises:
        FetchError, ModelLoadError: with a sentence that says what to do.
        ConfigError: for an unknown dtype, weights that cannot be kept so, or params of a model whose weights can be
            counted.
    """
    check_dtype(dtype)
    check_weights(weights)
    how = _How(dtype, device, weights)
    path = find_config(name, progress=progress)
    if path.is_file() and path.suffix != ".json":
        _refuse_params(params)
        return _from_gguf(name, path, how)
    config = path / "config.json" if path.is_dir() else path
    values = _read_json(config)
    folder = path if path.is_dir() else None
    reason = _not_run(values)
    if reason is None:
        _refuse_params(params)
        return _from_hf(name, values, config, folder, how)
    if weights != "auto":
        raise ConfigError(f"{reason} Leave out --weights, which is about weights that Kvine loads.")
    stored = None if folder is None else _stored_bytes(folder)
    return foreign_subject(
        values, str(config), name=name, dtype=dtype, reason=reason, stored_bytes=stored, params=params
    )


def _refuse_params(params: int | None) -> None:
    if params is not None:
        raise ConfigError("The weights of this model are counted exactly: leave out --params.")


@dataclass(frozen=True)
class _How:
    """What loading would be asked for: compute dtype, kind of device, and how the weights are kept."""

    dtype: str
    device: str
    weights: str


def _from_gguf(name: str, path: Path, how: _How) -> Subject:
    from kvine.formats.gguf_header import read_header  # the gguf package takes longer to load than the rest together

    header = read_header(path)
    shapes = {tensor: info.shape for tensor, info in header.tensors.items()}
    model = config_from_gguf(header.metadata, shapes, str(path))
    names = gguf_names(model)
    check_tensors(model, names, shapes, str(path))
    return _known(name, model, {role: header.tensors[stored] for role, stored in names.items()}, how)


def _from_hf(name: str, values: Mapping[str, Any], config: Path, folder: Path | None, how: _How) -> Subject:
    model = config_from_hf(values, str(config))
    if folder is not None and _has_weights(folder):
        tensors = read_headers(folder).tensors
        names = hf_names(model, tensors)
        check_tensors(model, names, {tensor: info.shape for tensor, info in tensors.items()}, str(folder))
        return _known(name, model, {role: tensors[stored] for role, stored in names.items()}, how)
    text = values.get("text_config")
    named = values.get("torch_dtype") or values.get("dtype")
    if named is None and isinstance(text, Mapping):
        named = text.get("torch_dtype") or text.get("dtype")
    stored_as = _STORED.get(str(named), "BF16")
    shapes = required_shapes(model)
    assumed = {role: TensorInfo(role, shape, stored_as, 0, 0, config) for role, shape in shapes.items()}
    return _known(name, model, assumed, how, says_stored=named is not None)


def _known(
    name: str, model: ModelConfig, stored: Mapping[str, TensorInfo], how: _How, *, says_stored: bool = True
) -> Subject:
    """A model that Kvine runs, by what is stored of each role: of no bytes where only the config is there."""
    dtype, why = _compute_dtype(how.dtype, _most_of(stored.values()), how.device)
    if not says_stored and how.dtype == "auto":
        why = "The config does not say how the weights are stored: bf16 is assumed."
    decided = choose_packings(
        stored, how.weights, is_fp32=dtype == "fp32", device=how.device, has_kernels=has_kernels()
    )
    packings, stored_bytes = decided.types, sum(info.nbytes for info in stored.values()) or None
    if decided.reason:
        why += f" {decided.reason[0].upper()}{decided.reason[1:]}."
    return Subject(
        name=name,
        architecture=model.architecture,
        layers=tuple(PlannedLayer(layer.window) for layer in model.layers),
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        dtype=dtype,
        weights=weights_of(model, dtype, packings, stored_bytes),
        num_heads=model.num_heads,
        max_context=model.max_context,
        model=model,
        packings=packings,
        dtype_reason=why,
        recount=lambda num_kv_heads: weights_of(replace(model, num_kv_heads=num_kv_heads), dtype, packings),
    )


def _compute_dtype(asked: str, stored: str, device: str) -> tuple[str, str]:
    if asked != "auto":
        return asked, f"Computes in {asked}, as asked."
    compute, why = automatic_dtype(stored, device)
    return compute, f"Computes in {why}."


def _most_of(tensors: Iterable[TensorInfo]) -> str:
    """The type of most of the weights' bytes, as loading goes by."""
    stored_bytes: Counter[str] = Counter()
    for info in tensors:
        stored_bytes[info.type] += info.nbytes
    return stored_bytes.most_common(1)[0][0]


def _not_run(values: Mapping[str, Any]) -> str | None:
    """Why Kvine does not run the model of a config.json; None if it does."""
    named = values.get("architectures")
    kind = values.get("model_type")
    architecture = named[0] if isinstance(named, list) and named else ARCHITECTURES.get(str(kind))
    if architecture not in ARCHITECTURES.values():
        return f"Kvine does not run {architecture or kind!r}; this is what it would take elsewhere."
    if values.get("quantization_config") is not None:
        return "Kvine reads packed weights from GGUF files only; this is what they would take elsewhere."
    return None


def _has_weights(folder: Path) -> bool:
    """Whether the folder holds the weights' headers too, not only an index of files that are elsewhere."""
    if (folder / SINGLE_FILE).is_file():
        return True
    if not (folder / INDEX_FILE).is_file():
        return False
    shards = _index(folder).get("weight_map")
    return isinstance(shards, dict) and any((folder / str(shard)).is_file() for shard in shards.values())


def _stored_bytes(folder: Path) -> int | None:
    """Bytes of all stored tensors, by the headers or else by the index."""
    if _has_weights(folder):
        return sum(info.nbytes for info in read_headers(folder).tensors.values())
    if not (folder / INDEX_FILE).is_file():
        return None
    metadata = _index(folder).get("metadata")
    if not isinstance(metadata, dict) or metadata.get("total_size") is None:
        return None
    return Fields(metadata, str(folder / INDEX_FILE), "metadata.").integer("total_size", maximum=MOST_BYTES)


def _index(folder: Path) -> dict[str, Any]:
    return _read_json(folder / INDEX_FILE)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ModelLoadError(f"{path} is not readable JSON: {error}.") from error
    if not isinstance(values, dict):
        raise ModelLoadError(f"{path} is not a JSON object.")
    return values
