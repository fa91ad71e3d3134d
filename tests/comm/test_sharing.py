"""Ranks that share the work of writing memory that all of them have: each writes a share, then all read it."""

from __future__ import annotations

import os

import pytest
import torch

from shardcomm import CommError, Communicator, launch
from shardcomm.comm import introduction
from support.thread_ranks import run_threads

RANKS, NUMEL = 4, 1_000

pytestmark = pytest.mark.usefixtures("nothing_is_left_in_shared_memory")


def writes_its_share(comm: Communicator, sharers: int) -> None:
    memory = comm.allocate(NUMEL, use="gather")
    sharing = comm.sharing(memory, tag=7)
    assert (sharing.number, sharing.ranks) == (comm.rank % sharers, sharers)
    assert sharing.meeting is not None
    for turn in range(50):
        comm.barrier()  # all have read
        memory[sharing.number :: sharers] = turn + sharing.number
        sharing.meeting.queue(comm.streams.gather, comm.streams.compute()).wait()
        assert memory.equal(turn + torch.arange(NUMEL) % sharers), turn


def on_a_host() -> None:
    with Communicator.from_env(transport="shm", deadline_s=60.0) as comm:
        writes_its_share(comm, RANKS)


def on_two_hosts() -> None:
    rank = int(os.environ["RANK"])
    introduction.host_identity = lambda: "AABB"[rank]  # type: ignore[assignment]
    with Communicator.from_env(transport="hosts", deadline_s=60.0) as comm:
        writes_its_share(comm, RANKS // 2)


def test_the_ranks_of_a_host_share_what_they_gather_into() -> None:
    launch(on_a_host, RANKS, timeout_s=120)


def test_each_host_has_memory_of_its_own() -> None:
    launch(on_two_hosts, RANKS, timeout_s=120)


def test_threads_share_what_they_gather_into() -> None:
    run_threads(lambda comm: writes_its_share(comm, RANKS), RANKS)


def test_a_rank_has_all_other_memory_alone() -> None:
    def claims(comm: Communicator) -> None:
        for memory in (
            torch.zeros(NUMEL),
            comm.allocate(NUMEL, use="reduce"),
            comm.allocate(0, use="gather"),
        ):
            assert comm.sharing(memory) == (0, 1, None)

    run_threads(claims, 2)


def test_ranks_that_share_different_parts_all_hear_of_it() -> None:
    def meets(comm: Communicator) -> None:
        halves = comm.allocate(2 * NUMEL, use="gather").split(NUMEL)
        meeting = comm.sharing(halves[comm.rank]).meeting
        assert meeting is not None
        with pytest.raises(CommError, match="each wrote a share of a buffer, and it is not one"):
            meeting()

    run_threads(meets, 2)


def test_ranks_that_share_different_numbers_of_bytes_see_both_numbers() -> None:
    def meets(comm: Communicator) -> None:
        memory = comm.allocate(NUMEL, use="gather")
        meeting = comm.sharing(memory[: NUMEL // (1 + comm.rank)], tag=7).meeting
        assert meeting is not None
        sentence = r"barrier\(4000 shared bytes, tag 7\) #.*barrier\(2000 shared bytes, tag 7\) #"
        with pytest.raises(CommError, match=sentence):
            meeting()

    run_threads(meets, 2)
