"""`shardcomm ps` and SIGUSR1: who waits, in what and where, told by whoever asks, with nobody disturbed."""

from __future__ import annotations

import ctypes
import faulthandler
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch

from shardcomm import _C, CommError, Communicator, Stream, enable_stack_dumps
from shardcomm.cli.ps import groups, stacks
from shardcomm.cli.ps.command import screen
from shardcomm.comm import introduction
from shardcomm.comm.core import CoreCommunicator
from shardcomm.process.stack_dumps import enable_where_free
from support.commands import command
from support.gates import DEADLINE_S, Gate, launched, until, wait_at

RANKS = 3
NOBODY = 65533  # not 65534, as whom other tests run ranks beside this one


def ps(*options: str) -> str:
    done = command("ps", *options)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def group_of(pid: int) -> groups.ShmGroup | None:
    """The one group that the process is a rank of, if there is one."""
    found = [g for g in groups.find().groups if pid in [rank.pid for rank in g.ranks]]
    assert len(found) <= 1
    return found[0] if found else None


def states(pid: int) -> list[str]:
    group = group_of(pid)
    return [rank.state for rank in group.ranks] if group else []


def wait_for_rank_1(pid: int) -> bool:
    """Whether all other ranks do, in their first call. Their attaching is call 1, in which they wait for it, too."""
    group = group_of(pid)
    if group is None or group.ranks[1].state != "running":
        return False
    calls = [[call.sequence for call in rank.calls] for rank in group.ranks]
    return calls == [[] if rank == 1 else [2] for rank in range(len(calls))]


def pids_in(folder: Path, ranks: int) -> list[int]:
    """Those of the ranks, once each has said its own."""
    files = [folder / f"pid {rank}" for rank in range(ranks)]
    until(lambda: all(file.exists() and file.read_text() for file in files), "the ranks run")
    return [int(file.read_text()) for file in files]


def say_pid(folder: Path) -> int:
    rank = int(os.environ["RANK"])
    (folder / f"pid {rank}").write_text(str(os.getpid()))
    return rank


def one_comes_late(folder: Path, late: int) -> list[float]:
    rank = say_pid(folder)
    with Communicator.from_env(deadline_s=DEADLINE_S, transport="shm") as comm:
        if rank == late:
            wait_at(folder / "gate")
        everybody = torch.zeros(comm.size)
        comm.all_gather(everybody, torch.tensor([float(rank)]))
        return everybody.tolist()


def test_ps_names_who_waits_in_what_and_for_whom_and_where_everybody_is(tmp_path: Path) -> None:
    gate = Gate(tmp_path)
    with launched(one_comes_late, RANKS, (tmp_path, 1), gate) as results:
        pids = pids_in(tmp_path, RANKS)
        until(lambda: wait_for_rank_1(pids[0]), "0 and 2 wait for 1")

        found = json.loads(ps("--json", "--stacks"))
        group = next(g for g in found["groups"] if g["ranks"][0]["pid"] == pids[0])
        assert group["failure"] == ""
        assert [(r["rank"], r["pid"], r["state"]) for r in group["ranks"]] == [
            (0, pids[0], "waiting"),
            (1, pids[1], "running"),
            (2, pids[2], "waiting"),
        ]
        for rank in (0, 2):
            (call,) = group["ranks"][rank]["calls"]
            assert call["waiting_s"] > 0
            assert (call["call"], call["channel"]) == ("all_gather(f32, count 1)", "gather")
            assert (call["sequence"], call["waits_for"]) == (2, [1])
            assert "in all_gather\n" in group["ranks"][rank]["stacks"]
        assert group["ranks"][1]["calls"] == []
        assert "in wait_at\n" in group["ranks"][1]["stacks"]
        for rank in group["ranks"]:
            assert "in one_comes_late\n" in rank["stacks"]

        text = ps()
        assert re.search(
            rf"rank 0 +pid {pids[0]} +waiting +in all_gather\(f32, count 1\) #2, has waited \d+\.\d s for rank 1\n",
            text,
        )
        assert re.search(rf"rank 1 +pid {pids[1]} +running +in no collective\n", text)
    assert results == [[0.0, 1.0, 2.0]] * RANKS  # nobody was disturbed


