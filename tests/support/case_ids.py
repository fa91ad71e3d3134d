"""Names of a parametrised test's cases, where pytest would number them: "fp32-full_shard" and not "dtype0-options3"."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence, Set
from typing import Any

import torch

LONGEST = 60


def case_id(value: Any) -> str | None:
    """What names `value` in an id; None leaves it to pytest, which names strings, numbers, classes and functions."""
    if isinstance(value, str | bytes | int | float | type | None):
        return None
    name = re.sub(r"\s+", " ", _name(value))
    if not name or " at 0x" in name or len(name) > LONGEST or not name.isascii():
        return None
    return re.sub(r"[\[\]:]+", "_", name)  # which mean something else in an id


@functools.singledispatch
def _name(value: Any) -> str:
    written: str = getattr(value, "__name__", repr(value))
    return written if written != "<lambda>" else f"line {value.__code__.co_firstlineno}"


@_name.register(str)
@_name.register(int)
@_name.register(float)
@_name.register(type(None))
@_name.register(torch.device)
def _of_plain(value: object) -> str:
    return str(value)


@_name.register
def _of_dtype(value: torch.dtype) -> str:
    return str(value).removeprefix("torch.")


@_name.register
def _of_partial(value: functools.partial) -> str:  # type: ignore[type-arg]
    values = ", ".join(map(_name, [*value.args, *value.keywords.values()]))
    return f"{_name(value.func)}({values})"


@_name.register
def _of_mapping(value: Mapping) -> str:  # type: ignore[type-arg]
    return ",".join(f"{_name(key)}={_name(each)}" for key, each in value.items()) or "none"


@_name.register
def _of_set(value: Set) -> str:  # type: ignore[type-arg]
    return "+".join(sorted(map(_name, value))) or "none"


@_name.register(list)
@_name.register(tuple)
def _of_sequence(value: Sequence[Any]) -> str:
    return ",".join(map(_name, value)) or "none"
