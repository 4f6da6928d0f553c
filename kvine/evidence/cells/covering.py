"""A covering design: few cells in which every two levels of different factors meet at least once.

Nearly all faults that depend on options depend on one or two of them (Kuhn, Wallace and Gallo, IEEE TSE 30(6), 2004);
a design for pairs needs dozens of cells where the full product has hundreds of thousands.
"""

import itertools
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvine.evidence.cells.factors import Factor, Level, refusal

CANDIDATES = 12  # cells drawn for each one that is kept

Pair = frozenset[tuple[str, str]]  # two (factor, level)
Choice = Mapping[str, Level]  # by factor


@dataclass(frozen=True)
class Refusal:
    """Levels that no cell combines, or a level that this model cannot be run with, and why."""

    levels: tuple[tuple[str, str], ...]  # (factor, level)
    reason: str


@dataclass(frozen=True)
class Design:
    """Cells to run.

    Attributes:
        cells: the level of each factor, by factor.
        pairs: pairs of levels that meet in them.
        refused: what does not, and why.
        seed: that it was drawn with.
    """

    cells: tuple[Choice, ...]
    pairs: int
    refused: tuple[Refusal, ...]
    seed: int


def cover(factors: Sequence[Factor], seed: int) -> Design:
    """Covers all pairs greedily: of some random cells that hold a pair still missing, keeps the one with most of them.

    Deterministic for a seed. The plain cell, the first level of each factor, comes first where it is possible.

    Args:
        factors: what to vary; a factor without a fitting level is left out.
        seed: of the random choices.
    """
    refused = [
        Refusal(((factor.name, level.name),), level.unfit)
        for factor in factors
        for level in factor.levels
        if level.unfit is not None
    ]
    fitting = [
        Factor(f.name, levels, f.refuse) for f in factors if (levels := tuple(x for x in f.levels if x.unfit is None))
    ]
    missing: dict[Pair, Choice] = {}  # in order
    for a, b in itertools.combinations(fitting, 2):
        for one, other in itertools.product(a.levels, b.levels):
            choice = {a.name: one, b.name: other}
            if (reason := refusal(factors, choice)) is not None:
                refused.append(Refusal(((a.name, one.name), (b.name, other.name)), reason))
            else:
                missing[_pair(choice)] = choice
    search = _Search(fitting, missing, random.Random(seed))
    cells: list[Choice] = []
    plain = {factor.name: factor.levels[0] for factor in fitting}
    if refusal(fitting, plain) is None:
        cells.append(plain)
        search.strike(plain)
    while missing:
        begin = next(iter(missing.values()))
        drawn = [cell for _ in range(CANDIDATES) if (cell := search.complete(begin)) is not None]
        if not drawn:
            two = tuple((name, level.name) for name, level in begin.items())
            refused.append(Refusal(two, "No choice of the other options goes with these two."))
            del missing[_pair(begin)]
            continue
        best = max(drawn, key=search.gain)
        cells.append({factor.name: best[factor.name] for factor in fitting})
        search.strike(best)
    return Design(tuple(cells), len({pair for cell in cells for pair in _pairs(cell)}), tuple(refused), seed)


class _Search:
    """Draws cells; `missing` shrinks as pairs are struck off."""

    def __init__(self, factors: Sequence[Factor], missing: dict[Pair, Choice], chance: random.Random) -> None:
        self._factors = factors
        self._missing = missing
        self._chance = chance

    def gain(self, cell: Choice) -> int:
        """How many missing pairs meet in a cell."""
        return sum(pair in self._missing for pair in _pairs(cell))

    def strike(self, cell: Choice) -> None:
        """Counts a cell's pairs as covered."""
        for pair in _pairs(cell):
            self._missing.pop(pair, None)

    def complete(self, begin: Choice) -> Choice | None:
        """A cell that holds `begin`; None if no choice of the rest is allowed."""
        rest = [factor for factor in self._factors if factor.name not in begin]
        self._chance.shuffle(rest)
        return self._extend(dict(begin), rest)

    def _extend(self, chosen: dict[str, Level], rest: Sequence[Factor]) -> Choice | None:
        if not rest:
            return chosen
        levels = list(rest[0].levels)
        self._chance.shuffle(levels)
        levels.sort(key=lambda level: -self._new_pairs(rest[0].name, level, chosen))
        for level in levels:
            chosen[rest[0].name] = level
            if refusal(self._factors, chosen) is None and (cell := self._extend(chosen, rest[1:])) is not None:
                return cell
            del chosen[rest[0].name]
        return None

    def _new_pairs(self, name: str, level: Level, chosen: Choice) -> int:
        return sum(_pair({name: level, other: known}) in self._missing for other, known in chosen.items())


def _pair(choice: Choice) -> Pair:
    return frozenset((name, level.name) for name, level in choice.items())


def _pairs(cell: Choice) -> list[Pair]:
    return [_pair(dict(two)) for two in itertools.combinations(cell.items(), 2)]
