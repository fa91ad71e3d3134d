"""A folder of checkpoints in which the newest complete one survives whatever happens to the next::

    DIR/step-00000100            complete
    DIR/step-00000200            complete, the newest
    DIR/step-00000300.partial    being written, or left by a save that was killed

A checkpoint is written under its partial name, and renamed by one rank once every rank has written its part: the rename
is what makes it one. An older one loses its name before its files. What is partial is removed by the next save. The
files themselves are written by `torch.distributed.checkpoint` (DCP), or by whoever else.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from shardcomm.communicator import Communicator

_COMPLETE = re.compile(r"step-(\d{8,})")
_PARTIAL = ".partial"


class CheckpointError(RuntimeError):
    """A checkpoint could not be saved or loaded; the message says by which rank, and why."""


class Checkpoints:
    """The checkpoints of one run, in `directory`, which is made if it is not there.

    Args:
        comm: the ranks that save and load; all of them see the directory.
        keep: how many complete checkpoints are left; at least 1.

    Raises:
        ValueError: `directory` is not one, or cannot be written to.
    """

    def __init__(self, directory: str | Path, comm: Communicator, *, keep: int = 2) -> None:
        if keep < 1:
            raise ValueError(f"Checkpoints: keep is {keep}; it must be at least 1")
        self.directory = Path(directory)
        self.comm = comm
        self._keep = keep
        self._background = ThreadPoolExecutor(1, "checkpoints")
        self._pending: tuple[str, Future[None]] | None = None
        check_directory(self.directory)

    def latest(self) -> int | None:
        """The step of the newest complete checkpoint; collective, the same on every rank."""
        steps = complete_steps(self.directory)
        found = torch.tensor([steps[-1] if steps else -1], device=self.comm.device)
        self.comm.broadcast(found)
        step = int(found)
        return None if step < 0 else step

    @contextmanager
    def save(self, step: int) -> Iterator[Path]:
        """A new directory, into which every rank writes its part of the checkpoint of `step`; collective.

        When all ranks have left the context it becomes a checkpoint; if one leaves it by an exception, or dies, it
        never does. It waits for an `async_save` that is under way first.

        Raises:
            ValueError: `step` is no whole number of at least 0, or not the same on every rank, or there is a checkpoint
                of it; on every rank, and nothing is written.
            CheckpointError: DCP could not save, a file could not be written, or another rank failed.
            CommError: a rank died, or did not come. At once where `comm` waits for it, but what waits in DCP may do so
                until its process group's timeout: Gloo does not end a send that was under way when its receiver died.
        """
        what, partial = self._begin(step)
        with self._together(what):
            yield partial
        with self._together(what):
            self._complete(partial)

    def async_save(self, step: int, write: Callable[[Path], Future[Any]]) -> None:
        """Begins to save, and returns while it goes on in the background; collective.

        One at a time: this, `save` and `wait` first wait for the one before, and raise what went wrong with it, as
        `save` does. It becomes a checkpoint when it is written; call `wait` to be sure of the last one.

        Args:
            write: called with the new directory; returns a future that is done when all ranks have written their parts,
                as `torch.distributed.checkpoint.async_save` does. That copies the state to CPU memory at once, and then
                talks from another thread: over a process group that nothing else uses meanwhile. If `write`
                raises on one rank alone, the others wait for that rank until the group's timeout, and no later save
                over this group succeeds: end the run then.
        """
        what, partial = self._begin(step)
        with self._together(what):
            written = write(partial)
        self._pending = what, self._background.submit(self._complete_when, written, partial)

    def wait(self) -> None:
        """Until what `async_save` began is a checkpoint; collective. Errors as of `save`."""
        if self._pending is None:
            return
        (what, completed), self._pending = self._pending, None
        with self._together(what):
            completed.result()

    @contextmanager
    def load(self, step: int) -> Iterator[Path]:
        """The checkpoint of `step`, from which every rank reads; collective.

        Raises:
            CheckpointError: there is none of this step, or not all ranks could load it.
            ValueError, CommError: as of `save`.
        """
        self._check_step("load", step)
        what = f"the checkpoint of step {step} was not loaded"
        with self._together(what):
            steps = complete_steps(self.directory)
            if step not in steps:
                there = ", ".join(map(str, steps)) or "none"
                raise CheckpointError(
                    f"{what}: it is not in {self.directory}; the steps there: {there}"
                )
        with self._together(what):
            yield self._path(step)

    def _begin(self, step: int) -> tuple[str, Path]:
        """What to say if it fails, and the directory to write into."""
        self.wait()
        self._check_step("save", step)
        complete = self._path(step)
        what, partial = f"the checkpoint of step {step} was not saved", _partial(complete)
        with self._together(what):
            if complete.exists():
                raise ValueError(
                    f"save: step is {step}, of which there is a checkpoint: {complete}"
                )
            if self.comm.rank == 0:
                for stale in self.directory.glob(f"step-*{_PARTIAL}"):
                    shutil.rmtree(stale)
                partial.mkdir()
        return what, partial

    def _check_step(self, operation: str, step: int) -> None:
        """ValueError on every rank unless all of them give the same whole number."""
        good = isinstance(step, int) and not isinstance(step, bool) and 0 <= step < 1 << 63
        given = torch.tensor([step if good else -1], device=self.comm.device)
        of_ranks = given.new_empty(self.comm.size)
        self.comm.all_gather(of_ranks, given)
        if not good:
            raise ValueError(
                f"{operation}: step is {step!r}; it must be a whole number of at least 0"
            )
        for rank, other in enumerate(of_ranks.tolist()):
            if other != step:
                theirs = other if other >= 0 else "no step"
                raise ValueError(
                    f"{operation}: step is {step} here and {theirs} on rank {rank}; every rank must give the same"
                )

    def _complete_when(self, written: Future[Any], partial: Path) -> None:
        try:
            written.result()
        except Exception as error:
            error.add_note(f"in the background, while {partial.name} was written")
            raise
        self._complete(partial)

    def _complete(self, partial: Path) -> None:
        """Makes it a checkpoint; one rank does."""
        if self.comm.rank == 0:
            _sync(partial)
            partial.rename(partial.with_suffix(""))
            _sync(self.directory)
            self._remove_old()

    def _remove_old(self) -> None:
        for step in complete_steps(self.directory)[: -self._keep]:
            without_name = _partial(self._path(step))
            self._path(step).rename(without_name)
            shutil.rmtree(without_name)

    @contextmanager
    def _together(self, what: str) -> Iterator[None]:
        """Fails on every rank where it fails on one; a rank that died is a CommError, whatever that led to in here."""
        # Not at every start: it takes a second, as long as torch itself.
        from torch.distributed.checkpoint.api import CheckpointException  # noqa: PLC0415

        try:
            yield
        except OSError as error:
            self._failed(here=True)
            reason = f"{error.filename}: {error.strerror}" if error.filename else str(error)
            raise CheckpointError(f"{what}: {reason}") from error
        except CheckpointException as error:  # DCP's, and the same on every rank
            self._failed(here=True)
            rank, (cause, _) = next(iter(error.failures.items()))
            raise CheckpointError(f"{what}: rank {rank}: {cause}") from error
        except Exception:
            self._failed(here=True)
            raise
        rank = self._failed(here=False)
        if rank >= 0:
            raise CheckpointError(f"{what}: rank {rank} failed; it says why")

    def _failed(self, *, here: bool) -> int:
        """A rank that failed, or -1; collective."""
        failed = torch.tensor([float(self.comm.rank if here else -1)], device=self.comm.device)
        self.comm.all_reduce(failed, "max")
        return int(failed)

    def _path(self, step: int) -> Path:
        return self.directory / f"step-{step:08d}"


def complete_steps(directory: Path) -> list[int]:
    """The steps of which there are complete checkpoints, in order."""
    names = (_COMPLETE.fullmatch(entry.name) for entry in directory.iterdir())
    return sorted(int(name[1]) for name in names if name)


def check_directory(directory: Path) -> None:
    """Makes it; ValueError if that cannot be, or nothing can be written there."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"{directory}: no such folder can be made: {error.strerror}") from error
    if not os.access(directory, os.R_OK | os.W_OK | os.X_OK):
        raise ValueError(f"{directory}: the folder cannot be written to")


def _partial(complete: Path) -> Path:
    return complete.with_name(complete.name + _PARTIAL)


def _sync(directory: Path) -> None:
    """Its entries to the disk; the files' own contents are their writers' business."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
