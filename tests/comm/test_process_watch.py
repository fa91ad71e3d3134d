"""The death of a rank is seen whatever the sandbox forbids, and whoever has its process number by now."""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import resource
import signal
import struct
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection

import pytest

from shardcomm import _C, CommError
from shardcomm.comm.core import CoreCommunicator

Step = Callable[[], None]

DEADLINE_S = 60.0
NOTICED_S = 10.0  # long before the deadline


def ended_child() -> int:
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    return child


def test_a_process_that_is_gone_has_ended() -> None:
    assert _C.ProcessWatch(ended_child(), 1).ended


def test_a_process_with_the_number_of_another_has_ended() -> None:
    pid, start = _C.own_process()
    assert pid == os.getpid()
    assert not _C.ProcessWatch(pid, start).ended
    assert _C.ProcessWatch(pid, start - 1).ended


def forbid_pidfd_open() -> None:
    """As a sandbox does, for this process and its children: the system call returns EPERM."""
    assert platform.machine() == "x86_64"
    architecture, number = 0xC000003E, 434
    # BPF_LD | BPF_W | BPF_ABS, BPF_JMP | BPF_JEQ, BPF_RET.
    load, jump_equal, answer = 0x20, 0x15, 0x06
    allow, refuse = 0x7FFF0000, 0x00050000 | errno.EPERM
    program = [
        (load, 0, 0, 4),  # seccomp_data.arch
        (jump_equal, 0, 3, architecture),
        (load, 0, 0, 0),  # seccomp_data.nr
        (jump_equal, 0, 1, number),
        (answer, 0, 0, refuse),
        (answer, 0, 0, allow),
    ]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in program))
    filter_ = ctypes.create_string_buffer(
        struct.pack("HxxxxxxP", len(program), ctypes.addressof(code))
    )
    libc = ctypes.CDLL(None, use_errno=True)
    no_new_privileges, set_seccomp, filter_mode = 38, 22, 2
    assert libc.prctl(no_new_privileges, 1, 0, 0, 0) == 0
    assert libc.prctl(set_seccomp, filter_mode, ctypes.byref(filter_), 0, 0) == 0


def use_all_descriptors() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
    with suppress(OSError):
        while True:
            os.dup(0)


def nothing() -> None:
    pass


def survive(address: str, before: Step, after: Step, tell: Connection) -> None:
    """Rank 0: attaches between the two steps, and says what it hears while it waits for rank 1."""
    tell.send("begun")
    try:
        before()
        comm = CoreCommunicator(_C.make_shm(address, 0, 2, DEADLINE_S))
        after()
        tell.send("attached")
        comm.barrier()
    except CommError as error:
        tell.send(str(error))


def be_killed(address: str, attached: Connection) -> None:
    """Rank 1."""
    _comm = _C.make_shm(address, 1, 2, DEADLINE_S)
    attached.recv()  # never


def heard_of_a_death(before: Step, after: Step) -> tuple[int, str, float]:
    """Rank 1's number, what rank 0 hears of its death, and the seconds until then."""
    context = get_context("forkserver")
    session = _C.ShmSession(2)
    listen, tell = context.Pipe(duplex=False)
    never, held = context.Pipe(duplex=False)
    ranks = [
        context.Process(target=survive, args=(session.address, before, after, tell)),
        context.Process(target=be_killed, args=(session.address, never)),
    ]
    try:
        for rank in ranks:
            rank.start()
        for expected in ("begun", "attached"):
            assert listen.poll(60)
            assert listen.recv() == expected
        pid = ranks[1].pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        killed = time.monotonic()
        assert listen.poll(30)
        return pid, listen.recv(), time.monotonic() - killed
    finally:
        held.close()
        for rank in ranks:
            rank.kill()
            rank.join(10)


