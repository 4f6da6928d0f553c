"""The same model with more or fewer KV heads, in fewer bits, or behind a window: what each would save."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Literal, get_args

from kvine.errors import ConfigError
from kvine.evidence.plan.answer import Plan
from kvine.evidence.plan.planner import Planner
from kvine.evidence.plan.weights import Weights

Axis = Literal["attention", "bits", "window"]
AXES: tuple[Axis, ...] = get_args(Axis)
BITS = (16, 8, 4)
WINDOWS = (4096, 1024)


@dataclass(frozen=True)
class Variant:
    """One row of a comparison: what is changed, in words, and the plan with it."""

    axis: Axis
    name: str
    plan: Plan


def compare(planned: Plan, axis: Axis) -> tuple[Variant, ...]:
    """The plan beside its variants along one axis.

    * `attention`: from one KV head for each query head (MHA) through groups (GQA) to one for all (MQA);
    * `bits`: weights and K and V in 16, 8 and 4 bits a number, without the scales that packing needs;
    * `window`: the whole past, and windows that are shorter than the planned context.

    Raises:
        ConfigError: if the number of query heads is unknown, for `attention`.
    """
    variants: dict[Axis, Callable[[Plan], Iterator[Variant]]] = {
        "attention": _attention,
        "bits": _bits,
        "window": _window,
    }
    return tuple(variants[axis](planned))


def planner_of(planned: Plan, **changed: object) -> Planner:
    """The formulas behind a plan, some of their arguments exchanged."""
    arguments = {
        "subject": planned.subject,
        "cache": planned.cache,
        "engine": planned.engine,
        "device": planned.device,
        "room": planned.fits.memory,
        "speed": planned.walls.bandwidth,
        "sequences": planned.sequences,
        "shared": planned.shared,
    }
    return Planner(**(arguments | changed))  # type: ignore[arg-type]  # each is of its own argument's type


def _again(planned: Plan, axis: Axis, name: str, **changed: object) -> Variant:
    return Variant(axis, name, planner_of(planned, **changed).plan(planned.context, planned.batch))


def _attention(planned: Plan) -> Iterator[Variant]:
    subject = planned.subject
    heads, own = subject.num_heads, subject.num_kv_heads
    if heads is None:
        raise ConfigError("How many query heads share the KV heads? Give --heads, to compare MHA, GQA and MQA.")
    numbers = {heads, own, 1} | {heads // share for share in (4, 8) if heads % share == 0}
    for number in sorted(numbers, reverse=True):
        kind = "MHA" if number == heads else "MQA" if number == 1 else "GQA"
        name = f"{kind}, {number} KV head{'s' if number > 1 else ''}" + (" (as it is)" if number == own else "")
        weights = subject.weights if subject.recount is None or number == own else subject.recount(number)
        model = subject.model and replace(subject.model, num_kv_heads=number)
        changed = replace(subject, num_kv_heads=number, weights=weights, model=model)
        yield _again(planned, "attention", name, subject=changed)


def _bits(planned: Plan) -> Iterator[Variant]:
    subject = planned.subject
    for bits in BITS:
        weights = None if subject.weights is None else _in_bits(subject.weights, bits)
        fewer = replace(subject, weights=weights, packings={})
        yield _again(planned, "bits", f"{bits} bits", subject=fewer, kv_bits=bits)


def _in_bits(weights: Weights, bits: int) -> Weights:
    if weights.parameters is None:
        return weights
    return weights.scaled(weights.parameters * bits // 8, f"{weights.parameters:,} parameters in {bits} bits")


def _window(planned: Plan) -> Iterator[Variant]:
    cache = planned.cache
    whole = replace(cache, window=None, sink_tokens=0, global_tokens=())
    name = "the model's own" if any(layer.window for layer in planned.subject.layers) else "the whole past"
    yield _again(planned, "window", name, cache=whole)
    windows = {window for window in WINDOWS if window < planned.context} | ({cache.window} if cache.window else set())
    for window in sorted(windows, reverse=True):
        yield _again(planned, "window", f"window of {window:,}", cache=replace(cache, window=window))
