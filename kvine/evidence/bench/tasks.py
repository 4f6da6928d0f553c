"""What every engine is asked to do, and which figures come of its answers."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from kvine.evidence.bench.settings import Prompts, Settings

STEPS_BESIDE_CACHE_FREE = 4
Answer = dict[str, Any]


class Key(NamedTuple):
    """What a figure is of: see `report.Row`. `cache_free` and `cached` are Kvine's two ways to one more token."""

    what: str
    context: int
    batch: int


@dataclass(frozen=True)
class Task:
    """A command for an engine's process.

    Attributes:
        do, ask: the command and its arguments.
        keys: of the figures that come of it, in the units of the report.
        take: the figures in an answer; None for one that the engine does not tell.
        only_kvine: whether other engines have nothing like it.
    """

    do: str
    ask: Answer
    keys: tuple[Key, ...]
    take: Callable[[Answer], Sequence[float | None]]
    only_kvine: bool = False


def tasks_of(settings: Settings, prompts: Prompts) -> Iterator[Task]:
    """All that is wanted but what a fresh process shows, `ready` and `peak_memory`."""
    short, long = len(prompts.short), len(prompts.long)
    if settings.wants("decode"):
        ask = {"ids": prompts.short, "tokens": settings.tokens}
        yield Task("generate", ask, (Key("decode", short, 1),), _step_ms)
    if settings.wants("prefill", "decode"):
        yield _long_generation(settings, prompts)
    for batch in settings.batches if settings.wants("batch") else ():
        ask = {"prompts": prompts.several(batch), "tokens": settings.tokens}
        yield Task("batch", ask, (Key("batch", short, batch),), _rate(batch * settings.tokens))
    if settings.wants("prefix_hit"):
        yield Task("prefix_hit", {"ids": prompts.long}, (Key("prefix_hit", long, 1),), _whole_ms)
    if settings.wants("cache_free"):
        ask = {"ids": prompts.long, "tokens": STEPS_BESIDE_CACHE_FREE}
        yield Task("cache_free", {"ids": prompts.long}, (Key("cache_free", long, 1),), _whole_ms, only_kvine=True)
        yield Task("generate", ask, (Key("cached", long, 1),), _step_ms, only_kvine=True)


def _long_generation(settings: Settings, prompts: Prompts) -> Task:
    """Prefill and decode at the long context come from the same runs."""
    wanted = [what for what in ("prefill", "decode") if settings.wants(what)]
    ask = {"ids": prompts.long, "tokens": settings.tokens if "decode" in wanted else 1}

    def take(answer: Answer) -> list[float | None]:
        figures = {"prefill": answer["first_s"], "decode": _step_ms(answer)[0]}
        return [figures[what] for what in wanted]

    return Task("generate", ask, tuple(Key(what, len(prompts.long), 1) for what in wanted), take)


def _step_ms(answer: Answer) -> list[float | None]:
    return [None if answer["step_s"] is None else answer["step_s"] * 1e3]


def _whole_ms(answer: Answer) -> list[float | None]:
    return [answer["seconds"] * 1e3]


def _rate(tokens: int) -> Callable[[Answer], Sequence[float | None]]:
    return lambda answer: [tokens / answer["seconds"]]
