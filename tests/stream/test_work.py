"""`Work`: what every collective returns that is queued on a stream; waited for, asked, or waited for a while."""

from __future__ import annotations

import copy
import itertools
import os
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardcomm
from shardcomm import Bucket, Communicator, Layout, ParamSpec, Stream, Work, launch
from shardcomm.stream.streams import TorchStream
from support.thread_ranks import run_threads

N = 4


def collectives(comm: Communicator) -> dict[str, Callable[[Stream | None], Work | None]]:
    part, whole = torch.full((N,), float(comm.rank)), torch.zeros(N * comm.size)
    return {
        "all_gather": lambda stream: comm.all_gather(whole, part, stream=stream),
        "reduce_scatter": lambda stream: comm.reduce_scatter(part, whole, stream=stream),
        "all_reduce": lambda stream: comm.all_reduce(part, stream=stream),
        "broadcast": lambda stream: comm.broadcast(part, stream=stream),
        "barrier": lambda stream: comm.barrier(stream=stream),
    }


ORDERED = [["all_gather", "broadcast", "barrier"], ["reduce_scatter", "all_reduce"]]


def in_order_of_calls(comm: Communicator) -> None:
    """The stream is held up, so that a blocking call which did not wait for it would run first."""
    calls, stream, shut = collectives(comm), Stream(), threading.Event()
    part = torch.zeros(N)
    bound = {"all_reduce": comm.bind_all_reduce(part), "barrier": comm.bind_barrier()}
    for channel in ORDERED:
        for queued, blocking in itertools.product(channel, channel):
            stream.enqueue(lambda: shut.wait(0.01))
            work = calls[queued](stream)
            assert calls[blocking](None) is None
            assert work is not None
            assert work.is_completed(), (queued, blocking)
            if blocking in bound:
                stream.enqueue(lambda: shut.wait(0.01))
                work = bound[blocking].start(stream)
                bound[blocking]()
                assert work.is_completed(), blocking


def test_a_blocking_call_comes_after_what_its_thread_has_queued_on_the_channel() -> None:
    run_threads(in_order_of_calls, 2)


def in_order_over_c10d() -> None:
    dist.init_process_group("gloo")
    with Communicator.from_process_group(transport="c10d", deadline_s=30) as comm:
        in_order_of_calls(comm)
    dist.destroy_process_group()


def test_a_blocking_call_comes_after_what_was_queued_over_c10d_too() -> None:
    launch(in_order_over_c10d, 2, timeout_s=60)


def test_a_blocking_call_comes_after_what_a_bucket_has_begun() -> None:
    def body(comm: Communicator) -> None:
        calls, shut = collectives(comm), threading.Event()
        bucket = Bucket.from_tensors({"w": torch.ones(8, N)}, comm)
        other = Bucket.from_tensors({"w": torch.ones(8, N)}, comm)
        grads = [torch.ones(8, N)]
        streams = comm.streams
        for blocking in (
            *[calls[name] for name in ORDERED[0]],
            lambda _: comm.allocate(N, use="gather"),
            lambda _: other.all_gather(),
        ):
            streams.gather.enqueue(lambda: shut.wait(0.01))
            work = bucket.all_gather(async_op=True)
            blocking(None)
            assert work.is_completed()
        for blocking in (
            *[calls[name] for name in ORDERED[1]],
            lambda _: comm.allocate(N, use="reduce"),
            lambda _: other.reduce_scatter(grads),
        ):
            streams.reduce.enqueue(lambda: shut.wait(0.01))
            work = bucket.reduce_scatter(grads, async_op=True)
            blocking(None)
            assert work.is_completed()

    run_threads(body, 2)


def test_a_blocking_call_raises_what_kept_the_queued_one_from_running() -> None:
    [comm] = Communicator.local_group(1)
    for name, call in collectives(comm).items():
        stream, failed = Stream(), ZeroDivisionError(name)

        def fail(error: Exception = failed) -> None:
            raise error

        stream.enqueue(fail)
        call(stream)
        with pytest.raises(ZeroDivisionError, match=name):
            call(None)
        call(None)  # told once


def test_a_forked_process_is_told_of_the_fork_whatever_was_queued() -> None:
    [comm] = Communicator.local_group(1)
    call, stream, shut = collectives(comm)["all_gather"], Stream(), threading.Event()
    stream.enqueue(shut.wait)
    work = call(stream)
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            call(None)
        except BaseException as error:
            os.write(writer, f"{type(error).__name__}: {error}".encode())
        finally:
            os._exit(0)
    os.close(writer)
    shut.set()
    with os.fdopen(reader) as told:
        assert told.read().startswith("CommError: this process was forked")
    os.waitpid(pid, 0)
    assert work is not None
    work.wait(30)


