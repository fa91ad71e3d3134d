"""`Communicator.pending`: what each rank is in, for how long, and for whom it waits. Asking disturbs nobody."""

from __future__ import annotations

import os
import random
import re
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch

from shardcomm import _C, CommError, Communicator, Pending, Stream
from shardcomm.comm import pending
from support.gates import Gate, launched, until, wait_at

RANKS = 3
DEADLINE_S = 60.0


def gather(comm: Communicator) -> None:
    comm.all_gather(torch.zeros(4 * comm.size), torch.zeros(4))


def reduce(comm: Communicator) -> None:
    comm.all_reduce(torch.zeros(2, dtype=torch.bfloat16), "max")


@contextmanager
def thread_ranks(
    fn: Callable[[Communicator], None], ranks: int, deadline_s: float = DEADLINE_S
) -> Iterator[list[Communicator]]:
    """Runs fn(communicator) in one thread per rank while the body looks on; CommErrors are expected."""
    comms = Communicator.local_group(ranks, deadline_s=deadline_s)

    def run(comm: Communicator) -> None:
        with suppress(CommError):
            fn(comm)

    threads = [threading.Thread(target=run, args=(comm,), daemon=True) for comm in comms]
    for thread in threads:
        thread.start()
    yield comms
    for thread in threads:
        thread.join(DEADLINE_S)
        assert not thread.is_alive()


def waiting(comm: Communicator, ranks: set[int]) -> list[Pending]:
    """Everybody's, once all of `ranks` wait, and only those, and for none of each other."""
    entries = comm.pending()
    waited_for = {rank for p in entries for rank in p.waits_for}
    waiting = {p.rank for p in entries if p.waiting_s is not None}
    return entries if waiting == ranks and not waited_for & waiting else []


@pytest.mark.covers("what ranks are in")
def test_ranks_that_wait_are_told_with_their_call_and_whom_they_wait_for() -> None:
    come = threading.Event()

    def body(comm: Communicator) -> None:
        if comm.rank == 1:
            assert come.wait(DEADLINE_S)
        gather(comm)

    with thread_ranks(body, RANKS) as comms:
        for comm in comms:  # each sees the same
            zero, one, two = until(lambda comm=comm: waiting(comm, {0, 2}), "0 and 2 wait for 1")
            assert one == Pending(1, os.getpid())
            for rank, entry in ((0, zero), (2, two)):
                waited = entry.waiting_s
                assert waited is not None
                assert waited >= 0
                call = "all_gather(f32, count 4)"
                assert entry == Pending(rank, os.getpid(), "gather", call, 1, waited, (1,))
        first = zero.waiting_s
        assert first is not None
        until(lambda: (comms[0].pending()[0].waiting_s or 0) > first, "it counts on")
        come.set()
    assert comms[0].pending() == [Pending(rank, os.getpid()) for rank in range(RANKS)]


def test_a_rank_that_is_in_a_gather_and_a_reduce_is_there_twice() -> None:
    come = threading.Event()

    def body(comm: Communicator) -> None:
        if comm.rank == 1:
            assert come.wait(DEADLINE_S)
        gathers, reduces = Stream(), Stream()
        gather_end = comm.all_gather(torch.zeros(8), torch.zeros(4), tag=7, stream=gathers)
        reduce_end = comm.all_reduce(torch.zeros(3), stream=reduces)
        gather_end.wait()
        reduce_end.wait()

    with thread_ranks(body, 2) as comms:

        def both() -> list[Pending]:
            entries = comms[1].pending()
            return entries if all(p.waiting_s is not None for p in entries[:2]) else []

        entries = until(both, "rank 0 waits in both")
        assert [(p.rank, p.channel, p.call, p.waits_for) for p in entries] == [
            (0, "gather", "all_gather(f32, count 4, tag 7)", (1,)),
            (0, "reduce", "all_reduce(f32, count 3, sum)", (1,)),
            (1, None, None, ()),
        ]
        come.set()


def test_after_a_failure_it_tells_what_the_ranks_were_in() -> None:
    failed = threading.Barrier(RANKS)

    def body(comm: Communicator) -> None:
        reduce(comm)
        try:
            if comm.rank != 2:
                reduce(comm)
        finally:
            failed.wait(DEADLINE_S)

    with thread_ranks(body, RANKS, deadline_s=0.2) as comms:
        pass
    call = "all_reduce(bf16, count 2, max)"
    assert comms[2].pending() == [
        Pending(0, os.getpid(), "reduce", call, 2, None, (2,)),
        Pending(1, os.getpid(), "reduce", call, 2, None, (2,)),
        Pending(2, os.getpid()),
    ]
    assert (
        str(comms[0].pending()[0]) == f"was in {call} #2 when the group failed; rank 2 had not come"
    )


def test_calls_that_differ_are_all_told_after_they_have_met() -> None:
    with thread_ranks(lambda comm: gather(comm) if comm.rank else comm.barrier(), 2) as comms:
        pass
    assert [(p.call, p.waits_for) for p in comms[0].pending()] == [
        ("barrier()", ()),
        ("all_gather(f32, count 4)", ()),
    ]


def test_ranks_that_go_on_are_never_seen_in_half_a_call(seed: int) -> None:
    choose = random.Random(seed)
    counts = [choose.randrange(1, 50) for _ in range(2000)]

    ended = [False, False]

    def body(comm: Communicator) -> None:
        try:
            for count in counts:
                comm.all_gather(torch.zeros(2 * count), torch.zeros(count), tag=count)
        finally:
            ended[comm.rank] = True

    latest = [0, 0]
    with thread_ranks(body, 2) as comms:
        while not all(ended):
            for entry in comms[0].pending():
                if entry.call is None:
                    continue
                assert entry.sequence is not None
                count = counts[entry.sequence - 1]
                assert entry.call == f"all_gather(f32, count {count}, tag {count})"
                assert entry.sequence >= latest[entry.rank]
                assert entry.rank not in entry.waits_for
                latest[entry.rank] = entry.sequence
    assert min(latest) > 0  # both were seen


