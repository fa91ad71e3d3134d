"""What a CommError says to programs: its fields, on every rank, whoever raises it and wherever it is caught."""

from __future__ import annotations

import os
import pickle
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardcomm import CommError, Communicator, launch
from support.thread_ranks import run_threads

DEADLINE_S = 60.0
FIELDS = ("kind", "rank", "operation", "sequence", "reporter")


def gather(comm: Communicator, count: int = 4) -> None:
    comm.all_gather(torch.zeros(count * comm.size), torch.zeros(count))


def reduce(comm: Communicator) -> None:
    comm.all_reduce(torch.zeros(4))


def fields_of(fn: Callable[[], object]) -> dict[str, Any]:
    with pytest.raises(CommError) as caught:
        fn()
    return {name: getattr(caught.value, name) for name in FIELDS}


def on_threads(
    fn: Callable[[Communicator], object], ranks: int = 2, deadline_s: float = DEADLINE_S
) -> list[dict[str, Any]]:
    return run_threads(lambda comm: fields_of(lambda: fn(comm)), ranks, deadline_s=deadline_s)


def test_an_error_raised_without_fields_has_them() -> None:
    assert [getattr(CommError("text"), name) for name in FIELDS] == ["backend", *[None] * 4]


def test_fields_survive_a_pickle() -> None:
    error = CommError("text")
    error.kind, error.rank = "died", 3
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.kind, again.rank) == ("text", "died", 3)


@pytest.mark.covers("different calls")
def test_different_collectives_are_a_mismatch_of_nobody() -> None:
    def body(comm: Communicator) -> None:
        gather(comm)
        gather(comm, count=4 + comm.rank)

    for fields in on_threads(body):
        assert fields["kind"] == "mismatch"
        assert fields["rank"] is None
        assert (fields["operation"], fields["sequence"]) == ("all_gather", 2)
        assert fields["reporter"] in (0, 1)


@pytest.mark.covers("ranks that wait for each other")
def test_ranks_that_wait_for_each_other_are_a_mismatch() -> None:
    def body(comm: Communicator) -> None:
        gather(comm)
        reduce(comm)
        (gather if comm.rank == 0 else reduce)(comm)

    own = ["all_gather", "all_reduce"]
    for rank, fields in enumerate(on_threads(body)):
        assert (fields["kind"], fields["rank"]) == ("mismatch", None)
        assert (fields["operation"], fields["sequence"]) == (own[rank], 2)


@pytest.mark.covers("late rank")
def test_a_rank_that_does_not_come_is_late() -> None:
    over = threading.Event()

    def body(comm: Communicator) -> None:
        if comm.rank == 1:
            assert over.wait(DEADLINE_S)
            return gather(comm)
        try:
            gather(comm)
        finally:
            over.set()

    present, absent = on_threads(body, deadline_s=0.5)
    assert present == {
        "kind": "late", "rank": 1, "operation": "all_gather", "sequence": 1, "reporter": 0,
    }  # fmt: skip
    assert absent == {
        "kind": "late", "rank": 1, "operation": None, "sequence": None, "reporter": 0,
    }  # fmt: skip


def test_a_rank_that_closes_is_the_one_that_closed() -> None:
    def body(comm: Communicator) -> None:
        gather(comm)
        if comm.rank == 1:
            comm.close()
        reduce(comm)

    left, closed = on_threads(body)
    assert (left["kind"], left["rank"], left["operation"]) == ("closed", 1, "all_reduce")
    assert (closed["kind"], closed["rank"], closed["operation"]) == ("closed", 1, None)


def test_a_rank_that_aborts_is_the_one_that_aborted() -> None:
    def body(comm: Communicator) -> None:
        if comm.rank == 1:
            comm.abort("enough")
        gather(comm)

    for fields in on_threads(body):
        assert (fields["kind"], fields["rank"], fields["reporter"]) == ("aborted", 1, 1)


def die(folder: Path) -> None:
    """Rank 1, after its first gather; the others write what they are told."""
    comm = Communicator.from_env(deadline_s=DEADLINE_S)
    gather(comm)
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    fields = fields_of(lambda: [reduce(comm) for _ in range(1000)])
    (folder / str(comm.rank)).write_text(repr(fields))


@pytest.mark.covers("dead rank")
def test_a_rank_that_dies_is_the_one_that_died(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="rank 1 was killed by SIGKILL"):
        launch(die, 3, (tmp_path,), timeout_s=DEADLINE_S)
    for rank in (0, 2):
        fields = eval((tmp_path / str(rank)).read_text())
        assert (fields["kind"], fields["rank"]) == ("died", 1)
        # Between processes a channel's first call is the one that connects it.
        assert (fields["operation"], fields["sequence"]) == ("all_reduce", 2)


def refuse_on_rank_1() -> dict[str, Any]:
    """A transport that is none, at set-up, on one rank alone."""
    rank = int(os.environ["RANK"])
    transport: Any = "pigeon" if rank == 1 else "auto"
    if rank == 1:
        with pytest.raises(ValueError, match="pigeon"):
            Communicator.from_env(transport=transport, deadline_s=DEADLINE_S)
        return {}
    return fields_of(lambda: Communicator.from_env(deadline_s=DEADLINE_S))


@pytest.mark.covers("set-up that fails")
def test_what_ends_set_up_on_one_rank_has_fields_on_the_others() -> None:
    heard, _ = launch(refuse_on_rank_1, 2, timeout_s=DEADLINE_S)
    assert (heard["kind"], heard["rank"], heard["reporter"]) == ("aborted", 1, 1)
    assert heard["operation"] is None


def over_gloo() -> list[dict[str, Any]]:
    dist.init_process_group("gloo")
    comm = Communicator.from_process_group(transport="c10d", deadline_s=DEADLINE_S)
    gather(comm)
    comm.abort("enough")
    aborted = fields_of(lambda: gather(comm))
    other = Communicator.from_process_group(transport="c10d", deadline_s=DEADLINE_S)
    other.close()
    closed = fields_of(lambda: gather(other))
    dist.destroy_process_group()
    return [aborted, closed]


@pytest.mark.covers("abort and close")
def test_c10d_has_the_fields_too() -> None:
    for rank, (aborted, closed) in enumerate(launch(over_gloo, 2, timeout_s=DEADLINE_S)):
        assert (aborted["kind"], aborted["rank"]) == ("aborted", rank)
        assert (closed["kind"], closed["rank"]) == ("closed", rank)
