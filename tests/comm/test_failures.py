"""A rank dies, calls something else, or comes too late: every other rank hears of it, by name, and nothing is left."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection

import pytest
import torch

from shardcomm import _C, CommError, Communicator, Stream, fully_shard
from shardcomm.comm.core import CoreCommunicator
from support.nets import batch, loss_of, make, optimizer_of
from support.thread_ranks import run_threads

RANKS = 3
NOTICED_S = 10.0  # long before the deadline
KILLS = 20


pytestmark = pytest.mark.usefixtures("nothing_is_left_in_shared_memory")


def train_until_error(rank: int, ranks: int, address: str, tell: Connection) -> None:
    """Trains for ever; reports each step, and the error that ends it."""
    torch.set_num_threads(1)
    comm = CoreCommunicator(_C.make_shm(address, rank, ranks, 60.0))
    model = make(layers=2)
    fully_shard(model, comm)
    optimizer = optimizer_of(model)
    step = 0
    try:
        while True:
            loss_of(model, batch(rank, step)).backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if step == 1:
                tell.send("training")
    except CommError as error:
        tell.send(str(error))


@pytest.mark.covers("failed ranks", "dead rank")
def test_rank_killed_at_random_moments_of_training_is_named_by_all_others(seed: int) -> None:
    choose = random.Random(seed)
    context = get_context("forkserver")
    for kill in range(KILLS):
        session = _C.ShmSession(RANKS)
        pipes = [context.Pipe(duplex=False) for _ in range(RANKS)]
        processes = [
            context.Process(target=train_until_error, args=(r, RANKS, session.address, pipes[r][1]))
            for r in range(RANKS)
        ]
        try:
            for process in processes:
                process.start()
            for _, tell in pipes:
                tell.close()
            ears = [listen for listen, _ in pipes]
            for ear in ears:
                assert ear.poll(60)
                assert ear.recv() == "training"
            # The moment itself is the test's input, not a synchronisation.
            time.sleep(choose.uniform(0.0, 0.05))
            victim = choose.randrange(RANKS)
            pid = processes[victim].pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            killed = time.monotonic()
            for rank, ear in enumerate(ears):
                if rank != victim:
                    assert ear.poll(30), (seed, kill, rank)
                    message = ear.recv()
                    assert time.monotonic() - killed < NOTICED_S, (seed, kill, rank, message)
                    assert f"rank {victim} (pid {pid}) died" in message, (seed, kill, message)
        finally:
            for process in processes:
                process.kill()
                process.join(10)
                process.close()
            del session


def gather(comm: Communicator) -> None:
    comm.all_gather(torch.zeros(4 * comm.size), torch.zeros(4))


def reduce(comm: Communicator) -> None:
    comm.all_reduce(torch.zeros(4))


def errors_of(fn: Callable[[Communicator], object], ranks: int, deadline_s: float) -> list[str]:
    """What each rank's CommError says."""

    def body(comm: Communicator) -> str:
        with pytest.raises(CommError) as caught:
            fn(comm)
        for call in (fn, gather, reduce):  # and it stays closed for use, on both channels
            with pytest.raises(CommError):
                call(comm)
        return str(caught.value)

    return run_threads(body, ranks, deadline_s=deadline_s)


def other_operation(comm: Communicator) -> None:
    if comm.rank == 1:
        comm.barrier()
    else:
        comm.all_gather(torch.zeros(12), torch.zeros(4))


def other_size(comm: Communicator) -> None:
    n = 5 if comm.rank == 1 else 4
    comm.reduce_scatter(torch.zeros(n), torch.zeros(3 * n))


def other_dtype(comm: Communicator) -> None:
    comm.all_reduce(torch.zeros(4, dtype=torch.bfloat16 if comm.rank == 1 else torch.float32))


def other_reduction(comm: Communicator) -> None:
    comm.all_reduce(torch.zeros(4), "max" if comm.rank == 1 else "sum")


def other_copy(comm: Communicator) -> None:
    comm.broadcast(torch.zeros(4, dtype=torch.int32 if comm.rank == 1 else torch.float32))
    comm.barrier()  # a root may have gone on before the others came


def other_root(comm: Communicator) -> None:
    comm.broadcast(torch.zeros(4), root=comm.rank % 2)
    comm.barrier()  # a root may have gone on before the others came


def other_memory(comm: Communicator) -> None:
    comm.allocate(4 if comm.rank == 1 else 8, use="gather")


def other_tag(comm: Communicator) -> None:
    comm.all_gather(torch.zeros(12), torch.zeros(4), tag=2 if comm.rank == 1 else 0)


@pytest.mark.covers("different calls")
@pytest.mark.parametrize(
    ("call", "theirs", "ours"),
    [
        (other_operation, "barrier()", "all_gather(f32, count 4)"),
        (other_size, "reduce_scatter(f32, count 5, sum)", "reduce_scatter(f32, count 4, sum)"),
        (other_dtype, "all_reduce(bf16, count 4, sum)", "all_reduce(f32, count 4, sum)"),
        (other_reduction, "all_reduce(f32, count 4, max)", "all_reduce(f32, count 4, sum)"),
        (other_root, "broadcast(f32, count 4, root 1)", "broadcast(f32, count 4, root 0)"),
        (other_copy, "broadcast(i32, count 4, root 0)", "broadcast(f32, count 4, root 0)"),
        (other_memory, "allocate(16 bytes, gather)", "allocate(32 bytes, gather)"),
        (other_tag, "all_gather(f32, count 4, tag 2)", "all_gather(f32, count 4)"),
    ],
)
def test_rank_that_calls_something_else_is_named_with_both_calls(
    call: Callable[[Communicator], None], theirs: str, ours: str
) -> None:
    for message in errors_of(call, 3, deadline_s=20):
        assert f"rank 1 called {theirs} #" in message
        assert f"rank 0 called {ours} #" in message


