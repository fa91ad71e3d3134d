"""The list of mutations: plausible mistakes, each a text in a file, what it becomes, and the tests that must notice.

One TOML file a room beside this one. An entry::

    [[mutation]]
    name = "a reduce-scatter returns before all have read"
    file = "csrc/comm/board_reduce.cpp"
    find = '''meet(channel, stream);  // all have read'''
    becomes = '''// all have read'''
    tests = ["comm_test"]

`find` occurs exactly once in `file`. `tests` are programs of tests/cpp and, with "c_" before their names, of tests/c,
"comm_test@thread" one under a sanitizer, or pytest's names of Python tests; they run in this order, until one notices.
An entry with `unnoticed` in their place says why no test can.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent
ROOT = FOLDER.parent.parent


@dataclass(frozen=True)
class Mutation:
    """A mistake in words, and as a change of one file."""

    room: str
    name: str
    file: str
    find: str
    becomes: str
    tests: tuple[str, ...] = ()
    unnoticed: str = ""

    @property
    def compiled(self) -> bool:
        """Whether the file belongs to the compiled core."""
        return self.file.startswith("csrc/")

    def check(self, root: Path = ROOT) -> str:
        """Why it cannot be applied to the tree at `root`; "" if it can."""
        if bool(self.tests) == bool(self.unnoticed):
            return "it must have either tests or unnoticed"
        if self.find == self.becomes:
            return "it changes nothing"
        file = root / self.file
        if not file.is_file():
            return f"{self.file} is not there"
        count = file.read_text().count(self.find)
        if count != 1:
            return f"its text occurs {count} times in {self.file}, not once"
        missing = [test for test in self.tests if not test_exists(test, root)]
        return f"there is no test {', '.join(missing)}" if missing else ""

    def applied(self, root: Path = ROOT) -> str:
        """The file's text with the mistake in it."""
        return (root / self.file).read_text().replace(self.find, self.becomes)


def is_cpp(test: str) -> bool:
    """Whether `test` is a program of tests/cpp or tests/c."""
    return not test.startswith("tests/")


def split_program(test: str) -> tuple[str, str]:
    """Such a program, and the sanitizer that it runs under, if any."""
    program, _, sanitizer = test.partition("@")
    return program, sanitizer


def test_exists(test: str, root: Path) -> bool:
    """Looks for the function in the file: that costs nothing, which collecting would."""
    if is_cpp(test):
        program = split_program(test)[0]
        in_c = f"{program.removeprefix('c_').partition('_test')[0]}_test.c"
        folder, source = ("c", in_c) if program.startswith("c_") else ("cpp", f"{program}.cpp")
        return (root / "tests" / folder / source).is_file()
    path, _, function = test.partition("::")
    file = root / path
    return file.is_file() and (
        not function or f"def {function.partition('[')[0]}(" in file.read_text()
    )


test_exists.__test__ = False  # type: ignore[attr-defined]  # pytest takes it for one


def mutations() -> list[Mutation]:
    """All of them, room by room."""
    return [
        Mutation(file.stem, **{**entry, "tests": tuple(entry.get("tests", ()))})
        for file in sorted(FOLDER.glob("*.toml"))
        for entry in _entries(file)
    ]


def _entries(file: Path) -> list[Mapping[str, str]]:
    entries: list[Mapping[str, str]] = tomllib.loads(file.read_text())["mutation"]
    return entries