def one_host_comes_late(folder: Path) -> list[float]:
    rank = say_pid(folder)
    introduction.host_identity = lambda: "AABB"[rank]  # type: ignore[assignment]
    with Communicator.from_env(deadline_s=DEADLINE_S, transport="hosts") as comm:
        if rank > 1:
            wait_at(folder / "gate")
        everybody = torch.zeros(comm.size)
        comm.all_gather(everybody, torch.tensor([float(rank)]))
        return everybody.tolist()


def test_ranks_of_several_hosts_have_the_numbers_of_the_whole_group(tmp_path: Path) -> None:
    gate = Gate(tmp_path)
    with launched(one_host_comes_late, 4, (tmp_path,), gate) as results:
        pids = pids_in(tmp_path, 4)
        until(lambda: states(pids[0]) == ["waiting"] * 2, "0 and 1 wait for the other host")
        until(lambda: states(pids[2]) == ["running"] * 2, "2 and 3 are at the gate")

        found = {g["ranks"][0]["pid"]: g for g in json.loads(ps("--json"))["groups"]}
        first, second = found[pids[0]], found[pids[2]]
        assert [(each["host"], each["hosts"]) for each in (first, second)] == [(0, 2), (1, 2)]
        assert [(r["rank"], r["pid"]) for r in second["ranks"]] == [(2, pids[2]), (3, pids[3])]
        for rank in (0, 1):
            (call,) = first["ranks"][rank]["calls"]
            assert (call["rank"], call["call"]) == (rank, "all_gather(f32, count 1)")
            assert call["waiting_s"] > 0
            assert call["waits_for"] == [rank + 2]
        assert second["ranks"][0]["calls"] == []

        text = ps()
        assert f"group {second['id']}: 2 ranks of 4, on host 1 of 2\n  rank 2 " in text
        assert re.search(rf"rank 1 +pid {pids[1]} .* has waited \d+\.\d s for rank 3\n", text)
    assert results == [[0.0, 1.0, 2.0, 3.0]] * 4


def test_a_stopped_rank_is_said_to_be_stopped_and_goes_on(tmp_path: Path) -> None:
    gate = Gate(tmp_path)
    with launched(one_comes_late, RANKS, (tmp_path, 1), gate) as results:
        pids = pids_in(tmp_path, RANKS)
        until(lambda: wait_for_rank_1(pids[0]), "0 and 2 wait for 1")
        os.kill(pids[1], signal.SIGSTOP)
        try:
            until(lambda: states(pids[0]) == ["waiting", "stopped", "waiting"], "it is stopped")
            found = json.loads(ps("--json", "--stacks"))
            group = next(g for g in found["groups"] if g["ranks"][0]["pid"] == pids[0])
            assert group["ranks"][1]["stacks"] is None
            assert group["ranks"][1]["no_stacks"] == "it is stopped"
            assert "in all_gather\n" in group["ranks"][0]["stacks"]
        finally:
            os.kill(pids[1], signal.SIGCONT)
    assert results == [[0.0, 1.0, 2.0]] * RANKS


def fail_and_stay(folder: Path) -> None:
    rank = say_pid(folder)
    comm = Communicator.from_env(deadline_s=DEADLINE_S, transport="shm")
    if rank == 1:
        until(lambda: wait_for_rank_1(os.getpid()), "others wait")
        comm.abort("it had enough")
    else:
        with pytest.raises(CommError):
            comm.all_reduce(torch.zeros(5))
    (folder / f"failed {rank}").touch()
    wait_at(folder / "gate")


def test_after_a_failure_ps_says_why_and_what_the_ranks_were_in(tmp_path: Path) -> None:
    gate = Gate(tmp_path)
    with launched(fail_and_stay, RANKS, (tmp_path,), gate):
        pids = pids_in(tmp_path, RANKS)
        until(lambda: len(list(tmp_path.glob("failed *"))) == RANKS, "all have heard of it")
        group = group_of(pids[0])
        assert group is not None
        assert group.failure == f"rank 1 (pid {pids[1]}) aborted: it had enough"
        assert [rank.state for rank in group.ranks] == ["running"] * RANKS
        assert str(group.ranks[0].calls[0]) == (
            "was in all_reduce(f32, count 5, sum) #2 when the group failed; rank 1 had not come"
        )
        assert group.ranks[1].calls == []
        assert f"failed: rank 1 (pid {pids[1]}) aborted: it had enough" in ps()


def killed_beside_one_that_stays(rank: int, address: str, folder: Path) -> None:
    os.environ["RANK"] = str(rank)
    comm = CoreCommunicator(_C.make_shm(address, rank, 2, DEADLINE_S))
    say_pid(folder)
    wait_at(folder / "gate")
    comm.close()


