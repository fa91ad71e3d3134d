"""Runs the Python that a page shows, as one of several ranks. Apart from the tests, whose module reads all pages."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import shardcomm


def run(page: str, example: str, folder: Path) -> None:
    os.chdir(folder)  # for what it writes
    names: dict[str, Any] = {"__name__": "__main__"}
    if re.search(r"^import .*shardcomm|^from shardcomm", example, re.MULTILINE):
        exec(compile(example, page, "exec"), names)
        return
    dist.init_process_group("gloo")
    with shardcomm.Communicator.from_process_group() as comm:
        names |= {"torch": torch, "shardcomm": shardcomm, "comm": comm}
        exec(compile(example, page, "exec"), names)
    dist.destroy_process_group()
