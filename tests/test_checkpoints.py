"""A folder of checkpoints keeps its newest complete one, whatever is killed and when."""

from __future__ import annotations

import os
import random
import signal
import time
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from test_engine import Net, make
from test_state_dict import load_here
from thread_ranks import run_threads

from shardcomm import _C, CommError, Communicator, fully_shard
from shardcomm.checkpoints import CheckpointError, Checkpoints, complete_steps
from shardcomm.communicator import CoreCommunicator

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

RANKS = 3
KILLS = 4


def write(checkpoints: Checkpoints, step: int, rank: int) -> None:
    with checkpoints.save(step) as path:
        (path / str(rank)).write_text(str(step))


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
    names = ["step-00000010", "step-200000000"]
    assert sorted(os.listdir(tmp_path / "made")) == names


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
            message = "the checkpoint of step 2 was not saved: rank 1 failed; it says why"
            assert str(caught.value) == message

    run_threads(body, 2)
    assert complete_steps(tmp_path) == [1]
    assert (tmp_path / "step-00000002.partial").exists()

    def again(comm: Communicator) -> None:
        checkpoints = Checkpoints(tmp_path, comm)
        assert checkpoints.latest() == 1
        write(checkpoints, 3, comm.rank)

    run_threads(again, 2)
    assert sorted(os.listdir(tmp_path)) == ["step-00000001", "step-00000003"]


def test_what_is_refused(tmp_path: Path) -> None:
    comm = Communicator.local_group(1)[0]
    checkpoints = Checkpoints(tmp_path, comm)
    write(checkpoints, 1, 0)
    with pytest.raises(ValueError, match="step is 1, of which there is a checkpoint: /"):
        write(checkpoints, 1, 0)
    with pytest.raises(ValueError, match="keep is 0; it must be at least 1"):
        Checkpoints(tmp_path, comm, keep=0)
    file = tmp_path / "file"
    file.touch()
    for directory in (file, file / "below"):
        with pytest.raises(ValueError, match=r"file.*: no such folder can be made: "):
            Checkpoints(directory, comm)


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
    rank: int, address: str, meeting: str, directory: Path, tell: Connection
) -> None:
    """Goes on from the newest checkpoint and saves for ever; reports the first, and the error that ends it."""
    torch.set_num_threads(1)
    comm = CoreCommunicator(_C.make_shm(address, rank, RANKS, 60.0))
    # Should Gloo not notice a death at some moment, its own timeout ends the wait.
    timeout = timedelta(seconds=10)
    dist.init_process_group(
        "gloo", f"file://{meeting}", timeout=timeout, world_size=RANKS, rank=rank
    )
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
            with checkpoints.save(step) as path:
                dcp.save({"model": engine}, checkpoint_id=path)
            if step == first + 1:
                tell.send("saving")
    except CommError as error:
        tell.send(str(error))


def test_a_rank_killed_while_saving_damages_no_checkpoint(seed: int, tmp_path: Path) -> None:
    choose = random.Random(seed)
    context = get_context("forkserver")
    directory = tmp_path / "checkpoints"
    saved = 0
    for kill in range(KILLS):
        session = _C.ShmSession(RANKS)
        pipes = [context.Pipe(duplex=False) for _ in range(RANKS)]
        meeting = str(tmp_path / f"meeting-{kill}")
        processes = [
            context.Process(
                target=save_until_error,
                args=(rank, session.address, meeting, directory, pipes[rank][1]),
            )
            for rank in range(RANKS)
        ]
        try:
            for process in processes:
                process.start()
            for _, tell in pipes:
                tell.close()
            ears = [listen for listen, _ in pipes]
            for ear in ears:
                assert ear.poll(60)
                assert ear.recv() == "saving"
            # The moment itself is the test's input, not a synchronisation.
            time.sleep(choose.uniform(0.0, 0.1))
            victim = choose.randrange(RANKS)
            pid = processes[victim].pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            for rank, ear in enumerate(ears):
                if rank != victim:
                    assert ear.poll(30), (seed, kill, rank)
                    assert f"rank {victim} (pid {pid}) died" in ear.recv(), (seed, kill, rank)
        finally:
            for process in processes:
                process.kill()
                process.join(10)
                process.close()
            del session
        steps = complete_steps(directory)
        assert steps[-1] > saved, (seed, kill)
        assert len(steps) <= 3, (seed, kill)  # the third when killed between rename and removal
        for step in steps:
            model, wanted = make(layers=2), make(layers=2)
            state = {"model": model.state_dict()}
            load_here(state, directory / f"step-{step:08d}")
            fill(wanted, step)
            for name, value in wanted.named_parameters():
                assert torch.equal(state["model"][name], value), (seed, kill, step, name)
        saved = steps[-1]
