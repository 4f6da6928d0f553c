"""The open registry of what `verify` varies. A policy, a kernel or a store joins by registering; no list is edited.

A factor has levels; a cell takes one level of each. `standard` registers the factors that every engine has.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvine.evidence.cells.setup import Prompt, Setup
from kvine.models.config import ModelConfig

# Values of the levels chosen so far, by factor → why they cannot go together, or None. Further choices never lift a
# refusal.
Refuse = Callable[[Mapping[str, Any]], str | None]
# Values of chosen levels, the factor's own among them → whether that one makes a difference beside them.
TakesEffect = Callable[[Mapping[str, Any]], bool]


def never(_: Mapping[str, Any]) -> str | None:
    """Refuses nothing."""
    return None


def always(_: Mapping[str, Any]) -> bool:
    """Makes a difference beside everything."""
    return True


@dataclass(frozen=True)
class Level:
    """One way to choose.

    Attributes:
        name: shown in reports.
        apply: makes the choice; each level changes fields of its own.
        value: what `Refuse` sees of it.
        unfit: why this model cannot be run so; None if it can.
    """

    name: str
    apply: Callable[[Setup], Setup]
    value: Any = None
    unfit: str | None = None


@dataclass(frozen=True)
class Factor:
    """One thing that is varied; its first level is the plain one.

    Attributes:
        name: shown in reports.
        levels: to choose from.
        refuse: which choices cannot go together.
        takes_effect: beside which choices a level makes a difference: only there does it count as tried.
    """

    name: str
    levels: tuple[Level, ...]
    refuse: Refuse = never
    takes_effect: TakesEffect = always


@dataclass(frozen=True)
class Scope:
    """What a run of cells is about, for factors to make their levels from.

    Attributes:
        model: the model.
        prompts: what cells read.
        dtypes: what the model computes in.
        new_tokens: after each prompt.
        quick: whether few levels should do.
        device: where the model is.
    """

    model: ModelConfig
    prompts: tuple[Prompt, ...]
    dtypes: tuple[str, ...]
    new_tokens: int
    quick: bool
    device: torch.device


FactorMaker = Callable[[Scope], Factor]
_MAKERS: list[FactorMaker] = []


def register(make: FactorMaker) -> FactorMaker:
    """Has every later run vary one more factor, or further levels of one that is registered under the same name.

    Usable as a decorator. Order matters: levels are applied factor by factor.
    """
    _MAKERS.append(make)
    return make


def registered(scope: Scope) -> list[Factor]:
    """The factors of a run. Factors of one name become one, which refuses what any of them does."""
    import kvine.evidence.cells.standard  # noqa: F401  # registers the standard ones, first of all

    joined: dict[str, Factor] = {}
    for make in _MAKERS:
        factor = make(scope)
        known = joined.get(factor.name, Factor(factor.name, ()))
        joined[factor.name] = Factor(
            factor.name,
            known.levels + factor.levels,
            _either(known.refuse, factor.refuse),
            _both(known.takes_effect, factor.takes_effect),
        )
    return list(joined.values())


def refusal(factors: Sequence[Factor], chosen: Mapping[str, Level]) -> str | None:
    """Why levels cannot go together; None if no factor refuses."""
    values = {name: level.value for name, level in chosen.items()}
    return next((reason for factor in factors if (reason := factor.refuse(values)) is not None), None)


def tried(factors: Mapping[str, Factor], chosen: Mapping[str, Level], pair: Sequence[str]) -> bool:
    """Whether the levels of two factors make a difference together, with all the other choices of a cell.

    What one of the two does to the other is what is tried, so each is judged beside the rest only.
    """
    values = {name: level.value for name, level in chosen.items()}
    one, other = pair
    return all(
        factors[name].takes_effect({key: value for key, value in values.items() if key != without})
        for name, without in ((one, other), (other, one))
    )


def _either(first: Refuse, second: Refuse) -> Refuse:
    return lambda values: first(values) or second(values)


def _both(first: TakesEffect, second: TakesEffect) -> TakesEffect:
    return lambda values: first(values) and second(values)
