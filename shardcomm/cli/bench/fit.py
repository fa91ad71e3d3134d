"""The alpha-beta model of a collective: time = alpha + beta * size (Hockney 1994)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Fit:
    """A fitted model.

    Attributes:
        alpha_s: The latency in seconds.
        beta_s: The seconds that a byte takes.
        rms_error: The root mean square of the relative errors.
        worst_error: The largest relative error.
    """

    alpha_s: float
    beta_s: float
    rms_error: float
    worst_error: float


def fit(points: Sequence[tuple[int, float]]) -> Fit | None:
    """The model that is nearest to the points (bytes, seconds), with no term below 0.

    It has the least sum of squared relative errors. Sizes span decades, and so do times, whose noise grows with them;
    with absolute errors the largest size alone would decide. Divided by t, the model t = alpha + beta s becomes
    1 = alpha / t + beta s / t.

    Returns:
        The fit; None for less than three different sizes.
    """
    points = [(size, seconds) for size, seconds in points if seconds > 0]
    if len({size for size, _ in points}) < 3:
        return None
    u = [1 / seconds for _, seconds in points]
    v = [size / seconds for size, seconds in points]
    uu, uv, vv = _dot(u, u), _dot(u, v), _dot(v, v)
    determinant = uu * vv - uv * uv
    alpha = (sum(u) * vv - sum(v) * uv) / determinant
    beta = (sum(v) * uu - sum(u) * uv) / determinant
    if alpha < 0:
        alpha, beta = 0.0, sum(v) / vv
    elif beta < 0:
        alpha, beta = sum(u) / uu, 0.0
    errors = [abs(alpha * a + beta * b - 1) for a, b in zip(u, v, strict=True)]
    return Fit(alpha, beta, math.sqrt(_dot(errors, errors) / len(errors)), max(errors))


def _dot(a: Sequence[float], b: Sequence[float]) -> float:
    return math.fsum(x * y for x, y in zip(a, b, strict=True))
