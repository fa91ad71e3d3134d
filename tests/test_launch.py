"""`launch`: N ranks as processes of this host. More on how it tells of failures: test_failures.py."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from shardcomm import Communicator, RankError, launch

RANKS = 3


def rank_and_double(value: int) -> tuple[int, int]:
    return int(os.environ["RANK"]), 2 * value


def test_results_come_in_rank_order() -> None:
    assert launch(rank_and_double, RANKS, (21,), deadline_s=60) == [(r, 42) for r in range(RANKS)]


def sum_both_ways() -> tuple[list[float], list[float]]:
    theirs = torch.tensor([1.0, float(os.environ["RANK"])])
    ours = theirs.clone()
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    with Communicator.from_env(deadline_s=30) as comm:
        dist.all_reduce(theirs)
        comm.all_reduce(ours)
    dist.destroy_process_group()
    return theirs.tolist(), ours.tolist()


def test_torch_distributed_and_communicator_both_find_the_ranks() -> None:
    for theirs, ours in launch(sum_both_ways, RANKS, deadline_s=60):
        assert theirs == ours == [3.0, 3.0]


def test_ranks_share_the_cores() -> None:
    cores = os.cpu_count() or 1
    assert launch(torch.get_num_threads, 2, deadline_s=60) == [max(1, cores // 2)] * 2


def exit_without_result() -> None:
    if os.environ["RANK"] == "1":
        os._exit(7)


def return_a_lambda() -> Callable[[], None]:
    return lambda: None


@pytest.mark.parametrize(
    ("fn", "message"),
    [
        (exit_without_result, "rank 1 ended with exit status 7 and no result"),
        (return_a_lambda, r"(?s)rank 0 raised.*pickle"),
    ],
)
def test_rank_without_a_result_is_named(fn: Callable[[], object], message: str) -> None:
    with pytest.raises(RankError, match=message):
        launch(fn, 2, deadline_s=60)


def wait_for_ever() -> None:
    threading.Event().wait()


def end_well() -> None:
    launch(rank_and_double, RANKS, (1,), deadline_s=60)


def end_at_the_deadline() -> None:
    with pytest.raises(TimeoutError):
        launch(wait_for_ever, RANKS, deadline_s=0.5)


@pytest.mark.parametrize("run", [end_well, end_at_the_deadline])
def test_no_process_and_no_descriptor_is_left(run: Callable[[], None]) -> None:
    run()  # the fork server stays, once started
    before = len(os.listdir("/proc/self/fd"))
    run()
    assert multiprocessing.active_children() == []
    assert len(os.listdir("/proc/self/fd")) == before


def test_ranks_below_one_are_refused() -> None:
    with pytest.raises(ValueError, match="ranks is 0; it must be at least 1"):
        launch(rank_and_double, 0, (1,))
