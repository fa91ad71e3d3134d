"""The torch.distributed backend: what groups, and programs that end, leave behind: nothing."""

from __future__ import annotations

import os
from functools import partial
from operator import le
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from shardcomm import CommError, launch
from support.gates import until
from support.interpreters import run_ranks
from support.shared_names import shared_names

OURS = "shardcomm"
gather_into = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)

pytestmark = pytest.mark.usefixtures("nothing_is_left_in_shared_memory")


def threads_and_files() -> tuple[int, int]:
    """How many of each this process has."""
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))


def no_more_than(before: tuple[int, int]) -> bool:
    return all(map(le, threads_and_files(), before))


def come_and_go() -> None:
    before = (0, 0)
    for turn in range(5):
        dist.init_process_group(OURS)
        world = dist.group.WORLD
        work = dist.all_reduce(torch.ones(5), async_op=True)
        work.get_future().wait()
        gather_into(torch.empty(2 * dist.get_world_size()), torch.ones(2), async_op=True)
        dist.destroy_process_group()
        with pytest.raises(CommError, match="closed"):
            world.allreduce([torch.ones(1)], dist.distributed_c10d.AllreduceOptions()).wait()  # type: ignore[union-attr]
        del world, work
        if turn < 2:  # torch keeps some
            before = threads_and_files()
        else:  # a thread is listed a little longer than it does anything
            until(partial(no_more_than, before), f"no more than {before}")


def test_destroyed_groups_leave_nothing_behind_and_new_ones_follow() -> None:
    launch(come_and_go, 2, timeout_s=120)


def held_things() -> dict[str, int]:
    """How many of each this process holds, and how many files of shared memory there are."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    threads, files = threads_and_files()
    return {
        "threads": threads,
        "files": files,
        "maps": len(maps),
        "shm": len(shared_names()),
    }


def a_thousand_groups() -> tuple[dict[str, int], dict[str, int]]:
    """What is held after 100 sub-groups that have come and gone, and after 1,000."""
    dist.init_process_group(OURS)
    after = []
    for turn in range(1, 1001):
        group = dist.new_group([0, 1])
        total = torch.full((turn,), float(dist.get_rank()))
        dist.all_reduce(total, group=group)
        assert torch.equal(total, torch.ones(turn))
        dist.destroy_process_group(group)
        if turn in (100, 1000):
            after.append(held_things())
    dist.destroy_process_group()
    return after[0], after[1]


def test_a_thousand_groups_leave_nothing_behind() -> None:
    for early, late in launch(a_thousand_groups, 2, timeout_s=120):
        # Eight of the allocator's, as parts of memory come into use.
        assert late["maps"] <= early["maps"] + 8
        assert {**late, "maps": 0} == {**early, "maps": 0}


UNTIDY = """
import torch, torch.distributed as dist, shardcomm
dist.init_process_group("shardcomm")
x = torch.ones(9)
dist.all_reduce(x, async_op=True).get_future()
if dist.get_rank() == 0:
    dist.all_gather([x, x], x, async_op=True)  # the other never comes
"""


def test_a_program_that_ends_with_work_begun_ends_quietly() -> None:
    for ended in run_ranks(UNTIDY, 2):
        assert ended.returncode == 0, ended.stderr
