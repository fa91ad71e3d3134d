"""A fault at each operation on files, one after the other: the checkpoint is whole, or the one before it loads.

For n = 1, 2, 3, ... the n-th operation of a save, or of a load, fails, falls short, or is the process's last, until one
goes through untouched. Where that takes processes it is every 8th, from one that the seed chooses (--every-point: all).
"""

from __future__ import annotations

import errno
import os
import shutil
import signal
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from shardcomm import _C, CommError, Communicator
from shardcomm.checkpoint.checkpoints import Checkpoints
from shardcomm.checkpoint.folders import complete_steps
from shardcomm.checkpoint.manifest import CheckpointError
from shardcomm.comm.core import CoreCommunicator
from support.file_faults import Faults, ShortWriteError
from support.rank_processes import join, processes
from support.thread_ranks import run_threads

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

MOST_POINTS = 500
ERRORS = (errno.ENOSPC, errno.EIO, errno.EMFILE)


def state(step: int) -> dict[str, object]:
    """What the checkpoint of `step` holds: a tensor, and what is none."""
    return {"weight": torch.arange(12.0) + 100 * step, "groups": [{"step": step}]}


def write_state(path: Path, step: int, rank: int) -> None:
    """By DCP where a rank is alone (threads have no process group), else a file of each rank."""
    if rank < 0:
        dcp.save(state(step), checkpoint_id=path, no_dist=True)
    else:
        (path / f"of-{rank}").write_bytes(bytes([step]) * 100_000)


def read_state(path: Path, ranks: int) -> int:
    """The step, of what is right in every byte."""
    if ranks == 1:
        found = state(0)
        dcp.load(found, checkpoint_id=path, no_dist=True)
        [step] = [group["step"] for group in found["groups"]]  # type: ignore[attr-defined]
        assert torch.equal(found["weight"], state(step)["weight"])  # type: ignore[arg-type]
        return int(step)
    contents = {(path / f"of-{rank}").read_bytes() for rank in range(ranks)}
    [content] = contents
    assert content == content[:1] * 100_000
    return content[0]


def save(checkpoints: Checkpoints, step: int) -> None:
    with checkpoints.save(step) as path:
        write_state(path, step, part_of(checkpoints.comm))


def save_in_background(checkpoints: Checkpoints, step: int) -> None:
    def write(path: Path) -> Future[None]:
        write_state(path, step, part_of(checkpoints.comm))
        done: Future[None] = Future()
        done.set_result(None)
        return done

    checkpoints.async_save(step, write)
    checkpoints.wait()


def part_of(comm: Communicator) -> int:
    return -1 if comm.size == 1 else comm.rank


@pytest.fixture(scope="module", params=[1, 2])
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with checkpoints 1 and 2, by as many ranks as its name ends with."""
    return saved_by(request.param, tmp_path_factory)


@pytest.fixture(scope="module")
def by_one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As `saved`, by DCP."""
    return saved_by(1, tmp_path_factory)


