"""Collectives that are bound to their operands do what plain ones do, in every step, or say in a sentence why not."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import random
import signal
import threading
import weakref
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest
import torch

from shardcomm import BoundCollective, CommError, Communicator, Stream, Work, launch
from support.gates import until
from support.random_collectives import DTYPES, OPS, reduced, values
from support.rank_processes import heard, join, kill, processes
from support.thread_ranks import run_threads

TRANSPORTS = ["local", "shm", "c10d"]
STEPS = 20

pytestmark = pytest.mark.covers("streams and lifetimes")


def over(transport: str, body: Callable[..., None], ranks: int, *args: object) -> None:
    if transport == "local":
        run_threads(lambda comm: body(comm, *args), ranks)
    else:
        launch(called, ranks, (transport, body, *args), timeout_s=60)


def called(transport: str, body: Callable[..., None], *args: object) -> None:
    with Communicator.from_env(transport=transport, deadline_s=30) as comm:  # type: ignore[arg-type]
        body(comm, *args)


def run(bound: BoundCollective, stream: Stream | None) -> None:
    if stream is None:
        assert bound() is None  # type: ignore[func-returns-value]
    else:
        work = bound.start(stream)
        assert isinstance(work, Work)
        work.wait()


def gathers_and_reduces(comm: Communicator, seed: int, cases: int) -> None:
    """Each result is torch's, of what the operands hold in each step; plain and bound calls take turns."""
    choose = random.Random(seed)
    for case in range(cases):
        dtype, op, part = choose.choice(DTYPES), choose.choice(OPS), choose.choice([0, 1, 7, 300])
        counts = [part + r for r in range(comm.size)] if choose.random() < 0.5 else None
        lengths = counts or [part] * comm.size
        numel, own = sum(lengths), lengths[comm.rank]
        full = torch.zeros(numel, dtype=dtype)
        if choose.random() < 0.5:
            full = comm.allocate(numel, dtype=dtype, use="gather")
        shard, result = torch.zeros(own, dtype=dtype), torch.zeros(own, dtype=dtype)
        whole, buffer, sent = (torch.zeros(numel, dtype=dtype) for _ in range(3))
        root, tag = choose.randrange(comm.size), choose.choice([0, 5])
        gather = comm.bind_all_gather(full, shard, counts=counts, tag=tag)
        reduce = comm.bind_reduce_scatter(result, whole, op, counts=counts, tag=tag)
        all_reduce = comm.bind_all_reduce(buffer, op, tag=tag)
        broadcast = comm.bind_broadcast(sent, root)
        barrier = comm.bind_barrier(tag=tag)
        for step in range(4):
            context = f"seed {seed}, case {case}, {dtype}, {op}, counts {counts}, step {step}"
            everybody = [values(seed + 4 * case + step, r, numel, dtype) for r in range(comm.size)]
            parts = [all_.split(lengths) for all_ in everybody]
            shard.copy_(parts[comm.rank][comm.rank])
            for operand in (whole, buffer, sent):
                operand.copy_(everybody[comm.rank])
            on = comm.streams if choose.random() < 0.5 else None
            if choose.random() < 0.2:
                comm.all_gather(full, shard, counts=counts, tag=tag)
                comm.reduce_scatter(result, whole, op, counts=counts, tag=tag)
            else:
                run(gather, on and on.gather)
                run(reduce, on and on.reduce)
            run(all_reduce, on and on.reduce)
            run(broadcast, on and on.gather)
            own_parts = torch.cat([parts[r][r] for r in range(comm.size)])
            total = reduced(everybody, op)
            assert torch.equal(full, own_parts), context
            assert torch.equal(result, total.split(lengths)[comm.rank]), context
            assert torch.equal(buffer, total), context
            assert torch.equal(sent, everybody[root]), context
            run(barrier, on and on.gather)  # until here the others read `full`


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("ranks", [1, 4])  # by which an average divides without rounding
def test_a_bound_collective_does_what_the_plain_one_does(
    transport: str, ranks: int, seed: int
) -> None:
    over(transport, gathers_and_reduces, ranks, seed, 12)


def scales_and_adds(comm: Communicator) -> None:
    send, recv = torch.zeros(4 * comm.size), torch.full((4,), 100.0)
    flag = torch.zeros(1, dtype=torch.int32)
    reduce = comm.bind_reduce_scatter(
        recv, send, "avg", scale=0.5, accumulate=True, nonfinite=flag, tag=3
    )
    for step in range(STEPS):
        send.fill_(step)
        reduce()
    assert recv.tolist() == [100 + 0.5 * sum(range(STEPS))] * 4
    assert flag.item() == 0
    send.fill_(float("inf"))
    reduce()
    assert flag.item() == 1
    comm.barrier()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_bound_reduce_keeps_its_scale_and_its_flag(transport: str) -> None:
    over(transport, scales_and_adds, 2)


