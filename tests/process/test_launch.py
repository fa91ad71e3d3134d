"""`launch`: N ranks as processes of this host."""

from __future__ import annotations

import atexit
import ctypes
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
from datetime import timedelta
from multiprocessing import forkserver, util
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from shardcomm import Communicator, RankError, launch
from support import interpreters
from support.gates import Gate, wait_at
from support.listeners import listening

RANKS = 3


def rank_and_double(value: int) -> tuple[int, int]:
    return int(os.environ["RANK"]), 2 * value


def test_results_come_in_rank_order() -> None:
    assert launch(rank_and_double, RANKS, (21,), timeout_s=60) == [(r, 42) for r in range(RANKS)]


def sum_both_ways() -> tuple[list[float], list[float]]:
    theirs = torch.tensor([1.0, float(os.environ["RANK"])])
    ours = theirs.clone()
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    with Communicator.from_env(deadline_s=30) as comm:
        dist.all_reduce(theirs)
        comm.all_reduce(ours)
    dist.destroy_process_group()
    return theirs.tolist(), ours.tolist()


def test_torch_distributed_and_communicator_both_find_the_ranks() -> None:
    for theirs, ours in launch(sum_both_ways, RANKS, timeout_s=60):
        assert theirs == ours == [3.0, 3.0]


def test_ranks_share_the_cores() -> None:
    cores = os.cpu_count() or 1
    assert launch(torch.get_num_threads, 2, timeout_s=60) == [max(1, cores // 2)] * 2


def exit_without_result() -> None:
    if os.environ["RANK"] == "1":
        os._exit(7)


def return_a_lambda() -> Callable[[], None]:
    return lambda: None


@pytest.mark.parametrize(
    ("fn", "message"),
    [
        (exit_without_result, "rank 1 ended with exit status 7 and no result"),
        (return_a_lambda, r"(?s)rank 0 raised.*pickle"),
    ],
)
def test_rank_without_a_result_is_named(fn: Callable[[], object], message: str) -> None:
    with pytest.raises(RankError, match=message):
        launch(fn, 2, timeout_s=60)


@pytest.fixture
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    """For ranks that notice no failure, and would be waited for as long as `launch` does."""
    monkeypatch.setattr("shardcomm.process.launch.GRACE_S", 1.5)


def wait_for_ever() -> None:
    threading.Event().wait()


def end_by(number: int) -> None:
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), number)
    wait_for_ever()


@pytest.mark.usefixtures("short_grace")
@pytest.mark.parametrize(
    ("number", "name"),
    [
        (signal.SIGKILL, "SIGKILL"),
        (signal.SIGRTMIN, "SIGRTMIN"),
        (signal.SIGRTMIN + 3, r"SIGRTMIN\+3"),
    ],
)
def test_the_signal_that_killed_a_rank_is_named(number: int, name: str) -> None:
    with pytest.raises(RankError, match=f"^rank 1 was killed by {name}(\n|$)"):
        launch(end_by, 2, (number,), timeout_s=60)


def fork_and_come_back(raising: bool) -> str:
    """So does the child, before its parent."""
    child = os.fork()
    if child == 0:
        if raising:
            raise LookupError("in the child")
        return "the child's"
    _, status = os.waitpid(child, 0)
    return f"the rank's; its child ended with {os.waitstatus_to_exitcode(status)}"


@pytest.mark.parametrize("raising", [False, True])
def test_a_forked_child_that_comes_back_is_not_the_rank(raising: bool) -> None:
    said = f"the rank's; its child ended with {int(raising)}"
    assert launch(fork_and_come_back, 2, (raising,), timeout_s=60) == [said] * 2


def die_beside_a_child(gate: Path) -> None:
    """The child, which has the rank's pipe to the launcher too, ends when the test does."""
    if os.environ["RANK"] == "1":
        if os.fork() == 0:
            wait_at(gate)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)
    wait_for_ever()


@pytest.mark.usefixtures("short_grace")
def test_a_death_is_noticed_though_a_forked_child_lives_on(tmp_path: Path) -> None:
    gate = Gate(tmp_path)
    try:
        with pytest.raises(RankError, match="rank 1 was killed by SIGKILL"):
            launch(die_beside_a_child, 2, (gate.path,), timeout_s=30)
    finally:
        gate.open()


