"""How calls, futures and groups of the torch.distributed backend end: signals, forks, errors, and other groups."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardcomm import CommError, launch
from shardcomm.interop import backend
from support.commands import torchrun
from support.gates import until

pytestmark = pytest.mark.usefixtures("nothing_is_left_in_shared_memory")


def world(timeout_s: float = 60) -> Any:
    """The default group, of this backend; its methods are c10d's."""
    torch.set_num_threads(1)
    dist.init_process_group("shardcomm", timeout=timedelta(seconds=timeout_s))
    return dist.group.WORLD


def begun(work: dist.Work | None) -> dist.Work:
    assert work is not None
    return work


class Stopped(Exception):
    """What this test's signal handler raises, as Python's own raises KeyboardInterrupt."""


def call_from_a_handler() -> list[str]:
    world()
    store = dist.distributed_c10d._get_default_store()
    said: list[str] = []

    def call(*_: object) -> None:
        for collective in (
            lambda: dist.all_reduce(torch.ones(1)),
            lambda: dist.all_reduce(torch.ones(1), async_op=True),
            dist.barrier,
        ):
            with pytest.raises(ValueError, match="called from a signal handler") as refused:
                collective()
            said.append(str(refused.value))
        store.set("refused", "")

    if dist.get_rank() == 0:
        signal.signal(signal.SIGALRM, call)
        signal.setitimer(signal.ITIMER_REAL, 0.3)
    else:
        store.wait(["refused"])  # so that rank 0 waits in the collective
    x = torch.ones(3)
    dist.all_reduce(x)
    assert x.tolist() == [2, 2, 2]
    dist.barrier()
    dist.destroy_process_group()
    return said


def test_a_signal_handlers_collective_is_refused_inside_another_one() -> None:
    said, none = launch(call_from_a_handler, 2, timeout_s=30)
    assert [text.partition(":")[2].partition(":")[0] for text in said] == [
        "all_reduce",
        "all_reduce",
        "barrier",
    ]
    assert none == []


def stop_behind_a_reduce(wait: Callable[[], object]) -> None:
    group = world()
    store = dist.distributed_c10d._get_default_store()

    def stop(*_: object) -> None:
        raise Stopped

    if dist.get_rank() == 0:
        reducing = begun(dist.all_reduce(torch.ones(1), async_op=True))  # rank 1 never comes
        signal.signal(signal.SIGALRM, stop)
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(Stopped):
            wait()
        group.abort()
        store.set("stopped", "")
        with pytest.raises(CommError, match="aborted"):
            reducing.wait()
    else:
        store.wait(["stopped"])
        with pytest.raises(CommError, match=r"rank 0 .*aborted"):
            dist.barrier()


@pytest.mark.parametrize("wait", [dist.barrier, dist.destroy_process_group])
def test_a_signal_handler_ends_a_wait_for_reduces(wait: Callable[[], object]) -> None:
    """As Ctrl-C does."""
    launch(stop_behind_a_reduce, 2, (wait,), timeout_s=30)


def held() -> tuple[int, int, int]:
    """The files, mappings and threads of this process's groups."""
    gc.collect()
    files = [os.readlink(each.path) for each in os.scandir("/proc/self/fd") if each.is_symlink()]
    maps = Path("/proc/self/maps").read_text()
    threads = len(os.listdir("/proc/self/task"))
    return sum("shardcomm-group" in file for file in files), maps.count("shardcomm-group"), threads


def make_and_destroy() -> None:
    world()
    dist.barrier()
    before = held()
    for _ in range(3):
        groups = [dist.new_group() for _ in range(4)]
        for group in groups:
            begun(dist.all_reduce(torch.ones(1), group=group, async_op=True)).wait()
            dist.destroy_process_group(group)
        del groups, group
        until(lambda: held() == before, f"the process holds {before}, as before the groups")
    dist.barrier()
    dist.destroy_process_group()


def test_a_destroyed_group_gives_back_what_it_held_at_once() -> None:
    """And not when the next one is made."""
    launch(make_and_destroy, 2, timeout_s=100)


def fork_and_begin() -> None:
    group = world()
    begun(dist.all_reduce(torch.ones(1), async_op=True)).wait()  # there are threads now
    child = os.fork()
    if child == 0:
        refused = 0
        for begin in (
            lambda: dist.all_reduce(torch.ones(1), async_op=True),
            lambda: dist.all_gather([torch.ones(1)] * 2, torch.ones(1), async_op=True),
            lambda: dist.barrier(async_op=True),
            lambda: dist.isend(torch.ones(1), 0),
        ):
            try:
                work = begun(begin())
                work.get_future().add_done_callback(lambda _: None)
                work.wait()
            except CommError as error:
                refused += "was forked from" in str(error)
        group.shutdown()
        os._exit(refused)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 4
    dist.barrier()
    dist.destroy_process_group()


def test_what_a_forked_child_begins_is_refused() -> None:
    launch(fork_and_begin, 2, timeout_s=30)


def wait_and_look() -> None:
    world()
    for _ in range(300):
        work = begun(dist.all_reduce(torch.ones(1), async_op=True))
        future = work.get_future()
        work.wait()
        assert future.done()
    dist.destroy_process_group()


def test_the_future_is_done_when_the_wait_for_its_collective_returns() -> None:
    launch(wait_and_look, 2, timeout_s=60)


