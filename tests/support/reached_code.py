"""What a test runs, as far as its code tells: the functions of the tests that it names, and what those name."""

from __future__ import annotations

from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any

import pytest


def functions_of(item: pytest.Item) -> Iterator[Any]:
    """The test's own, and its fixtures'."""
    yield getattr(item, "function", None)
    fixtures: dict[str, Any] = getattr(item, "_fixtureinfo").name2fixturedefs  # noqa: B009
    for definitions in fixtures.values():
        for definition in definitions:
            yield definition.func


def reached(function: Any, seen: set[object] | None = None) -> Iterator[FunctionType]:
    """`function` if it is a function, and those of the tests that it names, each once."""
    seen = set() if seen is None else seen
    function = getattr(function, "__wrapped__", function)
    if not isinstance(function, FunctionType) or function in seen:
        return
    seen.add(function)
    yield function
    for name in set(names(function.__code__)):
        value = function.__globals__.get(name)
        if isinstance(value, type):
            for method in vars(value).values():
                if _is_tests(method):
                    yield from reached(method, seen)
        if _is_tests(value):
            yield from reached(value, seen)


def names(code: CodeType) -> Iterator[str]:
    """What `code`, and functions inside of it, call globals and attributes."""
    yield from code.co_names
    for inner in _codes_in(code):
        yield from names(inner)


def constants(code: CodeType) -> Iterator[object]:
    """What is written out in `code` and in functions inside of it."""
    yield from code.co_consts
    for inner in _codes_in(code):
        yield from constants(inner)


def _codes_in(code: CodeType) -> Iterator[CodeType]:
    return (constant for constant in code.co_consts if isinstance(constant, CodeType))


def _is_tests(value: object) -> bool:
    module = getattr(value, "__module__", None) or ""
    return module.startswith(("test_", "support", "conftest"))
