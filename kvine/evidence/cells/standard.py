"""The factors that every engine has: what is read, how it is fed, kept and attended to, and what happens beside it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

from kvine.cache.layout import PACKED_BITS
from kvine.config import KV_DTYPES, PACKED_CODECS, CacheConfig
from kvine.engine.build import usable_backends
from kvine.evidence.cells.drive import WRONG_TOKENS, cropped, edited, forked, queued
from kvine.evidence.cells.factors import Factor, Level, Scope, register
from kvine.evidence.cells.setup import Setup
from kvine.models.cache_specs import cache_specs

WINDOW, SINKS = 12, 3  # shorter than most prompts; sinks end within a block, whatever its size but 1 and 3
PREEMPT_EVERY = 3  # steps
MATE_LENGTHS = (13, 6, 1)
Values = Mapping[str, Any]


@register
def prompt(scope: Scope) -> Factor:
    """What is read."""

    def level(index: int) -> Level:
        chosen = scope.prompts[index]
        total = len(chosen.ids) + scope.new_tokens + WRONG_TOKENS
        unfit = None
        if total > scope.model.max_context:
            unfit = (
                f"{total} tokens, wrong ones included, are more than the model's context of {scope.model.max_context}."
            )
        return Level(chosen.name, lambda setup: replace(setup, prompt=chosen), chosen, unfit)

    return Factor("prompt", tuple(level(index) for index in range(len(scope.prompts))))


@register
def dtype(scope: Scope) -> Factor:
    """What the model computes in."""
    return Factor("dtype", _levels(scope.dtypes, lambda setup, name: replace(setup, dtype=name)))


@register
def feeding(scope: Scope) -> Factor:
    """How many tokens one model call takes, over all requests."""

    def apply(setup: Setup, tokens: int | None) -> Setup:
        return setup if tokens is None else replace(setup, engine=replace(setup.engine, max_step_tokens=tokens))

    sizes: dict[str, int | None] = {"at once": None, "chunks of 7": 7}
    if not scope.quick:
        sizes |= {"1 at a time": 1, "chunks of 31": 31, "chunks of 33": 33}

    def takes_effect(values: Values) -> bool:
        chunk, read = values.get("feeding"), values.get("prompt")
        return chunk is None or read is None or len(read.ids) > chunk

    longest = max(len(read.ids) for read in scope.prompts)
    levels = tuple(
        level
        if level.value is None or level.value < longest
        else replace(level, unfit=f"No prompt has more than {level.value} tokens.")
        for level in _named(sizes, apply)
    )
    return Factor("feeding", levels, takes_effect=takes_effect)


@register
def block_size(scope: Scope) -> Factor:
    """Tokens in a block."""
    sizes = (32, 3) if scope.quick else (32, 3, 1, 16)
    return Factor(
        "block size",
        _named({str(size): size for size in sizes}, lambda setup, size: _cache(setup, block_size=size)),
    )


@register
def prefix(scope: Scope) -> Factor:
    """Whether the beginning of the prompt was served before: not at all, in whole blocks, or up to within a block."""

    def apply(setup: Setup, kind: str) -> Setup:
        if kind == "miss":
            return setup
        return replace(setup, earlier=(*setup.earlier, _whole if kind == "blocks" else _partly), expects_hit=True)

    def refuse(values: Values) -> str | None:
        kind, size, read = values.get("prefix"), values.get("block size"), values.get("prompt")
        if kind == "partly" and size == 1:
            return "A block of one token matches in whole or not at all."
        if kind in ("blocks", "partly") and size is not None and read is not None:
            if kind == "blocks" and not _shared_blocks(len(read.ids), size):
                return f"The prompt has {len(read.ids)} tokens, no whole block of {size} before its last."
            if kind == "partly" and not _shared_tokens(len(read.ids), size):
                return f"The prompt has {len(read.ids)} tokens, too few to share a part of a block of {size}."
        if kind in ("blocks", "partly") and read is not None and len(read.ids) < 3:
            return f"The prompt has {len(read.ids)} tokens: nothing to share."
        return None

    return Factor("prefix", _named({"miss": "miss", "hit, blocks": "blocks", "hit, partly": "partly"}, apply), refuse)


@register
def mates(scope: Scope) -> Factor:
    """What runs beside the text: nothing, three requests of uneven length, or one that begins alike."""

    def apply(setup: Setup, kind: str) -> Setup:
        others = {"none": (), "uneven": tuple(_mate(n) for n in MATE_LENGTHS), "twin": (_twin,)}[kind]
        return replace(setup, mates=(*setup.mates, *others))

    kinds = {"none": "none", "three, uneven": "uneven", "begins alike": "twin"}

    def takes_effect(values: Values) -> bool:  # in one model call with the text
        together = values.get("history", queued) is queued and not values.get("memory")
        return values.get("mates") == "none" or together

    return Factor("mates", _named(kinds, apply), takes_effect=takes_effect)


@register
def preemption(scope: Scope) -> Factor:
    """Whether the text has to give its blocks up every few steps."""

    def apply(setup: Setup, forced: bool) -> Setup:
        return replace(setup, preempt_every=PREEMPT_EVERY) if forced else setup

    def refuse(values: Values) -> str | None:
        if values.get("preemption") and values.get("history", queued) is not queued:
            return "Only queued requests give way; caches stepped by hand keep what they hold."
        return None

    return Factor("preemption", _named({"none": False, f"every {PREEMPT_EVERY} steps": True}, apply), refuse)


@register
def memory(scope: Scope) -> Factor:
    """Whether the cache has room for all, or only for this text, so that mates wait and blocks are evicted."""

    def refuse(values: Values) -> str | None:
        if values.get("memory") and values.get("history", queued) is not queued:
            return "Caches stepped by hand do not wait for memory; forks and detours need some of their own."
        return None

    def takes_effect(values: Values) -> bool:  # somebody else has to want it
        return not values.get("memory") or values.get("mates") != "none"

    levels = _named({"ample": False, "one request": True}, lambda setup, tight: replace(setup, tight=tight))
    return Factor("memory", levels, refuse, takes_effect)


@register
def history(scope: Scope) -> Factor:
    """How the text comes about: queued, or stepped by hand with a fork, a crop, or an edited prompt."""

    def refuse(values: Values) -> str | None:
        read = values.get("prompt")
        if values.get("history") is edited and read is not None and len(read.ids) < 3:
            return f"The prompt has {len(read.ids)} tokens: too short to be edited."
        return None

    kinds = {"queued": queued, "fork": forked, "crop": cropped, "edit": edited}
    return Factor("history", _named(kinds, lambda setup, how: replace(setup, history=how)), refuse)


@register
def beams(scope: Scope) -> Factor:
    """Whether the text comes about by beam search, compared with one that recomputes each beam's whole text."""

    def refuse(values: Values) -> str | None:
        count, chunk = values.get("beams", 1), values.get("feeding")
        if count > 1 and values.get("history", queued) is not queued:
            return "Caches stepped by hand do not search; their forks are made by hand."
        if chunk is not None and count > chunk:
            return f"{count} beams take {count} tokens in each step, and a step takes {chunk}."
        return None

    return Factor("beams", _named({"1": 1, "3": 3}, lambda setup, count: replace(setup, num_beams=count)), refuse)


