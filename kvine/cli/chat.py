"""`kvine chat`: a conversation whose past stays cached between turns, and shows what each turn reused of it."""

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvine.cli.conversation import Conversation, Turn
from kvine.cli.loading import open_llm
from kvine.cli.options import CacheOptions, ModelOptions, SamplingOptions, spread_options
from kvine.cli.terminal import human_bytes, note, seconds_since_start, show_error, stdin_is_terminal, write, write_json
from kvine.errors import KvineError, RequestError

if TYPE_CHECKING:
    from kvine.generation import TextGeneration

HELP = """\
/edit N TEXT   change what you said in turn N and go on from there (without TEXT you are asked for it)
/undo          take the last turn back
/save FILE     keep the conversation, and what the cache holds of it
/load FILE     go on with a conversation that was saved
/reset         begin a new conversation
/stats         turns, tokens, and what the cache holds
/help          this list
/quit          leave; so do Ctrl-D, and Ctrl-C at the prompt. During an answer Ctrl-C stops that answer only"""


@spread_options
def chat(
    model: ModelOptions,
    sampling: SamplingOptions,
    cache: CacheOptions,
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="A system message.")] = None,
    pin_system: Annotated[bool, typer.Option("--pin-system", help="No window drops the system message.")] = False,
    json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout, when the chat has ended.")] = False,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="No line about the model, nor one after each turn.")
    ] = False,
) -> None:
    """Talk with a model. Lines piped in are taken as turns, one each."""
    params = sampling.params()
    if pin_system and system is None:
        raise RequestError("--pin-system pins what --system says: give it too.")
    llm = open_llm(model, cache)
    ready_s = seconds_since_start()
    if not quiet:
        from kvine.cli.report import show_ready

        show_ready(llm, ready_s)
    session = Session(Conversation(llm, params, system, pin_system=pin_system), streams=not json, quiet=quiet)
    session.run()
    if json:
        write_json(session.as_json(ready_s))


