"""What only a process of its own shows: exit codes, signals, pipes, start-up; and the real model, end to end."""

import json
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import kvine
from kvine.cli import start

COMMAND = [sys.executable, "-m", "kvine.cli.app"]
ENDLESS = ["--threads", "1", "--ignore-eos", "--max-tokens", "1000000"]
ENDLESS += ["--window", "16", "--sinks", "4", "--sink-rule", "in_cache"]
PATIENCE = 300  # seconds; a busy machine starts slowly


def run(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *arguments], input=stdin, capture_output=True, text=True, timeout=PATIENCE)


def heed_ctrl_c() -> None:
    """Whoever starts the tests in the background of a shell has them, and so their children, ignore it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@contextmanager
def started(*arguments: str, stdin: int = subprocess.DEVNULL) -> Iterator[subprocess.Popen[bytes]]:
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [*COMMAND, *arguments], stdin=stdin, stdout=pipe, stderr=pipe, preexec_fn=heed_ctrl_c
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def test_ctrl_c_outside_of_a_command_ends_with_130_too(monkeypatch, capfd):
    """While the commands are put together, for one, nothing of theirs is there to catch it."""

    def interrupted():
        raise KeyboardInterrupt

    monkeypatch.setattr("kvine.cli.app.main", interrupted)
    monkeypatch.setattr(start.gc, "freeze", lambda: None)  # this process lives on
    before = signal.getsignal(signal.SIGINT)
    try:
        with pytest.raises(SystemExit) as ended:
            start.main()
    finally:
        signal.signal(signal.SIGINT, before)
    assert ended.value.code == 130 and capfd.readouterr() == ("", "")


def test_the_real_model_can_add():
    ended = run("generate", "--max-tokens", "8", "--json", "--trace", "The answer to 2 + 3 is")
    assert ended.returncode == 0, ended.stderr
    outcome = json.loads(ended.stdout)
    assert "5" in outcome["text"]
    assert outcome["finish_reason"] == "stop"
    assert outcome["trace"][0]["input_shape"] == [1, outcome["usage"]["prompt_tokens"]]
    assert outcome["timings"]["ready_s"] > 0


def test_the_real_model_answers_with_packed_weights():
    ended = run("generate", "--max-tokens", "12", "--chat", "What is the capital of Japan?")
    assert ended.returncode == 0, ended.stderr
    assert "Tokyo" in ended.stdout and "211 weights stay packed (Q4_1, Q8_0)" in ended.stderr.replace("\n", " ")
    refused = run("generate", "--weights", "q3", "-q", "Hello")
    assert refused.returncode == 2 and "choose one of auto, exact, packed, q8, q4." in refused.stderr.replace("\n", " ")


def test_the_real_model_keeps_its_prefix_between_turns_and_edits():
    said = "Name a colour.\nName another colour.\n/edit 2 Name another animal.\n"
    ended = run("chat", "--max-tokens", "4", "--json", stdin=said)
    assert ended.returncode == 0, ended.stderr
    first, second, edited = json.loads(ended.stdout)["turns"]
    assert first["usage"]["cached_tokens"] == 0
    assert second["usage"]["cached_tokens"] >= first["usage"]["prompt_tokens"]
    assert edited["usage"]["cached_tokens"] > second["usage"]["cached_tokens"], "up to the edited word"
    assert "reused" in ended.stderr


def test_more_threads_than_cores_by_the_environment_are_told_of_once(tiny: Path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "99999")
    ended = run("verify", "-m", str(tiny), "--only", "paths", "--prompt", "The cache", "--new-tokens", "2")
    said = "Note: OMP_NUM_THREADS is '99999', and this process may use "
    assert ended.returncode == 0 and ended.stderr.startswith(said) and ended.stderr.count("OMP_NUM_THREADS") == 1


def test_ctrl_c_ends_a_generation_with_130(tiny: Path):
    with started("generate", "-m", str(tiny), *ENDLESS, "The cache") as process:
        assert process.stdout is not None and process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130
    assert b"Traceback" not in err


def test_ctrl_c_at_the_prompt_of_a_chat_ends_it_with_130(tiny: Path):
    keyboard, terminal = pty.openpty()
    with started("chat", "-m", str(tiny), "--threads", "1", stdin=terminal) as process:
        os.close(terminal)
        assert process.stderr is not None and b"ready in" in process.stderr.readline()
        assert process.stderr.readline().startswith(b"/help lists")
        os.write(keyboard, b"Hello\n")
        assert process.stderr.readline().startswith(b"turn 1")
        time.sleep(0.2)  # it is at the prompt, or about to be
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=PATIENCE)
    os.close(keyboard)
    assert process.returncode == 130
    assert b"Traceback" not in err


def test_a_reader_that_leaves_is_no_error(tiny: Path):
    with started("generate", "-m", str(tiny), *ENDLESS, "The cache") as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.read(1)
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(PATIENCE) == 141


def test_help_and_version_do_not_wait_for_torch():
    code = (
        "import sys, kvine.cli.app; print(sorted({'torch', 'transformers', 'numpy', 'kvine.llm'} & set(sys.modules)))"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "[]\n"
    assert run("--version").stdout == f"kvine {kvine.__version__}\n"
