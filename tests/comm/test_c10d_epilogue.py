"""What `c10d` does to a sum after its ProcessGroup: divided, scaled, added to what was there, in this order, once."""

from __future__ import annotations

import os
import threading

import pytest
import torch
import torch.distributed as dist

from shardcomm import Communicator, launch
from shardcomm._C import Stream


def scaled_and_added() -> None:
    dist.init_process_group("gloo")
    with Communicator.from_process_group(transport="c10d", deadline_s=30) as comm:
        for dtype in (torch.float32, torch.bfloat16):
            send = torch.full((2 * comm.size,), 1.0 + comm.rank, dtype=dtype)
            for op, reduced in (("sum", 3.0), ("avg", 1.5), ("max", 2.0), ("min", 1.0)):
                recv = torch.full((2,), 16.0, dtype=dtype)
                comm.reduce_scatter(recv, send, op, scale=0.5, accumulate=True)  # type: ignore[arg-type]
                assert recv.tolist() == [16.0 + 0.5 * reduced] * 2, op
                comm.reduce_scatter(recv, send, op, scale=2.0)  # type: ignore[arg-type]
                assert recv.tolist() == [2.0 * reduced] * 2, op
            assert send.tolist() == [1.0 + comm.rank] * (2 * comm.size)
    dist.destroy_process_group()


def test_sums_are_divided_then_scaled_then_added_to_what_was_there() -> None:
    launch(scaled_and_added, 2, timeout_s=60)


def summed_in_float32() -> None:
    dist.init_process_group("gloo")
    with Communicator.from_process_group(transport="c10d", deadline_s=30) as comm:
        # 256 + 1 + 1 in bf16 steps of 2: rounding after each addition loses both ones.
        value = 256.0 if comm.rank == 0 else 1.0
        recv = torch.zeros(1, dtype=torch.bfloat16)
        comm.reduce_scatter(recv, torch.full((comm.size,), value, dtype=torch.bfloat16))
        assert recv.item() == 258.0
        wide = torch.zeros(1)  # and is not rounded to the wire's dtype on its way to a wider one
        send = torch.full((comm.size,), 256.0 if comm.rank == 0 else 0.5, dtype=torch.bfloat16)
        comm.reduce_scatter(wide, send)
        assert wide.item() == 257.0
    dist.destroy_process_group()


@pytest.mark.covers("sums in fp32")
def test_halves_are_summed_in_float32_and_rounded_once() -> None:
    launch(summed_in_float32, 3, timeout_s=60)


def gathered_and_reduced_at_once() -> None:
    dist.init_process_group("gloo")
    with Communicator.from_process_group(transport="c10d", deadline_s=20) as comm:
        gathers, reduces = Stream(), Stream()
        gathered, reduced = torch.zeros(comm.size), torch.zeros(1)
        mine = torch.full((1,), float(comm.rank))
        calls = [
            lambda: comm.all_gather(gathered, mine, stream=gathers),
            lambda: comm.reduce_scatter(reduced, torch.ones(comm.size), stream=reduces),
        ]
        # What one rank begins with, the other has second.
        first, second = calls if comm.rank == 0 else reversed(calls)
        done = first()
        # Until the group has been given it; the other rank may be quick, and it over already.
        while all(pending.call is None for pending in comm.pending()) and not done.is_completed():
            os.sched_yield()
        second()
        for stream in (gathers, reduces):
            stream.record().wait()
        assert gathered.tolist() == [0.0, 1.0]
        assert reduced.item() == comm.size
    dist.destroy_process_group()


def test_a_gather_and_a_reduce_have_no_common_order() -> None:
    launch(gathered_and_reduced_at_once, 2, timeout_s=60)


def looked_at() -> None:
    dist.init_process_group("gloo")
    with Communicator.from_process_group(transport="c10d", deadline_s=30) as comm:
        flag = torch.zeros(1, dtype=torch.int32)
        send = torch.ones(2 * comm.size)
        send[0] = float("inf") if comm.rank == 1 else 1.0  # in the part of rank 0
        comm.reduce_scatter(torch.zeros(2), send, nonfinite=flag)
        assert flag.item() == (comm.rank == 0)
        comm.reduce_scatter(torch.zeros(2), torch.ones(2 * comm.size), nonfinite=flag)
        assert flag.item() == (comm.rank == 0)  # never cleared
    dist.destroy_process_group()


@pytest.mark.covers("NaN and Inf flags")
def test_what_is_not_finite_is_found_on_the_rank_that_holds_it() -> None:
    launch(looked_at, 2, timeout_s=60)


def in_either_order() -> None:
    dist.init_process_group("gloo")
    with Communicator.from_process_group(transport="c10d", deadline_s=10) as comm:
        gathered, value = torch.empty(comm.size), torch.ones(1)
        mine = torch.full((1,), float(comm.rank))
        if comm.rank == 0:
            gathers, begun = Stream(), threading.Event()
            gathers.enqueue(begun.set)
            comm.all_gather(gathered, mine, stream=gathers)
            begun.wait()
            comm.all_reduce(value)
            gathers.synchronize()
        else:
            comm.all_reduce(value)
            comm.all_gather(gathered, mine)
        assert value.item() == comm.size
        assert gathered.tolist() == list(range(comm.size))
    dist.destroy_process_group()


@pytest.mark.covers("streams and lifetimes")
def test_a_gather_and_a_reduce_may_come_in_either_order() -> None:
    launch(in_either_order, 2, timeout_s=60)
