"""JSON that somebody else may have written, read value by value: what is wrong is said with its place in the file."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any


class Value:
    """A value of a JSON file. What takes it for something else raises ValueError, which names the file and the place.

    Attributes:
        raw: as `json` gives it.

    Args:
        file: begins every error: the file's name, and what it was to be.
        place: of the value in the file.
    """

    def __init__(self, raw: Any, file: str, place: str = "") -> None:
        self.raw = raw
        self._file = file
        self._place = place

    def __getitem__(self, key: str) -> Value:
        """Of an object that has `key`."""
        if not isinstance(self.raw, dict) or key not in self.raw:
            raise self.wrong(f"an object with {key!r}")
        return self._inside(self.raw[key], f"[{key!r}]")

    def items(self) -> Iterator[tuple[str, Value]]:
        """Of an object."""
        if not isinstance(self.raw, dict):
            raise self.wrong("an object")
        for key, raw in self.raw.items():
            yield self._inside(key, "'s names").text(), self._inside(raw, f"[{key!r}]")

    def __iter__(self) -> Iterator[Value]:
        """Of a list."""
        if not isinstance(self.raw, list):
            raise self.wrong("a list")
        for i, raw in enumerate(self.raw):
            yield self._inside(raw, f"[{i}]")

    def text(self) -> str:
        """A string that can be printed."""
        if not isinstance(self.raw, str) or not self.raw.isprintable():
            raise self.wrong("a printable text")
        return self.raw

    def whole(self, low: int, high: int) -> int:
        """A whole number from `low` to `high`."""
        if type(self.raw) is not int or not low <= self.raw <= high:
            raise self.wrong(f"a whole number from {low} to {high}")
        return self.raw

    def number(self, low: float, high: float) -> float:
        """A number from `low` to `high`, with a point or without."""
        if type(self.raw) not in (int, float) or not low <= self.raw <= high:
            raise self.wrong(f"a number from {low:g} to {high:g}")
        return float(self.raw)

    def wrong(self, accepted: str) -> ValueError:
        """Says that this is not what is `accepted`."""
        where = f"{self._place} is " if self._place else "it is "
        return ValueError(f"{self._file}: {where}{reprlib.repr(self.raw)}; it must be {accepted}")

    def _inside(self, raw: Any, place: str) -> Value:
        return Value(raw, self._file, self._place + place)


def read_json(path: str | Path, what: str) -> Value:
    """The value of a file that is to be `what`, which errors say.

    Raises:
        OSError: it cannot be read.
        ValueError: it is not JSON, or nested too deeply to be read.
    """
    file = f"{path} is not {what}"
    try:
        return Value(json.loads(Path(path).read_bytes()), file)
    except RecursionError:
        raise ValueError(f"{file}: its JSON is nested too deeply to be read") from None
    except ValueError as error:
        raise ValueError(f"{file}: it is not JSON: {error}") from None
