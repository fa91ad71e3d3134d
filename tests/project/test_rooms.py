"""Rooms that form layers: import-linter fences them, but for what the package itself gives, which is all of it.

Tests have the same rooms, and do not know each other.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "shardcomm"
ROOMS = sorted(path.parent for path in PACKAGE.glob("*/__init__.py"))


def imported_from_the_package(source: str) -> set[str]:
    """What a module imports from `shardcomm` itself; "shardcomm" for the whole."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names if alias.name == PACKAGE.name}
        elif isinstance(node, ast.ImportFrom) and node.module == PACKAGE.name:
            names |= {alias.name for alias in node.names}
    return names


@pytest.mark.parametrize("room", ROOMS, ids=lambda room: room.name)
def test_a_room_takes_nothing_but_the_compiled_core_from_the_package_itself(room: Path) -> None:
    allowed = {"_C"} | ({PACKAGE.name} if room.name == "cli" else set())  # which prints the version
    for path in room.rglob("*.py"):
        assert imported_from_the_package(path.read_text()) <= allowed, path


def test_what_tests_share_is_in_their_support() -> None:
    """Neither a test nor a program that it writes imports another test."""
    imports = re.compile(r"^ *(?:from|import) +(?:tests\.)?test_\w+", re.MULTILINE)
    tests = Path(__file__).parents[1]
    found = {path.name: imports.findall(path.read_text()) for path in tests.rglob("*.py")}
    assert not {name: lines for name, lines in found.items() if lines}


def test_every_room_has_tests_in_a_folder_of_its_name() -> None:
    folders = {path.parent.name for path in Path(__file__).parents[1].glob("*/test_*.py")}
    assert folders == {room.name for room in ROOMS} | {"project"}