def test_a_dead_rank_is_said_to_be_dead_and_one_that_has_not_come_not_attached(
    tmp_path: Path,
) -> None:
    context = get_context("forkserver")
    gate, session = Gate(tmp_path), _C.ShmSession(2)
    processes = [
        context.Process(target=killed_beside_one_that_stays, args=(r, session.address, tmp_path))
        for r in range(2)
    ]
    try:
        processes[0].start()
        pid = processes[0].pid
        assert pid is not None
        until(lambda: states(pid) == ["waiting", "not attached"], "rank 0 is alone")
        processes[1].start()
        pids_in(tmp_path, 2)  # both have attached: one killed before would be an error of the other
        assert states(pid) == ["running", "running"]
        processes[1].kill()
        until(lambda: states(pid) == ["running", "dead"], "rank 1 is dead")
    finally:
        gate.open()
        for process in processes:
            process.join(DEADLINE_S)
    assert group_of(pid) is None  # and nothing is left


def in_two_groups(folder: Path) -> None:
    rank = say_pid(folder)
    first, second = (
        Communicator.from_env(deadline_s=DEADLINE_S, transport="shm") for _ in range(2)
    )
    if rank == 1:
        wait_at(folder / "gate")
    stream = Stream()
    end = first.all_reduce(torch.zeros(1), stream=stream)
    second.barrier()
    end.wait()


def test_two_groups_of_the_same_processes_are_told_apart(tmp_path: Path) -> None:
    gate = Gate(tmp_path)
    with launched(in_two_groups, 2, (tmp_path,), gate):
        pid = pids_in(tmp_path, 2)[0]

        def calls() -> list[str]:
            return sorted(
                call.call or ""
                for group in groups.find().groups
                if group.ranks[0].pid == pid and group.ranks[0].state == "waiting"
                for call in group.ranks[0].calls
            )

        until(lambda: calls() == ["all_reduce(f32, count 1, sum)", "barrier()"], "it waits in both")
        first, second = (
            group.id for group in groups.find().groups if pid in [rank.pid for rank in group.ranks]
        )
        assert [group["id"] for group in json.loads(ps("--json", str(first)))["groups"]] == [first]
        assert f"group {second}:" in ps("--stacks", str(second))


def test_a_group_that_is_not_there_is_refused() -> None:
    done = command("ps", "--stacks", "1")
    assert done.returncode == 2
    assert "GROUP is 1; groups of this host: " in done.stderr


def not_registered(rank: int, address: str, folder: Path, register: str) -> None:
    os.environ["RANK"] = str(rank)
    if register == "then reset":
        enable_stack_dumps(on=None)
        number = next(n for n in range(signal.SIGRTMAX, 0, -1) if _C.has_handler(n))
        faulthandler.unregister(number)
        signal.signal(number, signal.SIG_DFL)
    comm = CoreCommunicator(_C.make_shm(address, rank, 2, DEADLINE_S))
    say_pid(folder)
    wait_at(folder / "gate")
    comm.barrier()


@pytest.mark.parametrize("register", ["never", "then reset"])
def test_a_process_that_has_not_said_how_gets_no_signal(tmp_path: Path, register: str) -> None:
    """One would end it."""
    context = get_context("forkserver")
    gate, session = Gate(tmp_path), _C.ShmSession(2)
    processes = [
        context.Process(target=not_registered, args=(r, session.address, tmp_path, register))
        for r in range(2)
    ]
    try:
        for process in processes:
            process.start()
        pids = pids_in(tmp_path, 2)
        for answer in stacks.ask(pids).values():
            assert answer.text is None
            assert answer.reason == "it has not called shardcomm.enable_stack_dumps()"
        assert "no stacks: it has not called shardcomm.enable_stack_dumps()" in ps("--stacks")
    finally:
        gate.open()
        for process in processes:
            process.join(DEADLINE_S)
    assert [process.exitcode for process in processes] == [0, 0]


@contextmanager
def memory_named(label: str, content: bytes) -> Iterator[None]:
    fd = os.memfd_create(label)
    os.write(fd, content)
    yield
    os.close(fd)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "not the memory of a group"),
        (bytes(100_000), "not the memory of a group"),
        (b"shrdcomm" + bytes(100_000), "another build of shardcomm"),
    ],
)
def test_a_process_that_is_no_rank_is_not_listed(content: bytes, says: str) -> None:
    with memory_named(_C.group_label, content):
        found = groups.find()
        assert all(r.pid != os.getpid() for group in found.groups for r in group.ranks)
        (note,) = [note for note in found.notes if note.startswith(f"process {os.getpid()}:")]
        assert says in note


