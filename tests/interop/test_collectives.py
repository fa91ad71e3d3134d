"""`shardcomm.all_gather_into_tensor` and `reduce_scatter_tensor` against torch.distributed's, in a loop by hand."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

import shardcomm
from shardcomm import Communicator, launch
from support.thread_ranks import run_threads

OPS = [dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN]


def values(seed: int, *shape: int) -> torch.Tensor:
    """Whole numbers, whose sums are exact in any order."""
    generator = torch.Generator().manual_seed(seed + dist.get_rank())
    return torch.randint(-1000, 1000, shape, generator=generator).float()


def same_as_torch(seed: int) -> None:
    dist.init_process_group("gloo")
    ranks = dist.get_world_size()
    pair = dist.new_group([0, 1])
    for group, size in ((None, ranks), (pair, 2)):
        if group is pair and dist.get_rank() > 1:
            continue
        for numel in (1, 7, 4096):
            shard, full = values(seed, numel), values(seed, size * numel, 3)
            theirs, ours = shard.new_empty(2, size, numel).unbind()
            dist.all_gather_into_tensor(theirs.view(-1), shard, group=group)
            assert shardcomm.all_gather_into_tensor(ours, shard, group) is None
            assert torch.equal(ours, theirs)
            for op in OPS:
                theirs, ours = shard.new_empty(2, numel, 3).unbind()
                dist.reduce_scatter_tensor(theirs, full, op, group=group)
                shardcomm.reduce_scatter_tensor(ours, full, op, group)
                assert torch.equal(ours, theirs)
    dist.destroy_process_group()


@pytest.mark.covers("drop-in collectives")
def test_results_are_torchs_in_groups_and_subgroups(seed: int) -> None:
    launch(same_as_torch, 3, (seed,), timeout_s=60)


def over_a_group_with_nccl() -> list[float]:
    dist.init_process_group("gloo")
    dist.get_backend_config = lambda _: "cpu:gloo,cuda:nccl"
    full, part = torch.empty(2), torch.empty(1)
    shardcomm.all_gather_into_tensor(full, torch.ones(1) + dist.get_rank())
    shardcomm.reduce_scatter_tensor(part, full)
    with pytest.raises(ValueError, match="input is on meta; the group has backends for tensors on"):
        shardcomm.all_gather_into_tensor(full.to("meta"), part.to("meta"))
    dist.destroy_process_group()
    return [*full.tolist(), *part.tolist()]


def test_the_tensors_choose_the_backend_of_a_group_with_several() -> None:
    assert launch(over_a_group_with_nccl, 2, timeout_s=60) == [[1.0, 2.0, 2.0], [1.0, 2.0, 4.0]]


def mixed_sync_and_async(seed: int) -> None:
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    works, gathered, reduced = [], [], []
    for turn in range(40):
        shard = values(seed + 100 * turn, 64).requires_grad_()
        gathered.append((torch.empty(ranks * 64), shard))
        reduced.append((torch.empty(64), values(seed + 100 * turn, ranks * 64)))
        async_op = turn % 3 < 2
        works += [
            shardcomm.all_gather_into_tensor(*gathered[-1], async_op=async_op),
            shardcomm.reduce_scatter_tensor(*reduced[-1], async_op=async_op),
        ]
    for work in works:
        if work is not None:
            work.wait()
    for full, shard in gathered:
        assert torch.equal(full[rank * 64 : rank * 64 + 64], shard)
        theirs = torch.empty_like(full)
        dist.all_gather_into_tensor(theirs, shard.detach())
        assert torch.equal(full, theirs)
    for part, full in reduced:
        dist.all_reduce(full)
        assert torch.equal(part, full[rank * 64 : rank * 64 + 64])
    dist.destroy_process_group()


def test_synchronous_calls_come_after_the_asynchronous_before_them(seed: int) -> None:
    launch(mixed_sync_and_async, 2, (seed,), timeout_s=60)


@pytest.mark.parametrize("async_op", [False, True])
def test_a_backward_that_needs_what_was_overwritten_raises(async_op: bool) -> None:
    def body(comm: Communicator) -> None:
        part, full = torch.ones(2), torch.ones(2 * comm.size)
        for result, fill in (
            (full, lambda x: shardcomm.all_gather_into_tensor(x, part, comm, async_op)),
            (
                part,
                lambda x: shardcomm.reduce_scatter_tensor(x, full, group=comm, async_op=async_op),
            ),
        ):
            output = torch.zeros_like(result)
            loss = (torch.ones_like(result, requires_grad=True) * output).sum()
            with torch.inference_mode():
                of_inference = torch.zeros_like(result)
            for each in (output, of_inference):
                work = fill(each)
                if work is not None:
                    work.wait()
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()

    run_threads(body, 2)


def groups_come_and_go() -> int:
    """Open files beyond those of the first round."""
    counts = []
    dist.init_process_group("gloo")
    for _ in range(10):
        group = dist.new_group()
        full = torch.empty(dist.get_world_size())
        shardcomm.all_gather_into_tensor(full, torch.ones(1), group)
        dist.barrier()
        dist.destroy_process_group(group)
        del group
        gc.collect()
        counts.append(len(os.listdir("/proc/self/fd")))
    dist.destroy_process_group()
    return counts[-1] - counts[1]


def test_a_destroyed_group_leaves_nothing_open() -> None:
    assert max(launch(groups_come_and_go, 2, timeout_s=60)) <= 0


def test_a_communicator_may_stand_for_the_group_and_converts() -> None:
    def rank(comm: Communicator) -> None:
        full = comm.allocate(comm.size * 5, dtype=torch.bfloat16, use="gather")
        shard = torch.arange(5.0) + comm.rank / 3
        work = shardcomm.all_gather_into_tensor(full, shard, comm, async_op=True)
        work.wait()
        expected = [(torch.arange(5.0) + r / 3).bfloat16() for r in range(comm.size)]
        assert torch.equal(full, torch.cat(expected))
        mean = torch.empty(1)
        shardcomm.reduce_scatter_tensor(mean, torch.arange(3.0), dist.ReduceOp.AVG, comm)
        assert mean.item() == comm.rank

    run_threads(rank, 3)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda c: shardcomm.all_gather_into_tensor(torch.ones(2), torch.ones(1)), "no default group"),
        (lambda c: shardcomm.all_gather_into_tensor(torch.ones(2), torch.ones(1), "world"), "group is 'world'"),
        (lambda c: shardcomm.all_gather_into_tensor(torch.ones(3), torch.ones(1), c), "recv"),
        (lambda c: shardcomm.reduce_scatter_tensor(torch.ones(1), torch.ones(1), dist.ReduceOp.BAND, c), "op is"),
    ],
)  # fmt: skip
def test_bad_arguments_are_named(call: Callable[[Communicator], object], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        call(Communicator.local_group(1)[0])