@register
def store(scope: Scope) -> Factor:
    """Whether what was served before comes from memory, or from a folder on disk that another engine has filled."""

    def refuse(values: Values) -> str | None:
        if values.get("store") and values.get("prefix") == "partly":
            return "What comes back from a store are whole blocks."
        return None

    def takes_effect(values: Values) -> bool:  # something has to come back
        return not values.get("store") or values.get("prefix") != "miss"

    levels = _named({"none": False, "disk": True}, lambda setup, on_disk: replace(setup, on_disk=on_disk))
    missing = None if find_spec("lmdb") else "It takes `pip install 'kvine[store]'`."
    return Factor("store", (levels[0], replace(levels[1], unfit=missing)), refuse, takes_effect)


@register
def backend(scope: Scope) -> Factor:
    """The attention backend: each that an engine can be built with."""
    names = usable_backends(cache_specs(scope.model, CacheConfig()), scope.device)
    return Factor(
        "backend", _levels(names, lambda setup, name: replace(setup, engine=replace(setup.engine, backend=name)))
    )


@register
def codec(scope: Scope) -> Factor:
    """What K and V are stored as. Lossy ones are compared with an oracle of the same loss."""

    def refuse(values: Values) -> str | None:
        kept, computed = values.get("codec"), values.get("dtype")
        if kept in (None, "exact"):
            return None
        if kept in PACKED_CODECS:
            each, size = 8 // PACKED_BITS[kept], values.get("block size")
            if size is not None and size % each:
                return f"Keys in {kept} share bytes among {each} tokens, and a block has {size}."
            if values.get("prefix") == "partly":
                return "A packed block matches in whole or not at all."
            return None
        if kept == computed:
            return f"{kept} in a model that computes in {kept} is exact."
        return None

    names = ("exact", "fp16") if scope.quick else KV_DTYPES
    return Factor("codec", _levels(names, lambda setup, name: _cache(setup, kv_dtype=name)), refuse)


