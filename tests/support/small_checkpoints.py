"""Checkpoints of one rank and of one small state, saved and loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from shardcomm import Communicator
from shardcomm.checkpoint.checkpoints import Checkpoints


def alone(directory: Path, keep: int = 2) -> Checkpoints:
    return Checkpoints(directory, Communicator.local_group(1)[0], keep=keep)


def state(step: int) -> dict[str, Any]:
    return {"weight": torch.arange(12.0) + step, "groups": [{"lr": 0.1, "step": step}]}


def save(directory: Path, *steps: int) -> None:
    checkpoints = alone(directory)
    for step in steps:
        with checkpoints.save(step) as path:
            dcp.save(state(step), checkpoint_id=path)
            (path / "below").mkdir()
            (path / "below/empty").touch()


def load(directory: Path, step: int) -> None:
    found = state(0)
    with alone(directory).load(step) as path:
        dcp.load(found, checkpoint_id=path)
    assert torch.equal(found["weight"], state(step)["weight"])
    assert found["groups"] == state(step)["groups"]
