"""Ranks that wait for each other in different collectives learn it at once, with every rank's call; none is blamed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
import torch
from torch import nn

from shardcomm import CommError, Communicator, Engine, Stream, fully_shard, launch
from support.nets import batch, loss_of, make, optimizer_of
from support.thread_ranks import run_threads

# What one rank does otherwise than the others.
Diverge = Callable[[int, nn.Module, Engine], None]

DEADLINE_S = 120.0
AT_ONCE_S = 5.0  # several looks of every rank, on a busy machine


def gather(comm: Communicator, stream: Stream | None = None) -> None:
    comm.all_gather(torch.zeros(4 * comm.size), torch.zeros(4), stream=stream)
    if stream is not None:
        stream.synchronize()


def reduce(comm: Communicator, stream: Stream | None = None) -> None:
    comm.all_reduce(torch.zeros(4), stream=stream)
    if stream is not None:
        stream.synchronize()


def crosswise(comm: Communicator, on_streams: bool) -> str:
    """What the CommError says of a gather on rank 0 that meets reduces on all others."""
    streams = (Stream(), Stream()) if on_streams else (None, None)
    gather(comm, streams[0])
    reduce(comm, streams[1])
    call, stream = (gather, streams[0]) if comm.rank == 0 else (reduce, streams[1])
    with pytest.raises(CommError) as caught:
        call(comm, stream)
    return str(caught.value)


def crosswise_from_env(on_streams: bool) -> tuple[str, float]:
    with Communicator.from_env(deadline_s=DEADLINE_S) as comm:
        begin = time.monotonic()
        return crosswise(comm, on_streams), time.monotonic() - begin


@pytest.mark.covers("ranks that wait for each other")
@pytest.mark.parametrize("on_streams", [False, True], ids=["by the caller", "on streams"])
def test_ranks_in_different_channels_are_all_named_at_once(on_streams: bool) -> None:
    for message, seconds in launch(crosswise_from_env, 3, (on_streams,), timeout_s=60):
        assert seconds < AT_ONCE_S
        assert message.startswith(
            "ranks wait for each other in different collectives: rank 0 (pid "
        )
        assert ") is in all_gather(f32, count 4) #3; rank 1 (pid " in message
        # Two are enough to know; the third may not have called yet.
        assert message.count(") is in all_reduce(f32, count 4, sum) #3") >= 1


@pytest.mark.covers("ranks that wait for each other")
def test_thread_ranks_in_different_channels_are_all_named_at_once() -> None:
    begin = time.monotonic()
    messages = run_threads(lambda comm: crosswise(comm, False), 2, deadline_s=DEADLINE_S)
    assert time.monotonic() - begin < AT_ONCE_S
    for message in messages:
        assert "rank 0 is in all_gather(f32, count 4) #2" in message
        assert "rank 1 is in all_reduce(f32, count 4, sum) #2" in message


def threads_that_change_places() -> None:
    """Two threads of a rank, of which each gathers once and reduces once; who is late differs from rank to rank."""
    with Communicator.from_env(deadline_s=DEADLINE_S) as comm:
        for gathers_in_main in (True, False):
            errors: list[BaseException] = []

            def call(is_gather: bool, late: bool, errors: list[BaseException] = errors) -> None:
                try:
                    if late:
                        threading.Event().wait(0.4)  # several looks of those who wait
                    (gather if is_gather else reduce)(comm)
                except BaseException as error:
                    errors.append(error)

            gather_is_late = comm.rank == 1
            helper = threading.Thread(
                target=call,
                args=(not gathers_in_main, gather_is_late != gathers_in_main),
            )
            helper.start()
            call(gathers_in_main, gather_is_late == gathers_in_main)
            helper.join()
            assert not errors, errors


def test_threads_that_change_places_are_never_taken_for_stuck() -> None:
    launch(threads_that_change_places, 2, timeout_s=60)


def queued_by_another_thread() -> None:
    """Rank 0's reduce is queued by a helper, behind slow work, while its main thread waits in a gather."""
    with Communicator.from_env(deadline_s=DEADLINE_S) as comm:
        gather(comm)
        reduce(comm)
        stream = Stream()
        if comm.rank == 0:

            def queue() -> None:
                stream.enqueue(lambda: threading.Event().wait(0.5))
                comm.all_reduce(torch.zeros(4), stream=stream)

            helper = threading.Thread(target=queue)
            helper.start()
            helper.join()
            gather(comm)
        else:
            reduce(comm)
            gather(comm)
        stream.synchronize()


def test_what_another_thread_has_queued_still_comes() -> None:
    launch(queued_by_another_thread, 2, timeout_s=60)


def test_a_rank_that_comes_late_from_another_thread_is_waited_for() -> None:
    """A thread that gathers and a thread that reduces, on every rank, in any order: nobody is stuck."""
    late = threading.Event()
    in_gather = threading.Event()

    def body(comm: Communicator) -> None:
        gather(comm)
        reduce(comm)
        streams = (Stream(), Stream())
        if comm.rank == 0:
            comm.all_gather(torch.zeros(8), torch.zeros(4), stream=streams[0])
            in_gather.set()
            assert late.wait(20)  # its own thread may still call
            comm.all_reduce(torch.zeros(4), stream=streams[1])
        else:
            comm.all_reduce(torch.zeros(4), stream=streams[1])
            assert in_gather.wait(20)
            end = streams[1].record()
            # Several looks of both ranks, at what is not a deadlock.
            threading.Timer(0.5, late.set).start()
            comm.all_gather(torch.zeros(8), torch.zeros(4), stream=streams[0])
            end.wait()
        for stream in streams:
            stream.synchronize()

    run_threads(body, 2, deadline_s=DEADLINE_S)