class Session:
    """Reads lines, answers or obeys them, and says what each turn reused and computed.

    Args:
        conversation: what is said.
        streams: whether answers go to stdout as they come.
        quiet: whether the line after each turn is left out.
    """

    def __init__(self, conversation: Conversation, *, streams: bool, quiet: bool) -> None:
        self.conversation = conversation
        self.answered: list[Turn] = []
        self._streams = streams
        self._quiet = quiet
        self._interactive = stdin_is_terminal()
        self._commands: dict[str, Callable[[str], None]] = {
            "/edit": self._edit,
            "/undo": self._undo,
            "/save": self._save,
            "/load": self._load,
            "/reset": self._reset,
            "/stats": self._stats,
            "/help": lambda _: note(HELP),
        }

    def run(self) -> None:
        """Goes on to the end of the input or `/quit`.

        A mistake at a terminal is shown and the conversation goes on; in a script it raises its KvineError.
        """
        if self._interactive:
            _edit_lines()
            note("/help lists the commands.")
        while (line := self._read("› ")) is not None and line.strip() != "/quit":
            try:
                self._take(line)
            except KvineError as error:
                if not self._interactive:
                    raise
                show_error(error)

    def as_json(self, ready_s: float) -> dict[str, Any]:
        """Every answer in the order given, and the conversation as it stands after edits."""
        from kvine.cli.report import generation_json, model_json

        llm = self.conversation.llm
        turns = [
            {"turn": turn.number, "edited": turn.edited, "user": turn.user} | generation_json(llm, turn.answer, ready_s)
            for turn in self.answered
            if turn.answer is not None
        ]
        return model_json(llm) | {
            "turns": turns,
            "messages": self.conversation.messages(),
            "kv_bytes_held": llm.engine.manager.bytes_referenced,
            "kv_bytes_cached": llm.engine.manager.bytes_cached,
        }

    # -- lines --------------------------------------------------------------------------------------------------------

    def _read(self, prompt: str) -> str | None:
        """The next line without its end; None at the end of the input."""
        try:
            if self._interactive:
                return input(prompt)
            line = sys.stdin.readline()
        except EOFError:
            note("")
            return None
        except UnicodeDecodeError as error:
            raise RequestError(f"A line on stdin is not {error.encoding} text: convert it first.") from None
        return line.removesuffix("\n") if line else None

    def _take(self, line: str) -> None:
        if not line.strip():
            return
        if not line.startswith("/"):
            self._answer(line)
            return
        name, _, rest = line.partition(" ")
        command = self._commands.get(name)
        if command is None:
            raise RequestError(f"{name} is no command: /help lists them.")
        command(rest.strip())

    # -- commands -----------------------------------------------------------------------------------------------------

    def _edit(self, arguments: str) -> None:
        number, _, text = arguments.partition(" ")
        if not number.isdecimal() or len(number) > 9:
            raise RequestError("Say which turn to edit and what you say instead: /edit 1 TEXT.")
        self.conversation.check_number(int(number))
        if not text.strip():
            was = self.conversation.turns[int(number) - 1].user
            note(f"turn {number} was: {was}")
            try:
                answer = self._read("instead › ")
            except KeyboardInterrupt:
                answer = None
            if answer is None or not answer.strip():
                note("nothing changed")
                return
            text = answer
        self._answer(text.strip(), number=int(number))

    def _undo(self, _: str) -> None:
        note(f"taken back: {self.conversation.undo().user}")

    def _save(self, name: str) -> None:
        note(f"{self.conversation.save(_file(name)):,} tokens kept in {name}")

    def _load(self, name: str) -> None:
        num_tokens = self.conversation.load(_file(name))
        turns = self.conversation.turns
        count = f"{len(turns)} turn{'s' if len(turns) > 1 else ''}"
        note(f"{count}, {num_tokens:,} tokens from {name}; you said last: {turns[-1].user}")

    def _reset(self, _: str) -> None:
        self.conversation.turns.clear()
        note("a new conversation; what the old one computed stays cached as long as there is room")

    def _stats(self, _: str) -> None:
        turns, manager = self.conversation.turns, self.conversation.llm.engine.manager
        usages = [turn.answer.usage for turn in self.answered if turn.answer is not None]
        prompts, reused = sum(usage.prompt_tokens for usage in usages), sum(usage.cached_tokens for usage in usages)
        length = self.conversation.num_tokens
        note(
            f"turns: {len(turns)} · tokens: {length} · prompt tokens so far: {prompts}, {reused} of them from the cache"
        )
        held, cached = manager.bytes_referenced, manager.bytes_cached
        note(
            f"K/V held by running answers: {held:,} bytes ({human_bytes(held)}) · "
            f"cached for later: {cached:,} bytes ({human_bytes(cached)}) of {human_bytes(manager.budget)}"
        )

    # -- answers ------------------------------------------------------------------------------------------------------

    def _answer(self, user: str, *, number: int | None = None) -> None:
        from kvine.cli.report import outcome_line, show_full_context

        turn = self.conversation.ask(user, self._show, number=number)
        if turn is None or turn.answer is None:
            note("stopped before the answer began; the turn is dropped")
            return
        self.answered.append(turn)
        if not self._quiet:
            note(f"turn {turn.number}{' edited' if turn.edited else ''} · {outcome_line(turn.answer)}")
            show_full_context(turn.answer)

    def _show(self, running: "TextGeneration") -> None:
        with _interrupting(running):
            for piece in running:
                if self._streams:
                    write(piece)
        if self._streams:
            write("\n")


def _file(name: str) -> Path:
    if not name:
        raise RequestError("Name the file: /save FILE, or /load FILE.")
    return Path(name).expanduser()


@contextmanager
def _interrupting(running: "TextGeneration") -> Iterator[None]:
    """Ctrl-C ends the answer after the model call that is under way; a second one ends the program."""

    def stop(_signal: int, _frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        running.cancel()

    before = signal.signal(signal.SIGINT, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _edit_lines() -> None:
    """Arrow keys and history for `input`, where the platform has them."""
    try:
        import readline  # noqa: F401
    except ImportError:
        return
