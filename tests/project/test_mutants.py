"""The list of mutations stays alive: each still applies to the code, and the tests that must notice it exist."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "mutants"))

from mutations import mutations

ALL = mutations()


def test_each_applies_and_its_tests_exist() -> None:
    assert {m.name: trouble for m in ALL if (trouble := m.check())} == {}


def test_python_with_a_mistake_in_it_is_still_python() -> None:
    for mutation in ALL:
        if mutation.file.endswith(".py"):
            compile(mutation.applied(), mutation.file, "exec")


def test_names_are_unique_and_nine_of_ten_have_tests() -> None:
    assert len({(mutation.room, mutation.name) for mutation in ALL}) == len(ALL) >= 100
    assert sum(bool(mutation.tests) for mutation in ALL) >= 0.9 * len(ALL)