def end_badly() -> None:
    world()
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 0:
        # Its elements are one: what is received cannot be written to it.
        folded = begun(dist.irecv(torch.zeros(1).expand(4), 1))
        ended = begun(dist.irecv(torch.zeros(4), 1))
        future = ended.get_future()
        future.set_result([torch.ones(1)])  # the program completes it itself
        store.set("begun", "")
        with pytest.raises(RuntimeError, match="single memory location"):
            folded.wait()
        ended.wait()
        assert [value.tolist() for value in future.value()] == [[1]]
    else:
        store.wait(["begun"])
        for _ in range(2):
            dist.send(torch.ones(4), 0)
    dist.barrier()
    dist.destroy_process_group()


def test_what_goes_wrong_at_a_messages_end_is_told_to_who_waits() -> None:
    launch(end_badly, 2, timeout_s=30)


def look_at_sources() -> None:
    world()
    if dist.get_rank() == 0:
        received = begun(dist.irecv(torch.zeros(1)))
        assert received._source_rank() == -1
        dist.barrier()
        received.wait()
        assert received._source_rank() == 1
    else:
        dist.barrier()
        sent = begun(dist.isend(torch.ones(1), 0))
        with pytest.raises(RuntimeError, match="recv or recv-from-any"):
            sent._source_rank()
        sent.wait()
    dist.destroy_process_group()


def test_the_source_of_a_message_is_as_with_gloo() -> None:
    launch(look_at_sources, 2, timeout_s=30)


def tell_the_unheeding() -> None:
    group = world(timeout_s=8)
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 0:
        sends = [begun(dist.isend(torch.ones(64), 1)) for _ in range(20_000)]
        assert not sends[-1].is_completed()
        with pytest.raises(RuntimeError, match="Rank 1 failed to pass monitoredBarrier in 100 ms"):
            group.monitored_barrier(timedelta(milliseconds=100))
        store.set("seen", "")
    else:
        store.wait(["seen"])
    dist.destroy_process_group()


def test_a_monitored_barrier_does_not_wait_to_tell_who_takes_no_messages() -> None:
    launch(tell_the_unheeding, 2, timeout_s=30)


def call_after_the_end() -> None:
    group = world()
    begun(dist.all_reduce(torch.ones(1), async_op=True)).wait()
    dist.destroy_process_group()
    for _ in range(2):
        work = group.allreduce([torch.ones(1)])
        work.get_future().add_done_callback(lambda _: None)
        with pytest.raises(CommError, match="closed"):
            work.wait()


def test_what_is_begun_after_the_end_is_refused() -> None:
    launch(call_after_the_end, 2, timeout_s=30)


# Rank 1 stays until rank 0 has ended, whose callback in one group waits for a collective in the other.
TWO_GROUPS = """
import atexit, os, sys, threading, time
from pathlib import Path
ended = Path(sys.argv[1])
rank = int(os.environ["RANK"])
if rank == 0:
    atexit.register(ended.touch)  # the last
import torch, torch.distributed as dist, shardcomm
dist.init_process_group("shardcomm")
second = dist.new_group(backend="shardcomm")
if rank == 0:
    waits = threading.Event()

    def wait_in_the_second(_):
        waits.set()
        try:
            dist.all_reduce(torch.ones(1), group=second)
        except shardcomm.CommError:
            pass
    dist.all_reduce(torch.ones(1), async_op=True).get_future().add_done_callback(wait_in_the_second)
    waits.wait()
else:
    dist.all_reduce(torch.ones(1))
    end = time.monotonic() + 20
    while not ended.exists() and time.monotonic() < end:
        time.sleep(0.05)
    os._exit(0 if ended.exists() else 1)
"""


def test_a_callback_that_waits_in_another_group_does_not_hold_up_the_end(tmp_path: Path) -> None:
    script = tmp_path / "two_groups.py"
    script.write_text(TWO_GROUPS)
    ended = torchrun("--standalone", "--nproc-per-node=2", str(script), str(tmp_path / "ended"))
    assert ended.returncode == 0, ended.stderr


# What libraries register when they are imported, before there is a group.
AT_EXIT = """
import atexit, os
import torch, torch.distributed as dist
x = torch.ones(3)

def reduce_once_more():
    dist.all_reduce(x)
    os.write(1, f"{x.tolist()}\\n".encode())  # a whole line at once, beside the other rank's
atexit.register(dist.destroy_process_group)
atexit.register(reduce_once_more)
dist.init_process_group("shardcomm")
if dist.get_rank() == 0:
    dist.all_reduce(x, async_op=True)
else:
    dist.all_reduce(x)
"""


def test_what_a_program_registered_for_its_end_may_use_the_group(tmp_path: Path) -> None:
    script = tmp_path / "at_exit.py"
    script.write_text(AT_EXIT)
    ended = torchrun("--standalone", "--nproc-per-node=2", str(script))
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines() == ["[4.0, 4.0, 4.0]"] * 2, ended.stderr


def load_badly() -> None:
    def refuse() -> None:
        raise KeyError("no such thing")

    if int(os.environ["RANK"]) == 1:
        backend.load = refuse  # type: ignore[assignment]
    with pytest.raises(RuntimeError, match=r"rank 1: KeyError\('no such thing'\)"):
        world()


def test_a_rank_that_cannot_load_the_backend_says_why_on_all() -> None:
    launch(load_badly, 2, timeout_s=90)


def test_a_compiler_that_fails_leaves_nothing_behind(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    compiler = tmp_path / "compiler"
    compiler.write_text('#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done\ntouch "$2"\nexit 1\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(RuntimeError, match="ended with 1"):
        backend.load.__wrapped__()
    assert [file.name for file in (tmp_path / "shardcomm").iterdir()] == ["lock"]
