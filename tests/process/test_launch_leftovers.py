"""Nothing is left of a launch, however it ends, and what ranks leave running is ended."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import util
from pathlib import Path

import pytest

from shardcomm import RankError, launch
from support import waiting_ranks
from support.waiting_ranks import (
    is_gone,
    return_and_never_end,
    wait_for_ever,
    wait_until,
    wait_without_the_interpreter,
)


def end_well() -> None:
    launch(abs, 3, (1,), timeout_s=60)


def end_at_the_deadline() -> None:
    with pytest.raises(TimeoutError):
        launch(wait_for_ever, 3, timeout_s=0.5)


@pytest.mark.parametrize("run", [end_well, end_at_the_deadline])
def test_no_process_and_no_descriptor_is_left(run: Callable[[], None]) -> None:
    run()  # the fork server stays, once started
    before = len(os.listdir("/proc/self/fd"))
    children = set(multiprocessing.active_children())  # of other tests' fixtures
    run()
    assert set(multiprocessing.active_children()) == children
    assert len(os.listdir("/proc/self/fd")) == before


def is_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def has_ended(process: int) -> bool:
    """Whether the process of a pidfd has: a zombie too, which whoever has inherited it may never collect."""
    return bool(select.select([process], [], [], 0)[0])


@pytest.mark.parametrize(
    ("wait", "stopped"),
    [
        ("wait_without_the_interpreter", ["rank 0"]),
        ("wait_without_the_interpreter", ["rank 0", "rank 1", "server"]),
        ("wait_with_the_interpreter", []),
        ("return_and_never_end", []),
    ],
)
def test_nothing_is_left_of_a_launcher_that_is_killed(
    tmp_path: Path, wait: str, stopped: list[str]
) -> None:
    temporary = Path(tempfile.mkdtemp())  # short: a socket's path has at most 107 characters
    launcher = subprocess.Popen(
        [sys.executable, __file__, wait, str(tmp_path)],
        env=os.environ | {"TMPDIR": str(temporary)},
    )
    processes: dict[str, int] = {}
    try:
        files = [tmp_path / f"rank {rank}" for rank in range(2)]
        wait_until(lambda: all(file.exists() for file in files), 60, "the ranks start")
        pids = {file.name: int(file.read_text().split()[0]) for file in files}
        pids["server"] = int(files[0].read_text().split()[1])
        processes = {name: os.pidfd_open(pid) for name, pid in pids.items()}
        for name in stopped:
            signal.pidfd_send_signal(processes[name], signal.SIGSTOP)
            wait_until(lambda pid=pids[name]: is_stopped(pid), 10, f"{name} stops")
        launcher.kill()
        launcher.wait()
        for name, process in processes.items():
            wait_until(lambda process=process: has_ended(process), 20, f"{name} ends")
        wait_until(lambda: not os.listdir(temporary), 20, "its folder is removed")
    finally:
        launcher.kill()
        launcher.wait()
        for process in processes.values():
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(process, signal.SIGKILL)
            os.close(process)
        shutil.rmtree(temporary)


def leave_what_ends_with_a_program(folder: Path) -> str:
    """Returns the process of a worker that never ends by itself."""
    own = folder / os.environ["RANK"]

    def say(what: str) -> None:
        with own.open("a") as file:
            file.write(f"{what}\n")

    def say_later() -> None:
        threading.main_thread().join()
        threading.Event().wait(0.3)  # some last work
        say("thread")

    threading.Thread(target=say_later).start()
    util.Finalize(None, say, ("multiprocessing's",), exitpriority=0)
    weakref.finalize(wait_for_ever, say, "of an object")
    atexit.register(say, "atexit")
    worker = multiprocessing.get_context("fork").Process(target=wait_for_ever, daemon=True)
    worker.start()
    return str(worker.pid)


def test_ranks_that_have_returned_end_as_programs_do(tmp_path: Path) -> None:
    workers = launch(leave_what_ends_with_a_program, 2, (tmp_path,), timeout_s=60)
    left = [worker for worker in workers if not is_gone(worker)]
    for worker in left:
        os.kill(int(worker), signal.SIGKILL)
    assert left == []
    for rank in range(2):
        assert (tmp_path / str(rank)).read_text() == (
            "thread\natexit\nof an object\nmultiprocessing's\n"
        )


def never_end_but_on_rank_0(folder: Path) -> None:
    if os.environ["RANK"] == "0":
        wait_until((folder / "rank 1").exists, 60, "rank 1 returns")
        raise LookupError("rank 0 has a bug")
    return_and_never_end(folder)


def test_ranks_that_do_not_end_are_killed_at_once_when_one_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardcomm.process.launch.FINISH_S", 0.5)
    launch(return_and_never_end, 2, (tmp_path,), timeout_s=60)
    pids = [(tmp_path / f"rank {rank}").read_text().split()[0] for rank in range(2)]
    assert all(is_gone(pid) for pid in pids)
    (tmp_path / "rank 1").unlink()

    monkeypatch.setattr("shardcomm.process.launch.FINISH_S", 600.0)
    begun = time.monotonic()
    with pytest.raises(RankError, match="rank 0 has a bug"):
        launch(never_end_but_on_rank_0, 2, (tmp_path,), timeout_s=60)
    assert time.monotonic() - begun < 60
    assert is_gone((tmp_path / "rank 1").read_text().split()[0])


def launch_inside() -> list[str | None]:
    return launch(os.getenv, 2, ("RANK",), timeout_s=60)


def die_while_ranks_inside_run(folder: Path) -> None:
    def die() -> None:
        files = [folder / f"rank {rank}" for rank in range(2)]
        wait_until(lambda: all(file.exists() for file in files), 60, "the ranks start")
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=die, daemon=True).start()
    launch(wait_without_the_interpreter, 2, (folder,), timeout_s=60)


def launch_launchers(folder: Path) -> None:
    assert launch(launch_inside, 1, timeout_s=90) == [["0", "1"]]
    assert launch_inside() == ["0", "1"]
    with pytest.raises(RankError, match=r"^rank 0 was killed by SIGKILL$"):
        launch(die_while_ranks_inside_run, 1, (folder,), timeout_s=90)
    assert launch_inside() == ["0", "1"]


def test_ranks_may_launch_ranks_of_their_own(tmp_path: Path) -> None:
    """In a program of its own: the fork servers of tests do not end as an interpreter does."""
    with tempfile.TemporaryDirectory() as temporary:
        ran = subprocess.run(
            [sys.executable, __file__, "launch_launchers", str(tmp_path)],
            env=os.environ | {"TMPDIR": temporary},
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert (ran.returncode, ran.stderr) == (0, "")
        pids = [pid for file in tmp_path.iterdir() for pid in file.read_text().split()]
        assert len(pids) == 4
        for pid in pids:
            wait_until(lambda pid=pid: is_gone(pid), 20, "the ranks and their servers end")
        wait_until(lambda: not os.listdir(temporary), 20, "their folders are removed")


if __name__ == "__main__":
    name, folder = sys.argv[1], Path(sys.argv[2])
    if name == "launch_launchers":
        launch_launchers(folder)
    else:
        launch(getattr(waiting_ranks, name), 2, (folder,))
