"""A conversation and its edits, apart from the terminal: turns are only ever replaced once their answer is there."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvine.errors import RequestError

if TYPE_CHECKING:
    from kvine.generation import Generation, TextGeneration
    from kvine.llm import LLM
    from kvine.sampling.params import SamplingParams


CHAT_NOTE = "kvine-chat"  # what a session's file holds beside the text if that is a conversation


@dataclass(frozen=True)
class Turn:
    """What the user said and what came of it.

    Attributes:
        number: its place in the conversation, from 1.
        user: the user's words.
        text: the model's answer.
        answer: what is known of how it came about; None in a conversation that was loaded.
        edited: whether it replaced an earlier turn.
    """

    number: int
    user: str
    text: str
    answer: "Generation | None"
    edited: bool


class Conversation:
    """Turns with one model. The cache needs no care: what a prompt shares with earlier ones is found by its tokens.

    Args:
        llm: the model.
        params: for every answer.
        system: a system message, or None.
        pin_system: whether no window drops it.
    """

    def __init__(
        self, llm: "LLM", params: "SamplingParams", system: str | None = None, *, pin_system: bool = False
    ) -> None:
        self.llm = llm
        self.params = params
        self.system = system
        self.pin_system = pin_system
        self.turns: list[Turn] = []

    @property
    def num_tokens(self) -> int:
        """Tokens up to the last answer."""
        if not self.turns:
            return 0
        if (answer := self.turns[-1].answer) is not None:
            return answer.usage.prompt_tokens + answer.usage.completion_tokens
        return len(self.llm.encode_chat(self.messages(), add_generation_prompt=False))

    def messages(self, end: int | None = None) -> list[dict[str, str]]:
        """The conversation up to turn number `end`, as a chat template takes it."""
        spoken = [] if self.system is None else [{"role": "system", "content": self.system}]
        for turn in self.turns[:end]:
            spoken.append({"role": "user", "content": turn.user})
            spoken.append({"role": "assistant", "content": turn.text})
        return spoken

    def check_number(self, number: int) -> None:
        """Raises RequestError if there is no such turn."""
        if not 1 <= number <= len(self.turns):
            there = f"there are turns 1 to {len(self.turns)}" if self.turns else "nothing has been said yet"
            raise RequestError(f"There is no turn {number} to edit: {there}.")

    def undo(self) -> Turn:
        """Takes the last turn back and returns it. Raises RequestError if there is none."""
        if not self.turns:
            raise RequestError("There is no turn to take back: nothing has been said yet.")
        return self.turns.pop()

    def save(self, path: Path) -> int:
        """Writes the conversation to a file, with the keys and values of its text; returns its tokens.

        Raises:
            RequestError: if nothing has been said yet.
            SessionError: if it cannot be written; a file that was there is as it was.
        """
        if not self.turns:
            raise RequestError("There is nothing to save: nothing has been said yet.")
        note = {"system": self.system, "turns": [[turn.user, turn.text] for turn in self.turns]}
        pinned = self.llm.system_span(self.messages()) if self.pin_system else ()
        ids = self.llm.encode_chat(self.messages(), add_generation_prompt=False)
        with self.llm.session(ids, pinned=pinned) as session:
            session.save(path, note={CHAT_NOTE: note})
            return session.num_tokens

    def load(self, path: Path) -> int:
        """Goes on with the conversation in a file instead of this one; returns its tokens.

        What the file holds of the cache stays there as long as there is room.

        Raises:
            RequestError: if the file holds no conversation; nothing has changed then, nor after an error of
                `LLM.load_session`.
        """
        with self.llm.load_session(path) as session:
            system, turns = _conversation(session.note, path)
            self.system = system
            self.turns[:] = [Turn(n, user, text, None, edited=False) for n, (user, text) in enumerate(turns, start=1)]
            return session.num_tokens

    def ask(self, user: str, on_start: Callable[["TextGeneration"], None], *, number: int | None = None) -> Turn | None:
        """Answers the user, as the next turn or in place of turn `number` and all that followed it.

        Args:
            user: what to answer.
            on_start: is handed the running answer, and returns when it has ended; it may close it early.
            number: the turn to replace.

        Returns:
            The new turn; None if the answer was stopped before it began, and nothing has changed then.

        Raises:
            RequestError: if there is no such turn, or the conversation has become too long; nothing has changed then.
        """
        if number is not None:
            self.check_number(number)
        before = len(self.turns) if number is None else number - 1
        messages = [*self.messages(before), {"role": "user", "content": user}]
        running = self.llm.stream_chat(messages, self.params, pin_system=self.pin_system)
        try:
            on_start(running)
        finally:
            running.close()
        answer = running.result
        if answer.finish_reason == "abort" and not answer.token_ids:
            return None
        turn = Turn(before + 1, user, answer.text, answer, edited=number is not None)
        self.turns[before:] = [turn]
        return turn


def _conversation(note: Any, path: Path) -> tuple[str | None, list[list[str]]]:
    match note:
        case {"kvine-chat": {"system": None | str() as system, "turns": [_, *_] as turns}}:
            if all(isinstance(turn, list) and [type(text) for text in turn] == [str, str] for turn in turns):
                return system, turns
    raise RequestError(f"{path} holds a text and no conversation: go on with it by kvine generate --session.")
