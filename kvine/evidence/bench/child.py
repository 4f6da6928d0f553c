"""An engine's process, from outside: asked one thing at a time, stopped while others are measured, never left alive.

A stopped process burns nothing, whatever its threads would do while they wait.
"""

import contextlib
import json
import os
import selectors
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from kvine.engine.interrupt import uninterrupted
from kvine.errors import KvineError

LAST_LINES = 5
MOST_BYTES = 1 << 24  # of an answer


class ChildError(KvineError):
    """An engine's process that failed, died, did not answer or answered nonsense. `last_words` end its stderr."""

    def __init__(self, message: str, last_words: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.last_words = tuple(last_words)


class CannotError(Exception):
    """Something that this engine does not offer; the message says why."""


class MissingError(Exception):
    """A module that this Python does not have; the message is its name."""


class RefusedError(Exception):
    """An exception in the other process: its type's name, and its text."""


class Child:
    """A process that answers lines of JSON with lines of JSON, in a process group of its own.

    Args:
        name: of the engine.
        command: starts it.
        env: its environment.
        patience: seconds that an answer may take.
    """

    def __init__(self, name: str, command: Sequence[str], env: Mapping[str, str], patience: float) -> None:
        self._name, self._patience = name, patience
        self._complaints = tempfile.TemporaryFile()  # noqa: SIM115  # closed with the process
        self._read = b""
        self._process: subprocess.Popen[bytes] | None = None
        with uninterrupted():  # so that there is no process which nobody ends
            self._began = time.perf_counter()
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._complaints,
                env=dict(env),
                process_group=0,  # Ctrl-C is for us; and in our session, so that one that is stopped dies with us
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def ask(self, do: str, **more: Any) -> dict[str, Any]:
        """What it answers to a command.

        Raises:
            CannotError, MissingError, RefusedError: as the process says.
            ChildError: if it dies, or does not answer in time.
        """
        process = self._running
        with contextlib.suppress(BrokenPipeError):  # it has died: its last words say why
            assert process.stdin is not None
            process.stdin.write(json.dumps({"do": do, **more}).encode() + b"\n")
            process.stdin.flush()
        end = time.perf_counter() + self._patience
        while True:
            reply = _reply(self._line(do, end))
            if reply is None:
                continue  # printed by somebody who does not know of us
            if "ok" in reply:
                return dict(reply["ok"])
            if "cannot" in reply:
                raise CannotError(reply["cannot"])
            if "missing" in reply:
                raise MissingError(reply["missing"])
            raise RefusedError(str(reply.get("kind")), str(reply.get("failed")))

    @property
    def seconds_since_start(self) -> float:
        """Wall time since the process was begun."""
        return time.perf_counter() - self._began

    def pause(self) -> None:
        """Stops it until `resume`."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Lets it go on."""
        self._signal(signal.SIGCONT)

    def close(self) -> None:
        """Ends it and all that it has started."""
        if self._process is None:
            return
        self._signal(signal.SIGKILL)
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._complaints):
            with contextlib.suppress(BrokenPipeError):
                assert stream is not None
                stream.close()
        self._process = None

    def last_words(self) -> list[str]:
        """The last lines of its stderr."""
        self._complaints.seek(max(0, self._complaints.seek(0, os.SEEK_END) - 8192))
        lines = self._complaints.read().decode(errors="replace").splitlines()
        return [line for line in lines if line.strip()][-LAST_LINES:]

    @property
    def _running(self) -> subprocess.Popen[bytes]:
        assert self._process is not None, "it has been closed"
        return self._process

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._running.pid, number)

    def _line(self, do: str, end: float) -> bytes:
        """The next line of its stdout."""
        stdout = self._running.stdout
        assert stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(stdout, selectors.EVENT_READ)
            while b"\n" not in self._read:
                if not selector.select(max(0.0, end - time.perf_counter())):
                    raise ChildError(
                        f"{self._name} was asked for {do} and has not answered within {self._patience:g} s.",
                        self.last_words(),
                    )
                piece = os.read(stdout.fileno(), 1 << 16)
                if not piece or len(self._read) > MOST_BYTES:
                    self._signal(signal.SIGKILL)
                    code = self._running.wait()
                    raise ChildError(f"{self._name}'s process ended with code {code}.", self.last_words())
                self._read += piece
        line, _, self._read = self._read.partition(b"\n")
        return line


def _reply(line: bytes) -> dict[str, Any] | None:
    try:
        reply = json.loads(line)
    except ValueError:
        return None
    return reply if isinstance(reply, dict) and {"ok", "cannot", "missing", "failed"} & reply.keys() else None
