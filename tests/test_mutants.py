"""The list of mutations stays alive: each still applies to the code, and the tests that must notice it exist."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "mutants"))

from mutations import Mutation, mutations

ALL = mutations()


@pytest.mark.parametrize("mutation", ALL, ids=lambda mutation: f"{mutation.room}: {mutation.name}")
def test_it_applies_and_its_tests_exist(mutation: Mutation) -> None:
    assert mutation.check() == ""


def test_names_are_unique_and_nine_of_ten_are_noticed() -> None:
    assert len({(mutation.room, mutation.name) for mutation in ALL}) == len(ALL) >= 100
    assert sum(bool(mutation.tests) for mutation in ALL) >= 0.9 * len(ALL)
