"""Checks of numbers that callers give, before the core takes them."""

from __future__ import annotations

import math
from contextlib import suppress

import torch

_FLOAT32_MAX = torch.finfo(torch.float32).max


def is_whole(value: object, low: int, high: int = (1 << 31) - 1) -> bool:
    """Whether `value` is a whole number from `low` to `high`. True and False are none."""
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def check_tag(operation: str, tag: int) -> None:
    """ValueError unless `tag` is a whole number of 64 bits."""
    if not isinstance(tag, int) or not -(1 << 63) <= tag < 1 << 63:
        raise ValueError(
            f"{operation}: tag is {tag!r}; it must be a whole number from -2**63 to 2**63 - 1"
        )


def checked_scale(operation: str, scale: float) -> float:
    """`scale` as a float; ValueError unless it is a number, of any type and also infinite, that float32 can hold."""
    value = None
    if not isinstance(scale, bool | str | bytes):
        # A tensor of several elements raises a RuntimeError.
        with suppress(TypeError, ValueError, RuntimeError, OverflowError):
            value = float(scale)
    if value is None or _FLOAT32_MAX < abs(value) < math.inf:
        raise ValueError(
            f"{operation}: scale is {scale!r}; it must be a number that float32 can hold"
        )
    return value
