"""A forked child of a rank has copies of its streams and communicators, but is not the rank and has no threads."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress

import pytest
import torch

from shardcomm import CommError, Communicator, Stream, fully_shard, launch
from support.interpreters import run

# A process that forks a child which ends through the interpreter, as multiprocessing's fork does.
ENDS = """
import os, sys, threading, time
import torch
from shardcomm import Stream

stream, busy = Stream(), Stream()
stream.enqueue(lambda: None)
stream.synchronize()
hold = threading.Event()
if {busy}:
    busy.enqueue(hold.wait)  # its thread works, and others wait for it, while the process forks
    event = busy.record()
    waiting = threading.Thread(target=event.wait)
    waiting.start()
child = os.fork()
if child == 0:
    sys.exit(7)
_, status = os.waitpid(child, 0)
hold.set()
sys.exit(0 if os.waitstatus_to_exitcode(status) == 7 else 1)
"""


@pytest.mark.parametrize("busy", [False, True], ids=["idle stream", "busy stream"])
def test_a_child_ends_through_the_interpreter_when_there_was_a_stream(busy: bool) -> None:
    ended = run(ENDS.format(busy=busy))
    assert ended.returncode == 0, ended.stderr


def in_a_child(body: Callable[[], None]) -> None:
    """Runs `body` in a forked child of this process; fails unless that returns."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            body()
            status = 0
        finally:
            os._exit(status)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0


def streams_of_the_parent() -> None:
    stream = Stream()
    hold, release = os.pipe()
    stream.enqueue(lambda: os.read(hold, 1))
    event = stream.record()

    def child() -> None:
        for use in (lambda: stream.enqueue(print), stream.record, stream.synchronize):
            with pytest.raises(RuntimeError, match="make a stream after the fork"):
                use()
        with pytest.raises(RuntimeError, match="the event never fires here"):
            event.wait()
        own = Stream()
        done: list[int] = []
        own.enqueue(lambda: done.append(1))
        own.synchronize()
        assert done == [1]

    in_a_child(child)
    os.write(release, b".")
    event.wait()


def test_streams_of_the_parent_are_refused_in_a_child_and_new_ones_work() -> None:
    launch(streams_of_the_parent, 1, timeout_s=60)


def post_from_a_child() -> str:
    with Communicator.from_env(deadline_s=20) as comm:
        window = comm.allocate(8, use="gather")

        def child() -> None:
            for call in (
                comm.barrier,
                lambda: comm.all_gather(window, torch.zeros(8 // comm.size)),
                lambda: comm.all_reduce(torch.zeros(4)),
                lambda: comm.allocate(8, use="reduce"),
            ):
                with pytest.raises(
                    CommError, match=rf"forked from rank {comm.rank} \(pid \d+\) and is not"
                ):
                    call()

        if comm.rank == 1:
            in_a_child(child)  # rank 0 waits in the barrier, which no child may let it leave
            comm.abort("rank 1 has seen enough")
            return ""
        with pytest.raises(CommError) as caught:
            comm.barrier()
        return str(caught.value)


@pytest.mark.covers("forks")
def test_a_child_cannot_call_as_its_rank() -> None:
    waited, _ = launch(post_from_a_child, 2, timeout_s=60)
    assert "rank 1 has seen enough" in waited


def abort_from_a_child() -> None:
    with Communicator.from_env(deadline_s=20) as comm:

        def child() -> None:
            comm.abort("the child is wrong")
            comm.close()

        in_a_child(child)
        value = torch.ones(4)
        comm.all_reduce(value)
        assert torch.equal(value, torch.full((4,), float(comm.size)))


@pytest.mark.covers("forks")
def test_a_child_that_aborts_or_closes_does_not_touch_the_group() -> None:
    launch(abort_from_a_child, 2, timeout_s=60)


def call_from_a_child_meanwhile() -> list[float]:
    with Communicator.from_env(transport="shm", deadline_s=30) as comm:
        values = torch.full((4,), float(comm.rank + 1))
        go, goes = os.pipe()
        child = os.fork() if comm.rank == 0 else None
        if child == 0:
            os.read(go, 1)
            with suppress(CommError):
                comm.all_reduce(torch.full((4,), 100.0))
            os._exit(0)
        if child is None:
            comm.barrier()
            comm.all_reduce(values)
        else:
            work = comm.all_reduce(values, stream=comm.streams.reduce)
            while not any(p.channel == "reduce" for p in comm.pending() if p.rank == 0):
                pass
            os.write(goes, b"1")
            os.waitpid(child, 0)
            comm.barrier()  # rank 1 comes only now
            work.wait()
        return values.tolist()


def test_a_childs_call_leaves_what_its_rank_has_sent() -> None:
    assert launch(call_from_a_child_meanwhile, 2, timeout_s=60) == [[3.0] * 4] * 2


def train_in_a_child() -> None:
    with Communicator.from_env(deadline_s=20) as comm:
        model = torch.nn.Linear(4, 4)
        fully_shard(model, comm)
        model(torch.ones(4)).sum().backward()  # there are streams now

        def child() -> None:
            with pytest.raises(RuntimeError, match=r"sharded model .* and not in a child such as"):
                model(torch.ones(4))

        in_a_child(child)
        model(torch.ones(4)).sum().backward()


def test_a_sharded_model_says_that_a_child_cannot_call_it() -> None:
    launch(train_in_a_child, 2, timeout_s=60)
