"""A rank alone is refused after the end as ranks among others are: after close and abort, and in a forked child."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from shardcomm import Bucket, CommError, Communicator, Stream, fully_shard, launch

Call = Callable[[], object]


def calls(comm: Communicator) -> dict[str, Call]:
    """Each operation: plain, bound, and of a bucket. Nothing here has several ranks but what `comm` has."""
    part, whole = torch.ones(4), torch.ones(4 * comm.size)
    bucket, converting, double = (
        Bucket.from_tensors({"w": torch.ones(8, 3, dtype=dtype)}, comm, param_dtype=param_dtype)
        for dtype, param_dtype in [
            (torch.float32, None),
            (torch.float32, torch.bfloat16),
            (torch.float64, None),
        ]
    )
    reduction = comm.bind_reduction(part.clone(), whole)
    return {
        "all_gather": lambda: comm.all_gather(whole.clone(), part),
        "reduce_scatter": lambda: comm.reduce_scatter(part.clone(), whole),
        "all_reduce": lambda: comm.all_reduce(part.clone()),
        "broadcast": lambda: comm.broadcast(part),
        "broadcast of many": lambda: comm.broadcast(torch.ones(5000)),
        "barrier": comm.barrier,
        "allocate": lambda: comm.allocate(4, use="gather"),
        "queued": lambda: comm.all_reduce(part.clone(), stream=Stream()).wait(),
        "bound all_gather": comm.bind_all_gather(whole.clone(), part),
        "bound reduce_scatter": comm.bind_reduce_scatter(part.clone(), whole),
        "bound all_reduce": comm.bind_all_reduce(part.clone()),
        "bound broadcast": comm.bind_broadcast(part.clone()),
        "bound barrier": comm.bind_barrier(),
        "bound reduction": lambda: reduction(Stream(), None, part, 1.0, False, None).wait(),
        "Bucket.all_gather": bucket.all_gather,
        "Bucket.all_gather, converting": converting.all_gather,
        "Bucket.reduce_scatter": lambda: bucket.reduce_scatter([torch.ones(8, 3)]),
        "Bucket.reduce_scatter, converting": lambda: converting.reduce_scatter([None]),
        "Bucket.reduce_scatter of float64": lambda: double.reduce_scatter([None]),
        "Bucket": lambda: Bucket.from_tensors({"w": part}, comm),
        "fully_shard": lambda: fully_shard(torch.nn.Linear(4, 4), comm),
    }


def answered(each: dict[str, Call], reason: str) -> list[str]:
    """The names of the calls that are not refused for this reason."""
    wrong = []
    for name, call in each.items():
        try:
            call()
        except CommError as error:
            if reason in str(error):
                continue
        wrong.append(name)
    return wrong


def alone(transport: str) -> Communicator:
    if transport == "local":
        return Communicator.local_group(1)[0]
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return Communicator.from_process_group(transport=transport, deadline_s=10)  # type: ignore[arg-type]


def end(comm: Communicator, how: str) -> str:
    """Ends it, or forks. Returns what refusals say, and nothing in the parent of a child, which answers for both."""
    if how == "close":
        comm.close()
        return "closed"
    if how == "abort":
        comm.abort("that is enough")
        return "that is enough"
    return "was forked from rank 0"


def use_after_the_end(transport: str, how: str) -> list[str]:
    comm = alone(transport)
    each = calls(comm)
    reason = end(comm, how)
    if how != "fork":
        return answered(each, reason)
    readable, writable = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(writable, repr(answered(each, reason)).encode())
        finally:
            os._exit(0)
    os.close(writable)
    os.waitpid(child, 0)
    with os.fdopen(readable) as pipe:
        said = pipe.read()
    assert answered(each, reason) == list(each)  # the rank itself goes on
    return [] if said == "[]" else [said or "the child ended early"]


@pytest.mark.parametrize("how", ["close", "abort", "fork"])
@pytest.mark.parametrize("transport", ["local", "shm", "c10d"])
def test_nothing_answers_after_the_end(transport: str, how: str) -> None:
    assert launch(use_after_the_end, 1, (transport, how), timeout_s=60) == [[]]
