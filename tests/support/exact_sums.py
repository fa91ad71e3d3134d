"""Sums of floats from first principles: exact as fractions, then rounded once to a format, to nearest even."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

import torch

SIGNIFICANDS = {  # bits of a significand, and the exponent of the smallest normal number
    torch.float16: (11, -14),
    torch.bfloat16: (8, -126),
    torch.float32: (24, -126),
    torch.float64: (53, -1022),
}


def rounded(value: Fraction, dtype: torch.dtype) -> float:
    """The number of `dtype` that is nearest to `value`; of two the even one."""
    bits, least = SIGNIFICANDS[dtype]
    if value == 0:
        return 0.0
    exponent = max(_exponent(abs(value)), least)
    unit = Fraction(2) ** (exponent - bits + 1)
    units = round(value / unit)  # Python rounds a tie to the even one
    # The largest exponent mirrors the smallest.
    infinite = abs(units * unit) >= Fraction(2) ** (2 - least)
    magnitude = math.inf if infinite else float(abs(units * unit))
    return -magnitude if value < 0 else magnitude


def _exponent(value: Fraction) -> int:
    """The n with 2^n <= value < 2^(n + 1)."""
    n = value.numerator.bit_length() - value.denominator.bit_length()
    return n if Fraction(2) ** n <= value else n - 1


def exact_sum(summands: Sequence[float], dtype: torch.dtype) -> float:
    """The sum, rounded once to `dtype`; infinities and NaN add up as in IEEE 754."""
    if any(not math.isfinite(x) for x in summands):
        kinds = {x for x in summands if not math.isfinite(x)}
        return kinds.pop() if len(kinds) == 1 else math.nan
    if all(x == 0 and math.copysign(1, x) < 0 for x in summands):
        return -0.0
    return rounded(sum((Fraction(x) for x in summands), Fraction(0)), dtype)


def exact_sums(sources: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """Element by element; the result has `dtype`."""
    columns = zip(*(source.double().tolist() for source in sources), strict=True)
    wide = torch.tensor([exact_sum(column, dtype) for column in columns], dtype=torch.float64)
    return wide.to(dtype)
