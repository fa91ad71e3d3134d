"""Ranks of which one fails, or sees another folder than rank 0: all of them go by the same."""

from __future__ import annotations

import re
from concurrent.futures import Future
from pathlib import Path

import pytest

from shardcomm import Communicator
from shardcomm.checkpoint.checkpoints import Checkpoints
from shardcomm.checkpoint.folders import complete_steps
from shardcomm.checkpoint.manifest import CheckpointError
from support.thread_ranks import run_threads


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_whichever_rank_fails_the_others_name_it(failing: int, tmp_path: Path) -> None:
    def body(comm: Communicator) -> None:
        checkpoints = Checkpoints(tmp_path, comm)
        with (  # noqa: PT012
            pytest.raises((CheckpointError, LookupError)) as caught,
            checkpoints.save(2),
        ):
            if comm.rank == failing:
                raise LookupError("here")
        if comm.rank != failing:
            assert f"rank {failing}: LookupError: here" in str(caught.value)

    run_threads(body, 3)
    assert complete_steps(tmp_path) == []


def test_the_reasons_of_all_ranks_that_fail_reach_every_rank(tmp_path: Path) -> None:
    def body(comm: Communicator) -> str:
        checkpoints = Checkpoints(tmp_path, comm)
        with (  # noqa: PT012
            pytest.raises((CheckpointError, LookupError)) as caught,
            checkpoints.save(2),
        ):
            match comm.rank:
                case 0:
                    raise CheckpointError("the checkpoint of step 2 was not saved: rank 0: its own")
                case 1:
                    raise OSError(28, "No space left", "file")
                case 3:
                    raise LookupError("here")
        notes = getattr(caught.value, "__notes__", [])
        assert isinstance(caught.value, LookupError) == (comm.rank == 3)
        return notes[0] if notes else str(caught.value)

    said = (
        "the checkpoint of step 2 was not saved: rank 0: its own; rank 1: file: No space left; "
        "rank 3: LookupError: here"
    )
    assert run_threads(body, 4) == [said] * 4


def test_of_many_ranks_that_fail_some_are_named_and_the_rest_counted(tmp_path: Path) -> None:
    def body(comm: Communicator) -> str:
        with pytest.raises(CheckpointError) as caught, Checkpoints(tmp_path, comm).save(2):
            raise OSError(28, "No space left", f"of-{comm.rank}")
        return str(caught.value)

    [said] = set(run_threads(body, 6))
    assert said.count("No space left") == 4
    assert said.endswith("rank 3: of-3: No space left; and 2 ranks more")


@pytest.mark.parametrize("in_background", [False, True])
def test_a_rank_that_does_not_see_the_folder_ends_the_save(
    in_background: bool, tmp_path: Path
) -> None:
    """Such as one on another host, where the directory is on that host's own disk."""

    def body(comm: Communicator) -> str:
        checkpoints = Checkpoints(tmp_path / str(comm.rank), comm)
        entered = []
        with pytest.raises(CheckpointError) as caught:  # noqa: PT012
            if in_background:
                checkpoints.async_save(2, lambda path: entered.append(path) or Future())
            else:
                with checkpoints.save(2) as path:
                    entered.append(path)
        assert entered == []
        return str(caught.value)

    [said] = set(run_threads(body, 3))
    for rank in (1, 2):
        assert re.search(rf"rank {rank}: {tmp_path}/{rank}/step-00000002\.\w+\.partial: ", said)
    assert said.startswith("the checkpoint of step 2 was not saved: rank 1: ")
    assert said.count("all ranks must see it, on a file system that they share") == 2


def test_the_newest_is_that_which_rank_0_sees(tmp_path: Path) -> None:
    """A file system may show a new name on one host sooner than on another."""
    for host, steps in (("0", [5]), ("1", [5, 7])):
        for step in steps:
            with Checkpoints(tmp_path / host, Communicator.local_group(1)[0]).save(step) as path:
                (path / "part").write_bytes(b"abc")

    def body(comm: Communicator) -> int | None:
        return Checkpoints(tmp_path / str(comm.rank), comm).latest()

    assert run_threads(body, 2) == [5, 5]