def work_behind_other_work() -> None:
    """Rank 0 waits for its gather while its reduce is queued behind something slow: it still comes."""
    with Communicator.from_env(deadline_s=DEADLINE_S) as comm:
        gather(comm)
        reduce(comm)
        gathers, reduces = Stream(), Stream()
        if comm.rank == 0:
            reduces.enqueue(lambda: threading.Event().wait(0.5))  # slow work, not a synchronisation
            comm.all_reduce(torch.zeros(4), stream=reduces)
            gather(comm, gathers)
        else:
            comm.all_reduce(torch.zeros(4), stream=reduces)
            gathers.enqueue(lambda: threading.Event().wait(0.5))
            comm.all_gather(torch.zeros(8), torch.zeros(4), stream=gathers)
        gathers.synchronize()
        reduces.synchronize()


def test_what_is_queued_behind_other_work_still_comes() -> None:
    launch(work_behind_other_work, 2, timeout_s=60)


def two_threads_of_a_rank() -> None:
    """Gathers and reduces from a thread each, which nothing orders against each other."""
    with Communicator.from_env(deadline_s=DEADLINE_S) as comm:
        gather(comm)
        reduce(comm)
        errors: list[BaseException] = []

        def repeat(call: Callable[[Communicator], None], pause: bool) -> None:
            try:
                for step in range(3):
                    if pause and step == 1:
                        threading.Event().wait(0.4)  # the other thread waits for its peer meanwhile
                    call(comm)
            except BaseException as error:
                errors.append(error)

        threads = [
            threading.Thread(target=repeat, args=(call, pauses == comm.rank))
            for call, pauses in ((gather, 0), (reduce, 1))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors, errors


def test_threads_that_gather_and_reduce_apart_are_never_taken_for_stuck() -> None:
    launch(two_threads_of_a_rank, 2, timeout_s=60)


def one_sided_no_sync(rank: int, model: nn.Module, engine: Engine) -> None:
    if rank == 0:
        with engine.no_sync():
            loss_of(model, batch(rank, 1)).backward()
        loss_of(model, batch(rank, 2)).backward()
    else:
        loss_of(model, batch(rank, 1)).backward()


def evaluation_on_one_rank(rank: int, model: nn.Module, engine: Engine) -> None:
    loss = loss_of(model, batch(rank, 1))
    if rank == 0:
        with torch.no_grad():
            loss_of(model, batch(rank, 2))
            loss_of(model, batch(rank, 3))
    loss.backward()


def exception_in_one_backward(rank: int, model: nn.Module, engine: Engine) -> None:
    loss = loss_of(model, batch(rank, 1))
    if rank == 0:

        def fail(_gradient: torch.Tensor) -> None:
            raise LookupError("lost")

        loss.register_hook(fail)
    try:
        loss.backward()
    except LookupError:
        loss_of(model, batch(rank, 1)).backward()


def diverge(rank: int, comm: Communicator, how: Diverge) -> str:
    torch.set_num_threads(1)
    model = make(layers=3)
    engine = fully_shard(model, comm)
    optimizer = optimizer_of(model)
    loss_of(model, batch(rank, 0)).backward()
    optimizer.step()

    def twice() -> None:
        for _ in range(2):  # the difference may be at the end of a backward; the next step shows it
            how(rank, model, engine)

    with pytest.raises(CommError) as caught:
        twice()
    return str(caught.value)


def diverge_from_env(how: Diverge) -> tuple[str, float]:
    with Communicator.from_env(deadline_s=DEADLINE_S) as comm:
        begin = time.monotonic()
        return diverge(comm.rank, comm, how), time.monotonic() - begin


@pytest.mark.covers("failed ranks")
@pytest.mark.parametrize(
    "how",
    [one_sided_no_sync, evaluation_on_one_rank, exception_in_one_backward],
    ids=lambda how: how.__name__,
)
def test_trainings_that_diverge_end_at_once_with_every_ranks_call(
    how: Diverge,
) -> None:
    for message, seconds in launch(diverge_from_env, 2, (how,), timeout_s=90):
        assert seconds < AT_ONCE_S, message
        assert message.startswith(
            ("ranks wait for each other in different", "ranks called different collectives: ")
        ), message
        assert "rank 0 (pid" in message
        assert "rank 1 (pid" in message


def test_a_rank_that_waits_itself_is_not_the_late_one() -> None:
    failed = threading.Event()

    def body(comm: Communicator) -> str:
        if comm.rank == 2:
            assert failed.wait(20)
        with pytest.raises(CommError) as caught:
            gather(comm) if comm.rank == 0 else reduce(comm)
        failed.set()
        return str(caught.value)

    for message in run_threads(body, 3, deadline_s=1.0):
        assert message.startswith("rank 2 did not come within 1 s"), message