def test_a_streams_own_call_does_not_wait_for_what_is_behind_it() -> None:
    def body(comm: Communicator) -> None:
        stream, go = Stream(), threading.Event()
        own, behind = torch.ones(N), torch.ones(N)
        stream.enqueue(go.wait)
        stream.enqueue(lambda: comm.all_reduce(own))
        work = comm.all_reduce(behind, stream=stream)
        go.set()
        work.wait(30)
        assert own.eq(comm.size).all()
        assert behind.eq(comm.size).all()

    run_threads(body, 2)


@pytest.mark.parametrize(
    "name", ["all_gather", "reduce_scatter", "all_reduce", "broadcast", "barrier"]
)
def test_a_queued_collective_returns_work_and_a_blocking_one_nothing(name: str) -> None:
    """Nothing, as torch's: a hook of a gradient may be `lambda param: comm.all_reduce(param.grad)`."""

    def body(comm: Communicator) -> None:
        collective = collectives(comm)[name]
        assert collective(None) is None
        stream = Stream()
        work = collective(stream)
        assert type(work) is Work
        work.wait()
        assert work.is_completed()
        work.wait(0.0)  # as often as one likes

    run_threads(body, 2)


def test_a_stream_can_wait_for_the_event_of_work_that_was_done_at_once() -> None:
    comm = Communicator.local_group(1)[0]
    bucket = Bucket(Layout.plan([ParamSpec("w", (N,))], world_size=1), comm)
    work = bucket.all_gather(async_op=True)
    assert work.event.query()
    for stream in (Stream(), TorchStream(torch.Stream("cpu"))):
        stream.wait(work.event)
    assert work.is_completed()
    comm.close()


@pytest.mark.parametrize("timeout", [0.01, timedelta(seconds=0.01)], ids=["seconds", "timedelta"])
def test_a_wait_that_times_out_may_be_repeated(timeout: float | timedelta) -> None:
    waited = threading.Event()

    def body(comm: Communicator) -> float:
        summed = torch.ones(N)
        if comm.rank == 1:
            assert waited.wait(60)
            comm.all_reduce(summed)
        else:
            stream = Stream()
            work = comm.all_reduce(summed, stream=stream)
            assert not work.is_completed()
            with pytest.raises(TimeoutError, match=r"not ended within 0\.01 s; it goes on"):
                work.wait(timeout)
            waited.set()
            work.wait(60)
            assert work.is_completed()
        return summed.sum().item()

    assert run_threads(body, 2) == [2 * N, 2 * N]


def test_a_buckets_work_times_out_too() -> None:
    waited = threading.Event()

    def body(comm: Communicator) -> None:
        layout = Layout.plan([ParamSpec("weight", (4, 2))], comm.size)
        bucket = Bucket(layout, comm)
        if comm.rank == 1:
            assert waited.wait(60)
        work = bucket.all_gather(async_op=True)
        if comm.rank == 0:
            with pytest.raises(TimeoutError):
                work.wait(0.01)
            waited.set()
        work.wait(60)

    run_threads(body, 2)


def test_failed_work_is_completed_and_raises_in_every_wait() -> None:
    def body(comm: Communicator) -> None:
        stream = Stream()
        work = comm.all_reduce(torch.zeros(N + comm.rank), stream=stream)
        with pytest.raises(shardcomm.CommError):
            work.wait(60)
        assert work.is_completed()
        with pytest.raises(shardcomm.CommError):
            work.wait()

    run_threads(body, 2)


@pytest.mark.parametrize(("old", "new"), [("Block", "RowBlock"), ("Plan", "MemoryPlan")])
def test_an_old_name_is_an_alias_that_warns(old: str, new: str) -> None:
    with pytest.warns(DeprecationWarning, match=f"shardcomm.{old} is called shardcomm.{new} now"):
        assert getattr(shardcomm, old) is getattr(shardcomm, new)
    assert old not in shardcomm.__all__


@pytest.mark.parametrize(
    ("timeout", "error", "message"),
    [
        ("1", TypeError, "timeout is a str; it must be a number of seconds"),
        (True, TypeError, "timeout is a bool"),
        (float("nan"), ValueError, "timeout is nan; it must be a number of seconds of at least 0"),
        (-1, ValueError, "timeout is -1"),
    ],
)
def test_limits_that_are_none_are_refused(
    timeout: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        Work().wait(timeout)


def test_a_work_is_not_copied() -> None:
    with pytest.raises(TypeError, match="a Work cannot be copied or pickled"):
        copy.deepcopy(Work())
