"""Needle in a haystack: a fact hidden at some depth of a long text, and asked for at its end.

The text goes on where the fact's own sentence began, so any decoder can be asked, tuned for conversations or not.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING

import torch

from kvine.errors import ContextLengthError, RequestError
from kvine.evidence.progress import Progress, silent
from kvine.evidence.quality.policies import Policy
from kvine.evidence.quality.reader import Reader, read_all
from kvine.evidence.quality.scores import losses
from kvine.evidence.quality.texts import beginning, prose

if TYPE_CHECKING:
    from kvine.llm import LLM
    from kvine.text.tokenizer import Tokenizer

DEPTHS = (0, 25, 50, 75, 100)
LENGTHS = (512, 1024, 2048)


@dataclass(frozen=True)
class Fact:
    """A sentence in two parts: what is asked again, and what must follow, with the space before it."""

    lead: str
    answer: str


FACTS = (
    Fact("The password of the lighthouse keeper is", " banana"),
    Fact("The treasure of the old pirate is buried in", " Lisbon"),
    Fact("The name of the librarian's parrot is", " Ruby"),
)


@dataclass(frozen=True)
class Haystack:
    """A text in token ids, its fact in it; `at` is the position of the fact's first token."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    at: int


@dataclass(frozen=True)
class Cell:
    """One policy at one length and depth.

    Attributes:
        policy: its name.
        length: tokens of the text, question included.
        depth: where the fact stands, per cent of the filler before it.
        facts: hidden one at a time.
        found: of them, those whose answer is what the model writes, greedily.
        loglik: mean log-likelihood of an answer, nats.
        loglik_exact: the same by the exact cache.
    """

    policy: str
    length: int
    depth: int
    facts: int
    found: int
    loglik: float
    loglik_exact: float


def haystack(tokenizer: "Tokenizer", fact: Fact, length: int, depth: int, filler: Sequence[int]) -> Haystack:
    """A text of exactly `length` tokens up to the answer.

    Args:
        tokenizer: of the model.
        fact: hidden in it.
        length: in tokens, what the model's texts begin with and the question included.
        depth: per cent of the filler that stand before the fact; it is put behind the nearest line end before.
        filler: at least that many tokens of other text.

    Raises:
        RequestError: if the length has no room for fact and question.
    """
    begin = beginning(tokenizer)
    needle = tokenizer.encode(f"{fact.lead}{fact.answer}.\n", add_special=False)
    question = tokenizer.encode(f"\n\n{fact.lead}", add_special=False)
    room = length - len(begin) - len(needle) - len(question)
    if room < 0:
        raise RequestError(f"{length} tokens have no room for a fact and its question: give {length - room} or more.")
    hay = list(filler[:room])
    assert len(hay) == room, "there is less filler than that"
    at = room * depth // 100
    while at > 0 and b"\n" not in tokenizer.token_bytes(hay[at - 1]):
        at -= 1
    prompt = (*begin, *hay[:at], *needle, *hay[at:], *question)
    return Haystack(prompt, tuple(tokenizer.encode(fact.answer, add_special=False)), len(begin) + at)


def check_needle(lengths: Sequence[int], depths: Sequence[int], context: int | None = None) -> None:
    """Says what can be said before anything is read. Raises RequestError or ContextLengthError."""
    if not lengths or min(lengths) < 1:
        raise RequestError("--needle-lengths takes numbers of tokens, such as 512,1024.")
    if not depths or min(depths) < 0 or max(depths) > 100:
        raise RequestError("--needle-depths takes per cents from 0 to 100, such as 0,50,100.")
    if context is not None and max(lengths) >= context:
        raise ContextLengthError(
            f"A haystack of {max(lengths):,} tokens and its answer do not fit the model's context of {context:,}: give "
            "less to --needle-lengths."
        )


def find_needles(
    llm: "LLM",
    policies: Sequence[Policy],
    *,
    lengths: Sequence[int] = LENGTHS,
    depths: Sequence[int] = DEPTHS,
    facts: Sequence[Fact] = FACTS,
    progress: Progress = silent,
) -> tuple[Cell, ...]:
    """Asks for each fact at each depth and length, by each policy; the exact one must be the first.

    Raises:
        RequestError, ContextLengthError: for a length or depth that cannot be.
    """
    check_needle(lengths, depths, llm.model.config.max_context)
    filler = llm.tokenizer.encode(prose(max(lengths)), add_special=False)
    texts = {
        (length, depth): [haystack(llm.tokenizer, fact, length, depth, filler) for fact in facts]
        for length in lengths
        for depth in depths
    }
    total, done = len(policies) * len(texts) * len(facts), 0
    found: dict[tuple[str, int, int], list[tuple[bool, float]]] = {}
    for policy in policies:
        with Reader(llm, policy.cache, max(lengths) + 64) as reader:
            for place, hidden in texts.items():
                for text in hidden:
                    progress("needles", done, total)
                    found.setdefault((policy.name, *place), []).append(_ask(reader, text))
                    done += 1
    progress("needles", total, total)
    return tuple(
        Cell(
            policy=name,
            length=length,
            depth=depth,
            facts=len(answers),
            found=sum(right for right, _ in answers),
            loglik=fmean(likely for _, likely in answers),
            loglik_exact=fmean(likely for _, likely in found[policies[0].name, length, depth]),
        )
        for (name, length, depth), answers in found.items()
    )


@torch.inference_mode()
def _ask(reader: Reader, text: Haystack) -> tuple[bool, float]:
    """Whether greedy decoding writes the answer, and the answer's log-likelihood, nats.

    The answer is fed as it should be: greedy decoding writes it exactly if each of its tokens is the likeliest.
    """
    reader.begin()
    rows = [read_all(reader, text.prompt)]
    rows += [reader.read([token], last=True)[0] for token in text.answer[:-1]]
    logits = torch.stack(rows)
    right = logits.argmax(-1).tolist() == list(text.answer)
    return right, -math.fsum(losses(logits, text.answer))
