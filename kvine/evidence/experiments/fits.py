"""Power laws through measured points: the slope of a straight line through their logarithms."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvine.errors import RequestError


@dataclass(frozen=True)
class PowerFit:
    """y ≈ factor × x^exponent by least squares on logarithms.

    Attributes:
        exponent, factor: of the law.
        r2: share of the logarithms' variance that it explains, 1 where all points lie on it (or y does not vary).
        low, high: the range of x that was fitted; beyond it the law says nothing.
    """

    exponent: float
    factor: float
    r2: float
    low: float
    high: float


def fit_power(x: Sequence[float], y: Sequence[float]) -> PowerFit:
    """The power law through points with positive coordinates.

    Raises:
        RequestError: for fewer than two different x.
    """
    if len(set(x)) < 2:
        raise RequestError("A curve needs at least 2 different sizes.")
    log_x, log_y = np.log(np.asarray(x, float)), np.log(np.asarray(y, float))
    exponent, intercept = np.polyfit(log_x, log_y, 1)
    residual = float(((log_y - intercept - exponent * log_x) ** 2).sum())
    total = float(((log_y - log_y.mean()) ** 2).sum())
    r2 = 1.0 if total < 1e-24 else 1 - residual / total
    return PowerFit(float(exponent), float(np.exp(intercept)), r2, float(min(x)), float(max(x)))
