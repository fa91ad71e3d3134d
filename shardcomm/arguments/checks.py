"""What callers give, checked at the door: errors say which argument of what, what was given, and what is accepted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_MOST_SECONDS = 1e9  # that a timedelta, and a wait, can take


def check_type(operation: str, name: str, value: object, kind: Any, accepted: str) -> None:
    """TypeError unless `value` is of `kind`, which the message calls `accepted`."""
    if not isinstance(value, kind):
        raise TypeError(f"{operation}: {name} is a {type(value).__name__}; it must be {accepted}")


def check_list(operation: str, name: str, value: object) -> None:
    """TypeError unless it has a length and items in order; a text counts as none."""
    # The usual two first: an abstract class is asked at ten times the cost.
    if isinstance(value, str) or not isinstance(value, (list, tuple, Sequence)):
        raise TypeError(
            f"{operation}: {name} is a {type(value).__name__}; it must be a list or a tuple"
        )


def check_flag(operation: str, name: str, value: object) -> None:
    """ValueError unless it is True or False; a text such as "no" would count as true."""
    if not isinstance(value, bool):
        raise ValueError(f"{operation}: {name} is {value!r}; it must be True or False")


def check_seconds(operation: str, name: str, seconds: object) -> None:
    """ValueError unless it is a number of seconds."""
    is_number = isinstance(seconds, (int, float)) and not isinstance(seconds, bool)
    if not (is_number and 0 < seconds <= _MOST_SECONDS):  # type: ignore[operator]
        raise ValueError(
            f"{operation}: {name} is {seconds!r}; it must be a number above 0, at most 1e9"
        )
