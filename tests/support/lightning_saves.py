"""Saves under Lightning's Fabric that fail, are killed, or are seen half done."""

from __future__ import annotations

import errno
import os
import pickle
import shutil
import signal
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from shardcomm import CheckpointError
from support.file_faults import Faults
from support.lightning_fabric import fabric_of
from support.lightning_ranks import OURS

_OF_NAMES = ("mkdir", "rename", "replace", "unlink", "rmdir")
Log = list[tuple[str, str]]


class Saver:
    """Saves versions: every number in the model and in the optimizer of a version is its number."""

    def __init__(self, kind: str) -> None:
        self.fabric = fabric_of(OURS, state_dict_type=kind)
        model = nn.Linear(4, 4)
        sgd = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9)
        self._model, self._sgd = self.fabric.setup(model, sgd)
        self.fabric.backward(self._model(torch.ones(1, 4)).sum())
        self._sgd.step()

    def __call__(self, path: Path, version: int) -> None:
        with torch.no_grad():
            for parameter in self._model.parameters():
                parameter.to_local().fill_(version)
                self._sgd.state[parameter]["momentum_buffer"].fill_(version)
        self.fabric.save(path, {"model": self._model, "sgd": self._sgd, "version": version})


def version_at(path: Path) -> int:
    """The version of the whole checkpoint that `fabric.load` would find at `path`. Torch alone reads it."""
    from shardcomm.checkpoint.folders import at
    from shardcomm.interop.lightning.shards import is_folder

    path = at(path)
    if is_folder(path):
        file = path.parent.with_name("of a folder")
        dcp_to_torch_save(path, file)
        state = {**torch.load(file), **torch.load(path / "meta.pt")}
    else:
        state = torch.load(path)
    version = state["version"]
    buffers = [each["momentum_buffer"] for each in state["sgd"]["state"].values()]
    tensors = [*state["model"].values(), *buffers]
    assert len(tensors) == 4
    for tensor in tensors:
        assert torch.equal(tensor, torch.full_like(tensor, version))
    return int(version)


def copy(saved: Path, path: Path) -> None:
    """Makes a copy of the checkpoint `saved` all that is in the folder of `path`."""
    shutil.rmtree(path.parent, ignore_errors=True)
    path.parent.mkdir()
    if saved.is_dir():
        shutil.copytree(saved, path)
    else:
        shutil.copy(saved, path)


def changing_names(log: Log) -> list[int]:
    """The numbers of the operations that make a file or a folder, rename it or remove it."""
    return [n for n, (operation, _) in enumerate(log, 1) if operation in _OF_NAMES]


# ---- killed: one rank, in a process of its own


def kill(operation: str, path: str) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def in_a_fork(fn: Callable[[], None]) -> int:
    """Runs `fn` in a process that is a group of its own; returns its exit code, or minus the signal that ended it."""
    from lightning.fabric.plugins.environments import MPIEnvironment

    pid = os.fork()
    if pid == 0:
        try:
            store = dist.HashStore()  # type: ignore[attr-defined]
            dist.init_process_group("gloo", store=store, rank=0, world_size=1)
            # To look for MPI takes half a second.
            with mock.patch.object(MPIEnvironment, "detect", return_value=False):
                fn()
        except BaseException as error:
            sys.excepthook(type(error), error, error.__traceback__)
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def killed(folder: Path, before: str, after: str) -> tuple[list[int], Log]:
    """Saves version 2 over version 1, and is killed before each change of a name, one after the other.

    Returns:
        The versions that are left, and the operations of a save that nothing kills.
    """
    import shardcomm.interop.lightning  # noqa: F401 (once, for all forks)

    torch.set_num_threads(1)
    saved, path, listed = folder / "saved", folder / "work/last.ckpt", folder / "log"
    assert in_a_fork(lambda: Saver(before)(saved, 1)) == 0

    def save(n: int) -> None:
        saver, faults = Saver(after), Faults(path.parent, n, kill)
        with faults():
            saver(path, 2)
        listed.write_bytes(pickle.dumps(faults.log))

    copy(saved, path)
    assert in_a_fork(lambda: save(0)) == 0
    assert version_at(path) == 2
    log: Log = pickle.loads(listed.read_bytes())
    left = []
    for n in changing_names(log):
        copy(saved, path)
        assert in_a_fork(lambda: save(n)) == -signal.SIGKILL  # noqa: B023
        left.append(version_at(path))
        assert in_a_fork(lambda: Saver(after)(path, 3)) == 0
        assert version_at(path) == 3
        assert [*path.parent.iterdir()] == [path]
    return left, log


