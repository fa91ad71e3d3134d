"""Reads JSON that somebody else may have written, value by value. Errors say where in the file something is wrong."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any


class Value:
    """A value of a JSON file. Its methods raise ValueError, with the file and the place, if it is of another type.

    Args:
        raw: The value as `json` gives it.
        file: The beginning of every error: the file's name, and what it should have been.
        place: The value's place in the file.

    Attributes:
        raw: As given.
    """

    def __init__(self, raw: Any, file: str, place: str = "") -> None:
        self.raw = raw
        self._file = file
        self._place = place

    def __getitem__(self, key: str) -> Value:
        """The value under `key` of an object."""
        if not isinstance(self.raw, dict) or key not in self.raw:
            raise self.wrong(f"an object with {key!r}")
        return self._inside(self.raw[key], f"[{key!r}]")

    def items(self) -> Iterator[tuple[str, Value]]:
        """The names and values of an object."""
        if not isinstance(self.raw, dict):
            raise self.wrong("an object")
        for key, raw in self.raw.items():
            yield self._inside(key, "'s names").text(), self._inside(raw, f"[{key!r}]")

    def __iter__(self) -> Iterator[Value]:
        """The entries of a list."""
        if not isinstance(self.raw, list):
            raise self.wrong("a list")
        for i, raw in enumerate(self.raw):
            yield self._inside(raw, f"[{i}]")

    def text(self) -> str:
        """The value as a string, all of which can be printed."""
        if not isinstance(self.raw, str) or not self.raw.isprintable():
            raise self.wrong("a printable text")
        return self.raw

    def whole(self, low: int, high: int) -> int:
        """The value as a whole number from `low` to `high`."""
        if type(self.raw) is not int or not low <= self.raw <= high:
            raise self.wrong(f"a whole number from {low} to {high}")
        return self.raw

    def number(self, low: float, high: float) -> float:
        """The value as a number from `low` to `high`, with or without a decimal point."""
        if type(self.raw) not in (int, float) or not low <= self.raw <= high:
            raise self.wrong(f"a number from {low:g} to {high:g}")
        return float(self.raw)

    def wrong(self, accepted: str) -> ValueError:
        """The error which says that this value is not what is `accepted`."""
        where = f"{self._place} is " if self._place else "it is "
        return ValueError(f"{self._file}: {where}{reprlib.repr(self.raw)}; it must be {accepted}")

    def _inside(self, raw: Any, place: str) -> Value:
        return Value(raw, self._file, self._place + place)


def read_json(path: str | Path, what: str) -> Value:
    """Reads a JSON file.

    Args:
        path: The file.
        what: What the file should be, for the errors.

    Raises:
        OSError: The file cannot be read.
        ValueError: It is not JSON, or is nested too deeply to be read.
    """
    file = f"{path} is not {what}"
    try:
        return Value(json.loads(Path(path).read_bytes()), file)
    except RecursionError:
        raise ValueError(f"{file}: its JSON is nested too deeply to be read") from None
    except ValueError as error:
        raise ValueError(f"{file}: it is not JSON: {error}") from None
