"""Calls that go to the process of a rank, and what comes back: both pickled, in files in memory."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable, Sequence
from typing import Any


def pack(fn: Callable[..., Any], args: Sequence[Any]) -> bytes:
    """What a rank is to call, and where it finds the modules of it.

    Raises:
        TypeError: `fn` or `args` cannot be pickled, or `fn` is of the script that runs, which ranks do not have.
    """
    if getattr(fn, "__module__", None) == "__main__":
        raise TypeError(
            f"run: what is {fn!r} of the script that runs; ranks import it, so it must be a function of a module"
        )
    try:
        return pickle.dumps((sys.path, pickle.dumps((fn, tuple(args)))))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise TypeError(
            f"run: what and args must be what pickle can send to another process: {error}"
        ) from error


def unpack(outcome: bytes) -> Any:
    """What the rank's function has returned, or the `Failure` of a rank that ended with status 1."""
    return pickle.loads(outcome)
