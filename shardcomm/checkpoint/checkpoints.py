"""A folder of checkpoints in which the newest complete one survives whatever happens to the next::

    DIR/step-00000100            complete
    DIR/step-00000200            complete, the newest
    DIR/step-00000300.partial    being written, or left by a save that was killed
    DIR/step-00000150.damaged    was complete, and is no more what was saved

A checkpoint is written under its partial name. When every rank has written its part, all of it is brought to the disk
with a manifest (`shardcomm.checkpoint.manifest`), and then one rank renames it: that makes it a checkpoint. An older
one loses its name before its files. What is partial is removed by the next save. The files themselves are written by
`torch.distributed.checkpoint` (DCP), or by whoever else.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from shardcomm.arguments.checks import check_type
from shardcomm.arguments.scalars import is_whole
from shardcomm.checkpoint.manifest import (
    MANIFEST,
    CheckpointError,
    DamagedError,
    FileEntry,
    Manifest,
    files_in,
    sync,
    sync_folders,
)
from shardcomm.checkpoint.together import sentence, together
from shardcomm.checkpoint.unpickling import check_unpickling
from shardcomm.comm.communicator import Communicator
from shardcomm.comm.texts import all_gather_bytes

__all__ = [
    "CheckpointError",
    "Checkpoints",
    "check_directory",
    "checkpoint_folder",
    "complete_steps",
]

_COMPLETE = re.compile(r"step-(\d{8,})")
_PARTIAL = ".partial"
_DAMAGED = ".damaged"


class Checkpoints:
    """The checkpoints of one run, in `directory`, which is made if it is not there.

    Loading runs no code that a checkpoint names, as unpickling does: what DCP would unpickle is looked at first. Who
    can write to `directory` meanwhile is trusted.

    Args:
        comm: the ranks that save and load; all of them see the directory.
        keep: how many complete checkpoints are left; at least 1.

    Raises:
        TypeError: `directory` is no path, or `comm` no Communicator.
        ValueError: `directory` is not one, or cannot be written to; or `keep` is no whole number of at least 1.
    """

    def __init__(self, directory: str | Path, comm: Communicator, *, keep: int = 2) -> None:
        check_type("Checkpoints", "directory", directory, str | os.PathLike, "a str or a Path")
        check_type("Checkpoints", "comm", comm, Communicator, "a shardcomm.Communicator")
        if not is_whole(keep, 1):
            raise ValueError(f"Checkpoints: keep is {keep!r}; it must be at least 1")
        self.directory = Path(directory)
        self.comm = comm
        self._keep = keep
        self._background = ThreadPoolExecutor(1, "checkpoints")
        self._pending: tuple[int, Path, Future[None]] | None = None
        # The same on every rank: of the steps that this has saved or looked at, why they are damaged, or None.
        self._damage: dict[int, str | None] = {}
        self._verified: int | None = None  # not to be read again by the load that follows
        check_directory(self.directory)

    def latest(self) -> int | None:
        """The step of the newest checkpoint that is whole; collective, the same on every rank.

        What this has not saved itself is read, every file by one rank, and compared with its manifest. Rank 0 warns of
        a damaged one, and the one before is looked at. The next save renames what was damaged.

        Raises:
            CheckpointError: there are checkpoints, and none is whole; or a file could not be read, and it is not said
                that it is damaged.
            CommError: as of `save`.
        """
        with self._together("no checkpoint was found", self.directory):
            there = complete_steps(self.directory) if self.comm.rank == 0 else []
        [steps, *_] = all_gather_bytes(self.comm, json.dumps(there).encode())
        passed_over = []
        for step in reversed(json.loads(steps)):
            known = step in self._damage
            if not known:
                self._damage[step] = self._find_damage(step)
            reason = self._damage[step]
            if reason is None:
                self._verified = self._verified if known else step
                return int(step)
            passed_over.append(reason)
            if not known and self.comm.rank == 0:
                warnings.warn(
                    f"the checkpoint of step {step} is damaged, and the one before it is taken: {reason}",
                    RuntimeWarning,
                    stacklevel=2,
                )
        if passed_over:
            raise CheckpointError(f"no checkpoint is whole: {'; '.join(passed_over)}")
        return None

    @contextmanager
    def save(self, step: int) -> Iterator[Path]:
        """A new directory, into which every rank writes its part of the checkpoint of `step`; collective.

        When all ranks have left the context it becomes a checkpoint; if one leaves it by an exception, or dies, it
        never does. It waits for an `async_save` that is under way first. A checkpoint that `latest` or `load` found
        damaged is renamed, so that one of its step can be saved.

        Raises:
            ValueError: `step` is no whole number of at least 0, or not the same on every rank, or there is a checkpoint
                of it; on every rank, and nothing is written.
            CheckpointError: DCP could not save, a file could not be written, no rank wrote anything, or another rank
                failed; the message says why on every rank, of every rank that failed.
            CommError: a rank died, or did not come. At once where `comm` waits for it, and where DCP does by a group of
                the backend "cpu:shardcomm". Another group waits for what it waits for: Gloo does not end a send that
                was under way when its receiver died, until the group's timeout.
        """
        partial = self._begin(step)
        with self._together(_not_saved(step), partial):
            yield partial
        with self._together(_not_saved(step), partial):
            names = json.dumps(files_in(partial))
        of_ranks = all_gather_bytes(self.comm, names.encode())
        every = sorted({name for names in of_ranks for name in json.loads(names)})
        with self._together(_not_saved(step), partial):
            share = every[self.comm.rank :: self.comm.size]
            entries = json.dumps({name: asdict(_synced(partial / name)) for name in share})
        of_ranks = all_gather_bytes(self.comm, entries.encode())
        with self._together(_not_saved(step), partial):
            if self.comm.rank == 0:
                files = {
                    n: FileEntry(**e) for part in of_ranks for n, e in json.loads(part).items()
                }
                self._complete(step, partial, files)
        self._damage[step] = None
        with self._together(_not_removed(step), self.directory):
            if self.comm.rank == 0:
                self._remove_old()

    def async_save(self, step: int, write: Callable[[Path], Future[Any]]) -> None:
        """Begins to save, and returns while it goes on in the background; collective.

        One at a time: this, `save` and `wait` first wait for the one before, and raise what went wrong with it, as
        `save` does. It becomes a checkpoint when it is written and rank 0, alone, has read it for the manifest; call
        `wait` to be sure of the last one.

        Args:
            write: called with the new directory; returns a future that is done when all ranks have written their parts,
                as `torch.distributed.checkpoint.async_save` does. That copies the state to CPU memory at once, and then
                talks from another thread: over a process group that nothing else uses meanwhile. If `write`
                raises on one rank alone, the others wait for that rank until the group's timeout, and no later save
                over this group succeeds: end the run then.
        """
        partial = self._begin(step)
        with self._together(_not_saved(step), partial):
            check_type("async_save", "write", write, Callable, "a function of the new directory")
            written = write(partial)
            check_type(
                "async_save", "what write returned", written, Future, "a concurrent.futures.Future"
            )
        completed = self._background.submit(self._complete_when, written, step, partial)
        self._pending = step, partial, completed

    def wait(self) -> None:
        """Until what `async_save` began is a checkpoint; collective. Errors as of `save`."""
        if self._pending is None:
            return
        (step, partial, completed), self._pending = self._pending, None
        with self._together(_not_saved(step), partial):
            completed.result()
        self._damage[step] = None

    @contextmanager
    def load(self, step: int) -> Iterator[Path]:
        """The checkpoint of `step`, from which every rank reads; collective.

        Before that each file is read by one rank and compared with the manifest, if `latest` has not just done so, and
        what DCP would unpickle is looked at.

        Raises:
            CheckpointError: there is none of this step, it is damaged, what it has DCP unpickle is refused, or not all
                ranks could load it.
            ValueError, CommError: as of `save`.
        """
        self._check_step("load", step)
        what, folder = f"the checkpoint of step {step} was not loaded", self._path(step)
        with self._together(what, folder):
            steps = complete_steps(self.directory)
            if step not in steps:
                there = ", ".join(map(str, steps)) or "none"
                raise CheckpointError(
                    f"{what}: it is not in {self.directory}; the steps there: {there}"
                )
        if self._verified != step:
            self._damage[step] = reason = self._find_damage(step)
            if reason is not None:
                raise CheckpointError(f"{what}: {reason}")
        self._verified = None
        with self._together(what, folder):
            if self.comm.rank == 0:
                try:
                    check_unpickling(folder, frozenset(Manifest.read(folder, step).files))
                except CheckpointError as error:
                    raise CheckpointError(f"{what}: {error}") from error
        with self._together(what, folder):
            yield folder

    def _begin(self, step: int) -> Path:
        """The directory to write into."""
        self.wait()
        self._check_step("save", step)
        complete = self._path(step)
        partial = _partial(complete)
        damaged = [other for other, reason in self._damage.items() if reason is not None]
        with self._together(_not_saved(step), self.directory):
            if step not in damaged and complete.exists():
                raise ValueError(
                    f"save: step is {step}, of which there is a checkpoint: {complete}"
                )
            if self.comm.rank == 0:
                for stale in self.directory.glob(f"step-*{_PARTIAL}"):
                    shutil.rmtree(stale)
                for other in damaged:
                    _set_aside(self._path(other))
                partial.mkdir()
        for other in damaged:
            del self._damage[other]
        return partial

    def _find_damage(self, step: int) -> str | None:
        """Of a checkpoint, on every rank; collective."""
        folder, found = self._path(step), ""
        with self._together(f"the checkpoint of step {step} could not be read", folder):
            try:
                manifest = Manifest.read(folder, step)
                manifest.verify_share(folder, self.comm.rank, self.comm.size)
            except DamagedError as error:
                found = str(error)
        of_ranks = all_gather_bytes(self.comm, found.encode(errors="replace"))
        return next((reason.decode() for reason in of_ranks if reason), None)

    def _check_step(self, operation: str, step: int) -> None:
        """ValueError on every rank unless all of them give the same whole number."""
        good = is_whole(step, 0, (1 << 63) - 1)
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

    def _complete_when(self, written: Future[Any], step: int, partial: Path) -> None:
        """Rank 0 reads what all have written: ranks cannot share that out while training has the communicator."""
        try:
            written.result()
        except Exception as error:
            error.add_note(f"in the background, while {partial.name} was written")
            raise
        if self.comm.rank == 0:
            self._complete(step, partial, {n: _synced(partial / n) for n in files_in(partial)})
            try:
                self._remove_old()
            except OSError as error:
                reason = f"{_not_removed(step)}: rank 0: {sentence(error, self.directory)}"
                raise CheckpointError(reason) from error

    def _complete(self, step: int, partial: Path, files: dict[str, FileEntry]) -> None:
        """Makes it a checkpoint, of files that are on the disk; one rank does."""
        if MANIFEST in files:
            raise CheckpointError(
                f"{_not_saved(step)}: {partial / MANIFEST}: the name is taken here"
            )
        # DCP lists in `.metadata` what the ranks gave it, be it nothing.
        if not any(entry.bytes for name, entry in files.items() if name != ".metadata"):
            raise CheckpointError(f"{_not_saved(step)}: {partial}: no rank wrote anything there")
        Manifest(step, self.comm.size, files).write(partial)
        sync_folders(partial)
        partial.rename(partial.with_suffix(""))
        sync(self.directory)

    def _remove_old(self) -> None:
        for step in complete_steps(self.directory)[: -self._keep]:
            without_name = _partial(self._path(step))
            self._path(step).rename(without_name)
            # Else the disk may have removed some of its files, and have its name still.
            sync(self.directory)
            shutil.rmtree(without_name)

    def _together(self, what: str, folder: Path) -> AbstractContextManager[None]:
        return together(self.comm, what, folder)

    def _path(self, step: int) -> Path:
        return checkpoint_folder(self.directory, step)


def checkpoint_folder(directory: Path, step: int) -> Path:
    """Where the complete checkpoint of `step` is."""
    return directory / f"step-{step:08d}"


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
    except ValueError as error:  # of a name with a null byte
        raise ValueError(f"{str(directory)!r}: no such folder can be made: {error}") from error
    if not os.access(directory, os.R_OK | os.W_OK | os.X_OK):
        raise ValueError(f"{directory}: the folder cannot be written to")


def _partial(complete: Path) -> Path:
    return complete.with_name(complete.name + _PARTIAL)


def _set_aside(damaged: Path) -> None:
    """Takes its name from a checkpoint that is none, for somebody to look at it."""
    aside = damaged.with_name(damaged.name + _DAMAGED)
    if damaged.exists():
        if aside.exists():
            shutil.rmtree(aside)
        damaged.rename(aside)


def _synced(path: Path) -> FileEntry:
    """Of a file, which is on the disk afterwards."""
    sync(path)
    return FileEntry.of(path)


def _not_saved(step: int) -> str:
    return f"the checkpoint of step {step} was not saved"


def _not_removed(step: int) -> str:
    return f"the checkpoint of step {step} was saved, but those before it were not removed"
