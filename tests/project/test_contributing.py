"""What the guide for contributors names is there: files, and in a file the names that it is said to have."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT = " ".join((ROOT / "docs/contributing.md").read_text().split())

NAME = r"`[\w.]+`"
PATH = r"`((?:shardcomm|csrc|tests|bench|docs|examples)/[\w./-]+\.\w+)`"
FILES = sorted(set(re.findall(PATH, TEXT)))
# "`a` in `path`", and "`a`, `b` and `c` in `path`".
IN_FILES = [
    (name, path)
    for names, path in re.findall(rf"((?:{NAME}(?:, | and )?)+) in {PATH}", TEXT)
    for name in re.findall(r"[\w.]+", names.replace(" and ", " "))
]


@pytest.mark.parametrize("path", FILES)
def test_a_file_that_is_named_is_there(path: str) -> None:
    assert (ROOT / path).is_file()


@pytest.mark.parametrize(("name", "path"), IN_FILES)
def test_a_name_that_is_said_to_be_in_a_file_is_there(name: str, path: str) -> None:
    assert re.search(rf"\b{re.escape(name)}\b", (ROOT / path).read_text())


def test_the_guide_names_files_and_names_in_them() -> None:
    assert len(FILES) > 50
    assert len(IN_FILES) > 10
