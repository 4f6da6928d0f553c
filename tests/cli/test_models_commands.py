"""`kvine pull` and `kvine models`, without the network: fetching itself is tested with the hub."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from kvine import hub
from kvine.cli import progress as progress_module
from kvine.cli.progress import FetchProgress


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVINE_HOME", str(tmp_path))
    return tmp_path


def test_models_lists_aliases_and_the_cache(kvine, folder, monkeypatch):
    held = hub.CachedModel("gemma3-270m", folder / "g.gguf", "gguf", 5 << 20, "gemma", "https://huggingface.co/x/y")
    monkeypatch.setattr(hub, "cached_models", lambda: [held])
    listing = kvine("models", "--json").json
    assert listing["cache_folder"] == str(folder)
    assert {alias["name"]: alias["fetched"] for alias in listing["aliases"]} == {
        "smollm2-135m": False,
        "gemma3-270m": True,
    }
    assert [alias["name"] for alias in listing["aliases"] if alias["default"]] == [hub.DEFAULT_MODEL]
    assert listing["cached"] == [
        {
            "name": "gemma3-270m",
            "path": str(folder / "g.gguf"),
            "format": "gguf",
            "nbytes": 5 << 20,
            "licence": "gemma",
            "source": "https://huggingface.co/x/y",
        }
    ]
    ended = kvine("models")
    assert (ended.code, ended.err) == (0, "")
    for shown in ("Apache-2.0", "no: kvine pull smollm2-135m", "5.0 MiB", "gemma"):
        assert shown in ended.out


def test_pull_names_licence_and_verified_digest(kvine, monkeypatch):
    alias = hub.ALIASES["smollm2-135m"]
    verified = []
    source = hub.ModelSource(alias.name, Path("/models/m.gguf"), "gguf", alias.licence)
    monkeypatch.setattr(hub, "pull", lambda name, progress: source)
    monkeypatch.setattr(hub, "verify", lambda name, progress: verified.append(name))
    ended = kvine("pull", alias.name)
    assert (ended.code, ended.out, verified) == (0, "", [alias.name])
    for shown in (alias.licence, alias.licence_url, f"{alias.sha256}, verified", "/models/m.gguf"):
        assert shown in ended.err
    assert kvine("pull", alias.name, "--json").json == {
        "name": alias.name,
        "path": "/models/m.gguf",
        "format": "gguf",
        "licence": alias.licence,
        "licence_url": alias.licence_url,
        "sha256": alias.sha256,
        "bytes": alias.nbytes,
    }


def test_pull_of_what_is_no_model(kvine, folder):
    ended = kvine("pull", "no-such-model", "--json")
    assert (ended.code, ended.out) == (2, "")
    assert ended.err.startswith("Error: 'no-such-model' is no model")


def test_progress_is_lines_where_nobody_watches(capsys):
    with FetchProgress() as progress:
        progress.message("licence [red]x[/red]")
        progress.start("fetching", 3 << 20)
        progress.advance(1 << 20)
        progress.done()
        progress.start("verifying", None)
        progress.done()
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "licence [red]x[/red]\nfetching (3.0 MiB)\nverifying\n"


def test_progress_is_a_bar_at_a_terminal(monkeypatch):
    shown = io.StringIO()
    console = Console(file=shown, force_terminal=True, width=100, color_system=None)
    monkeypatch.setattr(progress_module, "stderr_console", lambda: console)
    with FetchProgress() as progress:
        progress.start("fetching", 4 << 20)
        progress.advance(3 << 20)
        progress.done()
    assert "3.0/4.0 MiB" in shown.getvalue()
    assert shown.getvalue().endswith("\x1b[?25h"), "the cursor is back"