def saved_by(ranks: int, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("saved") / f"by-{ranks}"

    def body(comm: Communicator) -> None:
        checkpoints = Checkpoints(folder, comm)
        save(checkpoints, 1)
        save(checkpoints, 2)

    with warnings.catch_warnings(action="ignore"):
        run_threads(body, ranks)
    return folder


def copies(saved: Path, work: Path, first: int = 1, stride: int = 1) -> Iterator[tuple[int, Path]]:
    """n, and a copy of the folder for it, until its user is done."""
    for n in range(first, MOST_POINTS, stride):
        folder = work / "checkpoints"
        shutil.copytree(saved, folder)
        yield n, folder
        shutil.rmtree(folder)
    raise AssertionError(f"more than {MOST_POINTS} operations")


def good_step(folder: Path, ranks: int) -> int:
    """That of the newest whole checkpoint, which is read; what was left over does not stop the save after it."""
    checkpoints = Checkpoints(folder, Communicator.local_group(1)[0])
    step = checkpoints.latest()
    assert step is not None
    with checkpoints.load(step) as path:
        assert read_state(path, ranks) == step
    with checkpoints.save(step + 1) as path:
        write_state(path, step + 1, 0)
    assert checkpoints.latest() == step + 1
    assert not list(folder.glob("*.partial"))
    assert len(complete_steps(folder)) == 2
    return step


def failing(code: int) -> Callable[[str, str], None]:
    def fail(operation: str, path: str) -> None:
        raise OSError(code, os.strerror(code), path if operation != "write" else None)

    return fail


@pytest.mark.parametrize("saving", [save, save_in_background])
def test_an_error_at_every_point_of_a_save(
    saved: Path, saving: Callable[[Checkpoints, int], None], seed: int, tmp_path: Path
) -> None:
    ranks = int(saved.name[-1])
    outcomes: Counter[str] = Counter()
    for n, folder in copies(saved, tmp_path):
        code = ERRORS[(n + seed) % len(ERRORS)]
        made = run_threads(lambda comm: Checkpoints(folder, comm), ranks)  # noqa: B023
        faults = Faults(folder, n, failing(code))

        def body(comm: Communicator) -> str:
            try:
                saving(made[comm.rank], 3)  # noqa: B023
            except CheckpointError as error:
                return str(error)
            return ""

        with faults():
            said = run_threads(body, ranks)
        assert len(set(said)) == 1, (n, said)
        failed = said[0]
        step = good_step(folder, ranks)
        operation = faults.log[n - 1] if faults.reached else None
        if failed:
            assert failed.startswith("the checkpoint of step 3 was "), (n, failed)
            assert str(folder) in failed, (n, failed)
            assert os.strerror(code) in failed or "could not write" in failed, (n, failed)
        assert step == 3 or (failed and step == 2), (n, operation, failed)
        outcomes[("failed, " if failed else "saved, ") + f"{step} loads"] += 1
        if not faults.reached:
            break
    print(f"\n{saving.__name__}, {ranks} ranks: {n - 1} points: {dict(outcomes)}")
    assert outcomes["failed, 2 loads"] > 10


def test_short_writes_are_gone_on_with(saved: Path, tmp_path: Path) -> None:
    ranks = int(saved.name[-1])

    def short(operation: str, path: str) -> None:
        if operation == "write":
            raise ShortWriteError

    for n, folder in copies(saved, tmp_path):
        made = run_threads(lambda comm: Checkpoints(folder, comm), ranks)  # noqa: B023
        faults = Faults(folder, n, short)
        with faults():
            run_threads(lambda comm: save(made[comm.rank], 3), ranks)  # noqa: B023
        assert good_step(folder, ranks) == 3
        if not faults.reached:
            break


def test_an_error_at_every_point_of_a_load(saved: Path, seed: int, tmp_path: Path) -> None:
    ranks = int(saved.name[-1])
    outcomes: Counter[str] = Counter()
    for n, folder in copies(saved, tmp_path):
        code = ERRORS[(n + seed) % len(ERRORS)]
        made = run_threads(lambda comm: Checkpoints(folder, comm), ranks)  # noqa: B023
        faults = Faults(folder, n, failing(code))

        def body(comm: Communicator) -> str:
            checkpoints = made[comm.rank]  # noqa: B023
            try:
                step = checkpoints.latest()
                with checkpoints.load(step) as path:  # type: ignore[arg-type]
                    assert read_state(path, ranks) == step
            except CheckpointError as error:
                return str(error)
            return f"{step} loads"

        with faults(), warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always", RuntimeWarning)
            said = run_threads(body, ranks)
        assert len(set(said)) == 1, (n, said)
        assert said[0] in ("1 loads", "2 loads") or str(folder) in said[0], (n, said)
        # Only a file that is lost makes a checkpoint damaged, not a process that is out of descriptors.
        assert code == errno.EIO or said[0] != "1 loads", (n, said)
        told = [str(warning.message) for warning in warned if "damaged" in str(warning.message)]
        assert len(told) == (said[0] == "1 loads" or "step 1" in said[0]), (n, said, told)
        assert complete_steps(folder) == [1, 2]
        outcomes[said[0] if "loads" in said[0] else "failed"] += 1
        if not faults.reached:
            assert said[0] == "2 loads"
            break
    print(f"\nload, {ranks} ranks: {n - 1} points: {dict(outcomes)}")


# What DCP's ranks agree by, on what each writes.
EXCHANGES = ("gather_object", "scatter_object_list", "broadcast_object_list")


def end_in(
    rank: int,
    tell: Connection,
    ranks: int,
    address: str,
    meeting: str,
    folder: Path,
    operation: str,
    victim: int,
    n: int,
    how: signal.Signals,
    deadline_s: float,
) -> None:
    """Saves step 3, or loads; `victim` ends at its n-th operation. Tells what came of it, and when.

    By DCP where the victim is killed, whose exchanges count as operations. Where it is stopped, the deadline is too
    short for torch's groups to meet.
    """
    by_dcp = how is signal.SIGKILL
    if by_dcp:
        comm = join(rank, ranks, address, meeting, "shardcomm")
    else:
        comm = CoreCommunicator(_C.make_shm(address, rank, ranks, deadline_s))
    checkpoints = Checkpoints(folder, comm)

    def act(operation: str, path: str) -> None:
        if rank == victim:
            tell.send((time.monotonic(), f"ended at {operation} {path}"))
            os.kill(os.getpid(), how)

    def counted(function: Callable[..., None]) -> Callable[..., None]:
        def exchange(*args: object, **options: object) -> None:
            faults.point(function.__name__, folder)
            function(*args, **options)

        return exchange

    said = "done"
    faults = Faults(folder, n, act)
    exchanges = {name: counted(getattr(dist, name)) for name in EXCHANGES}
    with faults(), mock.patch.multiple(dist, **exchanges):
        comm.barrier()
        try:
            if operation == "load":
                with checkpoints.load(checkpoints.latest() or 0) as path:
                    dcp.load(state(0), checkpoint_id=path)
            else:
                with checkpoints.save(3) as path:
                    if by_dcp:
                        dcp.save(state(3), checkpoint_id=path)
                    else:
                        write_state(path, 3, rank)
            comm.barrier()  # what the others would do next
        except CommError as error:
            said = str(error)
    with suppress(BrokenPipeError):
        tell.send((time.monotonic(), said))


@pytest.mark.covers("checkpoint folders")
@pytest.mark.parametrize(
    ("operation", "how", "deadline_s"),
    [
        ("save", signal.SIGKILL, 60.0),
        ("save", signal.SIGSTOP, 1.0),
        ("load", signal.SIGKILL, 60.0),
    ],
    ids=["save-kill", "save-stop", "load-kill"],
)
@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_ends_at_any_point(
    by_one: Path,
    operation: str,
    victim: int,
    how: signal.Signals,
    deadline_s: float,
    every_point: bool,
    seed: int,
    tmp_path: Path,
) -> None:
    survivor = 1 - victim
    outcomes: Counter[str] = Counter()
    stride = 1 if every_point else 8
    for n, folder in copies(by_one, tmp_path, 1 + seed % stride, stride):
        arguments = (folder, operation, victim, n, how, deadline_s)
        with processes(end_in, 2, tmp_path / f"meeting-{n}", *arguments) as (ranks, ears):
            told = []
            for ear in ears:
                assert ear.poll(60), n
                told.append(ear.recv())
            pid = ranks[victim].pid
        (at, last), (noticed, said) = told[victim], told[survivor]
        if not last.startswith("ended at"):
            assert (last, said) == ("done", "done")
            break
        assert f"rank {victim}" in said, (n, last, said)
        if how is signal.SIGKILL:
            assert f"rank {victim} (pid {pid}) died" in said, (n, last, said)
            assert noticed - at < 2.0, (n, last, said)
        else:
            assert noticed - at < deadline_s + 2.0, (n, last, said)
        by_both = how is signal.SIGSTOP and 3 in complete_steps(folder)
        outcomes[f"{good_step(folder, 2 if by_both else 1)} loads"] += 1
    print(
        f"\n{operation}, {how.name} of rank {victim}: {outcomes.total()} points: {dict(outcomes)}"
    )


def test_all_is_on_the_disk_before_it_is_a_checkpoint_and_no_checkpoint_is_removed_under_its_name(
    saved: Path, tmp_path: Path
) -> None:
    folder, ranks = tmp_path / "checkpoints", int(saved.name[-1])
    shutil.copytree(saved, folder)
    faults = Faults(folder, 0, lambda *_: None)
    with faults():
        run_threads(lambda comm: save(Checkpoints(folder, comm), 3), ranks)
    old = folder / "step-00000001"
    log = [(operation, Path(path)) for operation, path in faults.log]
    [partial] = {path for operation, path in log if operation == "mkdir" and path != folder}
    named = log.index(("rename", partial))
    files = sorted((folder / "step-00000003").iterdir())
    assert folder / "step-00000003/manifest.json" in files
    for file in files:
        last = {
            operation: max(i for i, entry in enumerate(log) if entry == (operation, partial / file.name))
            for operation in {each for each, path in log if path == partial / file.name}
            & {"write", "fsync"}
        }  # fmt: skip
        assert last.get("write", -1) < last["fsync"] < named, file
    manifest = log.index(("open", partial / "manifest.json"))
    of_manifest = {"open", "write", "fsync"}
    others = [i for i, (operation, path) in enumerate(log) if operation in of_manifest
              and path.parent == partial and path.name != "manifest.json"]  # fmt: skip
    assert max(others) < manifest
    assert log.index(("fsync", partial)) in range(manifest, named)
    assert log[named + 1 : named + 3] == [("open", folder), ("fsync", folder)]
    assert not [
        entry for entry in log if entry[0] in ("unlink", "rmdir") and old in entry[1].parents
    ]
    unnamed = log.index(("rename", old))
    removed = next(
        i for i, (op, path) in enumerate(log) if op == "unlink" and path.parent != folder
    )
    assert unnamed < log.index(("fsync", folder), unnamed) < removed
