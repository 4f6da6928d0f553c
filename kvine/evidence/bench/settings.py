"""What a bench measures, and the prompts that every engine reads."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvine.config import check_device, check_dtype
from kvine.engine.resources import checked_threads
from kvine.errors import ContextLengthError, RequestError
from kvine.evidence.prompts import DEFAULT_PROMPT, QUESTION, fox_prompt
from kvine.models.packing import check_weights
from kvine.text.tokenizer import Tokenizer

WHAT = ("ready", "prefill", "decode", "batch", "prefix_hit", "peak_memory", "cache_free")
MOST_REQUESTS = 256  # what an engine runs at once
PATIENCE = 900.0
MOST_PATIENCE = 86_400.0  # a day
WARM_UP_TOKENS = 16


@dataclass(frozen=True)
class Settings:
    """What to measure, and how.

    Attributes:
        what: any of WHAT.
        repeats: of each figure, of which the median counts.
        tokens: new ones after each prompt.
        batches: numbers of requests at once.
        context: tokens of the long prompt; None for the default text.
        weights, dtype, device, threads: as `LLM` takes them.
        patience: seconds that an engine may take for one answer.
    """

    what: tuple[str, ...] = WHAT
    repeats: int = 3
    tokens: int = 64
    batches: tuple[int, ...] = (1, 8, 32, 64)
    context: int | None = None
    weights: str = "auto"
    dtype: str = "auto"
    device: str = "auto"
    threads: int | None = None
    patience: float = PATIENCE

    def __post_init__(self) -> None:
        check_device(self.device)
        check_dtype(self.dtype)
        check_weights(self.weights)
        if self.threads is not None:
            checked_threads(self.threads)
        if unknown := [name for name in self.what if name not in WHAT]:
            raise RequestError(f"A bench does not measure {unknown[0]!r}: choose among {', '.join(WHAT)}.")
        if not self.what:
            raise RequestError(f"What to measure? Choose among {', '.join(WHAT)}.")
        if self.repeats < 1 or self.tokens < 2:
            raise RequestError("A bench needs at least 1 repeat and 2 tokens: the first is prefill, the others decode.")
        if any(not 1 <= batch <= MOST_REQUESTS for batch in self.batches):
            raise RequestError(f"A batch has 1 to {MOST_REQUESTS} requests.")
        if self.context is not None and self.context < 2:
            raise RequestError("A context has at least 2 tokens.")
        if not 0 < self.patience <= MOST_PATIENCE:
            raise RequestError(
                f"An engine needs some time to answer: give a timeout of up to {MOST_PATIENCE:,.0f} seconds."
            )

    def wants(self, *what: str) -> bool:
        """Whether any of these is to be measured."""
        return any(name in self.what for name in what)


@dataclass(frozen=True)
class Prompts:
    """The same token ids for all engines.

    Attributes:
        short: a question of a few tokens.
        long: the text about the fox with that question at its end.
        vocab_size: ids that there are.
        was_cut: whether the long one was shortened to fit the model.
    """

    short: list[int]
    long: list[int]
    vocab_size: int
    was_cut: bool

    def several(self, count: int) -> list[list[int]]:
        """The short prompt so many times, each with another first token, so that none shares its K and V."""
        return [[(self.short[0] + number) % self.vocab_size, *self.short[1:]] for number in range(count)]


def prompts_for(tokenizer: Tokenizer, settings: Settings, max_context: int | None) -> Prompts:
    """The prompts of a model. Raises ContextLengthError if not even the short one fits its context."""
    short, long = tokenizer.encode(QUESTION), _long(tokenizer, settings.context)
    room = len(long) if max_context is None else max_context - settings.tokens
    if len(short) > room:
        raise ContextLengthError(
            f"{len(short)} tokens of prompt and {settings.tokens} new ones exceed the model's context of "
            f"{max_context}: give fewer --tokens."
        )
    return Prompts(short, long[-room:], tokenizer.vocab_size, len(long) > room)


def _long(tokenizer: Tokenizer, context: int | None) -> list[int]:
    if context is None:
        return tokenizer.encode(DEFAULT_PROMPT)
    sentences = 1
    while len(ids := tokenizer.encode(fox_prompt(sentences))) < context:
        sentences *= 2
    return ids[-context:]


def leading_matches(ours: Sequence[int], theirs: Sequence[int]) -> int:
    """How many tokens two texts begin with in common."""
    count = 0
    for a, b in zip(ours, theirs, strict=False):
        if a != b:
            break
        count += 1
    return count
