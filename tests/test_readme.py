"""The README's Python examples run as they stand, on two ranks."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from shardcomm import launch

README = Path(__file__).parents[1] / "README.md"
EXAMPLES = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)


def run(example: str, folder: Path) -> None:
    os.chdir(folder)  # for what it writes
    exec(compile(example, "README.md", "exec"), {"__name__": "__main__"})


@pytest.mark.parametrize("index", range(len(EXAMPLES)))
def test_example_runs(index: int, tmp_path: Path) -> None:
    launch(run, 2, (EXAMPLES[index], tmp_path), deadline_s=60)


def test_there_are_examples() -> None:
    assert len(EXAMPLES) >= 2
