"""What `c10d` makes of its ProcessGroups: what they carry, whose failure it tells, for which devices, and their end."""

from __future__ import annotations

import gc
import os
import signal
import threading
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import ProcessGroupGloo
from torch.distributed import distributed_c10d
from torch.testing._internal.distributed.fake_pg import FakeStore

from shardcomm import CommError, Communicator, all_gather_into_tensor, fully_shard, launch
from shardcomm._C import Stream
from shardcomm.comm import rendezvous
from support import interpreters
from support.gates import DEADLINE_S, until
from support.thread_ranks import run_threads

# Dtypes in which the core computes nothing, and of which Gloo moves some.
MOVED_ONLY = [
    torch.bool,
    torch.int8,
    torch.int16,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
]


def bytes_of(tensor: torch.Tensor) -> list[int]:
    return tensor.view(-1).view(torch.uint8).tolist()


def broadcast_and_refused(comm: Communicator) -> None:
    for dtype in MOVED_ONLY:
        own = torch.zeros(2, 3, dtype=dtype)
        own.view(-1).view(torch.uint8).fill_(comm.rank)
        expected = [1] * own.nbytes
        comm.broadcast(own, 1)
        assert bytes_of(own) == expected, dtype
        own.view(-1).view(torch.uint8).fill_(comm.rank)
        comm.bind_broadcast(own, 1)()
        assert bytes_of(own) == expected, dtype

        part, whole = torch.zeros(1, dtype=dtype), torch.zeros(comm.size, dtype=dtype)
        calls: list[Callable[[], object]] = [
            lambda: comm.all_gather(whole, part),  # noqa: B023
            lambda: comm.reduce_scatter(part, whole),  # noqa: B023
            lambda: comm.all_reduce(part),  # noqa: B023
        ]
        for call in calls:
            with pytest.raises(TypeError, match=f"is of {dtype}; accepted: torch.uint8, "):
                call()
    total = torch.ones(1)
    comm.all_reduce(total)
    assert total.item() == comm.size


def called(body: Callable[[Communicator], None], transport: str) -> None:
    with Communicator.from_env(transport=transport, deadline_s=30) as comm:  # type: ignore[arg-type]
        body(comm)


@pytest.mark.parametrize("transport", ["shm", "c10d"])
def test_any_dtype_is_broadcast_and_none_that_is_refused_harms_the_ranks(transport: str) -> None:
    launch(called, 2, (broadcast_and_refused, transport), timeout_s=60)


def test_threads_broadcast_any_dtype() -> None:
    run_threads(broadcast_and_refused, 2)


# The first failure stays.


def abort_what_waits() -> list[tuple[str, str]]:
    """Rank 1 comes to no collective, so that the one of rank 0 fails at its deadline, after its abort."""
    dist.init_process_group("gloo")
    errors: list[tuple[str, str]] = []
    with Communicator.from_process_group(transport="c10d", deadline_s=2) as comm:

        def reduce() -> None:
            with pytest.raises(CommError) as caught:
                comm.all_reduce(torch.ones(1))
            errors.append((caught.value.kind, str(caught.value)))

        if comm.rank == 0:
            waiting = threading.Thread(target=reduce)
            waiting.start()
            until(lambda: comm.pending()[0].call, "rank 0 waits")
            comm.abort("enough")
            waiting.join()
            reduce()
        dist.barrier()
    dist.destroy_process_group()
    return errors


@pytest.mark.covers("abort and close")
def test_what_an_abort_ends_says_its_reason() -> None:
    running, later = launch(abort_what_waits, 2, timeout_s=60)[0]
    assert running == later == ("aborted", "all_reduce: rank 0 aborted: enough")


def abort_what_is_queued(kind: str) -> str:
    """Over a group of one rank, whose collectives would succeed at once."""
    dist.init_process_group("gloo")
    comm = Communicator.from_process_group(transport="c10d", deadline_s=30)
    stream, gate, given = Stream(), threading.Event(), torch.ones(1)
    stream.enqueue(lambda: gate.wait(DEADLINE_S))
    comm.broadcast(given, stream=stream)
    comm.abort("enough") if kind == "aborted" else comm.close()
    gate.set()
    with pytest.raises(CommError) as caught:
        stream.synchronize()
    assert caught.value.kind == kind
    dist.destroy_process_group()
    return str(caught.value)


@pytest.mark.covers("abort and close")
@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("aborted", "broadcast: rank 0 aborted: enough"),
        ("closed", "broadcast: rank 0 closed the communicator"),
    ],
)
def test_a_queued_collective_does_not_run_after_the_end(kind: str, said: str) -> None:
    assert launch(abort_what_is_queued, 1, (kind,), timeout_s=60) == [said]


# The groups end with whom they were made for.


def held() -> tuple[int, int, int]:
    """How many descriptors, threads and groups of torch's this process has."""
    groups = len(distributed_c10d._world.pg_map)
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), groups


