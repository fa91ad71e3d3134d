"""Ranks that end without a result, and a fork server that does: `launch` says what happened."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from shardcomm import Communicator, RankError, launch
from support.gates import Gate, wait_at
from support.waiting_ranks import (
    wait_for_ever,
)


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
        sys.modules["shardcomm.process.rank"].Outcome.send = half
    return bytes(10_000)


def test_a_rank_that_ends_in_the_middle_of_its_result_is_named() -> None:
    with pytest.raises(RankError, match="rank 1 was killed by SIGKILL"):
        launch(end_in_the_middle_of_the_result, 2, (signal.SIGKILL,), timeout_s=60)
    with pytest.raises(TimeoutError, match=r"ranks \[1\] of 2 still ran after 3 s"):
        launch(end_in_the_middle_of_the_result, 2, (signal.SIGSTOP,), timeout_s=3)


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
