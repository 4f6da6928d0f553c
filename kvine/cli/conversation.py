"""A conversation and its edits, apart from the terminal: turns are only ever replaced once their answer is there."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvine.errors import RequestError

if TYPE_CHECKING:
    from kvine.generation import Generation, TextGeneration
    from kvine.llm import LLM
    from kvine.sampling.params import SamplingParams


@dataclass(frozen=True)
class Turn:
    """What the user said and what came of it.

    Attributes:
        number: its place in the conversation, from 1.
        user: the user's words.
        answer: the model's.
        edited: whether it replaced an earlier turn.
    """

    number: int
    user: str
    answer: "Generation"
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

    def messages(self, end: int | None = None) -> list[dict[str, str]]:
        """The conversation up to turn number `end`, as a chat template takes it."""
        spoken = [] if self.system is None else [{"role": "system", "content": self.system}]
        for turn in self.turns[:end]:
            spoken.append({"role": "user", "content": turn.user})
            spoken.append({"role": "assistant", "content": turn.answer.text})
        return spoken

    def check_number(self, number: int) -> None:
        """Raises RequestError if there is no such turn."""
        if not 1 <= number <= len(self.turns):
            there = f"there are turns 1 to {len(self.turns)}" if self.turns else "nothing has been said yet"
            raise RequestError(f"There is no turn {number} to edit: {there}.")

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
        turn = Turn(before + 1, user, answer, edited=number is not None)
        self.turns[before:] = [turn]
        return turn
