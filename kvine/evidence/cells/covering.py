"""A covering design: few cells in which every two levels of different factors meet at least once.

Nearly all faults that depend on options depend on one or two of them (Kuhn, Wallace and Gallo, IEEE TSE 30(6), 2004);
a design for pairs needs dozens of cells where the full product has hundreds of thousands.
"""

import itertools
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from kvine.evidence.cells.factors import Factor, Level, refusal, tried

CANDIDATES = 12  # cells drawn for each one that is kept
MOST_STEPS = 5000  # of a search for one cell; what is not found by then counts as impossible

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

    A pair counts where both levels take effect, if there is any such cell; otherwise where they meet. Deterministic for
    a seed. The plain cell, the first level of each factor, comes first where it is possible.

    Args:
        factors: what to vary; where one has no level that fits the model, there is no cell.
        seed: of the random choices.
    """
    refused = [
        Refusal(((factor.name, level.name),), level.unfit)
        for factor in factors
        for level in factor.levels
        if level.unfit is not None
    ]
    fitting = [replace(f, levels=levels) for f in factors if (levels := tuple(x for x in f.levels if x.unfit is None))]
    if len(fitting) < len(factors):
        return Design((), 0, tuple(refused), seed)
    missing: dict[Pair, Choice] = {}  # in order
    for a, b in itertools.combinations(fitting, 2):
        for one, other in itertools.product(a.levels, b.levels):
            choice = {a.name: one, b.name: other}
            if (reason := refusal(factors, choice)) is not None:
                refused.append(Refusal(((a.name, one.name), (b.name, other.name)), reason))
            else:
                missing[_pair(choice)] = choice
    search = _Search(fitting, missing, random.Random(seed))
    for begin in search.drop_impossible():
        two = tuple((name, level.name) for name, level in begin.items())
        refused.append(Refusal(two, "No choice of the other options goes with these two."))
    pairs = len(missing)
    cells: list[Choice] = []
    plain = {factor.name: factor.levels[0] for factor in fitting}
    if refusal(fitting, plain) is None:
        cells.append(plain)
        search.strike(plain)
    while missing:
        best = search.best_with(next(iter(missing.values())))
        cells.append({factor.name: best[factor.name] for factor in fitting})
        search.strike(best)
    return Design(tuple(cells), pairs, tuple(refused), seed)


class _Search:
    """Draws cells; `missing` shrinks as pairs are struck off."""

    def __init__(self, factors: Sequence[Factor], missing: dict[Pair, Choice], chance: random.Random) -> None:
        self._factors = {factor.name: factor for factor in factors}
        self._missing = missing
        self._chance = chance
        self._steps_left = MOST_STEPS
        self._anyhow: set[Pair] = set()  # pairs that count wherever they meet
        self._examples: dict[Pair, Choice] = {}  # for each missing pair a cell that holds it

    def strike(self, cell: Choice) -> None:
        """Counts a cell's pairs as covered."""
        for pair in self._tried(cell):
            self._missing.pop(pair, None)

    def drop_impossible(self) -> list[Choice]:
        """Takes pairs that no cell can hold out of what is missing, and returns them."""
        dropped = []
        for pair, begin in list(self._missing.items()):
            example = self._complete(begin)
            if example is None:
                self._anyhow.add(pair)
                example = self._complete(begin)
            if example is None:
                dropped.append(self._missing.pop(pair))
            else:
                self._examples[pair] = example
        return dropped

    def best_with(self, begin: Choice) -> Choice:
        """Of some cells that hold a missing pair, the one with most of them."""
        drawn = [cell for _ in range(CANDIDATES) if (cell := self._complete(begin)) is not None]
        return max(
            (*drawn, self._examples[_pair(begin)]),
            key=lambda cell: sum(pair in self._missing for pair in self._tried(cell)),
        )

    def _complete(self, begin: Choice) -> Choice | None:
        """A random cell that holds a pair which counts there; None if there is none."""
        # In the order of registering: what others depend on, such as the prompt, comes first, and dead ends show early.
        rest = [factor for name, factor in self._factors.items() if name not in begin]
        self._steps_left = MOST_STEPS
        return self._extend(dict(begin), rest, () if _pair(begin) in self._anyhow else tuple(begin))

    def _extend(self, chosen: dict[str, Level], rest: Sequence[Factor], pair: tuple[str, ...]) -> Choice | None:
        """Chooses the rest such that nothing is refused, and the levels of `pair` make a difference."""
        self._steps_left -= 1
        if self._steps_left < 0 or (pair and not tried(self._factors, chosen, pair)):
            return None
        if not rest:
            return chosen
        levels = list(rest[0].levels)
        self._chance.shuffle(levels)
        levels.sort(key=lambda level: -self._new_pairs(rest[0].name, level, chosen))
        for level in levels:
            extended = {**chosen, rest[0].name: level}
            if refusal(list(self._factors.values()), extended) is None:
                cell = self._extend(extended, rest[1:], pair)
                if cell is not None:
                    return cell
        return None

    def _new_pairs(self, name: str, level: Level, chosen: Choice) -> int:
        return sum(_pair({name: level, other: known}) in self._missing for other, known in chosen.items())

    def _tried(self, cell: Choice) -> list[Pair]:
        pairs = ((two, _pair({name: cell[name] for name in two})) for two in itertools.combinations(cell, 2))
        return [pair for two, pair in pairs if pair in self._anyhow or tried(self._factors, cell, two)]


def _pair(choice: Choice) -> Pair:
    return frozenset((name, level.name) for name, level in choice.items())
