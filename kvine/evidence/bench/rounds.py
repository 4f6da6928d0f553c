"""The rounds: each engine in a process of its own, one at work while the others are stopped, all in turn.

What goes wrong with a peer ends its part; if its Python was named, or if it is Kvine, it ends everything.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvine import errors
from kvine.errors import ConfigError, KvineError
from kvine.evidence.bench.child import CannotError, Child, ChildError, MissingError, RefusedError
from kvine.evidence.bench.players import OWN_COMMAND, Peer, environment
from kvine.evidence.bench.report import Skipped
from kvine.evidence.bench.settings import WARM_UP_TOKENS, Prompts, Settings
from kvine.evidence.bench.tasks import Key, Task
from kvine.evidence.progress import Progress

MEMORY_TOKENS = 4


@dataclass(eq=False)
class Player:
    """An engine that takes part.

    Attributes:
        name: of it.
        peer: None for Kvine.
        load: what its process is told first: model, dtype, threads and room.
        child: its process.
        facts: what it says of itself, see `peer.Driver`.
        token_ids: what it has written first, after the short prompt; None where it does not tell.
        figures: of each key, one for each repeat.
        given_up: what it cannot do.
    """

    name: str
    peer: Peer | None
    load: dict[str, Any]
    child: Child | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    token_ids: list[int] | None = None
    figures: dict[Key, list[float]] = field(default_factory=dict)
    given_up: set[Key] = field(default_factory=set)

    @property
    def process(self) -> Child:
        """Its process, which has been started."""
        assert self.child is not None
        return self.child

    @property
    def model_path(self) -> Path:
        """What it has read."""
        return Path(self.load["model"])

    def add(self, key: Key, figure: float) -> None:
        """Notes what one repeat has come to."""
        self.figures.setdefault(key, []).append(figure)


class Rounds:
    """Has players do tasks in turn; a context, at whose end none of their processes is left.

    Args:
        players: who takes part; those that drop out are removed.
        settings, prompts: what is measured.
        progress: told of every measurement.
        tell: hears in a sentence what is left out.

    Attributes:
        skipped: what was left out.
    """

    def __init__(
        self,
        players: list[Player],
        settings: Settings,
        prompts: Prompts,
        progress: Progress,
        tell: Callable[[str], None],
    ) -> None:
        self._players, self._settings, self._prompts = players, settings, prompts
        self._progress, self._tell = progress, tell
        self._stack = ExitStack()
        self._done = self._total = 0
        self.skipped: list[Skipped] = []

    def run(self, tasks: Sequence[Task]) -> None:
        """Fills in the players' figures.

        Progress counts tasks only, if there are any: how long engines take to load says nothing about them.

        Raises:
            ConfigError: of a peer that was named with its Python and fails.
            KvineError: what keeps Kvine from being measured.
        """
        repeats = self._settings.repeats
        starts = repeats if self._settings.wants("ready", "peak_memory") else 1
        self._total = self._measurements(tasks) or len(self._players) * starts
        with self._stack:
            for number in range(1, starts + 1):
                for player in tuple(self._players):
                    what = f"{player.name}: start, {number} of {starts}"
                    self._turn(what, player, lambda p=player, n=number: self._start(p, stays=n == starts))  # type: ignore[misc]
                    self._done += not tasks
            self._total = self._measurements(tasks)  # without those that could not be started
            for task in tasks:
                for number in range(1, repeats + 1):
                    for player in tuple(self._players):
                        if not _takes(player, task):
                            continue
                        what = f"{player.name}: {task.do.replace('_', ' ')}, {number} of {repeats}"
                        self._turn(what, player, lambda p=player, t=task: self._measure(p, t))  # type: ignore[misc]
                        self._done += 1

    def skip(self, engine: str, what: str | None, reason: str) -> None:
        """Notes what is left out, and says so."""
        self.skipped.append(Skipped(engine, what, reason))
        self._tell(f"{engine}{'' if what is None else f', {what}'}: {reason}.")

    # -- inside -------------------------------------------------------------------------------------------------------

    def _measurements(self, tasks: Sequence[Task]) -> int:
        """How many there are to come."""
        return self._settings.repeats * sum(_takes(player, task) for task in tasks for player in self._players)

    def _turn(self, what: str, player: Player, work: Callable[[], None]) -> None:
        self._progress(what, self._done, self._total)
        try:
            work()
        except MissingError as error:
            module = str(error)
            if player.peer is None:
                raise KvineError(f"Kvine's process has no module {module}.") from error
            if player.peer.python is not None:
                raise ConfigError(f"{player.name} is {player.peer.not_installed(module)}.") from error
            self._drop(player, player.peer.not_installed(module))
        except RefusedError as error:
            kind, text = error.args
            is_sentence = player.peer is None and kind in vars(errors)
            self._fail(player, text if is_sentence else f"{kind}: {text}", player.process.last_words())
        except ChildError as error:
            self._fail(player, str(error), error.last_words)

    def _fail(self, player: Player, reason: str, last_words: Sequence[str]) -> None:
        if player.peer is None:
            raise KvineError(reason)
        if player.peer.python is not None:
            raise ConfigError("\n".join([f"{player.name} failed: {reason}", *last_words]))
        self._drop(player, "; ".join([reason.removesuffix("."), *last_words[-1:]]))

    def _drop(self, player: Player, reason: str) -> None:
        player.process.close()
        self._players.remove(player)
        self.skip(player.name, None, reason)

    def _start(self, player: Player, *, stays: bool) -> None:
        """A fresh process, from its start until it could generate, and the most memory that it needs."""
        child = player.child = self._stack.enter_context(self._open(player))
        player.facts = child.ask("load", **player.load)
        player.add(Key("ready", 0, 1), child.seconds_since_start)
        if self._settings.wants("peak_memory"):
            child.ask("generate", ids=self._prompts.long, tokens=MEMORY_TOKENS)
            player.add(Key("peak_memory", len(self._prompts.long), 1), child.ask("memory")["peak_bytes"])
        if not stays:
            child.close()
            return
        player.token_ids = child.ask("generate", ids=self._prompts.short, tokens=WARM_UP_TOKENS)["token_ids"]
        child.pause()

    def _open(self, player: Player) -> Child:
        threads, patience = player.load["threads"], self._settings.patience
        if player.peer is None:
            return Child(player.name, OWN_COMMAND, environment(threads), patience)
        try:
            return Child(player.name, player.peer.command, player.peer.environment(threads), patience)
        except OSError as error:
            raise ConfigError(f"{player.peer.command[0]} cannot be started: {error.strerror}.") from error

    def _measure(self, player: Player, task: Task) -> None:
        if player.given_up.issuperset(task.keys):
            return
        player.process.resume()
        try:
            answer = player.process.ask(task.do, **task.ask)
        except CannotError as error:
            player.given_up.update(task.keys)
            self.skip(player.name, task.keys[0].what, str(error))
            return
        except RefusedError as error:  # of which only this is lost, and not what has taken minutes before
            if player.peer is None:
                raise
            player.given_up.update(task.keys)
            kind, text = error.args
            self.skip(player.name, task.keys[0].what, f"failed: {kind}: {text.splitlines()[0] if text else ''}")
            return
        finally:
            player.process.pause()
        for key, figure in zip(task.keys, task.take(answer), strict=True):
            if figure is not None:
                player.add(key, figure)


def _takes(player: Player, task: Task) -> bool:
    return player.peer is None or not task.only_kvine