def end_in_the_middle_of_the_result(number: int) -> bytes:
    def half(tell: Connection, outcome: bytes) -> None:
        os.write(tell.fileno(), len(outcome).to_bytes(8) + outcome[: len(outcome) // 2])
        os.kill(os.getpid(), number)

    if os.environ["RANK"] == "1":
        sys.modules["shardcomm.process.launch"]._Outcome.send = half
    return bytes(10_000)


def test_a_rank_that_ends_in_the_middle_of_its_result_is_named() -> None:
    with pytest.raises(RankError, match="rank 1 was killed by SIGKILL"):
        launch(end_in_the_middle_of_the_result, 2, (signal.SIGKILL,), timeout_s=60)
    with pytest.raises(TimeoutError, match=r"ranks \[1\] of 2 still ran after 3 s"):
        launch(end_in_the_middle_of_the_result, 2, (signal.SIGSTOP,), timeout_s=3)


def return_much() -> bytes:
    return bytes(range(256)) * 40_000


def test_a_result_is_as_long_as_one_likes() -> None:
    assert launch(return_much, 2, timeout_s=60) == [return_much()] * 2


class ReadNowhere:
    """Pickled, it makes an error."""

    def __reduce__(self) -> object:
        return int, ("no number",)


def return_what_cannot_be_read() -> ReadNowhere:
    return ReadNowhere()


def test_a_result_that_cannot_be_unpickled_names_its_rank() -> None:
    said = "rank 0 returned what cannot be unpickled here: ValueError: invalid literal"
    with pytest.raises(RankError, match=said):
        launch(return_what_cannot_be_read, 1, timeout_s=60)


def end_well() -> None:
    launch(rank_and_double, RANKS, (1,), timeout_s=60)


def end_at_the_deadline() -> None:
    with pytest.raises(TimeoutError):
        launch(wait_for_ever, RANKS, timeout_s=0.5)


@pytest.mark.parametrize("run", [end_well, end_at_the_deadline])
def test_no_process_and_no_descriptor_is_left(run: Callable[[], None]) -> None:
    run()  # the fork server stays, once started
    before = len(os.listdir("/proc/self/fd"))
    children = set(multiprocessing.active_children())  # of other tests' fixtures
    run()
    assert set(multiprocessing.active_children()) == children
    assert len(os.listdir("/proc/self/fd")) == before


def addresses_of_gloo_and_of_the_store() -> list[str]:
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    dist.barrier()
    addresses = [*listening(), *listening(int(os.environ["MASTER_PORT"]))]
    dist.barrier()
    dist.destroy_process_group()
    return addresses


def test_only_this_host_can_connect() -> None:
    for addresses in launch(addresses_of_gloo_and_of_the_store, 2, timeout_s=60):
        assert len(addresses) >= 2
        assert set(addresses) == {"127.0.0.1"}


def say_who(folder: Path) -> None:
    name = f"rank {os.environ['RANK']}"
    (folder / f".{name}").write_text(f"{os.getpid()} {os.getppid()}")
    (folder / f".{name}").rename(folder / name)  # whole


def wait_with_the_interpreter(folder: Path) -> None:
    say_who(folder)
    ctypes.PyDLL(None).pause()  # unlike a CDLL, it does not let go of the interpreter


def wait_without_the_interpreter(folder: Path) -> None:
    say_who(folder)
    wait_for_ever()


def wait_until(condition: Callable[[], object], seconds: float, what: str) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.01)


def return_and_never_end(folder: Path) -> None:
    say_who(folder)
    threading.Thread(target=wait_for_ever).start()


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


def die_in_set_up() -> None:
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    Communicator.from_env(deadline_s=1)


def test_rank_that_dies_before_it_attaches_does_not_hang_the_others() -> None:
    with pytest.raises(RankError, match="rank 1 was killed by SIGKILL"):
        launch(die_in_set_up, 2, timeout_s=60)


def raise_on_rank_1() -> None:
    with Communicator.from_env(deadline_s=20) as comm:
        if comm.rank == 1:
            raise ValueError("rank 1 has a bug")
        comm.barrier()


def test_launch_names_the_first_cause() -> None:
    with pytest.raises(RankError) as caught:
        launch(raise_on_rank_1, 3, timeout_s=60)
    message = str(caught.value)
    assert message.startswith("rank 1 raised")
    assert "ValueError: rank 1 has a bug" in message
    assert "rank 0 raised CommError: rank 1 (pid" in message


def never_end() -> None:
    threading.Event().wait()


def test_launch_ends_ranks_at_its_deadline() -> None:
    with pytest.raises(TimeoutError, match=r"ranks \[0, 1\] of 2 still ran after 1 s"):
        launch(never_end, 2, timeout_s=1)


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


def launch_inside() -> list[tuple[int, int]]:
    return launch(rank_and_double, 2, (1,), timeout_s=60)


def die_while_ranks_inside_run(folder: Path) -> None:
    def die() -> None:
        files = [folder / f"rank {rank}" for rank in range(2)]
        wait_until(lambda: all(file.exists() for file in files), 60, "the ranks start")
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=die, daemon=True).start()
    launch(wait_without_the_interpreter, 2, (folder,), timeout_s=60)


def launch_launchers(folder: Path) -> None:
    doubles = [(0, 2), (1, 2)]
    assert launch(launch_inside, 1, timeout_s=90) == [doubles]
    assert launch(rank_and_double, 2, (1,), timeout_s=60) == doubles
    with pytest.raises(RankError, match=r"^rank 0 was killed by SIGKILL$"):
        launch(die_while_ranks_inside_run, 1, (folder,), timeout_s=90)
    assert launch(rank_and_double, 2, (1,), timeout_s=60) == doubles