def watched_by_its_own_thread(gate: Path, opener: str) -> list[Pending]:
    """Rank 2 does not come before a thread of rank 0, which is blocked itself, has told whom the ranks wait for."""
    with Communicator.from_env(deadline_s=DEADLINE_S, transport="shm") as comm:
        seen: list[Pending] = []
        comm.barrier()

        def found() -> list[Pending]:
            now = waiting(comm, {0, 1})
            # Rank 2 has left the first barrier.
            return now if now and now[2].channel is None else []

        def watch() -> None:
            seen.extend(until(found, "0 and 1 wait, and rank 2 is in none"))
            Path(opener).touch()

        if comm.rank == 0:
            watcher = threading.Thread(target=watch)
            watcher.start()
        if comm.rank == 2:
            wait_at(gate)
        comm.barrier(tag=5)
        if comm.rank == 0:
            watcher.join()
        pids = [torch.zeros(1, dtype=torch.int64) for _ in range(RANKS)]
        everybody = torch.cat(pids)
        comm.all_gather(everybody, torch.tensor([os.getpid()]))
        return [p._replace(pid=everybody.tolist().index(p.pid)) for p in seen]


@pytest.mark.covers("what ranks are in")
def test_processes_tell_of_each_other_while_they_wait_themselves(tmp_path: Path) -> None:
    gate, seen = Gate(tmp_path), tmp_path / "seen"
    args = (gate.path, str(seen))
    with launched(watched_by_its_own_thread, RANKS, args, gate) as results:
        until(seen.exists, "a thread of rank 0 has seen the ranks wait")
    zero, one, two = results[0]
    for rank, entry in ((0, zero), (1, one)):
        # attach came first on this channel, then a barrier.
        assert entry._replace(waiting_s=None) == Pending(
            rank, rank, "gather", "barrier(tag 5)", 3, None, (2,)
        )
    assert two == Pending(2, 2)


def waiting_over_gloo(gate: Path, seen_file: str) -> list[Pending]:
    with Communicator.from_env(deadline_s=DEADLINE_S, transport="c10d") as comm:
        seen: list[Pending] = []
        own = comm.pending()
        assert own == [Pending(comm.rank, os.getpid())]

        def watch() -> None:
            seen.extend(
                until(lambda: [p for p in comm.pending() if p.waiting_s], "rank 0 is in its call")
            )
            Path(seen_file).touch()

        if comm.rank == 0:
            watcher = threading.Thread(target=watch)
            watcher.start()
        else:
            wait_at(gate)
        comm.barrier()
        comm.all_reduce(torch.zeros(1))
        if comm.rank == 0:
            watcher.join()
        assert comm.pending() == own
        return [p._replace(pid=None, waiting_s=None) for p in seen]


@pytest.mark.covers("what ranks are in")
def test_over_a_process_group_a_rank_knows_its_own(tmp_path: Path) -> None:
    gate, seen = Gate(tmp_path), tmp_path / "seen"
    with launched(waiting_over_gloo, 2, (gate.path, str(seen)), gate) as results:
        until(seen.exists, "a thread of rank 0 has seen it in its barrier")
    assert results[0] == [Pending(0, None, "gather", "barrier", 1)]


def test_the_report_of_a_process_tells_of_each_group_once() -> None:
    come = threading.Event()

    def body(comm: Communicator) -> None:
        if comm.rank == 0:
            assert come.wait(DEADLINE_S)
        comm.barrier()

    alone = Communicator.local_group(1)
    with thread_ranks(body, 2) as comms:
        until(lambda: waiting(comms[0], {1}), "rank 1 waits")
        lines = [re.sub(r"\d+\.\d s", "N s", line) for line in pending.report()]
        # Other tests' groups may be reported as well, until they are collected.
        waits = f"  rank 1 (pid {os.getpid()}): in barrier() #1, has waited N s for rank 0"
        at = lines.index(waits)
        assert lines[at - 2 : at] == [
            "local group of 2 ranks, threads of this process:",
            f"  rank 0 (pid {os.getpid()}): in no collective",
        ]
        assert lines.count(waits) == 1
        assert "group of 1 ranks" not in "".join(lines)
        come.set()
    for comm in (*comms, *alone):
        comm.close()
    assert not any("has waited" in line for line in pending.report())


def test_signals_do_not_disturb_an_allocation() -> None:
    """Older kernels end a reservation of pages that a signal meets, as one that asks for stacks may."""
    session = _C.ShmSession(1)
    comm = _C.make_shm(session.address, 0, 1, DEADLINE_S)
    before = signal.signal(signal.SIGALRM, lambda *_: None)
    signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
    try:
        memory = comm.allocate(256 << 20, _C.Use.gather)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert memory.nbytes == 256 << 20
    comm.close()


@pytest.mark.parametrize("size", [1, 2])
def test_a_closed_group_can_be_asked(size: int) -> None:
    comms = Communicator.local_group(size)
    for comm in comms:
        comm.close()
    assert comms[0].pending() == [Pending(rank, os.getpid()) for rank in range(size)]


def test_a_forked_child_is_in_no_group_of_its_parent() -> None:
    with Communicator.local_group(2)[0] as parents:
        assert f"local group of {parents.size} ranks, threads of this process:" in pending.report()
        child = os.fork()
        if child == 0:
            status = 1
            try:
                status = len([*pending.report()])
            finally:  # whatever it raises, the child runs no other test
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
