"""Checkpoints of which the newest complete one survives whatever happens to the next.

Each save writes into a partial folder of its own (`shardcomm.checkpoint.folders`). When every rank has written its
part, the files are synced to the disk, and so is a manifest of them (`shardcomm.checkpoint.manifest`). Then one rank
renames the folder, which makes it a checkpoint, unless another run has begun to save (`shardcomm.checkpoint.writer`).
To remove an older one, a rank first takes its name away, and then deletes its files. The next save removes partial
folders. The files themselves are written by `torch.distributed.checkpoint` (DCP), or by any other writer.
"""

from __future__ import annotations

import errno
import json
import os
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import torch

from shardcomm.arguments.checks import check_type
from shardcomm.arguments.scalars import is_whole
from shardcomm.checkpoint.folders import (
    check_directory,
    checkpoint_folder,
    complete_steps,
    last_changed,
    partial_folder,
    partial_folders,
    remove,
    set_aside,
)
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
from shardcomm.checkpoint.together import together
from shardcomm.checkpoint.unpickling import check_unpickling
from shardcomm.checkpoint.writer import Writer, check_writer
from shardcomm.comm.communicator import Communicator
from shardcomm.comm.texts import all_gather_bytes


class Checkpoints:
    """The checkpoints of one run, in one directory. The newest complete one survives whatever happens to the next.

    The contents are written and read by `torch.distributed.checkpoint` (DCP), or by any other writer. Loading runs no
    code that a checkpoint names, although DCP unpickles: what DCP would unpickle is checked first. Processes that can
    write to the directory meanwhile are trusted.

    If two runs save into one directory, the one whose save began last goes on. The other one raises a CheckpointError
    that names it, from what it saves then or later. No checkpoint has files of both.

    Args:
        directory: The folder of the run. It is made if it is not there.
        comm: The ranks that save and load. All of them must see the directory.
        keep: How many complete checkpoints are kept, at least 1; a save removes older ones, but not its own.

    Attributes:
        directory: As given, as an absolute Path. So it stays the same where the program changes its current folder.
        comm: As given.

    Raises:
        TypeError: `directory` is no path, or `comm` no Communicator.
        ValueError: `directory` is empty or no folder, cannot be made, or cannot be written to; or `keep` is no whole
            number of at least 1.

    Example:
        ```python
        import torch.distributed.checkpoint as dcp

        model = torch.nn.Linear(64, 64)
        engine = shardcomm.fully_shard(model, comm)
        checkpoints = shardcomm.Checkpoints("run", comm)
        step = checkpoints.latest()
        if step is not None:
            with checkpoints.load(step) as folder:
                dcp.load({"model": engine}, checkpoint_id=folder)
        with checkpoints.save(step=100) as folder:
            dcp.save({"model": engine}, checkpoint_id=folder)
        ```
    """

    def __init__(self, directory: str | Path, comm: Communicator, *, keep: int = 2) -> None:
        check_type("Checkpoints", "directory", directory, str | os.PathLike, "a str or a Path")
        check_type("Checkpoints", "comm", comm, Communicator, "a shardcomm.Communicator")
        if not is_whole(keep, 1):
            raise ValueError(
                f"Checkpoints: keep is {keep!r}; it must be a whole number of at least 1"
            )
        self.directory = check_directory(directory).absolute()
        self.comm = comm
        self._keep = keep
        self._background = ThreadPoolExecutor(1, "checkpoints")
        self._pending: tuple[int, Path, Future[None]] | None = None
        # For each step that this object has saved or read: why it is damaged, or None. The same on every rank.
        self._damage: dict[int, str | None] = {}
        # When the folders of these were changed last, on rank 0: of a folder that differs now, nothing is known.
        self._seen: dict[int, tuple[int | None, int | None]] = {}
        self._verified: int | None = None  # the load that follows need not read this step again
        self._has_begun = False  # a save; on rank 0

    def latest(self) -> int | None:
        """Finds the newest checkpoint that is whole; collective.

        A checkpoint that this object has not saved itself is read, each file by one rank, and compared with its
        manifest. If it is damaged, rank 0 warns, and the one before it is read. The next save renames damaged ones. An
        `async_save` that is under way is waited for first.

        Returns:
            The step, the same on every rank; None if there are no checkpoints.

        Raises:
            CheckpointError: There are checkpoints, and none is whole; or a file could not be read, for another reason
                than damage; or, as `wait` raises it, an `async_save` failed. Another call then goes on without it.
            CommError: As `save`.
        """
        self.wait()
        steps = self._steps()
        passed_over: list[str] = []
        while steps:
            step = steps.pop()
            known = step in self._damage
            if not known:
                self._damage[step] = self._find_damage(step)
            reason = self._damage[step]
            if reason is None:
                self._verified = self._verified if known else step
                return step
            if not known and step not in (now := self._steps()):
                # Another program has removed it meanwhile, since there is a newer one.
                steps, passed_over = now, []
                continue
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
        """A context that saves a checkpoint: it gives a new folder, into which every rank writes its part; collective.

        When all ranks have left the context, the folder becomes a checkpoint. If a rank leaves it by an exception, or
        dies, the folder never does. An `async_save` that is under way is waited for first. A checkpoint that `latest`
        or `load` found damaged is renamed, so that its step can be saved again. An older one that cannot be removed
        stays, and the next save tries again.

        If a rank raises an exception before it calls `dcp.save`, the other ranks wait for it in DCP's group, and it
        waits for them in `comm`, until the group's timeout or the deadline of `comm`. Only then they raise.

        Args:
            step: The number of the step: whole, at least 0, and the same on every rank.

        Yields:
            The folder to write into.

        Raises:
            ValueError: `step` is not as described, or there is a checkpoint of it. It is raised on every rank, and
                nothing is written.
            CheckpointError: DCP could not save, a file could not be written, no rank wrote anything, a rank does not
                see the folder that rank 0 has made, another run has begun to save into the directory, or another rank
                failed. On every rank the message gives the reasons of all ranks that failed.
            CommError: A rank died, or did not come. It is raised at once while `comm` waits for that rank, or DCP does
                over a group of the backend "shardcomm". Over another group DCP may wait longer: Gloo does not end a
                send that was under way when its receiver died before the group's timeout.
        """
        partial = self._begin("save", step)
        with self._saving(step, partial):
            yield partial
        with self._saving(step, partial):
            names = json.dumps(files_in(partial))
        of_ranks = all_gather_bytes(self.comm, names.encode())
        every = sorted({name for names in of_ranks for name in json.loads(names)})
        with self._saving(step, partial):
            share = every[self.comm.rank :: self.comm.size]
            entries = json.dumps({name: asdict(_synced(partial / name)) for name in share})
        of_ranks = all_gather_bytes(self.comm, entries.encode())
        with self._saving(step, partial):
            if self.comm.rank == 0:
                files = {
                    n: FileEntry(**e) for part in of_ranks for n, e in json.loads(part).items()
                }
                self._complete(step, partial, files)
        self._damage[step] = None
        if self.comm.rank == 0:
            self._remove_old(saved=step)

    def async_save(self, step: int, write: Callable[[Path], Future[Any]]) -> None:
        """Begins to save a checkpoint, and returns while the save goes on in the background; collective.

        There is one save at a time: `async_save`, `save`, `wait`, `latest` and `load` first wait for the one before,
        and raise its errors as `save` would. The folder becomes a checkpoint when it is written and rank 0, alone, has
        read it for the manifest. Call `wait` to be sure of the last one.

        Args:
            step: As in `save`.
            write: A function of the new folder, which returns a future that is done when all ranks have written their
                parts. `torch.distributed.checkpoint.async_save` returns such a future. It copies the state to CPU
                memory at once, and then communicates from another thread; give it a process group that nothing else
                uses meanwhile. If `write` raises on one rank alone, the other ranks wait for that rank until the
                group's timeout, and no later save over this group succeeds: end the run then.

        Raises:
            TypeError: `write` is no function, or returned no `concurrent.futures.Future`.
            ValueError: As `save`.
            CheckpointError: As `save`; also of the save before.
            CommError: As `save`.

        Example:
            ```py
            group = torch.distributed.new_group(backend="gloo")  # for these saves alone
            checkpoints.async_save(
                200, lambda folder: dcp.async_save(state, checkpoint_id=folder, process_group=group)
            )
            ```
        """
        partial = self._begin("async_save", step)
        with self._saving(step, partial):
            check_type("async_save", "write", write, Callable, "a function of the new directory")
            written = write(partial)
            check_type(
                "async_save", "what write returned", written, Future, "a concurrent.futures.Future"
            )
        completed = self._background.submit(self._complete_when, written, step, partial)
        self._pending = step, partial, completed

    def wait(self) -> None:
        """Waits until the save that `async_save` began is a checkpoint; collective.

        Raises:
            CheckpointError: As `save`.
            CommError: As `save`.
        """
        if self._pending is None:
            return
        (step, partial, completed), self._pending = self._pending, None
        with self._saving(step, partial):
            completed.result()
        self._damage[step] = None

    @contextmanager
    def load(self, step: int) -> Iterator[Path]:
        """A context that loads a checkpoint: it gives the folder from which every rank reads; collective.

        First each file is read by one rank and compared with the manifest, unless `latest` has just done so. What DCP
        would unpickle is checked, too. An `async_save` that is under way is waited for before all this.

        If a rank raises an exception before it calls `dcp.load`, the other ranks wait for it in DCP's group, and it
        waits for them in `comm`, until the group's timeout or the deadline of `comm`. Only then they raise.

        Args:
            step: The step, as `latest` returns it.

        Yields:
            The folder to read from.

        Raises:
            CheckpointError: There is no checkpoint of this step, it is damaged, it would have DCP unpickle what is
                refused, or not all ranks could load it; or, as `wait` raises it, an `async_save` failed. Another call
                then goes on without it.
            ValueError: `step` is no whole number of at least 0, or not the same on every rank.
            CommError: As `save`.
        """
        self.wait()
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

    def _steps(self) -> list[int]:
        """The steps that rank 0 sees, in order; what is known of other folders than these is forgotten. Collective."""
        with self._together("no checkpoint was found", self.directory):
            there = complete_steps(self.directory) if self.comm.rank == 0 else []
        known = [step for step in there if self._is_as_seen(step)]
        [steps, *_] = all_gather_bytes(self.comm, json.dumps([there, known]).encode())
        there, known = cast("list[list[int]]", json.loads(steps))
        self._damage = {step: why for step, why in self._damage.items() if step in known}
        return there

    def _is_as_seen(self, step: int) -> bool:
        """Whether the folder of `step` is still that of which `_damage` tells; on rank 0."""
        return step in self._seen and self._seen[step] == last_changed(self._path(step))

    def _begin(self, operation: str, step: int) -> Path:
        """Makes the folder into which ranks write the checkpoint of `step`; collective."""
        self.wait()
        self._check_step(operation, step)
        complete = self._path(step)
        with self._together(_not_saved(step), self.directory):
            if self._has_begun:
                check_writer(_not_saved(step), self.directory)
        damaged = [other for other, reason in self._damage.items() if reason is not None]
        damaged = [other for other in damaged if self._is_as_seen(other)]
        own = json.dumps([partial_folder(complete).name, damaged])
        [of_rank_0, *_] = all_gather_bytes(self.comm, own.encode())
        name, damaged = cast("tuple[str, list[int]]", json.loads(of_rank_0))
        partial = self.directory / name
        with self._together(_not_saved(step), self.directory):
            if step not in damaged and complete.exists():
                raise ValueError(
                    f"{operation}: step is {step}, of which there is a checkpoint: {complete}"
                )
            if self.comm.rank == 0:
                # In this order, so that of several runs which begin at once nobody removes the folder of the last one.
                stale = partial_folders(self.directory)
                Writer.here(partial.name).take(self.directory)
                self._has_begun = True
                for folder in stale:
                    # Over a network file system a file may be open. The next save tries again.
                    with suppress(OSError):
                        remove(folder)
                for other in damaged:
                    set_aside(self._path(other))
                partial.mkdir()
        self._damage = {other: None for other, reason in self._damage.items() if reason is None}
        with self._saving(step, partial):
            if not partial.is_dir():
                raise CheckpointError(
                    f"{_not_saved(step)}: rank {self.comm.rank}: {partial}: rank 0 has made this folder, and this rank "
                    "does not see it; all ranks must see it, on a file system that they share"
                )
        return partial

    def _find_damage(self, step: int) -> str | None:
        """Why the checkpoint of `step` is damaged, the same on every rank; None if it is whole. Collective."""
        folder, found = self._path(step), ""
        self._damage.pop(step, None)
        if self.comm.rank == 0:
            self._seen[step] = last_changed(folder)
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
                f"{operation}: step is {step!r}; it must be a whole number from 0 to 2**63 - 1"
            )
        for rank, other in enumerate(of_ranks.tolist()):
            if other != step:
                theirs = other if other >= 0 else "no step"
                raise ValueError(
                    f"{operation}: step is {step} here and {theirs} on rank {rank}; every rank must give the same"
                )

    def _complete_when(self, written: Future[Any], step: int, partial: Path) -> None:
        """In the background: completes a checkpoint when it has been written.

        Rank 0 reads all files. Ranks cannot share out that work, since training uses the communicator meanwhile.
        """
        try:
            written.result()
        except Exception as error:
            error.add_note(f"in the background, while {partial.name} was written")
            raise
        if self.comm.rank == 0:
            self._complete(step, partial, {n: _synced(partial / n) for n in files_in(partial)})
            self._remove_old(saved=step)

    def _complete(self, step: int, partial: Path, files: dict[str, FileEntry]) -> None:
        """Makes `partial` a checkpoint of `files`, which must be on the disk. One rank calls it."""
        if MANIFEST in files:
            raise CheckpointError(
                f"{_not_saved(step)}: {partial / MANIFEST}: the name is taken here"
            )
        # DCP writes `.metadata` even if the ranks gave it nothing.
        if not any(entry.bytes for name, entry in files.items() if name != ".metadata"):
            raise CheckpointError(f"{_not_saved(step)}: {partial}: no rank wrote anything there")
        Manifest(step, self.comm.size, files).write(partial)
        sync_folders(partial)
        # DCP makes the folder again if another run has removed it: what was written before is not there.
        check_writer(_not_saved(step), self.directory, partial.name)
        try:
            partial.rename(self._path(step))
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            raise CheckpointError(
                f"{_not_saved(step)}: another run has saved it meanwhile: {self._path(step)}"
            ) from error
        self._seen[step] = last_changed(self._path(step))
        sync(self.directory)

    def _remove_old(self, saved: int) -> None:
        """Removes older checkpoints. The new one is complete, so what cannot be removed stays until the next save."""
        with suppress(OSError):
            for step in complete_steps(self.directory)[: -self._keep]:
                if step == saved:  # by a run that goes on from an earlier step than the newest
                    continue
                with suppress(OSError):
                    remove(self._path(step))

    @contextmanager
    def _saving(self, step: int, partial: Path) -> Iterator[None]:
        """As `_together`; where another run has begun to save, and so has removed `partial`, an error says that."""
        try:
            with self._together(_not_saved(step), partial):
                yield
        except CheckpointError:
            with suppress(OSError):
                check_writer(_not_saved(step), self.directory, partial.name)
            raise

    def _together(self, what: str, folder: Path) -> AbstractContextManager[None]:
        return together(self.comm, what, folder)

    def _path(self, step: int) -> Path:
        return checkpoint_folder(self.directory, step)


def _synced(path: Path) -> FileEntry:
    """Syncs a file to the disk, and returns its entry for the manifest."""
    sync(path)
    return FileEntry.of(path)


def _not_saved(step: int) -> str:
    return f"the checkpoint of step {step} was not saved"
