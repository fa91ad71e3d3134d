"""What a queued collective reads and writes is kept until it has ended, whoever lets go of it."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from shardcomm import Bucket, Communicator, launch
from shardcomm.stream.streams import AnyStream, _new_stream
from support.thread_ranks import run_threads

# The memory of an operand: alive as long as a tensor over it is, whichever tensor object that is.
Memory = np.ndarray[Any, Any]
Begin = Callable[[Communicator, AnyStream], list[Memory]]


def floats(numel: int) -> Memory:
    return np.ones(numel, np.float32)


def gather(comm: Communicator, stream: AnyStream) -> list[Memory]:
    recv, send = floats(3 * comm.size), floats(3)
    comm.all_gather(torch.from_numpy(recv), torch.from_numpy(send), stream=stream)
    return [recv, send]


def reduce(comm: Communicator, stream: AnyStream) -> list[Memory]:
    recv, send, flag = floats(3), floats(3 * comm.size), np.zeros(1, np.int32)
    comm.reduce_scatter(
        torch.from_numpy(recv),
        torch.from_numpy(send),
        nonfinite=torch.from_numpy(flag),
        stream=stream,
    )
    return [recv, send, flag]


def all_reduce(comm: Communicator, stream: AnyStream) -> list[Memory]:
    buffer = floats(3)
    comm.all_reduce(torch.from_numpy(buffer), stream=stream)
    return [buffer]


def broadcast(comm: Communicator, stream: AnyStream) -> list[Memory]:
    buffer = floats(3)
    comm.broadcast(torch.from_numpy(buffer), stream=stream)
    return [buffer]


def reduce_what_moves(comm: Communicator, stream: AnyStream) -> list[Memory]:
    recv, send = floats(3), floats(3 * comm.size)
    tensors = torch.from_numpy(recv), torch.from_numpy(send)
    comm.reduce_scatter(*tensors, stream=stream)
    for tensor in tensors:
        tensor.data = torch.zeros(1)
    return [recv, send]


def keeps_operands(comm: Communicator, begin: Begin) -> None:
    stream, gate = _new_stream(comm.device), threading.Event()
    stream.enqueue(gate.wait)
    operands = begin(comm, stream)
    kept = [weakref.ref(each) for each in operands]
    del operands
    gc.collect()
    alive = [ref() is not None for ref in kept]
    gate.set()
    stream.record().wait()
    assert all(alive), alive


@pytest.mark.covers("streams and lifetimes")
@pytest.mark.parametrize("begin", [gather, reduce, all_reduce, broadcast, reduce_what_moves])
def test_operands_of_queued_collectives_are_kept(begin: Begin) -> None:
    run_threads(lambda comm: keeps_operands(comm, begin), 2)


def over_gloo() -> None:
    dist.init_process_group("gloo")
    with Communicator.from_process_group(transport="c10d", deadline_s=30) as comm:
        for begin in (gather, reduce, all_reduce, broadcast, reduce_what_moves):
            keeps_operands(comm, begin)
    dist.destroy_process_group()


@pytest.mark.covers("streams and lifetimes")
def test_operands_are_kept_over_c10d_too() -> None:
    launch(over_gloo, 2, timeout_s=60)


def test_a_work_that_is_dropped_has_its_buckets_memory_kept_until_the_end() -> None:
    """What a gather reads and writes belongs to the bucket."""

    def body(comm: Communicator) -> None:
        gate = threading.Event()
        bucket = Bucket.from_tensors({"w": torch.ones(8, 4)}, comm)
        comm.streams.gather.enqueue(gate.wait)
        work = bucket.all_gather(async_op=True)
        memory = [weakref.ref(bucket.shard), weakref.ref(bucket.full)]
        del bucket, work
        gc.collect()
        kept = all(tensor() is not None for tensor in memory)
        gate.set()
        comm.streams.gather.record().wait()
        assert kept

    run_threads(body, 2)


def test_a_work_that_has_been_waited_for_holds_nothing() -> None:
    def body(comm: Communicator) -> None:
        bucket = Bucket.from_tensors({"w": torch.ones(8, 4)}, comm)
        work = bucket.all_gather(async_op=True)
        work.wait()
        gathered = weakref.ref(bucket.gathering)
        del bucket
        gc.collect()
        assert gathered() is None
        work.wait()

    run_threads(body, 2)


def windows_come_and_go() -> None:
    maps = Path("/proc/self/maps")

    def mapped() -> int:
        return maps.read_text().count("memfd:shardcomm")

    with Communicator.from_env(deadline_s=30) as comm:
        before = mapped()
        for use in ("gather", "reduce"):
            window = comm.allocate(1 << 16, use=use)  # type: ignore[arg-type]
            view = window[3:]
            assert mapped() > before
            del window
            assert mapped() > before
            del view
            assert mapped() == before
        comm.barrier()


def test_memory_goes_with_its_last_tensor_while_the_communicator_goes_on() -> None:
    launch(windows_come_and_go, 2, timeout_s=60)
