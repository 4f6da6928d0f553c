"""Which points are worth choosing where two things count and less is better of both."""

from collections.abc import Sequence


def non_dominated(points: Sequence[tuple[float, float]]) -> list[int]:
    """Indices of the points that no other beats by being as good in both and better in one; ascending in the first."""

    def beaten(point: tuple[float, float]) -> bool:
        return any(other != point and other[0] <= point[0] and other[1] <= point[1] for other in points)

    return sorted((i for i, point in enumerate(points) if not beaten(point)), key=lambda i: points[i])
