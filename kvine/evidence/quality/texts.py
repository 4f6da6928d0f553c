"""What is read: a user's text, or English prose that every Python has, in stretches that fit a model's context."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvine.errors import RequestError
from kvine.text.tokenizer import Tokenizer

LEAST_TOKENS = 2  # one to read, one to predict
CHARACTERS = 16  # of prose for each token that is wanted, more than any tokenizer makes of one


@dataclass(frozen=True)
class Stretch:
    """A part of a text, read from an empty cache.

    Attributes:
        ids: its tokens, the model's own beginning of a text first if it has one.
        first: the first of them that is scored; those before it are there to be read only.
    """

    ids: tuple[int, ...]
    first: int

    @property
    def num_scored(self) -> int:
        """Tokens that are scored."""
        return len(self.ids) - self.first


def prose(tokens: int | None = None) -> str:
    """The help texts of Python's own language, one after the other: belongs to a version of Python.

    Args:
        tokens: how many are wanted at least, whatever the tokenizer; None: all there are.
    """
    from pydoc_data.topics import topics

    text = "\n\n".join(topics[name] for name in sorted(topics))
    return text if tokens is None else text[: tokens * CHARACTERS]


def first_tokens(tokenizer: Tokenizer, text: str, tokens: int) -> list[int]:
    """The first tokens of a text, as many as it has up to `tokens`, without what the model's texts begin with."""
    ids = tokenizer.encode(text[: tokens * CHARACTERS], add_special=False)
    if len(ids) <= tokens:  # a long text of long tokens, or a short one
        ids = tokenizer.encode(text, add_special=False)
    return ids[:tokens]


def beginning(tokenizer: Tokenizer) -> list[int]:
    """What a model's texts begin with, by its tokenizer's own rule: nothing, or its BOS."""
    plain, begun = tokenizer.encode("a", add_special=False), tokenizer.encode("a")
    return begun[: len(begun) - len(plain)]


def stretches(begin: Sequence[int], ids: Sequence[int], context: int, stride: int) -> list[Stretch]:
    """Cuts a text so that each of its tokens but the first is scored once.

    Args:
        begin: what every stretch begins with.
        ids: the text without it.
        context: most tokens of a stretch, `begin` included.
        stride: how far apart stretches begin; where it is less than there is room, each begins with the end of the one
            before it, so that no token is scored with little to go by.

    Raises:
        RequestError: if the numbers leave nothing to score.
    """
    room = context - len(begin)
    if room < LEAST_TOKENS or len(ids) < LEAST_TOKENS:
        raise RequestError(f"{min(context, len(ids))} tokens are too few: there must be one to read and one to score.")
    if not 1 <= stride <= room:
        raise RequestError(f"--stride is {stride:,}: give 1 to {room:,}, the tokens of a stretch.")
    parts: list[Stretch] = []
    scored = 0 if begin else 1  # the first token follows nothing
    for start in range(0, len(ids), stride):
        part = ids[start : start + room]
        first = max(scored - start, 0 if begin else 1)
        if first < len(part):
            parts.append(Stretch((*begin, *part), len(begin) + first))
        scored = start + len(part)
        if scored == len(ids):
            break
    return parts
