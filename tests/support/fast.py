"""Which tests `pytest --fast` runs: of each function the first case, unless it is slow or starts a process."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any

import pytest

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
        starts = any(_starts(each, set()) for each in _functions(item))
        chosen = is_first and not is_slow and not starts
        (run if chosen else left_out).append(item)
    return run, left_out


def _functions(item: pytest.Item) -> Iterator[Any]:
    """The test's own, and its fixtures'."""
    yield getattr(item, "function", None)
    fixtures: dict[str, Any] = getattr(item, "_fixtureinfo").name2fixturedefs  # noqa: B009
    for definitions in fixtures.values():
        for definition in definitions:
            yield definition.func


def _starts(function: Any, seen: set[object]) -> bool:
    """Whether `function`, or one of the tests' functions that it names, starts a process."""
    function = getattr(function, "__wrapped__", function)
    if not isinstance(function, FunctionType) or function in seen:
        return False
    seen.add(function)
    for name in set(_names(function.__code__)):
        value = function.__globals__.get(name)
        if name in _STARTS or value is subprocess:
            return True
        if isinstance(value, type):
            methods = [each for each in vars(value).values() if _is_tests(each)]
            if any(_starts(method, seen) for method in methods):
                return True
        if _is_tests(value) and _starts(value, seen):
            return True
    return False


def _is_tests(value: object) -> bool:
    module = getattr(value, "__module__", None) or ""
    return module.startswith(("test_", "support", "conftest"))


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
