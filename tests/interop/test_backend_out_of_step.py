"""The torch.distributed backend where ranks are out of step, and tensors are not one range of memory."""

from __future__ import annotations

import time
from datetime import timedelta

import torch
import torch.distributed as dist

from shardcomm import launch

OURS = "shardcomm"
gather_into = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
scatter_from = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


def strided(shape: tuple[int, int]) -> torch.Tensor:
    """Every second column of a wider tensor."""
    return torch.full((shape[0], 2 * shape[1]), -1.0)[:, ::2]


def into_strided_outputs() -> None:
    dist.init_process_group(OURS, timeout=timedelta(seconds=60))
    rank, size = dist.get_rank(), dist.get_world_size()
    total = size * (size + 1) / 2
    for async_op in (False, True):
        parts = [torch.full((3, 2), (1.0 + rank) * (1 + r)) for r in range(size)]
        output = strided((3, 2))
        work = dist.reduce_scatter(output, parts, async_op=async_op)
        if work is not None:
            work.wait()
        assert output.eq(total * (1 + rank)).all(), output

        output = strided((3, 2))
        work = scatter_from(output, torch.cat(parts), async_op=async_op)
        if work is not None:
            work.wait()
        assert output.eq(total * (1 + rank)).all(), output

        whole = strided((3 * size, 2))
        work = gather_into(whole, parts[0], async_op=async_op)
        if work is not None:
            work.wait()
        assert whole.eq(torch.arange(1.0, size + 1).repeat_interleave(3).view(-1, 1)).all()

        summed = strided((3, 2)).fill_(1.0 + rank)
        work = dist.all_reduce(summed, async_op=async_op)
        if work is not None:
            work.wait()
        assert summed.eq(total).all()
    dist.destroy_process_group()


def test_strided_outputs_get_what_was_reduced_and_gathered() -> None:
    launch(into_strided_outputs, 2, timeout_s=60)


def barrier_behind_a_reduce() -> None:
    dist.init_process_group(OURS, timeout=timedelta(seconds=60))
    store = dist.distributed_c10d._get_default_store()
    value = torch.ones(3)
    if dist.get_rank() == 0:
        reducing = dist.all_reduce(value, async_op=True)
        meeting = dist.barrier(async_op=True)
        assert meeting is not None
        store.wait(["rank 1 is in the barrier"])
        # Rank 1 reduces only when told to: until then this must not end, however long one looks.
        end = time.monotonic() + 0.5
        while time.monotonic() < end:
            assert not meeting.is_completed()
        store.set("seen", "")
        meeting.wait()
        assert reducing is not None
        assert reducing.is_completed()
    else:
        meeting = dist.barrier(async_op=True)
        store.set("rank 1 is in the barrier", "")
        store.wait(["seen"])
        dist.all_reduce(value)
        assert meeting is not None
        meeting.wait()
    assert value.eq(2.0).all()
    dist.destroy_process_group()


def test_an_asynchronous_barrier_ends_after_the_reduces_before_it() -> None:
    launch(barrier_behind_a_reduce, 2, timeout_s=60)


def synchronous_barrier_behind_a_reduce() -> None:
    dist.init_process_group(OURS, timeout=timedelta(seconds=60))
    store = dist.distributed_c10d._get_default_store()
    value = torch.ones(3)
    if dist.get_rank() == 0:
        reducing = dist.all_reduce(value, async_op=True)
        dist.barrier()
        assert reducing is not None
        reduced = reducing.is_completed()
        store.set("past the barrier", "")
        assert reduced
    else:
        meeting = dist.barrier(async_op=True)
        end = time.monotonic() + 0.5
        while time.monotonic() < end and not store.check(["past the barrier"]):
            pass
        dist.all_reduce(value)
        assert meeting is not None
        meeting.wait()
    dist.destroy_process_group()


def test_a_synchronous_barrier_ends_after_the_reduces_before_it() -> None:
    launch(synchronous_barrier_behind_a_reduce, 2, timeout_s=60)


def future_of_a_reduce() -> None:
    dist.init_process_group(OURS, timeout=timedelta(seconds=60))
    store = dist.distributed_c10d._get_default_store()
    value = torch.ones(3)
    if dist.get_rank() == 0:
        reducing = dist.all_reduce(value, async_op=True)
        assert reducing is not None
        future = reducing.get_future()
        end = time.monotonic() + 0.3  # rank 1 has not begun, however long one looks
        while time.monotonic() < end:
            assert not future.done()
        store.set("seen", "")
        assert future.wait()[0].eq(2.0).all()
    else:
        store.wait(["seen"])
        dist.all_reduce(value)
    dist.destroy_process_group()


def test_a_future_is_done_when_the_collective_is() -> None:
    launch(future_of_a_reduce, 2, timeout_s=60)


def overlapping_inputs() -> None:
    dist.init_process_group(OURS, timeout=timedelta(seconds=60))
    x = torch.arange(5.0)
    output = torch.empty(4)
    dist.reduce_scatter(output, [x[:4], x[1:]])
    assert torch.equal(output, 2 * x[dist.get_rank() :][:4])
    dist.destroy_process_group()


def test_inputs_may_overlap() -> None:
    launch(overlapping_inputs, 2, timeout_s=60)
