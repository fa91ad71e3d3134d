"""Which tests `pytest --fast` runs: of each function the first case, unless it is slow or starts a process."""

from __future__ import annotations

import subprocess
from typing import Any

import pytest

from support.reached_code import functions_of, names, reached

# What starts processes, and what stands between a test and it.
_STARTS = {"launch", "launched", "get_context", "os.fork", "ProcessPoolExecutor"}


def select(items: list[pytest.Item]) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """Those that are run, and the others."""
    run, left_out = [], []
    seen: set[object] = set()
    for item in items:
        function = getattr(item, "function", None)
        is_first = function not in seen
        seen.add(function)
        is_slow = item.get_closest_marker("slow") or item.get_closest_marker("gpu")
        starts = "cluster" in getattr(item, "fixturenames", ()) or any(
            _starts(each) for each in functions_of(item)
        )
        chosen = is_first and not is_slow and not starts
        (run if chosen else left_out).append(item)
    return run, left_out


def _starts(function: Any) -> bool:
    """Whether `function`, or one of the tests' functions that it names, starts a process."""
    return any(
        name in _STARTS or each.__globals__.get(name) is subprocess
        for each in reached(function)
        for name in set(names(each.__code__))
    )
