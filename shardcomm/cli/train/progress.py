"""The progress of a training run: everything that it must save to go on, bit for bit, as if it had never stopped.

`torch.distributed.checkpoint` saves the model, the optimizer's state and each rank's random state. A readable file has
the step (from which the data follow), the losses, and the options that must be the same again.
"""

from __future__ import annotations

import json
import math
import os
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import torch

from shardcomm.checkpoint.checkpoints import Checkpoints
from shardcomm.checkpoint.folders import checkpoint_folder, complete_steps
from shardcomm.checkpoint.manifest import CheckpointError, Manifest
from shardcomm.engine.engine import Engine
from shardcomm.files.json_file import read_json

FILE = "progress.json"


@dataclass(frozen=True)
class Progress:
    """What is saved beside the tensors.

    Attributes:
        ranks: How many ranks saved it.
        losses: The loss of each step that was done; NaN also where it was infinite, once it has been saved.
        run: The options that make it this run, by name: those that shape the model, its data and its steps.
    """

    ranks: int
    losses: list[float]
    run: dict[str, Any]

    @property
    def step(self) -> int:
        """How many steps were done."""
        return len(self.losses)

    @classmethod
    def latest(cls, directory: Path) -> Progress | None:
        """Reads the progress of the newest complete checkpoint whose progress file is whole; None without checkpoints.

        Whether the rest of the checkpoint is whole, the ranks find out when they load it.

        Raises:
            ValueError: There are checkpoints, and none has a whole progress file.
        """
        damage = []
        for step in reversed(complete_steps(directory)):
            folder = checkpoint_folder(directory, step)
            try:
                Manifest.read(folder, step).verify(folder, [FILE])
                return cls.read(folder)
            except (CheckpointError, ValueError) as error:
                damage.append(str(error))
        if damage:
            raise ValueError(f"no checkpoint there can be gone on from: {'; '.join(damage)}")
        return None

    @classmethod
    def read(cls, checkpoint: Path) -> Progress:
        """Reads the progress of a checkpoint.

        Raises:
            OSError: The file cannot be read.
            ValueError: The checkpoint is none of a training run.
        """
        found = read_json(checkpoint / FILE, "the progress of a training run")
        losses = [math.nan if loss.raw is None else loss.raw for loss in found["losses"]]
        if not all(isinstance(loss, float) for loss in losses):
            raise found["losses"].wrong("a list of numbers")
        run = {name: value.raw for name, value in found["run"].items()}
        return cls(found["ranks"].whole(1, 1 << 30), losses, run)

    def write(self, checkpoint: Path) -> None:
        """Writes the progress into a checkpoint's folder, and syncs it to the disk."""
        with (checkpoint / FILE).open("w") as file:
            json.dump({**asdict(self), "losses": in_json(self.losses)}, file, allow_nan=False)
            file.flush()
            os.fsync(file.fileno())

    def differences(self, run: dict[str, Any]) -> list[str]:
        """Sentences about the options in which `run` differs from this run."""
        return [
            f"--{name} is {run[name]}, the checkpoint's is {self.run.get(name)}"
            for name in run
            if run[name] != self.run.get(name)
        ]


def in_json(losses: list[float]) -> list[float | None]:
    """The losses as JSON has them, which has no NaN and no infinity: None instead."""
    return [loss if math.isfinite(loss) else None for loss in losses]


def save(
    checkpoints: Checkpoints,
    progress: Progress,
    engine: Engine,
    optimizer: torch.optim.Optimizer,
) -> None:
    """Saves a checkpoint; collective. It goes on in the background until `checkpoints.wait()`."""
    # Imported here, since it takes a second, and not every run saves.
    from torch.distributed.checkpoint.state_dict_saver import (  # noqa: PLC0415
        async_save as dcp_async_save,
    )

    state = {**_state(engine, optimizer), "random": _RandomState(checkpoints.comm.rank)}

    def write(path: Path) -> Future[Any]:
        if checkpoints.comm.rank == 0:
            progress.write(path)
        return cast("Future[Any]", dcp_async_save(state, checkpoint_id=path))

    checkpoints.async_save(progress.step, write)


def load(
    checkpoints: Checkpoints, engine: Engine, optimizer: torch.optim.Optimizer
) -> Progress | None:
    """Loads the newest checkpoint that is whole; collective. It raises as `Checkpoints.latest` and `Checkpoints.load`.

    With another number of ranks than saved it, ranks draw other batches, and random numbers of their own.

    Returns:
        The progress; None if there is no checkpoint.
    """
    step = checkpoints.latest()
    if step is None:
        return None
    from torch.distributed.checkpoint.state_dict_loader import load as dcp_load  # noqa: PLC0415

    with checkpoints.load(step) as path:
        progress = Progress.read(path)
        state: dict[str, Any] = _state(engine, optimizer)
        if progress.ranks == checkpoints.comm.size:
            state["random"] = _RandomState(checkpoints.comm.rank)
        dcp_load(state, checkpoint_id=path)
    return progress


def _state(engine: Engine, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {"model": engine, "optimizer": engine.optimizer_state(optimizer)}


class _RandomState:
    """DCP's `Stateful` for this rank's random generators."""

    def __init__(self, rank: int) -> None:
        self._name = f"rank {rank}"

    def state_dict(self) -> dict[str, Any]:
        state = {"cpu": torch.get_rng_state()}
        if torch.cuda.is_available():
            state["cuda"] = torch.cuda.get_rng_state()
        return {self._name: state}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        state = state_dict[self._name]
        torch.set_rng_state(state["cpu"])
        if "cuda" in state:
            torch.cuda.set_rng_state(state["cuda"])