@pytest.mark.covers("dead rank")
@pytest.mark.parametrize(
    ("before", "after"),
    [(nothing, nothing), (nothing, use_all_descriptors), (forbid_pidfd_open, nothing),
     (forbid_pidfd_open, use_all_descriptors)],
    ids=["as usual", "no descriptor left", "no pidfd_open", "neither"],
)  # fmt: skip
def test_a_death_is_noticed_and_named(before: Step, after: Step) -> None:
    pid, message, seconds = heard_of_a_death(before, after)
    assert f"rank 1 (pid {pid}) died" in message
    assert seconds < NOTICED_S


def attach_without_descriptors(address: str, rank: int, tell: Connection) -> None:
    member = _C.ShmMember(address, rank, 2)
    if rank == 0:
        use_all_descriptors()
    try:
        member.attach(DEADLINE_S)
    except CommError as error:
        tell.send(str(error))


def test_a_rank_that_cannot_watch_the_others_says_so_to_all_when_they_attach() -> None:
    context = get_context("forkserver")
    session = _C.ShmSession(2)
    pipes = [context.Pipe(duplex=False) for _ in range(2)]
    ranks = [
        context.Process(target=attach_without_descriptors, args=(session.address, rank, tell))
        for rank, (_, tell) in enumerate(pipes)
    ]
    try:
        for rank in ranks:
            rank.start()
        for listen, _ in pipes:
            assert listen.poll(30)
            message = listen.recv()
            assert "Too many open files" in message, message
    finally:
        for rank in ranks:
            rank.kill()
            rank.join(10)


def test_a_death_before_attaching_is_noticed_where_the_session_knows_the_ranks() -> None:
    child = os.fork()
    if child == 0:
        os.kill(os.getpid(), signal.SIGSTOP)
        os._exit(0)
    os.waitpid(child, os.WUNTRACED)
    with open(f"/proc/{child}/stat") as stat:
        start = int(stat.read().rsplit(")", 1)[1].split()[19])
    session = _C.ShmSession(2, [_C.own_process(), (child, start)])
    member = _C.ShmMember(session.address, 0, 2)
    os.kill(child, signal.SIGKILL)
    killed = time.monotonic()
    with pytest.raises(CommError, match=rf"rank 1 \(pid {child}\) died"):
        member.attach(DEADLINE_S)
    assert time.monotonic() - killed < NOTICED_S
    os.waitpid(child, 0)


def test_when_a_process_began_is_read_past_whatever_name_it_has() -> None:
    """Field 22 of /proc/PID/stat, as proc_pid_stat(5) counts them; the name may hold spaces and parentheses."""
    comm = f"/proc/{os.getpid()}/comm"
    with open(comm) as file:
        before = file.read()
    try:
        for name in ("plain", "a) S 1 2", "((", ")"):
            with open(comm, "w") as file:
                file.write(name)
            with open("/proc/self/stat") as file:
                start = int(file.read().rpartition(")")[2].split()[22 - 3])
            assert _C.own_process() == (os.getpid(), start)
    finally:
        with open(comm, "w") as file:
            file.write(before.rstrip("\n"))


def test_a_rank_that_is_taken_is_refused_to_another() -> None:
    session = _C.ShmSession(2)
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(_C.make_shm, session.address, 1, 2, DEADLINE_S)
        comm = _C.make_shm(session.address, 0, 2, DEADLINE_S)
        taken = f"rank 0 of .* is taken by process {os.getpid()}; .* each group an id of its own"
        with pytest.raises(CommError, match=taken):
            _C.make_shm(session.address, 0, 2, DEADLINE_S)
        meeting = pool.submit(_C.BoundCollective.barrier(other.result(), 0))
        _C.BoundCollective.barrier(comm, 0)()  # and those two go on
        meeting.result(DEADLINE_S)


def test_a_process_that_nobody_has_waited_for_has_ended() -> None:
    """Also where only /proc tells of it."""
    child = os.fork()
    if child == 0:
        forbid_pidfd_open()
        ended = os.fork()
        if ended == 0:
            os._exit(0)
        os.waitid(os.P_PID, ended, os.WEXITED | os.WNOWAIT)
        with open(f"/proc/{ended}/stat") as file:
            start = int(file.read().rpartition(")")[2].split()[22 - 3])
        os._exit(0 if _C.ProcessWatch(ended, start).ended else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