def connect_again_and_again(kind: str) -> None:
    dist.init_process_group("cpu:shardcomm" if kind == "another backend" else "gloo")
    if kind == "torch's groups":  # as for a backend that only torch can make
        rendezvous.backend_of = lambda *_: None  # type: ignore[assignment]
    closed = []
    for _ in range(3):
        dist.barrier()
        before = held()
        comm = Communicator.from_process_group(transport="c10d", deadline_s=30)
        total = torch.ones(1)
        comm.all_reduce(total)
        comm.barrier()
        assert total.item() == comm.size
        dist.barrier()
        assert held() > before
        comm.close()
        comm.close()
        until(lambda: held() == before, f"{held()} is {before}")  # noqa: B023
        closed.append(comm)
    comm = Communicator.from_process_group(transport="c10d", deadline_s=30)
    dist.barrier()  # the given group is still there
    dist.destroy_process_group()
    comm.close()


@pytest.mark.covers("abort and close")
@pytest.mark.parametrize("kind", ["Gloo", "torch's groups", "another backend"])
def test_close_ends_the_groups_that_were_made_and_no_other(kind: str) -> None:
    launch(connect_again_and_again, 2, (kind,), timeout_s=90)


END_UNCLOSED = """
import os, time, weakref
import torch
import torch.distributed as dist
from shardcomm import Communicator

def threads_since(before):
    end = time.monotonic() + 20
    while (left := len(os.listdir("/proc/self/task")) - before) and time.monotonic() < end:
        os.sched_yield()
    return left

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
before = len(os.listdir("/proc/self/task"))
# Python calls what is registered so in reverse order, and then ends the interpreter.
weakref.finalize(Communicator, lambda: print("left:", threads_since(before)))
comm = Communicator.from_process_group(transport="c10d", deadline_s=30)
comm.all_reduce(torch.ones(1))
"""


def test_no_thread_of_a_group_outlives_the_interpreter() -> None:
    """Such a thread aborts the process if it lets go of a tensor meanwhile."""
    ran = interpreters.run(END_UNCLOSED)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "left: 0\n", "")


def shard_by_hosts_again_and_again() -> None:
    dist.init_process_group("gloo")
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    before = held()[-1]
    for _ in range(2):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        engine = fully_shard(model, mesh, reshard_after_forward=2)
        assert engine.mesh.secondary is not None
        assert engine.mesh.secondary.size == 2
        model(torch.ones(2, 4)).sum().backward()
        assert held()[-1] == before
        engine.close()
        dist.new_group([0])  # after which ranks of a run would name their group differently
        before = held()[-1]
    dist.destroy_process_group()


@pytest.mark.covers("reshard_after_forward")
def test_ranks_that_gather_for_backward_are_no_group_of_torchs() -> None:
    launch(shard_by_hosts_again_and_again, 4, timeout_s=90)


# Groups without a timeout, and devices without a backend.


def timeout_of_a_fake_group() -> float:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    return rendezvous.timeout_s(dist.group.WORLD, torch.device("cpu"))  # type: ignore[arg-type]


def test_a_backend_without_options_has_the_default_deadline() -> None:
    assert launch(timeout_of_a_fake_group, 1, timeout_s=60) == [300.0]


def connect_on_other_devices() -> None:
    """A tensor of "meta" is what a backend of a device that torch cannot see here may be given."""
    dist.Backend.register_backend(
        "played",
        ProcessGroupGloo,
        devices=["meta"],
    )
    dist.init_process_group("cpu:gloo,meta:played")
    refusal = "device is xpu, for which the group has no backend; it has one for 'cpu', 'meta'"
    with pytest.raises(ValueError, match=refusal):
        Communicator.from_process_group(device="xpu", transport="c10d")
    with Communicator.from_process_group(device="meta", transport="c10d", deadline_s=30) as comm:
        assert comm.device == torch.device("meta")
        comm.barrier()
    dist.destroy_process_group()


def test_a_device_is_refused_for_which_the_group_has_no_backend() -> None:
    launch(connect_on_other_devices, 2, timeout_s=60)


def connect_without_being_in_the_group() -> None:
    dist.init_process_group("gloo")
    group = dist.new_group([0])
    if dist.get_rank() == 0:
        Communicator.from_process_group(group, deadline_s=30).close()
    else:
        calls: dict[str, Callable[[], object]] = {
            "from_process_group": lambda: Communicator.from_process_group(group),
            "all_gather_into_tensor": lambda: all_gather_into_tensor(
                torch.zeros(1), torch.zeros(1), group
            ),
        }
        for name, call in calls.items():
            with pytest.raises(ValueError, match=f"^{name}: this rank is not in the group"):
                call()
    dist.destroy_process_group()


def test_ranks_that_are_not_in_the_group_are_told_so() -> None:
    launch(connect_without_being_in_the_group, 2, timeout_s=60)


def drop_in_a_fork(close: bool) -> int:
    """Drops the communicator in a forked process, which has none of its threads; returns how that ended."""
    dist.init_process_group("gloo")
    comm = Communicator.from_process_group(transport="c10d", deadline_s=30)
    comm.barrier()
    child = os.fork()
    if child == 0:
        signal.alarm(20)  # a hang is a failure
        if close:
            comm.close()
        del comm
        gc.collect()
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    comm.close()
    dist.destroy_process_group()
    return status


@pytest.mark.parametrize("close", [False, True])
def test_a_forked_process_may_drop_it(close: bool) -> None:
    assert launch(drop_in_a_fork, 1, (close,), timeout_s=60) == [0]
