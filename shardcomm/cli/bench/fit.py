"""The alpha-beta model of a collective: time = alpha + beta * size (Hockney 1994)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Fit:
    """`alpha_s`: latency in seconds. `beta_s`: seconds a byte. Errors are relative: root mean square, and the worst."""

    alpha_s: float
    beta_s: float
    rms_error: float
    worst_error: float


def fit(points: Sequence[tuple[int, float]]) -> Fit | None:
    """The model nearest to (bytes, seconds), neither term below 0; None for less than three different sizes.

    Relative errors are least squared: sizes span decades, and so do times, whose noise grows with them; absolute errors
    would let the largest size decide alone. Dividing t = alpha + beta s by t, one wants 1 = alpha / t + beta s / t.
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
