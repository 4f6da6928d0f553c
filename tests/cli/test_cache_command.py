"""`--cache-dir` from one process to the next, and `kvine cache`."""

import json
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

COMMAND = [sys.executable, "-m", "kvine.cli.app"]
PROMPT = "the prompt that another process has computed before this one"  # 60 tokens, a character each


def generate(tiny: Path, folder: Path, *more: object) -> dict:
    arguments = ["-m", tiny, "--threads", 1, "--block-size", 8, "--max-tokens", 4, "--ignore-eos", "--json", *more]
    ended = subprocess.run(
        [*COMMAND, "generate", PROMPT, *map(str, arguments), "--cache-dir", str(folder)],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "blocks"


def test_another_process_finds_the_prompt(tiny, folder, kvine):
    first, second = generate(tiny, folder), generate(tiny, folder)
    assert first["usage"]["cached_tokens"] == 0 and second["usage"]["cached_tokens"] == 56
    assert first["token_ids"] == second["token_ids"]
    assert generate(tiny, folder, "--kv-dtype", "bf16")["usage"]["cached_tokens"] == 0
    listing = kvine("cache", "info", "--cache-dir", folder, "--json").json
    assert [(s["blocks"], s["tokens"]) for s in listing["namespaces"]] == [(7, 56), (7, 56)]
    assert {s["label"].rpartition("K/V ")[2] for s in listing["namespaces"]} == {"exact", "bf16"}


def test_info_verify_clear(tiny, folder, kvine):
    generate(tiny, folder)
    told = kvine("cache", "info", "--cache-dir", folder)
    assert told.code == 0 and "7 blocks" in told.out and "not measured" in told.out and "fp32, K/V exact" in told.out
    listing = kvine("cache", "info", "--cache-dir", folder, "--json").json
    assert (listing["blocks"], listing["damaged"], listing["set_aside"]) == (7, 0, None)
    assert listing["bytes_limit"] == 2 << 30 and listing["bytes_stored"] < listing["bytes_on_disk"]
    assert kvine("cache", "verify", "--cache-dir", folder, "--json").json["sound"] == 7
    ended = kvine("cache", "clear", "--cache-dir", folder)
    assert ended.code == 0 and "7 blocks forgotten" in ended.err
    assert kvine("cache", "info", "--cache-dir", folder, "--json").json["namespaces"] == []


def test_verify_names_damage_and_removes_it(tiny, folder, kvine):
    generate(tiny, folder)
    file = folder / "blocks.mdb"
    data = bytearray(file.read_bytes())
    at = data.rindex(b"KVB\x01")
    data[at + 500] ^= 1
    file.write_bytes(data)
    ended = kvine("cache", "verify", "--cache-dir", folder)
    assert ended.code == 1 and "6 blocks are sound, 1 are damaged and were removed" in ended.err
    assert kvine("cache", "verify", "--cache-dir", folder).code == 0
    file.write_bytes(data[: len(data) // 2])
    with pytest.warns(match="set aside"):
        ended = kvine("cache", "verify", "--cache-dir", folder, "--json")
    assert ended.code == 1 and json.loads(ended.out)["set_aside"]
    assert kvine("cache", "info", "--cache-dir", folder, "--json").json["set_aside"].endswith("damaged.mdb")
    kvine("cache", "clear", "--cache-dir", folder)
    assert not (folder / "damaged.mdb").exists()


def test_export_and_import(tiny, folder, kvine, tmp_path):
    generate(tiny, folder)
    file, other = tmp_path / "file", tmp_path / "other"
    assert kvine("cache", "export", file, "--cache-dir", folder, "--json").json["blocks"] == 7
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert kvine("cache", "import", file, "--cache-dir", other, "--json").json["new"] == 7
    ended = kvine("cache", "import", file, "--cache-dir", other)
    assert ended.code == 0 and "0 of them new" in ended.err
    assert generate(tiny, other)["usage"]["cached_tokens"] == 56
    file.write_bytes(file.read_bytes()[:-1])
    kvine("cache", "clear", "--cache-dir", other)
    ended = kvine("cache", "import", file, "--cache-dir", other)
    assert ended.code == 2 and "damaged" in ended.err and "Nothing was changed" in ended.err
    assert kvine("cache", "info", "--cache-dir", other, "--json").json["blocks"] == 0


@pytest.mark.parametrize("command", ["info", "verify", "clear", "export", "import"])
def test_what_is_not_there_is_a_sentence(kvine, tmp_path, command):
    file = [tmp_path / "file"] if command in ("export", "import") else []
    ended = kvine("cache", command, *file, "--cache-dir", tmp_path / "none")
    assert ended.code == 2 and ended.out == ""
    assert "There is no" in ended.err and ended.err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--cache-size", "12"], "at least 1MiB"),
        (["--no-prefix-caching"], "leave prefix_caching on"),
    ],
)
def test_options_that_cannot_work_are_said_before_anything_is_made(kvine, tiny, folder, options, said):
    ended = kvine("generate", "-m", tiny, "hello", "--cache-dir", folder, *options)
    assert ended.code == 2 and said in ended.err and not folder.exists()


def test_ctrl_c_leaves_the_prompt_in_the_folder(tiny, folder):
    endless = ["--window", "64", "--sinks", "4", "--sink-rule", "in_cache", "--max-tokens", "1000000", "--ignore-eos"]
    arguments = ["-m", str(tiny), "--threads", "1", "--block-size", "8", "--cache-dir", str(folder), *endless]
    process = subprocess.Popen(
        [*COMMAND, "generate", PROMPT, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    with process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.read(20)
        process.send_signal(signal.SIGINT)
        process.stdout.read()
        assert b"Traceback" not in process.stderr.read()
    assert process.returncode == 130
    found = subprocess.run(
        [*COMMAND, "generate", PROMPT, *arguments, "--json", "--max-tokens", "2"], capture_output=True, text=True
    )
    assert json.loads(found.stdout)["usage"]["cached_tokens"] == 56