def is_gone(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


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


FUNCTION = "def function(): pass"
STDIN = "__file__ = '<stdin>'"  # as Python sets it for a program that it reads there


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ([FUNCTION], "TypeError: launch: fn is <function function at "),
        ([STDIN, FUNCTION], "TypeError: launch: fn is <function function at "),
        ([STDIN, "from os import getpid as function"], "RuntimeError: launch: the program's file is '"),
    ],
)  # fmt: skip
def test_a_program_that_ranks_cannot_import_is_refused(program: list[str], said: str) -> None:
    lines = [*program, "import shardcomm", "shardcomm.launch(function, 2, timeout_s=60)"]
    ran = interpreters.run("\n".join(lines))
    assert ran.returncode == 1
    assert ran.stderr.count("Traceback") == 1
    assert ran.stderr.splitlines()[-1].startswith(said)


def test_a_call_that_is_not_under_the_guard_is_refused(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text("import os, shardcomm\nshardcomm.launch(os.getpid, 2, timeout_s=60)\n")
    ran = subprocess.run(
        [sys.executable, str(program)], capture_output=True, text=True, timeout=120, check=False
    )
    assert ran.returncode == 1
    assert 'put the call of launch under `if __name__ == "__main__":`' in ran.stderr
    assert "RankError: rank 0 ended with exit status 1 before it called fn; stderr" in ran.stderr


def test_a_rank_that_cannot_read_its_arguments_has_not_called_the_function() -> None:
    with pytest.raises(RankError, match=r"^rank 0 ended with exit status 1 before it called fn"):
        launch(abs, 1, (ReadNowhere(),), timeout_s=60)


def test_a_daemonic_process_is_refused() -> None:
    with (
        multiprocessing.get_context("forkserver").Pool(1) as pool,
        pytest.raises(RuntimeError, match="launch: this process is a daemonic one"),
    ):
        pool.apply(launch, (abs, 1, (1,)))


def launch_in_a_child(tell: Connection) -> None:
    try:
        launch(abs, 1, (1,), timeout_s=60)
    except RuntimeError as error:
        tell.send(str(error))


def test_a_forked_child_of_a_launcher_is_refused() -> None:
    assert launch(abs, 1, (-1,), timeout_s=60) == [1]
    context = multiprocessing.get_context("fork")
    told, tell = context.Pipe(duplex=False)
    child = context.Process(target=launch_in_a_child, args=(tell,))
    child.start()
    tell.close()
    try:
        assert told.recv().startswith("launch: this process was forked from one that has called")
    finally:
        child.join(60)
    assert child.exitcode == 0


def launch_with_sockets_in(folder: Path) -> None:
    tempfile.tempdir = str(folder)
    launch(rank_and_double, 1, (1,), timeout_s=60)


@pytest.mark.skipif(
    hasattr(multiprocessing.util, "_get_base_temp_dir"), reason="this Python then takes /tmp"
)
def test_a_long_path_of_temporary_files_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / ("long" * 25)
    folder.mkdir()
    with pytest.raises(
        RankError, match=r"OSError: launch: .* set TMPDIR to a folder with a shorter"
    ):
        launch(launch_with_sockets_in, 1, (folder,), timeout_s=60)


def kill_the_fork_server() -> None:
    os.kill(os.getppid(), signal.SIGKILL)
    wait_for_ever()


def launch_and_lose_the_fork_server() -> None:
    launch(kill_the_fork_server, 1, timeout_s=60)


def test_a_killed_fork_server_is_named() -> None:
    said = "RankError: rank 0 ended with the fork server, .*, and which was killed by SIGKILL"
    with pytest.raises(RankError, match=said):
        launch(launch_and_lose_the_fork_server, 1, timeout_s=60)


def kill_the_fork_server_while_a_rank_starts() -> None:
    forkserver.ensure_running()
    server = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
    os.kill(server, signal.SIGSTOP)
    read = forkserver.read_signed

    def read_of_a_killed_one(fd: int) -> int:
        os.kill(server, signal.SIGKILL)
        return read(fd)

    forkserver.read_signed = read_of_a_killed_one  # type: ignore[attr-defined]
    launch(print, 1, timeout_s=60)


def test_a_fork_server_that_is_killed_while_ranks_start_is_named() -> None:
    said = "RankError: rank 0 ended with the fork server, .*, and which was killed by SIGKILL"
    with pytest.raises(RankError, match=said):
        launch(kill_the_fork_server_while_a_rank_starts, 1, timeout_s=60)


if __name__ == "__main__":
    name, folder = sys.argv[1], Path(sys.argv[2])
    if name == "launch_launchers":
        launch_launchers(folder)
    else:
        launch(globals()[name], 2, (folder,))
