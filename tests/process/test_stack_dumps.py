"""`enable_stack_dumps`: a signal prints the stacks of a rank and what it is in, with nobody disturbed."""

from __future__ import annotations

import ctypes
import os
import re
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardcomm import Communicator, Stream, enable_stack_dumps, launch
from shardcomm.cli.ps import stacks
from shardcomm.process import own_groups
from shardcomm.process.stack_dumps import enable_where_free
from support import interpreters
from support.gates import DEADLINE_S, Gate, launched, until, wait_at
from support.ranks_of_groups import pids_in, say_pid, wait_for_rank_1

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


def wait_in_the_backend(folder: Path) -> None:
    dist.init_process_group("shardcomm")
    rank = dist.get_rank()
    os.dup2(os.open(folder / f"stderr {rank}", os.O_WRONLY | os.O_CREAT), 2)
    say_pid(folder)  # only now: at set-up the ranks are in another group for a moment
    if rank == 1:
        wait_at(folder / "gate")
    dist.all_reduce(torch.ones(4))
    dist.destroy_process_group()


def test_sigusr1_tells_of_the_groups_of_the_backend(tmp_path: Path) -> None:
    gate, stderr = Gate(tmp_path), tmp_path / "stderr 0"
    with launched(wait_in_the_backend, 2, (tmp_path,), gate):
        pids = pids_in(tmp_path, 2)
        until(lambda: wait_for_rank_1(pids[0]), "rank 0 waits")
        os.kill(pids[0], signal.SIGUSR1)
        until(lambda: "in no collective\n" in stderr.read_text(), "what the ranks are in")
    assert f"rank 0 (pid {pids[0]}): in all_reduce(f32, count 4, sum) #" in stderr.read_text()


def report_without_descriptors() -> str:
    with Communicator.from_env(deadline_s=DEADLINE_S, transport="shm") as comm:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))  # of those that are open, more stay
        told = own_groups.report()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        comm.barrier()
    return told


def test_what_ranks_are_in_is_told_where_no_file_can_be_opened() -> None:
    for told in launch(report_without_descriptors, 2, timeout_s=DEADLINE_S):
        assert re.fullmatch(r"groups of shm and hosts cannot be read: .*Too many open.*\n", told)


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
from shardcomm.process import own_groups
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


def test_a_daemon_that_has_closed_all_descriptors_keeps_those_that_it_opens() -> None:
    said = run_python(
        """
import os, shardcomm
shardcomm.enable_stack_dumps(on=None)
def in_a_child(does):
    child = os.fork()
    if child == 0:
        does()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
def be_a_daemon():
    os.closerange(3, 1000)
    null = [os.open("/dev/null", os.O_RDONLY) for _ in range(100)]
    in_a_child(lambda: print({os.readlink(f"/proc/self/fd/{fd}") for fd in null}, flush=True))
in_a_child(be_a_daemon)
"""
    )
    assert said == "{'/dev/null'}\n"


def test_who_asks_while_another_does_waits_for_its_turn() -> None:
    # Asked is a process at rest: Python shows the frames of threads that run, and has no lock on them.
    done = interpreters.run(
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
    assert (done.stdout, done.stderr) == ("[1, 1, 1, 1]\n", "")
