"""Communication memory is reused only when every rank has let go of it, whenever each does."""

from __future__ import annotations

import random

import torch

from shardcomm import Communicator
from shardcomm.interop.fsdp2.buffer_pool import MAX_BUFFERS, BufferPool
from support.thread_ranks import run_threads

ROUNDS = 200


def test_ranks_that_let_go_at_different_times_never_overwrite_each_other(seed: int) -> None:
    sizes = [random.Random(seed).choice((8, 24, 80)) for _ in range(ROUNDS)]

    def body(comm: Communicator) -> int:
        pool = BufferPool(comm, "gather")
        own = random.Random(seed + comm.rank)
        held: list[tuple[torch.Tensor, int]] = []
        for turn, numel in enumerate(sizes):
            whole = pool.take(numel * comm.size, torch.int64)
            part = whole[comm.rank * numel :][:numel]
            part.fill_(turn)  # before the gather, as FSDP2 does
            with pool.collective():
                comm.all_gather(whole, part)
            held.append((whole[:], turn))  # a view of it is enough
            del whole, part
            while held and own.random() < 0.6:
                held.pop(own.randrange(len(held)))
            for values, written in held:
                assert values.eq(written).all(), (turn, written)
        return len(pool._buffers)

    buffers = run_threads(body, 3)
    assert len(set(buffers)) == 1
    assert buffers[0] < MAX_BUFFERS


def test_one_larger_buffer_takes_the_place_of_those_too_small() -> None:
    def body(comm: Communicator) -> None:
        pool = BufferPool(comm, "reduce")
        places = set()
        for numel in [4] * 6 + [400] * 6 + [4, 400] * 6:
            buffer = pool.take(numel, torch.float32)
            places.add(buffer.data_ptr())
            with pool.collective():
                comm.reduce_scatter(torch.empty(numel // comm.size), buffer)
            del buffer
        assert len(pool._buffers) == 2
        assert all(len(buffer) == 1600 for buffer in pool._buffers.values())

    run_threads(body, 2)


def test_when_all_are_in_use_memory_is_ordinary_and_collectives_still_right() -> None:
    def body(comm: Communicator) -> None:
        pool = BufferPool(comm, "gather")
        held = []
        for turn in range(MAX_BUFFERS + 2):
            whole = pool.take(2, torch.float32)
            whole[comm.rank] = turn + comm.rank
            with pool.collective():
                comm.all_gather(whole, whole[comm.rank : comm.rank + 1])
            held.append(whole)
        for turn, whole in enumerate(held):
            assert whole.tolist() == [turn, turn + 1]
        (taken,) = {r.taken for r in comm.receipts() if r.operation == "all_gather"}
        assert taken == "inline"

    run_threads(body, 2)


def test_buffers_that_are_taken_before_one_collective_are_apart() -> None:
    def body(comm: Communicator) -> None:
        pool = BufferPool(comm, "reduce")
        for _ in range(4):  # new ones, and from then on those that all have let go of
            taken = [pool.take(4, torch.float32) for _ in range(2)]
            assert taken[0].data_ptr() != taken[1].data_ptr()
            for buffer in taken:
                with pool.collective():
                    comm.reduce_scatter(torch.empty(4 // comm.size), buffer)
            del taken, buffer
            with pool.collective():
                comm.all_reduce(torch.zeros(1))

    run_threads(body, 2)
