"""Attention small enough to check by hand: four vectors of two numbers, three fixed matrices, plain Python floats.

Every step is a function of its own, so that a notebook or a page can show it with its numbers.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvine.errors import RequestError
from kvine.notebook import bar, page, table

Vector = tuple[float, ...]
Matrix = tuple[Vector, ...]

VECTORS: Matrix = ((1.0, 0.0), (0.0, 1.0), (1.0, 1.0), (-1.0, 1.0))  # one for each position
W_QUERY: Matrix = ((1.0, 1.0), (-1.0, 1.0))
W_KEY: Matrix = ((1.0, 0.0), (1.0, 1.0))
W_VALUE: Matrix = ((2.0, 0.0), (-1.0, 1.0))
MOST_Q_SCALE = 1e6


def dot(a: Vector, b: Vector) -> float:
    """Sum of the products of two vectors' numbers."""
    return sum(x * y for x, y in zip(a, b, strict=True))


def project(matrix: Matrix, vector: Vector) -> Vector:
    """Matrix [n, d] times vector [d] → [n]."""
    return tuple(dot(row, vector) for row in matrix)


def apply_mask(scores: Sequence[float], position: int) -> Vector:
    """The scores of keys after `position` become minus infinity: a query must not see the future."""
    return tuple(score if key <= position else -math.inf for key, score in enumerate(scores))


def softmax(scores: Sequence[float]) -> Vector:
    """exp(score) over the sum of all; the largest score is subtracted first, so that nothing overflows."""
    largest = max(scores)
    powers = [math.exp(score - largest) for score in scores]
    return tuple(power / sum(powers) for power in powers)


def weighted_sum(weights: Sequence[float], values: Sequence[Vector]) -> Vector:
    """Weights [n] times values [n, d] → [d]."""
    return tuple(dot(tuple(weights), column) for column in zip(*values, strict=True))


@dataclass(frozen=True)
class ToyAttention:
    """One query's way through attention, each step with its numbers.

    Attributes:
        position: whose query it is, from 0.
        q_scale: factor on the query.
        mask: whether later positions are hidden.
        query: [2], scaled by q_scale.
        keys, values: [4, 2], one for each position: what a cache would keep.
        scores: [4] dot products of the query and each key.
        scaled: [4] scores over √2, the square root of the vectors' length.
        masked: [4] scaled, minus infinity where the mask hides a key.
        weights: [4] softmax of masked; they add up to 1.
        output: [2] the values' sum by these weights.
    """

    position: int
    q_scale: float
    mask: bool
    query: Vector
    keys: Matrix
    values: Matrix
    scores: Vector
    scaled: Vector
    masked: Vector
    weights: Vector
    output: Vector

    def to_json(self) -> dict[str, Any]:
        """All fields as JSON has them; minus infinity becomes null."""
        fields = {name: list(value) if isinstance(value, tuple) else value for name, value in vars(self).items()}
        return fields | {"masked": [score if math.isfinite(score) else None for score in self.masked]}

    def __str__(self) -> str:
        lines = [self.heading(), "key  score  ÷ √2    mask   weight"]
        for key, (score, scaled, masked, weight) in enumerate(
            zip(self.scores, self.scaled, self.masked, self.weights, strict=True)
        ):
            lines.append(f"{key:3} {score:6.3g} {scaled:6.3f} {shown_masked(masked):>7} {weight:8.4f}")
        return "\n".join([*lines, self.sum_line()])

    def heading(self) -> str:
        """Whose query it is, in a sentence."""
        hidden = "and sees no later position" if self.mask else "and sees all positions"
        return f"The query of position {self.position} is {shown(self.query)} {hidden}."

    def sum_line(self) -> str:
        """The weighted sum, written out."""
        terms = " + ".join(
            f"{weight:.3g} × {shown(value)}" for weight, value in zip(self.weights, self.values, strict=True)
        )
        return f"output = {terms} = {shown(self.output)}"

    def _repr_html_(self) -> str:
        columns = ("position", "key", "query · key", "÷ √2", "mask", "softmax: weight", "value")
        rows = [
            (
                f"{key}",
                shown(self.keys[key]),
                self.scores[key],
                self.scaled[key],
                shown_masked(self.masked[key]),
                bar(self.weights[key], f"{self.weights[key]:.4f}"),
                shown(self.values[key]),
            )
            for key in range(len(self.keys))
        ]
        return page(table(self.heading(), columns, rows), self.sum_line())


def attend(position: int = 2, *, q_scale: float = 1.0, mask: bool = True) -> ToyAttention:
    """Attention of one of the four positions over all of them.

    Args:
        position: 0 to 3; of 2, the default, the mask hides one key, and of 3 none.
        q_scale: factor on the query: 0 makes all that are seen equal, a large one picks the best match alone.
        mask: whether the positions after `position` are hidden.

    Raises:
        RequestError: for a position or a factor that is not allowed.
    """
    if isinstance(position, bool) or not isinstance(position, int) or not 0 <= position < len(VECTORS):
        raise RequestError(f"The toy has positions 0 to {len(VECTORS) - 1}, and no position {position}.")
    if not abs(q_scale) <= MOST_Q_SCALE:
        raise RequestError(
            f"A query scale of {q_scale} is out of range: give -{MOST_Q_SCALE:.0f} to {MOST_Q_SCALE:.0f}."
        )
    query = tuple(q_scale * number + 0.0 for number in project(W_QUERY, VECTORS[position]))  # + 0.0: no -0
    keys = tuple(project(W_KEY, vector) for vector in VECTORS)
    values = tuple(project(W_VALUE, vector) for vector in VECTORS)
    scores = tuple(dot(query, key) for key in keys)
    scaled = tuple(score / math.sqrt(len(query)) for score in scores)
    masked = apply_mask(scaled, position) if mask else scaled
    weights = softmax(masked)
    return ToyAttention(
        position, q_scale, mask, query, keys, values, scores, scaled, masked, weights, weighted_sum(weights, values)
    )


def shown(vector: Vector) -> str:
    """A vector in brackets, its numbers to three digits."""
    return f"({', '.join(f'{number:.3g}' for number in vector)})"


def shown_masked(score: float) -> str:
    """A score after the mask."""
    return f"{score:.3f}" if math.isfinite(score) else "−∞"