@pytest.mark.covers("late rank")
def test_late_rank_is_named() -> None:
    others_failed = threading.Event()

    def body(comm: Communicator) -> None:
        comm.all_reduce(torch.zeros(1))
        if comm.rank == 2:
            assert others_failed.wait(20)
        try:
            comm.all_gather(torch.zeros(3), torch.zeros(1))
        finally:
            others_failed.set()

    for message in errors_of(body, 3, deadline_s=0.3):
        assert "rank 2 did not come within 0.3 s" in message


@pytest.mark.covers("ranks that wait for each other")
def test_a_gather_that_meets_a_reduce_ends_with_both_named() -> None:
    def body(comm: Communicator) -> None:
        (gather if comm.rank == 0 else reduce)(comm)

    for message in errors_of(body, 2, deadline_s=0.3):
        assert message == (
            "ranks wait for each other in different collectives: rank 0 is in all_gather(f32, count 4) #1; "
            "rank 1 is in all_reduce(f32, count 4, sum) #1"
        )


@pytest.mark.covers("abort and close")
def test_rank_that_closes_is_named() -> None:
    def body(comm: Communicator) -> None:
        if comm.rank == 1:
            comm.close()
        else:
            with pytest.raises(CommError, match="rank 1 closed the communicator"):
                comm.barrier()

    run_threads(body, 3)


def test_closing_releases_the_own_thread_that_waits_and_refuses_later_calls() -> None:
    comms = Communicator.local_group(2, deadline_s=30)
    stream = Stream()
    comms[0].all_reduce(torch.zeros(4), stream=stream)  # rank 1 never comes
    comms[0].close()
    with pytest.raises(CommError, match=r"rank 0 (has )?closed"):
        stream.synchronize()
    with pytest.raises(CommError, match=r"rank 0 (has )?closed"):
        comms[0].all_reduce(torch.zeros(4))
    with pytest.raises(CommError, match="rank 0 closed the communicator"):
        comms[1].all_reduce(torch.zeros(4))


@pytest.mark.covers("abort and close")
def test_abort_reaches_ranks_that_wait_on_a_stream() -> None:
    def body(comm: Communicator) -> None:
        if comm.rank == 0:
            comm.abort("the data is bad")
            return
        stream = Stream()
        comm.all_reduce(torch.zeros(4), stream=stream)
        for _ in range(2):  # an event, and one queued after the failure
            with pytest.raises(CommError, match="rank 0 aborted: the data is bad"):
                stream.record().wait()

    run_threads(body, 2)


def other_conversion(comm: Communicator) -> None:
    dtype = torch.bfloat16 if comm.rank == 1 else torch.float32
    comm.all_gather(torch.zeros(12, dtype=dtype), torch.zeros(4))


def test_a_gather_into_another_dtype_is_another_call() -> None:
    for message in errors_of(other_conversion, 3, deadline_s=20):
        assert "rank 1 called all_gather(f32 to bf16, count 4) #" in message
        assert "rank 0 called all_gather(f32, count 4) #" in message


def test_a_call_from_a_signal_handler_says_what_its_thread_is_in() -> None:
    """On both channels; the call that was under way goes on."""
    comms = Communicator.local_group(2, deadline_s=60)
    refused: list[str] = []
    handled = threading.Event()

    def handler(*_: object) -> None:
        for call in (reduce, gather):
            with pytest.raises(ValueError, match="called from a signal handler") as caught:
                call(comms[0])
            refused.append(str(caught.value))
        handled.set()

    def other_rank() -> None:
        while not any(call.waiting_s for call in comms[1].pending()):
            pass
        os.kill(os.getpid(), signal.SIGUSR1)  # Python runs the handler on its main thread
        assert handled.wait(20)
        gather(comms[1])

    before = signal.signal(signal.SIGUSR1, handler)
    other = threading.Thread(target=other_rank)
    other.start()
    try:
        gather(comms[0])
    finally:
        signal.signal(signal.SIGUSR1, before)
        other.join(30)
    assert refused[0].startswith(
        "all_reduce: called from a signal handler while this thread is in all_gather of the same communicator"
    )
    assert refused[1].startswith(
        "all_gather: called from a signal handler while this thread is in all_gather of the same communicator"
    )


def test_an_abort_reaches_all_whatever_its_text_is() -> None:
    """Also one that UTF-8 cannot hold, as the name of a file may be."""
    comms = Communicator.local_group(2, deadline_s=60)
    comms[0].abort("cannot read \udcff")
    with pytest.raises(CommError, match=r"rank 0 aborted: cannot read \\udcff"):
        comms[1].barrier()


def test_ranks_of_two_builds_are_no_group() -> None:
    session = _C.ShmSession(2)
    memory = int(session.address.split(":")[1])
    with pytest.raises(CommError, match=r"size is 3; the group at .* has 2 ranks"):
        _C.ShmMember(session.address, 0, 3)
    os.pwrite(memory, b"\x01", 8)  # the layout, by which builds know each other
    with pytest.raises(CommError, match=r"rank 0 cannot attach at .* another build of shardcomm"):
        _C.ShmMember(session.address, 0, 2)
