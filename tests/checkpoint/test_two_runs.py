"""Two runs that save into one directory: one of them goes on, the other one is told, and no checkpoint is of both."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from shardcomm import CheckpointError, Checkpoints, Communicator, fully_shard, launch
from shardcomm.checkpoint.folders import complete_steps, partial_folders
from shardcomm.checkpoint.writer import Writer
from support.gates import until
from support.thread_ranks import each_rank, run_threads

TOLD = "another run .* saves into .*, and began later; a folder is for one run: end one of the two"


def alone(directory: Path) -> Checkpoints:
    return Checkpoints(directory, Communicator.local_group(1)[0])


def save(checkpoints: Checkpoints, step: int) -> None:
    with checkpoints.save(step) as path:
        (path / str(checkpoints.comm.rank)).write_text("ours")


def take_over(directory: Path) -> None:
    """What another run does when it begins to save."""
    stale = partial_folders(directory)
    Writer("step-00000009.01234567.partial", "node7", 4711, "other").take(directory)
    for folder in stale:
        shutil.rmtree(folder)


def train(who: str, directory: Path, moments: Path) -> str:
    """As run A or B: A has written its part, and waits, while B saves."""
    dist.init_process_group("shardcomm")
    comm = Communicator.from_env(deadline_s=40)
    model = torch.nn.Linear(16, 16)
    torch.nn.init.constant_(model.weight, 1.0 if who == "A" else 2.0)
    state = {"model": fully_shard(model, comm)}
    checkpoints = Checkpoints(directory, comm)
    if who == "B":
        until((moments / "A has written").exists, "A has written")
    try:
        with checkpoints.save(1) as path:
            dcp.save(state, checkpoint_id=path)
            if who == "A":
                (moments / "A has written").touch()
                until((moments / "B has written").exists, "B has written")
            else:
                (moments / "B has written").touch()
                until((moments / "A is done").exists, "A is done")
        said = ""
    except CheckpointError as error:
        said = str(error)
    comm.barrier()
    if who == "A":
        (moments / "A is done").touch()
    dist.destroy_process_group()
    return said


@pytest.mark.covers("checkpoint folders")
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_checkpoint_is_never_of_two_runs(tmp_path: Path) -> None:
    directory, moments = tmp_path / "checkpoints", tmp_path
    of_a, of_b = each_rank(
        lambda run: launch(train, 2, ("AB"[run], directory, moments), timeout_s=60), 2
    )
    assert of_b == ["", ""]
    assert len(set(of_a)) == 1
    process = Writer.of(directory)
    assert process is not None
    assert of_a[0].startswith(
        "the checkpoint of step 1 was not saved: another run "
        f"(process {process.pid} on host {process.host}) saves into {directory}, and began later; "
    )
    found = {"model": torch.nn.Linear(16, 16).state_dict()}
    checkpoints = alone(directory)
    assert checkpoints.latest() == 1
    with checkpoints.load(1) as path:
        dcp.load(found, checkpoint_id=path, no_dist=True)
    assert torch.equal(found["model"]["weight"], torch.full((16, 16), 2.0))
    save(checkpoints, 2)
    assert list(directory.glob("*.partial")) == []  # nothing is left of A's


@pytest.mark.parametrize("in_background", [False, True])
@pytest.mark.parametrize(
    "go_on",
    [
        lambda path: (path / "part").write_text("the folder is gone"),
        lambda path: (path.mkdir(exist_ok=True), (path / "part").write_text("as DCP does it")),
    ],
    ids=["gone", "made again"],
)
def test_every_rank_of_a_save_that_is_taken_over_is_told(
    go_on: Callable[[Path], object], in_background: bool, tmp_path: Path
) -> None:
    def body(comm: Communicator) -> None:
        checkpoints = Checkpoints(tmp_path, comm)
        save(checkpoints, 1)

        def write(path: Path) -> Future[None]:
            (path / "before").touch()
            comm.barrier()
            if comm.rank == 0:
                take_over(tmp_path)
            comm.barrier()
            go_on(path)
            done: Future[None] = Future()
            done.set_result(None)
            return done

        message = rf"^the checkpoint of step 2 was not saved: {TOLD}"
        with pytest.raises(CheckpointError, match=message):  # noqa: PT012
            if in_background:
                checkpoints.async_save(2, write)
                checkpoints.wait()
            else:
                with checkpoints.save(2) as path:
                    write(path)
        with pytest.raises(CheckpointError, match=rf"of step 3 was not saved: {TOLD}"):
            save(checkpoints, 3)
        assert checkpoints.latest() == 1

    run_threads(body, 2)
    assert complete_steps(tmp_path) == [1]


def test_a_run_is_told_of_another_that_has_saved_since(tmp_path: Path) -> None:
    """Else each would remove the other's checkpoints."""

    def body(comm: Communicator) -> None:
        checkpoints = Checkpoints(tmp_path, comm)
        save(checkpoints, 1)
        if comm.rank == 0:
            take_over(tmp_path)
        message = r"of step 1 was not saved: another run \(process 4711 on host node7\) saves into "
        with pytest.raises(CheckpointError, match=message):  # and not that there is step 1
            save(checkpoints, 1)
        save(Checkpoints(tmp_path, comm), 2)  # as a run that was started again

    run_threads(body, 2)
    assert complete_steps(tmp_path) == [1, 2]


def test_a_step_that_another_run_has_saved_meanwhile_stays(tmp_path: Path) -> None:
    with (  # noqa: PT012
        pytest.raises(CheckpointError, match=r"another run has saved it meanwhile: .*/step-0"),
        alone(tmp_path).save(1) as path,
    ):
        (path / "part").write_text("ours")
        other = tmp_path / "step-00000001"
        other.mkdir()
        (other / "part").write_text("theirs")
    assert (tmp_path / "step-00000001/part").read_text() == "theirs"


def test_several_checkpoints_of_one_program_take_turns(tmp_path: Path) -> None:
    first, second, reader = (alone(tmp_path) for _ in range(3))
    for step in range(1, 5):
        saving = (first, second)[step % 2]
        with saving.save(step) as path:
            (path / "part").write_text("ours")
            assert reader.latest() == (step - 1 or None)
        assert reader.latest() == step
    with (  # noqa: PT012
        pytest.raises(CheckpointError, match="another Checkpoints of this process saves into"),
        first.save(5) as path,
    ):
        (path / "part").write_text("ours")
        save(second, 6)
    assert reader.latest() == 6


def test_of_saves_that_begin_at_once_one_succeeds(tmp_path: Path) -> None:
    runs = 4
    start = threading.Barrier(runs)
    for round_ in range(20):

        def run(number: int) -> str:
            checkpoints = alone(tmp_path)
            start.wait(60)
            try:
                with checkpoints.save(runs * round_ + number) as path:  # noqa: B023
                    for file in range(3):
                        (path / str(file)).write_text(str(number))
            except CheckpointError as error:
                return str(error)
            return ""

        said = each_rank(run, runs)
        assert all("began later" in each for each in said if each), (round_, said)
        saved = [runs * round_ + number for number in range(runs) if not said[number]]
        assert saved, round_
        for step in saved[-1:]:
            with alone(tmp_path).load(step) as path:
                parts = [(path / str(file)).read_text() for file in range(3)]
            assert parts == [str(step % runs)] * 3