def in_place_and_of_numpy(comm: Communicator) -> None:
    array = np.zeros(2 * comm.size, np.float32)
    whole = torch.zeros(2 * comm.size)
    own = whole[2 * comm.rank : 2 * comm.rank + 2]
    gathers = [
        comm.bind_all_gather(whole, own),
        comm.bind_all_gather(array, own),
        comm.bind_all_gather(torch.zeros(2 * comm.size, dtype=torch.bfloat16), own),
    ]
    expected = torch.arange(1.0, comm.size + 1).repeat_interleave(2)
    for step in range(STEPS):
        own.fill_(step * (comm.rank + 1))
        for gather in gathers:
            gather()
        assert torch.equal(whole, step * expected)
        assert torch.equal(torch.from_numpy(array), step * expected)
        comm.barrier()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_operands_may_be_in_place_and_of_other_libraries(transport: str) -> None:
    over(transport, in_place_and_of_numpy, 2)


def bind_each(comm: Communicator) -> dict[str, tuple[BoundCollective, list[torch.Tensor]]]:
    """A bound collective of each kind, and its operands."""
    one, many = torch.zeros(8), torch.zeros(8 * comm.size)
    two, more = torch.zeros(8), torch.zeros(8 * comm.size)
    flag, buffer, sent = torch.zeros(1, dtype=torch.int32), torch.zeros(8), torch.zeros(8)
    return {
        "all_gather": (comm.bind_all_gather(many, one), [many, one]),
        "reduce_scatter": (
            comm.bind_reduce_scatter(two, more, nonfinite=flag),
            [two, more, flag],
        ),
        "all_reduce": (comm.bind_all_reduce(buffer), [buffer]),
        "broadcast": (comm.bind_broadcast(sent), [sent]),
        "barrier": (comm.bind_barrier(), []),
    }


def resize(tensor: torch.Tensor) -> None:
    tensor.resize_(1 << 16)


def set_data(tensor: torch.Tensor) -> None:
    tensor.data = tensor.clone()


def set_storage(tensor: torch.Tensor) -> None:
    tensor.set_(tensor.clone())  # type: ignore[call-overload]


def free_storage(tensor: torch.Tensor) -> None:
    tensor.untyped_storage().resize_(0)


def refuses_moved(comm: Communicator, move: Callable[[torch.Tensor], None]) -> None:
    names = {
        "all_gather": ["recv", "send"],
        "reduce_scatter": ["recv", "send", "nonfinite"],
        "all_reduce": ["buffer"],
        "broadcast": ["buffer"],
        "barrier": [],
    }
    for operation, arguments in names.items():
        for index, name in enumerate(arguments):
            bound, operands = bind_each(comm)[operation]
            assert bound.operation == operation
            bound()
            comm.barrier()
            move(operands[index])
            sentence = f"^{operation}: {name} has moved to other memory since it was bound .* again"
            with pytest.raises(ValueError, match=sentence):
                bound()
            with pytest.raises(ValueError, match=sentence):
                bound.start(comm.streams.gather)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("move", [resize, set_data, set_storage, free_storage])
def test_an_operand_that_has_moved_is_refused(
    transport: str, move: Callable[[torch.Tensor], None]
) -> None:
    over(transport, refuses_moved, 2, move)


def keeps_memory(comm: Communicator) -> None:
    arrays = [np.ones(4 * comm.size, np.float32), np.ones(4, np.float32)]
    full, shard = map(torch.from_numpy, arrays)
    gather = comm.bind_all_gather(full, shard)
    memory = [weakref.ref(array) for array in arrays]
    del arrays
    stream, gate = Stream(), threading.Event()
    stream.enqueue(gate.wait)
    work = gather.start(stream)
    full.data, shard.data = torch.zeros(1), torch.zeros(1)  # the gather is still to come
    del full, shard, gather
    gc.collect()
    alive = [ref() is not None for ref in memory]
    gate.set()
    work.wait()
    assert alive == [True, True]
    comm.barrier()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_what_is_bound_keeps_its_memory(transport: str) -> None:
    over(transport, keeps_memory, 2)


def lets_go(comm: Communicator) -> None:
    arrays = [np.ones(4, np.float32), np.ones(4, np.float32)]
    gather = comm.bind_all_gather(*map(torch.from_numpy, arrays))
    memory = [weakref.ref(array) for array in arrays]
    del arrays
    gather()
    assert all(ref() is not None for ref in memory)
    del gather
    # Gloo's own thread lets go of what it has sent some time after the collective.
    until(lambda: all(ref() is None for ref in memory), "nobody keeps the memory")


@pytest.mark.parametrize("transport", ["local", "c10d"])
def test_memory_goes_with_what_is_bound_to_it(transport: str) -> None:
    over(transport, lets_go, 1)


