"""A folder of checkpoints keeps its newest complete one, whatever is killed and when."""

from __future__ import annotations

import errno
import math
import os
import random
import re
import shutil
import signal
import time
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from shardcomm import CommError, Communicator, fully_shard
from shardcomm.checkpoint.checkpoints import Checkpoints
from shardcomm.checkpoint.folders import complete_steps
from shardcomm.checkpoint.manifest import CheckpointError
from shardcomm.interop.backend import receipts
from support.nets import Net, make
from support.rank_processes import heard, join, kill, processes
from support.thread_ranks import run_threads

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

RANKS = 3
KILLS = 4


def write(checkpoints: Checkpoints, step: int, rank: int) -> None:
    with checkpoints.save(step) as path:
        (path / str(rank)).write_text(str(step))


@pytest.mark.covers("checkpoint folders")
def test_the_newest_two_are_kept(tmp_path: Path) -> None:
    def body(comm: Communicator) -> None:
        checkpoints = Checkpoints(tmp_path / "made", comm)
        assert checkpoints.latest() is None
        for step in (5, 10, 200_000_000):
            write(checkpoints, step, comm.rank)
            assert checkpoints.latest() == step
        with checkpoints.load(10) as path:
            assert (path / str(comm.rank)).read_text() == "10"

    run_threads(body, 3)
    names = ["step-00000010", "step-200000000", "writer.json"]
    assert sorted(os.listdir(tmp_path / "made")) == names


@pytest.mark.covers("checkpoint folders")
@pytest.mark.parametrize("in_background", [False, True])
def test_a_save_does_not_remove_what_it_saved(tmp_path: Path, in_background: bool) -> None:
    """Of a run that goes on from an earlier step than the newest that is there."""

    def body(comm: Communicator) -> None:
        checkpoints = Checkpoints(tmp_path, comm, keep=1)
        write(checkpoints, 50, comm.rank)
        write(checkpoints, 200, comm.rank)
        if in_background:
            checkpoints.async_save(100, lambda path: written(path, comm.rank))
            checkpoints.wait()
        else:
            write(checkpoints, 100, comm.rank)
        with checkpoints.load(100) as path:
            assert (path / str(comm.rank)).exists()

    run_threads(body, 2)
    assert complete_steps(tmp_path) == [100, 200]


def written(path: Path, rank: int) -> Future[None]:
    (path / str(rank)).write_text("here")
    done: Future[None] = Future()
    done.set_result(None)
    return done


def test_a_save_that_fails_on_one_rank_is_no_checkpoint(tmp_path: Path) -> None:
    def body(comm: Communicator) -> None:
        checkpoints = Checkpoints(tmp_path, comm)
        write(checkpoints, 1, comm.rank)
        with (  # noqa: PT012
            pytest.raises((CheckpointError, ZeroDivisionError)) as caught,
            checkpoints.save(2),
        ):
            if comm.rank == 1:
                raise ZeroDivisionError
        if comm.rank == 0:
            message = "the checkpoint of step 2 was not saved: rank 1: ZeroDivisionError"
            assert str(caught.value) == message

    run_threads(body, 2)
    assert complete_steps(tmp_path) == [1]
    assert list(tmp_path.glob("step-00000002.*.partial"))

    def again(comm: Communicator) -> None:
        checkpoints = Checkpoints(tmp_path, comm)
        assert checkpoints.latest() == 1
        write(checkpoints, 3, comm.rank)

    run_threads(again, 2)
    assert sorted(os.listdir(tmp_path)) == ["step-00000001", "step-00000003", "writer.json"]


@pytest.mark.covers("checkpoint folders")
def test_a_save_in_the_background_is_a_checkpoint_once_it_is_written(tmp_path: Path) -> None:
    def body(comm: Communicator) -> None:
        checkpoints = Checkpoints(tmp_path, comm)
        for step in (1, 2):
            written: Future[None] = Future()
            checkpoints.async_save(step, lambda path: written)  # noqa: B023
            assert Checkpoints(tmp_path, comm).latest() == (step - 1 or None)
            [partial] = tmp_path.glob(f"step-0000000{step}.*.partial")
            (partial / str(comm.rank)).write_text(str(step))
            comm.barrier()  # all ranks have written
            written.set_result(None)
            if step == 1:
                checkpoints.wait()
                assert checkpoints.latest() == 1
        write(checkpoints, 3, comm.rank)  # after the one before
        checkpoints.wait()  # there is none

    run_threads(body, 2)
    assert complete_steps(tmp_path) == [2, 3]


