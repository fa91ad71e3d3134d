"""The Python in docs/composition.md runs as it stands, on four ranks."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardcomm

PAGE = Path(__file__).parents[2] / "docs" / "composition.md"
EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)


def run(example: str) -> None:
    dist.init_process_group("gloo")
    with shardcomm.Communicator.from_process_group() as comm:
        names: dict[str, Any] = {"torch": torch, "shardcomm": shardcomm, "comm": comm}
        exec(compile(example, PAGE.name, "exec"), names)
    dist.destroy_process_group()


@pytest.mark.parametrize("index", range(len(EXAMPLES)))
def test_example_runs(index: int) -> None:
    shardcomm.launch(run, 4, (EXAMPLES[index],), timeout_s=60)


def test_there_are_examples() -> None:
    assert len(EXAMPLES) >= 2