def test_a_process_of_a_container_is_named_once_whatever_its_groups(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(groups.processes, "is_of_this_namespace", lambda pid: False)
    with memory_named(_C.group_label, b""), memory_named(_C.group_label, b"x"):
        notes = groups.find().notes
    assert len([note for note in notes if note.startswith(f"process {os.getpid()} is of a")]) == 1


def test_where_there_are_no_groups_it_says_what_it_does_not_see() -> None:
    assert "by Gloo or NCCL alone is not seen" in screen(groups.Found(), None)


def look_as_nobody(folder: Path) -> list[str]:
    if say_pid(folder) == 0:
        with Communicator.from_env(deadline_s=DEADLINE_S, transport="shm"):
            wait_at(folder / "gate")
        return []
    with Communicator.from_env(deadline_s=DEADLINE_S, transport="shm"):
        os.seteuid(NOBODY)
        found = groups.find()
        answer = stacks.ask([os.getppid()])[os.getppid()]
        os.seteuid(0)
    assert found.groups == []
    assert answer.reason == "it is not this user's"
    (folder / "looked").touch()
    return found.notes


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_is_told_so_in_a_sentence(tmp_path: Path) -> None:
    gate = Gate(tmp_path)
    with launched(look_as_nobody, 2, (tmp_path,), gate) as results:
        until((tmp_path / "looked").exists, "another user has looked")
    (note,) = results[1]
    assert re.fullmatch(
        r"processes that could not be looked into: \d+; their own users see .*", note
    )


READ = ctypes.PyDLL(None).read  # PyDLL: with the interpreter's lock held


def wait_in_a_barrier(comm: Communicator, gate: Path) -> None:
    comm.barrier()


def wait_for_an_event(comm: Communicator, gate: Path) -> None:
    stream = Stream()
    event = comm.barrier(stream=stream)
    event.wait()


def wait_in_a_long_call(comm: Communicator, gate: Path) -> None:
    """No Python runs before the gate is open."""
    pipe, byte, read = os.open(gate, os.O_RDONLY), ctypes.create_string_buffer(1), READ
    read(pipe, byte, 1)
    comm.barrier()


def wait_and_print(folder: Path, wait: Callable[[Communicator, Path], None]) -> str:
    rank = say_pid(folder)
    stderr = os.open(folder / f"stderr {rank}", os.O_WRONLY | os.O_CREAT)
    os.dup2(stderr, 2)
    with Communicator.from_env(deadline_s=DEADLINE_S, transport="shm") as comm:
        if rank == 0:
            wait(comm, folder / "gate")
        else:
            wait_at(folder / "gate")
            comm.barrier()
    return "well"


@pytest.mark.parametrize("wait", [wait_in_a_barrier, wait_for_an_event, wait_in_a_long_call])
def test_sigusr1_prints_the_stacks_and_what_the_ranks_are_in(
    tmp_path: Path, wait: Callable[[Communicator, Path], None]
) -> None:
    gate, stderr = Gate(tmp_path), tmp_path / "stderr 0"
    sentence = "rank 1 (pid {1}): in no collective\n"
    with launched(wait_and_print, 2, (tmp_path, wait), gate) as results:
        pids = pids_in(tmp_path, 2)

        def is_there() -> bool:
            """Where the test wants it to be."""
            if wait is wait_in_a_long_call:
                line = wait.__code__.co_firstlineno + 3
                here = f"line {line} in wait_in_a_long_call\n"
                sleeps = " S " in Path(f"/proc/{pids[0]}/stat").read_text()
                return sleeps and here in (stacks.ask(pids[:1])[pids[0]].text or "")
            return wait_for_rank_1(pids[0])

        until(is_there, "rank 0 waits")
        os.kill(pids[0], signal.SIGUSR1)
        until(lambda: f"in {wait.__name__}\n" in stderr.read_text(), "its stacks")
        if wait is not wait_in_a_long_call:
            until(lambda: sentence.format(*pids) in stderr.read_text(), "what the ranks are in")
            head = f"shardcomm, process {pids[0]}:\nshm group of 2 ranks, this is 0:\n"
            assert f"{head}  rank 0 (pid {pids[0]}): in barrier() #2, has" in stderr.read_text()
            assert "s for rank 1\n" in stderr.read_text()
        else:
            assert "shardcomm, process" not in stderr.read_text()
    if wait is wait_in_a_long_call:  # as soon as Python runs again
        assert f"shardcomm, process {pids[0]}:\n" in stderr.read_text()
    assert results == ["well"] * 2


def run_python(code: str) -> str:
    """What a Python that runs it prints."""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def test_a_handler_of_the_programs_own_stays_and_ps_never_calls_it() -> None:
    said = run_python(
        """
import os, signal, shardcomm
from shardcomm.cli.ps import stacks
from shardcomm.process.stack_dumps import enable_where_free
signal.signal(signal.SIGUSR1, lambda *_: print("save what there is", flush=True))
enable_where_free()
try:
    shardcomm.enable_stack_dumps()
except RuntimeError as error:
    print(error, flush=True)
answer = stacks.ask([os.getpid()])[os.getpid()]
print("most recent call first" in answer.text, flush=True)
os.kill(os.getpid(), signal.SIGUSR1)
shardcomm.enable_stack_dumps(on=signal.SIGUSR2)
shardcomm.enable_stack_dumps(on=signal.SIGUSR2)
os.kill(os.getpid(), signal.SIGUSR2)
"""
    )
    lines = said.splitlines()
    assert lines[0] == (
        "enable_stack_dumps: SIGUSR1 has a handler, which stays; give another signal, such as on=signal.SIGUSR2, or "
        "on=None for `shardcomm ps --stacks` alone"
    )
    assert lines[1:3] == ["True", "save what there is"]
    assert said.count("save what there is") == 1
    assert said.count("most recent call first") == 1  # of SIGUSR2
    assert lines[-1] == "in no group of several ranks"


@pytest.mark.parametrize("on", [signal.SIGKILL, 0, 1000, "USR1"])
def test_what_is_no_signal_to_handle_is_refused(on: Any) -> None:
    with pytest.raises(ValueError, match=r"it must be a signal that a process can handle, or None"):
        enable_stack_dumps(on=on)


def test_another_thread_than_the_main_one_is_refused() -> None:
    errors: list[str] = []

    def enable() -> None:
        with pytest.raises(RuntimeError) as caught:
            enable_where_free()
        errors.append(str(caught.value))

    thread = threading.Thread(target=enable)
    thread.start()
    thread.join()
    assert errors == ["enable_stack_dumps: call it from the main thread, which handles signals"]


def test_a_forked_child_answers_for_itself() -> None:
    said = run_python(
        """
import os, shardcomm
from shardcomm.cli.ps import stacks
shardcomm.enable_stack_dumps(on=None)
def in_the_child(pipe):
    os.write(say, b"x")
    os.read(pipe, 1)
def in_the_parent(pids):
    return stacks.ask(pids)
out, into = os.pipe()
runs, say = os.pipe()
child = os.fork()
if child == 0:
    os.close(into)
    in_the_child(out)
    os._exit(0)
os.read(runs, 1)
answers = in_the_parent([os.getpid(), child])
os.close(into)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
print("in in_the_parent" in answers[os.getpid()].text, "in in_the_child" in answers[os.getpid()].text)
print("in in_the_parent" in answers[child].text, "in in_the_child" in answers[child].text)
"""
    )
    assert said.splitlines()[0] == "0"
    assert said.splitlines()[1] == "True False"
    # Its own stack goes through the parent's frames at the fork: it was called at the module's level.
    assert said.splitlines()[2] == "False True"


def test_who_asks_while_another_does_waits_for_its_turn() -> None:
    # Asked is a process at rest: Python shows the frames of threads that run, and has no lock on them.
    said = run_python(
        """
import subprocess, sys, threading
from shardcomm.cli.ps import stacks
rests = "import shardcomm, sys; shardcomm.enable_stack_dumps(on=None); print(flush=True); sys.stdin.read()"
asked = subprocess.Popen([sys.executable, "-c", rests], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
asked.stdout.readline()
answers = []
threads = [threading.Thread(target=lambda: answers.append(stacks.ask([asked.pid]))) for _ in range(4)]
for thread in threads: thread.start()
for thread in threads: thread.join()
asked.communicate()
print([a[asked.pid].text.count("in <module>") for a in answers])
"""
    )
    assert said == "[1, 1, 1, 1]\n"