def refuses(comm: Communicator) -> None:
    gather, _ = bind_each(comm)["all_gather"]
    for copied in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(
            TypeError, match=r"cannot be copied or pickled.*comm\.bind_all_gather again"
        ):
            copied(gather)
    with pytest.raises(TypeError, match=r"all_gather: start was given no stream; call the bound"):
        gather.start(None)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="all_gather: stream is a str; it must be"):
        gather.start("cuda")  # type: ignore[arg-type]
    negated = torch._neg_view(torch.zeros(4))
    for bind, message in [
        (lambda: comm.bind_all_gather(torch.zeros(3), torch.zeros(5)), "recv has 3 elements"),
        (lambda: comm.bind_all_gather(torch.zeros(4 * comm.size), negated), "negates"),
        (lambda: comm.bind_reduce_scatter(torch.zeros(3), torch.zeros(5)), "recv has 3 elements"),
        (
            lambda: comm.bind_reduce_scatter(torch.zeros(1), torch.zeros(comm.size), scale=1e300),
            "scale is 1e",
        ),
        (lambda: comm.bind_all_reduce(torch.zeros(4)[::2]), "buffer has strides"),
        (lambda: comm.bind_all_reduce(torch.zeros(4), "mean"), "op is 'mean'"),  # type: ignore[arg-type]
        (lambda: comm.bind_broadcast(torch.zeros(4), comm.size), "root is"),
        (lambda: comm.bind_barrier(tag="x"), "tag is 'x'"),  # type: ignore[arg-type]
    ]:
        with pytest.raises(ValueError, match=message):
            bind()
    assert "all_gather(recv of" in repr(gather)
    assert f"rank {comm.rank} of" in repr(gather)
    gather()  # and nothing is broken
    comm.barrier()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_mistakes_are_one_sentence_each(transport: str) -> None:
    over(transport, refuses, 2)


def ends(comm: Communicator, how: str) -> None:
    collectives = bind_each(comm)
    if comm.rank > 0:
        gather, _ = collectives["all_gather"]
        with pytest.raises(CommError):
            gather()  # which rank 0 does not call
    elif how == "close":
        comm.close()
    else:
        comm.abort("enough")
    for bound, _ in collectives.values():
        with pytest.raises(CommError):
            bound()
        with pytest.raises(CommError):
            bound.start(Stream()).wait()


@pytest.mark.covers("abort and close")
@pytest.mark.parametrize("how", ["close", "abort"])
@pytest.mark.parametrize(("transport", "ranks"), [("local", 2), ("shm", 2), ("c10d", 1)])
def test_after_the_end_of_the_group_it_raises(transport: str, ranks: int, how: str) -> None:
    over(transport, ends, ranks, how)


def gather_for_ever(rank: int, tell: Connection, ranks: int, address: str, meeting: str) -> None:
    comm = join(rank, ranks, address, meeting)
    gather, _ = bind_each(comm)["all_gather"]
    gather()
    tell.send("gathering")
    try:
        while True:
            gather()
    except CommError as error:
        tell.send(f"{error.kind} {error.rank} {error.operation}")


@pytest.mark.covers("dead rank")
def test_a_death_ends_a_bound_gather(tmp_path: Path) -> None:
    with processes(gather_for_ever, 2, tmp_path / "meeting") as (ranks, ears):
        for ear in ears:
            assert heard(ear) == "gathering"
        kill(ranks[1])
        assert heard(ears[0]) == "died 1 all_gather"


def mixes(comm: Communicator) -> None:
    bound = bind_each(comm)["all_gather" if comm.rank == 0 else "barrier"][0]
    with pytest.raises(CommError, match="all_gather") as caught:
        bound()
    assert caught.value.kind == "mismatch"


@pytest.mark.covers("different calls")
@pytest.mark.parametrize("transport", ["local", "shm"])
def test_ranks_that_run_different_ones_are_told(transport: str) -> None:
    over(transport, mixes, 2)


class Interrupt(Exception):
    pass


def interrupted(comm: Communicator) -> None:
    gather, _ = bind_each(comm)["all_gather"]
    if comm.rank == 1:
        with pytest.raises(CommError):
            comm.all_reduce(torch.zeros(1))  # in the other channel, until rank 0 gives up
        return

    def raise_(*_: object) -> None:
        raise Interrupt

    def strike() -> None:
        while not any(each.call for each in comm.pending() if each.rank == 0):
            pass  # other Python threads run while the gather waits
        os.kill(os.getpid(), signal.SIGUSR1)

    signal.signal(signal.SIGUSR1, raise_)
    thread = threading.Thread(target=strike)
    thread.start()
    with pytest.raises(Interrupt):
        gather()
    thread.join()


def test_a_signal_handlers_exception_ends_a_bound_wait() -> None:
    launch(called, 2, ("shm", interrupted), timeout_s=60)
