"""Rates and durations as `tc` writes them: "1gbit", "200us"."""

from __future__ import annotations

import re

_BITS = {"bit": 1, "kbit": 10**3, "mbit": 10**6, "gbit": 10**9}
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_LEAST_BITS, _MOST_BITS = 10**3, 10**12
_MOST_SECONDS = 1e6


def parse_rate(text: str) -> int:
    """The bits a second that a text such as "1gbit" or "2.5mbit" stands for.

    Raises:
        ValueError: It is no such text, or not from 1kbit to 1000gbit.
    """
    bits = _parse(text, _BITS)
    if bits is None or not _LEAST_BITS <= bits <= _MOST_BITS:
        raise ValueError(
            f"{text!r}; it must be a number and a unit (bit, kbit, mbit or gbit a second), such as 1gbit, from 1kbit "
            "to 1000gbit"
        )
    return round(bits)


def parse_duration(text: str) -> float:
    """The seconds that a text such as "200us", "1.5ms" or "3s" stands for.

    Raises:
        ValueError: It is no such text, or not from 1us to 1000000s.
    """
    seconds = _parse(text, _SECONDS)
    if seconds is None or not _SECONDS["us"] <= seconds <= _MOST_SECONDS:
        raise ValueError(
            f"{text!r}; it must be a number and a unit (us, ms or s), such as 200us, from 1us to 1000000s"
        )
    return seconds


def _parse(text: str, units: dict[str, float] | dict[str, int]) -> float | None:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([a-z]+)", text.lower())
    if found is None or found[2] not in units:
        return None
    return float(found[1]) * units[found[2]]