@register
def window(scope: Scope) -> Factor:
    """What a query sees: all, a window, or beside it sinks (at their distance or in the cache), global tokens, pins."""
    kept = ((SINKS, 2 * SINKS),)
    options: dict[str, dict[str, Any]] = {
        "none": {},
        "window": {"window": WINDOW},
        "sinks": {"window": WINDOW, "sink_tokens": SINKS},
        "in_cache": {"window": WINDOW, "sink_tokens": SINKS, "sink_rule": "in_cache"},
        "global": {"window": WINDOW, "global_tokens": kept},
        "pinned": {"window": WINDOW},
    }

    def takes_effect(values: Values) -> bool:
        read = values.get("prompt")
        return values.get("window") == "none" or read is None or len(read.ids) > WINDOW + SINKS

    if scope.quick:
        for name in ("window", "global", "pinned"):
            del options[name]

    def apply(setup: Setup, name: str) -> Setup:
        return replace(_cache(setup, **options[name]), pinned=kept if name == "pinned" else ())

    def refuse(values: Values) -> str | None:
        read = values.get("prompt")
        if values.get("window") == "pinned" and read is not None and len(read.ids) < 2 * SINKS:
            return f"The prompt has {len(read.ids)} tokens: too short to pin some behind its first {SINKS}."
        return None

    return Factor("window", _levels(tuple(options), apply), refuse, takes_effect=takes_effect)


def _named(values: Mapping[str, Any], apply: Callable[[Setup, Any], Setup]) -> tuple[Level, ...]:
    def level(name: str, value: Any) -> Level:
        return Level(name, lambda setup: apply(setup, value), value)

    return tuple(level(name, value) for name, value in values.items())


def _levels(names: Sequence[str], apply: Callable[[Setup, str], Setup]) -> tuple[Level, ...]:
    return _named({name: name for name in names}, apply)


def _cache(setup: Setup, **options: Any) -> Setup:
    return replace(setup, cache=replace(setup.cache, **options))


def _shared_blocks(length: int, size: int) -> int:
    """Tokens in half of the prompt's whole blocks, at least one block, and never its last token; 0 if there is none."""
    blocks = (length - 1) // size
    return (blocks + 1) // 2 * size


def _shared_tokens(length: int, size: int) -> int:
    """Tokens from the prompt's start, about two thirds of them, that end within a block; 0 if none do."""
    end = min((length - 1) * 2 // 3, length - 2)
    return end if end % size else end - 1 if end > 1 and (end - 1) % size else 0


def _begins_alike(ids: Sequence[int], shared: int) -> list[int]:
    """A prompt that parts from another after `shared` tokens."""
    return [*ids[:shared], *(token - 1 if token else token + 1 for token in ids[shared:])]


def _whole(ids: Sequence[int], size: int) -> list[int]:
    return _begins_alike(ids, _shared_blocks(len(ids), size))


def _partly(ids: Sequence[int], size: int) -> list[int]:
    return _begins_alike(ids, _shared_tokens(len(ids), size))


def _mate(length: int) -> Callable[[Sequence[int], int], list[int]]:
    return lambda ids, size: list(reversed(ids))[:length]


def _twin(ids: Sequence[int], size: int) -> list[int]:
    return _begins_alike(ids, max(1, len(ids) * 3 // 4))