def test_what_went_wrong_in_the_background_is_raised_by_the_next_save(tmp_path: Path) -> None:
    def body(comm: Communicator) -> None:
        checkpoints = Checkpoints(tmp_path, comm)
        written: Future[None] = Future()
        checkpoints.async_save(1, lambda path: written)
        written.set_exception(OSError(28, "No space left", f"of rank {comm.rank}"))
        message = "the checkpoint of step 1 was not saved: rank 0: of rank 0: No space left"
        with pytest.raises(CheckpointError, match=message):
            write(checkpoints, 2, comm.rank)
        write(checkpoints, 2, comm.rank)
        written = Future()
        checkpoints.async_save(3, lambda path: written)
        written.set_exception(RuntimeError("timed out"))
        with pytest.raises(RuntimeError) as caught:
            checkpoints.wait()
        note = r"in the background, while step-00000003\.\w{8}\.partial was written"
        assert re.fullmatch(note, caught.value.__notes__[0])

    run_threads(body, 2)
    assert complete_steps(tmp_path) == [2]


@pytest.mark.parametrize("reading", ["latest", "load"])
def test_reading_waits_for_the_save_in_the_background(reading: str, tmp_path: Path) -> None:
    """Else that could remove what is being read."""

    def read(checkpoints: Checkpoints) -> None:
        if reading == "latest":
            assert checkpoints.latest() == 1
            return
        with checkpoints.load(1) as path:
            assert (path / str(checkpoints.comm.rank)).read_text() == "1"

    def body(comm: Communicator) -> None:
        checkpoints = Checkpoints(tmp_path, comm, keep=1)
        write(checkpoints, 1, comm.rank)
        failed: Future[None] = Future()
        failed.set_exception(OSError(28, "No space left", f"of rank {comm.rank}"))
        checkpoints.async_save(2, lambda path: failed)
        with pytest.raises(CheckpointError, match=r"step 2 was not saved: .*No space left"):
            read(checkpoints)
        read(checkpoints)  # it is told once
        checkpoints.async_save(3, lambda path: written(path, comm.rank))
        if reading == "latest":
            assert checkpoints.latest() == 3
        else:
            message = r"it is not in .*; the steps there: 3$"
            with pytest.raises(CheckpointError, match=message), checkpoints.load(1):
                pass

    run_threads(body, 2)


def test_the_current_folder_may_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("here", "elsewhere"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "here")
    checkpoints = Checkpoints("run", Communicator.local_group(1)[0])
    write(checkpoints, 1, 0)
    done: Future[None] = Future()

    def begin(path: Path) -> Future[None]:
        (path / "0").write_text("2")
        return done

    checkpoints.async_save(2, begin)
    monkeypatch.chdir(tmp_path / "elsewhere")
    done.set_result(None)
    checkpoints.wait()
    assert checkpoints.latest() == 2
    write(checkpoints, 3, 0)
    with checkpoints.load(3) as path:
        assert (path / "0").read_text() == "3"
    assert complete_steps(tmp_path / "here/run") == [2, 3]
    assert list((tmp_path / "elsewhere").iterdir()) == []


