"""Gathers and reduces of parts that differ in length, against torch's arithmetic, over every transport."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from functools import partial

import pytest
import torch

from shardcomm import CommError, Communicator, launch
from support.thread_ranks import run_threads

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int64]


def over(transport: str, body: Callable[..., None], ranks: int, *args: object) -> None:
    if transport == "local":
        run_threads(lambda comm: body(comm, *args), ranks)
    else:
        launch(called, ranks, (transport, body, *args), timeout_s=60)


def called(transport: str, body: Callable[..., None], *args: object) -> None:
    with Communicator.from_env(transport=transport, deadline_s=30) as comm:  # type: ignore[arg-type]
        body(comm, *args)


def random_counts(case: random.Random, ranks: int) -> list[int]:
    """Of few elements or of several staged chunks; some ranks have none."""
    most = case.choice([3, 100, 5_000, 400_000])
    counts = [case.choice([0, case.randrange(most), most]) for _ in range(ranks)]
    counts[case.randrange(ranks)] += 1
    return counts


def random_uneven(comm: Communicator, seed: int, cases: int) -> None:
    case = random.Random(seed)
    windows = {
        use: comm.allocate(400_001 * comm.size, dtype=torch.float64, use=use)
        for use in ("gather", "reduce")
    }
    for index in range(cases):
        counts, dtype = random_counts(case, comm.size), case.choice(DTYPES)
        numel, own = sum(counts), slice(sum(counts[: comm.rank]), sum(counts[: comm.rank + 1]))
        context = f"seed {seed}, case {index}, counts {counts}, {dtype}"
        generator = torch.Generator().manual_seed(seed + index)
        everybody = torch.randint(-8, 9, (comm.size, numel), generator=generator).to(dtype)
        mine = everybody[comm.rank]

        wider = torch.float32 if dtype is torch.bfloat16 else dtype  # converted on the way
        recv = torch.zeros(numel, dtype=wider)
        if case.random() < 0.5:
            recv = windows["gather"].view(torch.uint8)[: numel * wider.itemsize].view(wider)
        comm.all_gather(recv, mine[own].clone(), counts=counts)
        parts = [row.split(counts)[rank] for rank, row in enumerate(everybody)]
        assert torch.equal(recv, torch.cat(parts).to(wider)), context
        comm.barrier()

        send = mine
        if case.random() < 0.5:
            send = windows["reduce"].view(torch.uint8)[: numel * dtype.itemsize].view(dtype)
            send.copy_(mine)
        floating = dtype.is_floating_point
        op, scale = case.choice(["sum", "max"]), 0.5 if floating else 1.0
        before = torch.ones(counts[comm.rank], dtype=dtype)
        reduced, flag = before.clone(), torch.zeros(1, dtype=torch.int32)
        comm.reduce_scatter(
            reduced,
            send,
            op,  # type: ignore[arg-type]
            counts=counts,
            scale=scale,
            accumulate=True,
            nonfinite=flag if floating else None,
        )
        exact = everybody[:, own].double()
        total = exact.sum(0) if op == "sum" else exact.amax(0)
        assert torch.equal(reduced, (before + total * scale).to(dtype)), context
        assert flag.item() == 0, context
        comm.barrier()


@pytest.mark.covers("uneven parts")
@pytest.mark.parametrize("transport", ["local", "shm", "c10d"])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_random_uneven_parts(transport: str, ranks: int, seed: int) -> None:
    over(transport, random_uneven, ranks, seed, 25)


def bound_and_on_streams(comm: Communicator) -> None:
    counts = [5, 0, 70_000]
    begin, own = sum(counts[: comm.rank]), counts[comm.rank]
    streams = comm.streams
    full = comm.allocate(70_005, use="gather")
    grads = comm.allocate(70_005, use="reduce")
    shard, reduced = torch.zeros(own), torch.zeros(own)
    gather = comm.bind_all_gather(full, shard, counts=counts)
    reduce = comm.bind_reduction(reduced, grads, "avg", counts=counts)
    place = torch.arange(70_005.0)
    owner = torch.tensor([0.0] * 5 + [2.0] * 70_000)
    for step in range(3):
        shard.fill_(10 * step + comm.rank)
        gather.queue(streams.gather, None).wait()
        assert torch.equal(full, owner + 10 * step)
        grads.copy_(place + step * comm.rank)
        flag = torch.zeros(1, dtype=torch.int32)
        reduce(streams.reduce, None, reduced, 2.0, False, flag).wait()
        assert torch.equal(reduced, 2 * (place + step)[begin : begin + own])
        assert flag.item() == 0
        comm.barrier()
    comm.all_gather(full, shard, counts=counts, stream=streams.gather).wait()
    grads[begin : begin + own] = float("inf")
    comm.reduce_scatter(reduced, grads, counts=counts, nonfinite=flag, stream=streams.reduce).wait()
    assert flag.item() == (own > 0)  # a rank looks at its part
    comm.barrier()


@pytest.mark.covers("uneven parts", "streams and lifetimes")
@pytest.mark.parametrize("transport", ["local", "shm", "c10d"])
def test_bound_and_on_streams(transport: str) -> None:
    over(transport, bound_and_on_streams, 3)


def in_place(comm: Communicator) -> None:
    counts = [2, 5]
    own = slice(sum(counts[: comm.rank]), sum(counts[: comm.rank + 1]))
    whole = torch.arange(7.0)
    full = torch.where(torch.isin(whole, whole[own]), whole, -1.0)
    comm.all_gather(full, full[own], counts=counts)
    assert torch.equal(full, whole)
    comm.reduce_scatter(full[own], full, counts=counts)
    assert torch.equal(full[own], 2 * whole[own])
    half = slice(own.start - comm.rank, own.stop - comm.rank) if comm.rank else slice(1, 3)
    with pytest.raises(
        ValueError, match=rf"send overlaps recv.* here recv\[{own.start} : {own.stop}\]"
    ):
        comm.all_gather(full, full[half], counts=counts)
    with pytest.raises(
        ValueError, match=rf"recv overlaps send.* here send\[{own.start} : {own.stop}\]"
    ):
        comm.reduce_scatter(full[half], full, counts=counts)
    comm.barrier()


@pytest.mark.parametrize("transport", ["local", "shm", "c10d"])
def test_in_place_is_the_ranks_own_part(transport: str) -> None:
    over(transport, in_place, 2)


def receipts(comm: Communicator) -> None:
    counts = [1, 3]
    send = torch.ones(counts[comm.rank])
    comm.all_gather(torch.zeros(4), send, counts=counts)
    comm.reduce_scatter(send, torch.ones(4), counts=counts)
    taken = {receipt.operation: receipt for receipt in comm.receipts()}
    if comm.transport == "c10d":
        assert taken["all_gather"].taken == "broadcasts"
        assert taken["reduce_scatter"].taken == "reduces"
        assert "equal parts" in taken["all_gather"].reason
    if comm.transport == "shm":  # nobody reads of a rank that has nothing
        own = comm.allocate(4, use="reduce")
        send = own if comm.rank == 0 else torch.zeros(0)
        comm.all_gather(torch.zeros(4), send, counts=[4, 0])
        assert "direct" in {each.taken for each in comm.receipts()}
    comm.all_gather(torch.zeros(4), torch.ones(2), counts=[2, 2])  # equal ones are as without
    (gathered,) = [each for each in comm.receipts() if each.operation == "all_gather"]
    assert gathered.taken == ("c10d" if comm.transport == "c10d" else "inline")


@pytest.mark.covers("uneven parts", "receipts")
@pytest.mark.parametrize("transport", ["shm", "c10d"])
def test_receipts_tell_how_uneven_parts_went(transport: str) -> None:
    over(transport, receipts, 2)


def refused(comm: Communicator) -> None:
    own = [2, 5][comm.rank]
    full, part = torch.zeros(7), torch.zeros(own)
    for counts, message in [
        ([7], "counts has 1 entries; it must have one for each of the 2 ranks"),
        ([2, -5], r"counts\[1\] is -5; it must be a whole number of elements"),
        ([2, 5.0], r"counts\[1\] is 5.0; it must be"),
        ([2, True], r"counts\[1\] is True; it must be"),
        ([3, 5], r"by counts \[3, 5\] .* must have 8 and"),
        ([5, 2], rf"by counts \[5, 2\] .* of rank {comm.rank}, {[5, 2][comm.rank]}"),
    ]:
        for call in (
            lambda counts=counts: comm.all_gather(full, part, counts=counts),
            lambda counts=counts: comm.bind_all_gather(full, part, counts=counts),
            lambda counts=counts: comm.reduce_scatter(part, full, counts=counts),
            lambda counts=counts: comm.bind_reduce_scatter(part, full, counts=counts),
        ):
            with pytest.raises(ValueError, match=message):
                call()
    for counts in (7, "25", {2: 5}):
        with pytest.raises(TypeError, match=r"counts is a \w+; it must be a list or a tuple"):
            comm.all_gather(full, part, counts=counts)  # type: ignore[arg-type]
    comm.all_gather(full, part, counts=(2, 5))  # and nothing is broken
    comm.barrier()


@pytest.mark.parametrize("transport", ["local", "shm", "c10d"])
def test_bad_counts_are_refused(transport: str) -> None:
    over(transport, refused, 2)


def disagree(comm: Communicator, gathers: bool) -> None:
    counts = [2, 2, 5] if comm.rank == 1 else [5, 2, 2]
    full, part = torch.zeros(9), torch.zeros(counts[comm.rank])
    call = partial(comm.all_gather, full) if gathers else partial(comm.reduce_scatter, part)
    with pytest.raises(CommError) as caught:
        call(part if gathers else full, counts=counts)
    message = str(caught.value)
    assert "ranks gave different counts to" in message
    assert re.search(r"rank 0( \(pid \d+\))? gave \[5, 2, 2\]; rank 1", message)
    assert message.endswith("gave [2, 2, 5]")


@pytest.mark.covers("different calls")
@pytest.mark.parametrize("gathers", [True, False])
@pytest.mark.parametrize("transport", ["local", "shm"])
def test_counts_that_differ_between_ranks_are_named(transport: str, gathers: bool) -> None:
    over(transport, disagree, 3, gathers)


def even_on_one(comm: Communicator) -> None:
    counts, send = ([3, 5], 3) if comm.rank == 0 else (None, 8)
    with pytest.raises(CommError, match=r"count 8 in uneven parts\).*count 8\)"):
        comm.all_gather(torch.zeros(8 * (comm.rank + 1)), torch.zeros(send), counts=counts)


@pytest.mark.parametrize("transport", ["local", "shm"])
def test_equal_parts_on_one_rank_and_uneven_ones_on_another_are_named(transport: str) -> None:
    over(transport, even_on_one, 2)
