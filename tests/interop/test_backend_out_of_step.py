"""The torch.distributed backend where ranks are out of step, and tensors are not one range of memory."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import shardcomm
from shardcomm import launch
from shardcomm.interop.backend import make_group

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


def unaligned_tensors() -> None:
    dist.init_process_group(OURS, timeout=timedelta(seconds=60))
    rank = dist.get_rank()

    def made(count: int, dtype: torch.dtype, offset: int = 1) -> torch.Tensor:
        memory = bytearray(count * dtype.itemsize + offset)
        return torch.frombuffer(memory, dtype=dtype, offset=offset).copy_(
            torch.arange(count) + rank
        )

    for dtype in (torch.float32, torch.float64, torch.int64, torch.bfloat16):
        numbers = torch.arange(6, dtype=dtype)
        total = 2 * numbers + 1
        summed = made(6, dtype, offset=rank)  # aligned on one rank alone
        dist.all_reduce(summed)
        assert summed.eq(total).all()
        gathered = [made(6, dtype), made(6, dtype)]
        dist.all_gather(gathered, made(6, dtype))
        assert torch.stack(gathered).eq(torch.stack([numbers, numbers + 1])).all()
        part = made(3, dtype)
        dist.reduce_scatter_tensor(part, made(6, dtype))
        assert part.eq(total[3 * rank :][:3]).all()
        exchanged = made(6, dtype)
        dist.all_to_all_single(exchanged, made(6, dtype))
        assert exchanged.eq(torch.cat([numbers[3 * rank :][:3] + r for r in range(2)])).all()
        reduced = made(6, dtype)
        dist.reduce(reduced, 1)
        assert rank == 0 or reduced.eq(total).all()
    dist.destroy_process_group()


def test_tensors_may_lie_where_no_element_is_aligned() -> None:
    launch(unaligned_tensors, 2, timeout_s=60)


def sparse_behind_a_gather() -> None:
    dist.init_process_group(OURS, timeout=timedelta(seconds=60))
    store = dist.distributed_c10d._get_default_store()
    for turn in range(5):
        whole = torch.empty(2)
        sparse = torch.tensor([0.0, 1.0 + dist.get_rank()]).to_sparse()
        if dist.get_rank() == 1:
            store.wait([f"begun {turn}"])
        gathering = gather_into(whole, torch.ones(1), async_op=True)
        summing = dist.all_reduce(sparse, async_op=True)
        assert gathering is not None
        assert summing is not None
        if dist.get_rank() == 0:
            time.sleep(0.1)  # both would be under way, if they could be
            store.set(f"begun {turn}", "")
        gathering.wait()
        summing.wait()
        assert whole.tolist() == [1, 1]
        assert sparse.to_dense().tolist() == [0, 3]
    dist.destroy_process_group()


def test_a_sparse_sum_which_gathers_comes_after_the_gathers_before_it() -> None:
    launch(sparse_behind_a_gather, 2, timeout_s=60)


def shared_on_one_rank() -> None:
    dist.init_process_group(OURS, timeout=timedelta(seconds=60))
    rank = dist.get_rank()
    base = torch.tensor([1.0, 2.0, 4.0])
    tensors = [base[:2], base[1:]] if rank == 0 else [torch.ones(2), torch.full((2,), 10.0)]
    group = dist.group.WORLD
    assert group is not None
    group.allreduce_coalesced(tensors).wait()
    if rank == 0:  # the later one is stored later, as with Gloo
        assert base.tolist() == [2, 12, 14]
    else:
        assert [each.tolist() for each in tensors] == [[2, 3], [12, 14]]
    dist.destroy_process_group()


def test_coalesced_tensors_may_share_memory_on_one_rank_alone() -> None:
    launch(shared_on_one_rank, 2, timeout_s=60)


def set_data_meanwhile() -> None:
    dist.init_process_group(OURS, timeout=timedelta(seconds=60))
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 1:
        store.wait(["set"])
    x = torch.ones(3)
    given = x.detach()
    first = dist.all_reduce(torch.ones(1), async_op=True)
    second = dist.all_reduce(x, async_op=True)  # on rank 0 it is queued behind the first
    if dist.get_rank() == 0:
        x.data = torch.zeros(3)
        store.set("set", "")
    assert first is not None
    assert second is not None
    second.wait()
    assert given.tolist() == [2, 2, 2]
    assert x.tolist() == ([0, 0, 0] if dist.get_rank() == 0 else [2, 2, 2])
    dist.destroy_process_group()


def test_a_result_goes_to_the_memory_that_was_given() -> None:
    launch(set_data_meanwhile, 2, timeout_s=60)


def gather_over_what_a_backward_needs() -> None:
    dist.init_process_group(OURS, timeout=timedelta(seconds=60))
    size = dist.get_world_size()
    part, whole = torch.ones(4), torch.ones(4 * size)
    fills: list[tuple[torch.Tensor, Callable[[torch.Tensor, bool], dist.Work | None]]] = [
        (whole, lambda x, later: gather_into(x, part, async_op=later)),
        (whole, lambda x, later: dist.all_gather(list(x.chunk(size)), part, async_op=later)),
        (part, lambda x, later: scatter_from(x, whole, async_op=later)),
        (part, lambda x, later: dist.reduce_scatter(x, list(whole.chunk(size)), async_op=later)),
    ]
    for like, fill in fills:
        for later in (False, True):
            result = torch.zeros_like(like)
            loss = (torch.ones_like(like, requires_grad=True) * result).sum()
            work = fill(result, later)
            if work is not None:
                work.wait()
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()
            with torch.inference_mode():  # tensors whose changes nobody counts
                work = fill(torch.zeros_like(like), later)
                if work is not None:
                    work.wait()
    dist.destroy_process_group()


def test_a_backward_that_needs_what_a_collective_overwrote_raises() -> None:
    """As over Gloo, which copies results into the tensors."""
    launch(gather_over_what_a_backward_needs, 2, timeout_s=60)


@pytest.mark.parametrize("rank", [-1, 2])
def test_a_rank_outside_of_the_group_is_refused(rank: int) -> None:
    with pytest.raises(ValueError, match=f"'shardcomm': rank is {rank}; it must be 0 to 1"):
        make_group(dist.HashStore(), rank, 2, timedelta(seconds=5))


def of_another_dtype(operation: str) -> None:
    dist.init_process_group(OURS, timeout=timedelta(seconds=60))
    rank, size = dist.get_rank(), dist.get_world_size()
    one = torch.ones(100, dtype=(torch.float32, torch.int32)[rank % 2])
    parts = [torch.empty_like(one) for _ in range(size)] if rank == 0 else None
    calls: dict[str, Callable[[], object]] = {
        "broadcast": lambda: dist.broadcast(one, 0),
        "gather": lambda: dist.gather(one, parts, 0),
        "scatter": lambda: dist.scatter(one, parts, 0),
    }
    with pytest.raises(shardcomm.CommError, match=rf"{operation}\(i32, count 100, root 0\)") as at:
        calls[operation]()
    assert (at.value.kind, at.value.operation) == ("mismatch", operation)
    dist.destroy_process_group()


@pytest.mark.parametrize("operation", ["broadcast", "gather", "scatter"])
def test_ranks_that_give_another_dtype_of_as_many_bytes_are_told(operation: str) -> None:
    launch(of_another_dtype, 2, (operation,), timeout_s=60)
