"""Stragglers: ranks that compute slower than they should, as a distribution.

A rank's factor holds for a step, and multiplies all its computation. So the rank of the largest factor comes last to
every collective, everybody waits for it, and the step is its step. Of n factors the largest is drawn at once: with u
uniform in (0, 1), the one at which n factors are all below with probability u. So 16,384 ranks cost one draw.
"""

from __future__ import annotations

import math
import random
from statistics import NormalDist


def slowest_factors(sigma: float, ranks: int, steps: int, seed: int) -> list[float]:
    """For each step the largest of `ranks` factors, whose logarithms are normal with deviation `sigma`.

    Args:
        sigma: The deviation; 0.05 is 5 % of a rank's time. Half of the ranks have a factor below 1.
        ranks: How many ranks there are.
        steps: How many steps.
        seed: The same draws come from the same seed.
    """
    chance = random.Random(seed)
    standard = NormalDist()
    factors = []
    for _ in range(steps):
        u = chance.uniform(1e-9, 1 - 1e-9)
        above = -math.expm1(math.log(u) / ranks)  # 1 - u ** (1 / ranks), which would round to 0
        factors.append(math.exp(-sigma * standard.inv_cdf(above)))
    return factors