@pytest.mark.parametrize("in_background", [False, True])
@pytest.mark.parametrize("named", ["step-00000001", "step-00000001.*.partial"])
def test_an_old_one_that_cannot_be_removed_stays_until_the_next_save(
    named: str, in_background: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither its name nor, once that is gone, its files."""
    comm = Communicator.local_group(1)[0]
    for step in (1, 2):
        write(Checkpoints(tmp_path, comm), step, 0)
    checkpoints = Checkpoints(tmp_path, comm, keep=1)
    rename, rmtree = Path.rename, shutil.rmtree

    def refused(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Path, *args: Any, **options: Any) -> Any:
            if path.match(named):
                raise OSError(errno.ENOTEMPTY, "Directory not empty", str(path))
            return function(path, *args, **options)

        return call

    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", refused(rename))
        patched.setattr(shutil, "rmtree", refused(rmtree))
        if in_background:
            checkpoints.async_save(3, lambda path: written(path, 0))
            checkpoints.wait()
        else:
            write(checkpoints, 3, 0)
    [left] = {path.name for path in tmp_path.glob("step-*")} - {"step-00000003"}
    assert Path(left).match(named)
    write(checkpoints, 4, 0)
    assert sorted(os.listdir(tmp_path)) == ["step-00000004", "writer.json"]


def test_what_is_refused(tmp_path: Path) -> None:
    comm = Communicator.local_group(1)[0]
    checkpoints = Checkpoints(tmp_path, comm)
    write(checkpoints, 1, 0)
    with pytest.raises(ValueError, match="step is 1, of which there is a checkpoint: /"):
        write(checkpoints, 1, 0)
    for keep in (0, -1, "3", None, True, 2.0, math.nan):
        with pytest.raises(ValueError, match=f"keep is {keep!r}; it must be a whole number of"):
            Checkpoints(tmp_path, comm, keep=keep)  # type: ignore[arg-type]
    odd: Any
    for odd in (None, 3, [], b"bytes"):
        message = f"directory is a {type(odd).__name__}; it must be a str or a Path"
        with pytest.raises(TypeError, match=message):
            Checkpoints(odd, comm)
    for odd in (None, "gloo", 2):
        with pytest.raises(TypeError, match=f"comm is a {type(odd).__name__}; it must be a shardc"):
            Checkpoints(tmp_path, odd)
    with pytest.raises(ValueError, match="'': a folder's name is not empty; the current folder"):
        Checkpoints("", comm)
    with pytest.raises(ValueError, match=r"null\\x00byte.*: no such folder can be made: "):
        Checkpoints(tmp_path / "null\0byte", comm)
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(ValueError, match=r"file' is a file; it must be a folder"):
        Checkpoints(file, comm)
    with pytest.raises(ValueError, match=r"below: no such folder can be made: Not a directory"):
        Checkpoints(file / "below", comm)


@pytest.mark.parametrize("in_background", [False, True])
@pytest.mark.parametrize("empty", ["nothing", "an empty file", "an empty state"])
def test_a_save_of_nothing_is_no_checkpoint(
    empty: str, in_background: bool, tmp_path: Path
) -> None:
    def write_nothing(path: Path, rank: int) -> Future[None]:
        if empty == "an empty file":
            (path / str(rank)).touch()
        elif empty == "an empty state" and rank == 0:
            dcp.save({}, checkpoint_id=path, no_dist=True)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def body(comm: Communicator) -> None:
        checkpoints = Checkpoints(tmp_path, comm)
        write(checkpoints, 1, comm.rank)
        message = f"the checkpoint of step 2 was not saved: {tmp_path}.*: no rank wrote anything"
        with pytest.raises(CheckpointError, match=message):  # noqa: PT012
            if in_background:
                checkpoints.async_save(2, lambda path: write_nothing(path, comm.rank))
                checkpoints.wait()
            else:
                with checkpoints.save(2) as path:
                    write_nothing(path, comm.rank)
        assert checkpoints.latest() == 1
        write(checkpoints, 2, comm.rank)

    run_threads(body, 2)
    assert complete_steps(tmp_path) == [1, 2]


@pytest.mark.parametrize(
    ("odd", "said"),
    [
        (lambda path: None, "what write returned is a NoneType; it must be a concurrent.futures."),
        ("folder", "write is a str; it must be a function of the new directory"),
    ],
)
def test_a_background_save_without_a_future_is_told_on_every_rank(
    odd: Any, said: str, tmp_path: Path
) -> None:
    def body(comm: Communicator) -> None:
        checkpoints = Checkpoints(tmp_path, comm)
        with pytest.raises((TypeError, CheckpointError), match=f"async_save: {said}") as caught:
            checkpoints.async_save(1, odd if comm.rank == 1 else lambda path: Future())
        assert isinstance(caught.value, TypeError if comm.rank == 1 else CheckpointError)
        write(checkpoints, 1, comm.rank)

    run_threads(body, 2)


@pytest.mark.parametrize(
    ("steps", "messages"),
    [
        ((10, 11), ("step is 10 here and 11 on rank 1", "step is 11 here and 10 on rank 0")),
        ((10, "1"), ("step is 10 here and no step on rank 1", "step is '1'; it must be a whole")),
        ((-5, -5), ("step is -5; it must be a whole number from 0 to",) * 2),
    ],
)
def test_every_rank_refuses_what_is_not_one_step_of_all(
    steps: tuple[int, int], messages: tuple[str, str], tmp_path: Path
) -> None:
    def body(comm: Communicator) -> None:
        checkpoints = Checkpoints(tmp_path, comm)
        step, message = steps[comm.rank], messages[comm.rank]
        with pytest.raises(ValueError, match=f"save: {message}"):
            write(checkpoints, step, comm.rank)
        with pytest.raises(ValueError, match=f"save: {message}"):
            checkpoints.async_save(step, lambda path: Future())
        with pytest.raises(ValueError, match=f"load: {message}"), checkpoints.load(step):
            pass

    run_threads(body, 2)
    assert list(tmp_path.iterdir()) == []


def test_loading_a_step_that_is_not_there_tells_those_that_are(tmp_path: Path) -> None:
    def body(comm: Communicator) -> None:
        checkpoints = Checkpoints(tmp_path, comm)
        for step, there in ((7, "none"), (8, "7"), (9, "7, 8")):
            message = f"step 99 was not loaded: it is not in .*; the steps there: {there}$"
            with pytest.raises(CheckpointError, match=message), checkpoints.load(99):
                pass
            write(checkpoints, step, comm.rank)

    run_threads(body, 2)


def test_why_a_checkpoint_was_not_written_is_told_in_a_sentence(tmp_path: Path) -> None:
    comm = Communicator.local_group(1)[0]
    engine = fully_shard(make(), comm)
    with (  # noqa: PT012
        pytest.raises(CheckpointError, match=r"^the checkpoint of step 7 was not saved: rank 0: "),
        Checkpoints(tmp_path, comm).save(7) as path,
    ):
        path.rmdir()
        path.touch()
        dcp.save({"model": engine}, checkpoint_id=path, no_dist=True)


def fill(model: Net, step: int) -> None:
    """Values that tell the step, and differ within a parameter."""
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.arange(param.numel()).view(param.shape) + 1000.0 * step)


def save_until_error(
    rank: int,
    tell: Connection,
    ranks: int,
    address: str,
    meeting: str,
    directory: Path,
    background: bool,
) -> None:
    """Goes on from the newest checkpoint and saves for ever; reports the first, and the error that ends it."""
    comm = join(rank, ranks, address, meeting, "shardcomm")
    model, full = make(layers=2), make(layers=2)
    engine = fully_shard(model, comm)
    checkpoints = Checkpoints(directory, comm)
    try:
        first = checkpoints.latest() or 0
        step = first
        while True:
            step += 1
            fill(full, step)
            engine.load_state_dict(full.state_dict())
            if background:
                checkpoints.async_save(
                    step, lambda path: dcp.async_save({"model": engine}, checkpoint_id=path)
                )
            else:
                with checkpoints.save(step) as path:
                    dcp.save({"model": engine}, checkpoint_id=path)
            if step == first + 1:
                checkpoints.wait()
                tell.send("saving")
    except CommError as error:
        tell.send(str(error))


@pytest.mark.covers("checkpoint folders")
def test_a_rank_killed_while_saving_damages_no_checkpoint(seed: int, tmp_path: Path) -> None:
    choose = random.Random(seed)
    directory = tmp_path / "checkpoints"
    saved = 0
    for round_ in range(KILLS):
        meeting = tmp_path / f"meeting-{round_}"
        background = round_ % 2 == 1
        with processes(save_until_error, RANKS, meeting, directory, background) as (ranks, ears):
            for ear in ears:
                assert heard(ear) == "saving"
            # The moment itself is the test's input, not a synchronisation.
            time.sleep(choose.uniform(0.0, 0.1))
            victim = choose.randrange(RANKS)
            pid = kill(ranks[victim])
            for rank, ear in enumerate(ears):
                if rank != victim:
                    said = heard(ear, seed, round_, rank)
                    assert f"rank {victim} (pid {pid}) died" in said, (seed, round_, rank)
        steps = complete_steps(directory)
        assert steps[-1] > saved, (seed, round_)
        assert len(steps) <= 3, (seed, round_)  # the third when killed between rename and removal
        for step in steps:
            model, wanted = make(layers=2), make(layers=2)
            state = {"model": model.state_dict()}
            dcp.load(state, checkpoint_id=directory / f"step-{step:08d}", no_dist=True)
            fill(wanted, step)
            for name, value in wanted.named_parameters():
                assert torch.equal(state["model"][name], value), (seed, round_, step, name)
        saved = steps[-1]


def send_while_saving(
    rank: int, tell: Connection, ranks: int, address: str, meeting: str, directory: Path
) -> None:
    """Rank 1 stops in a receive that rank 0 sends to: more than the sockets' buffers hold."""
    checkpoints = Checkpoints(directory, join(rank, ranks, address, meeting))
    much, ready = torch.zeros(1 << 26, dtype=torch.uint8), torch.zeros(1)
    try:
        with checkpoints.save(1):
            if rank == 1:
                receiving = dist.irecv(much, 0)
                dist.send(ready, 0)
                os.kill(os.getpid(), signal.SIGSTOP)
                receiving.wait()
            else:
                dist.recv(ready, 1)
                sending = dist.isend(much, 1)
                tell.send("sending")
                sending.wait(timedelta(seconds=1))
    except CommError as error:
        tell.send(str(error))


def test_a_death_that_gloo_does_not_notice_ends_a_save_with_the_timeout(tmp_path: Path) -> None:
    with processes(send_while_saving, 2, tmp_path / "meeting", tmp_path) as (ranks, ears):
        assert heard(ears[0]) == "sending"
        pid = kill(ranks[1])
        assert f"rank 1 (pid {pid}) died" in heard(ears[0])
    assert complete_steps(tmp_path) == []


def scatter_while_saving(
    rank: int, tell: Connection, ranks: int, address: str, meeting: str, directory: Path
) -> None:
    """Rank 1 stops while rank 0 scatters to it, as DCP does with plans: more than the sockets' buffers hold."""
    comm = join(rank, ranks, address, meeting, "shardcomm")
    own, parts = torch.zeros(1 << 24), [torch.ones(1 << 24)] * 2
    try:
        with Checkpoints(directory, comm).save(1):
            scattering = dist.scatter(own, parts if rank == 0 else None, 0, async_op=True)
            if rank == 1:
                while own[0] == 0:  # until the first of it is here
                    continue
                os.kill(os.getpid(), signal.SIGSTOP)
            else:
                tell.send("scattering")
            scattering.wait()
    except CommError as error:
        tell.send(str(error))
        tell.send(str(time.monotonic()))


def test_a_death_in_the_middle_of_an_exchange_is_noticed_at_once(tmp_path: Path) -> None:
    with processes(scatter_while_saving, 2, tmp_path / "meeting", tmp_path) as (ranks, ears):
        assert heard(ears[0]) == "scattering"
        assert ranks[1].pid is not None
        stat = Path(f"/proc/{ranks[1].pid}/stat")
        while stat.read_text().rpartition(") ")[2][0] != "T":
            assert ranks[1].is_alive()
        killed = time.monotonic()
        pid = kill(ranks[1])
        assert f"rank 1 (pid {pid}) died" in heard(ears[0])
        assert float(heard(ears[0])) - killed < 2.0
    assert complete_steps(tmp_path) == []


def save_beside_gloo(
    rank: int, tell: Connection, ranks: int, address: str, meeting: str, directory: Path
) -> None:
    checkpoints = Checkpoints(directory, join(rank, ranks, address, meeting, "gloo"))
    group = dist.new_group(backend="shardcomm")
    state = {"of all": torch.arange(4.0), f"of {rank}": [rank]}
    with checkpoints.save(1) as path:
        dcp.save(state, checkpoint_id=path, process_group=group)
    state = {"of all": torch.zeros(4), f"of {rank}": [-1]}
    with checkpoints.load(1) as path:
        dcp.load(state, checkpoint_id=path, process_group=group)
    assert torch.equal(state["of all"], torch.arange(4.0))  # type: ignore[arg-type]
    assert state[f"of {rank}"] == [rank]
    tell.send("".join(sorted({receipt.operation for receipt in receipts(group)})))


def test_dcp_exchanges_over_a_group_of_ours_beside_gloos(tmp_path: Path) -> None:
    with processes(save_beside_gloo, 2, tmp_path / "meeting", tmp_path) as (_, ears):
        assert [heard(ear) for ear in ears] == [
            "all_gatherbroadcastgatherscatter"
        ] * 2  # and nothing by Gloo