# ---- failed: two ranks, of which one has an error


def full_disk(*_: object, **options: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "some file")


def meta_is_not_written() -> AbstractContextManager[Any]:
    save = torch.save

    def saved(value: object, file: Any, *args: Any, **options: Any) -> None:
        full_disk() if str(file).endswith("meta.pt") else save(value, file, *args, **options)

    return mock.patch.object(torch, "save", saved)


def optimizers_are_not_merged() -> AbstractContextManager[Any]:
    from shardcomm.interop.lightning import shards

    return mock.patch.object(shards, "dcp_to_torch_save", full_disk)


def file_is_not_written() -> AbstractContextManager[Any]:
    from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO

    return mock.patch.object(TorchCheckpointIO, "save_checkpoint", full_disk)


FAULTS = {
    "sharded": [meta_is_not_written],
    "full": [optimizers_are_not_merged, file_is_not_written],
}


def failed(folder: Path, before: str, after: str) -> list[tuple[str, int]]:
    """Saves version 2 over version 1 with an error on rank 0, at one operation after the other.

    Returns:
        What this rank was told, and the version that is left.
    """
    saved, path = folder / "saved", folder / "work/last.ckpt"
    Saver(before)(saved, 1)
    saver = Saver(after)
    first = saver.fabric.is_global_zero

    def save(fault: Callable[[], AbstractContextManager[Any]]) -> tuple[str, int]:
        if first:
            copy(saved, path)
        dist.barrier()
        said = ""
        try:
            with fault() if first else nullcontext():
                saver(path, 2)
        except CheckpointError as error:
            said = str(error)
        dist.barrier()
        left = version_at(path) if first else 0
        dist.barrier()
        return said, left

    counted = Faults(path.parent, 0, full_disk)
    outcomes = [save(counted)]
    points = [changing_names(counted.log)]
    dist.broadcast_object_list(points)
    for n in points[0]:
        outcomes.append(save(Faults(path.parent, n, full_disk)))
    for fault in FAULTS[after]:
        outcomes.append(save(fault))
        assert not first or [*path.parent.iterdir()] == [path]
        dist.barrier()
    saver(path, 3)
    if first:
        assert version_at(path) == 3
        assert [*path.parent.iterdir()] == [path]
    return outcomes


# ---- seen half done


def half_removed(folder: Path) -> None:
    """Saves a file over a folder, of which rank 1 sees what there is while rank 0 removes it."""
    path = folder / "last.ckpt"
    Saver("sharded")(path, 1)
    saver = Saver("full")
    is_dir, is_file = Path.is_dir, Path.is_file
    seen = mock.patch.multiple(
        Path,
        is_dir=lambda each: each == path or is_dir(each),
        is_file=lambda each: each != path / "meta.pt" and is_file(each),
    )
    with nullcontext() if saver.fabric.is_global_zero else seen:
        saver(path, 2)
    assert version_at(path) == 2


def written_later(folder: Path) -> None:
    """Saves a file over a folder by a CheckpointIO that writes when it likes to."""
    from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
    from lightning.pytorch.plugins.io import AsyncCheckpointIO

    path = folder / "last.ckpt"
    Saver("sharded")(path, 1)
    saver = Saver("full")
    saver.fabric.strategy.checkpoint_io = AsyncCheckpointIO(TorchCheckpointIO())
    with pytest.raises(IsADirectoryError, match="AsyncCheckpointIO may write it later; move the"):
        saver(path, 2)
    if saver.fabric.is_global_zero:
        assert version_at(path) == 1
