"""Ranks meet, or all say why not: deaths, refusals, silence and Ctrl-C before the first collective."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardcomm import CommError, Communicator, RankError, launch
from shardcomm.comm import rendezvous
from shardcomm.meeting import background
from shardcomm.meeting.exchange import Exchange
from shardcomm.meeting.store import env_store
from support.thread_ranks import each_rank

RANKS = 3
NOTICED_S = 10.0  # long before the deadline


def dying(
    folder: Path, function: Callable[..., Any], calls: int, after: bool
) -> Callable[..., Any]:
    """`function`, but its `calls`th call kills this process, at its begin or after it; says so in `folder`."""
    done = 0

    def replacement(*args: Any, **kwargs: Any) -> Any:
        nonlocal done
        done += 1
        result = function(*args, **kwargs) if after or done < calls else None
        if done == calls:
            (folder / "died").write_text(json.dumps([os.getpid(), time.monotonic()]))
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    return replacement


@pytest.fixture(autouse=True)
def ranks_may_say_late_what_they_saw(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine may take longer than `launch` leaves those that outlive a rank."""
    monkeypatch.setattr("shardcomm.process.launch.GRACE_S", 2 * NOTICED_S)


# Where a rank dies: the transport, what it calls there, the how many-th call of that, and whether it dies after it.
POINTS = {
    "after its first word": ("shm", Exchange, "_post", 1, True),
    "after the first exchange": ("shm", Exchange, "__call__", 1, True),
    "after its second word": ("shm", Exchange, "_post", 2, True),
    "after the second exchange": ("shm", Exchange, "__call__", 2, True),
    "before it maps the memory": ("shm", rendezvous._C, "ShmMember", 1, False),
    "after it mapped the memory": ("shm", rendezvous._C, "ShmMember", 1, True),
    "before it attaches": ("shm", rendezvous._C.ShmMember, "attach", 1, False),
    "before Gloo connects": ("c10d", rendezvous, "PrefixStore", 1, False),
    "between Gloo's groups": ("c10d", rendezvous, "PrefixStore", 2, False),
}


def from_env(transport: Any, deadline_s: float, device: str = "cpu") -> None:
    Communicator.from_env(transport=transport, deadline_s=deadline_s, device=device)


def through_a_group(transport: Any, deadline_s: float, device: str = "cpu") -> None:
    dist.init_process_group("gloo")
    Communicator.from_process_group(transport=transport, deadline_s=deadline_s, device=device)


def as_backend(_: Any, deadline_s: float) -> None:
    dist.init_process_group("shardcomm", timeout=timedelta(seconds=deadline_s))


def die_at(folder: Path, victim: int, point: str, meet: Callable[[Any, float], None]) -> None:
    transport, owner, name, calls, after = POINTS[point]
    rank = int(os.environ["RANK"])
    if rank == victim:
        setattr(owner, name, dying(folder, getattr(owner, name), calls, after))
    with pytest.raises(CommError) as caught:
        meet(transport, 120.0)
    (folder / str(rank)).write_text(json.dumps([str(caught.value), time.monotonic()]))


def check_death_is_named(
    folder: Path, victim: int, point: str, meet: Callable[[Any, float], None]
) -> None:
    with pytest.raises(RankError, match=f"rank {victim} was killed by SIGKILL"):
        launch(die_at, RANKS, (folder, victim, point, meet), timeout_s=60)
    pid, died = json.loads((folder / "died").read_text())
    for rank in set(range(RANKS)) - {victim}:
        message, noticed = json.loads((folder / str(rank)).read_text())
        # Over Gloo a rank may see others that ended because they saw it, too.
        assert re.search(rf"rank {victim} \(pid {pid}\) (and .*)?died", message), message
        assert noticed - died < NOTICED_S, message


@pytest.mark.covers("set-up that fails")
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("point", POINTS)
def test_rank_that_dies_in_set_up_is_named_by_all_others_at_once(
    tmp_path: Path, victim: int, point: str
) -> None:
    check_death_is_named(tmp_path, victim, point, from_env)


@pytest.mark.parametrize("meet", [through_a_group, as_backend])
@pytest.mark.parametrize("point", ["before it maps the memory", "before it attaches"])
def test_so_is_one_that_meets_through_torch_distributed(
    tmp_path: Path, point: str, meet: Callable[[Any, float], None]
) -> None:
    check_death_is_named(tmp_path, 1, point, meet)


def meet_without(absent: list[int], folder: Path) -> None:
    rank = int(os.environ["RANK"])
    if rank in absent:
        os._exit(3)
    store, _, size = env_store(timedelta(seconds=60))
    store.set(f"{rank} begins", "")
    store.wait([f"{peer} begins" for peer in set(range(size)) - set(absent)], timedelta(seconds=60))
    with pytest.raises(CommError) as caught:
        from_env("auto", 3.0)
    assert type(caught.value) is CommError  # which users can import
    (folder / str(rank)).write_text(str(caught.value))


@pytest.mark.parametrize(
    ("absent", "named"), [([0], "rank 0"), ([2], "rank 2"), ([0, 2], "ranks 0, 2")]
)
def test_ranks_that_never_come_are_listed(tmp_path: Path, absent: list[int], named: str) -> None:
    with pytest.raises(RankError):
        launch(meet_without, 4, (absent, tmp_path), timeout_s=60)
    for rank in set(range(4)) - set(absent):
        message = (tmp_path / str(rank)).read_text()
        assert message.endswith(
            f"not all ranks came to the rendezvous within 3 s: no word of {named}"
        )


# Where a rank gives up: as in POINTS, or at an argument of its own.
GIVING_UP = [
    "device",
    "deadline_s",
    "after the first exchange",
    "after the second exchange",
    "before it maps the memory",
    "before Gloo connects",
    "between Gloo's groups",
]


def give_up_at(
    folder: Path, victim: int, point: str, meet: Callable[[Any, float, str], None]
) -> None:
    """The rank that gives up lives on until the others have heard of it."""
    transport, owner, name, calls, after = POINTS.get(point, ("shm", None, "", 0, False))
    rank = int(os.environ["RANK"])
    store, _, size = env_store(timedelta(seconds=60))
    if rank != victim:
        with pytest.raises(CommError) as caught:
            meet(transport, 120.0, "cpu")
        (folder / str(rank)).write_text(json.dumps([str(caught.value), time.monotonic()]))
        store.set(f"{rank} has heard", "")
        return
    begun = itertools.count(1)

    def giving_up(*args: Any, **kwargs: Any) -> Any:
        last = next(begun) == calls
        result = function(*args, **kwargs) if after or not last else None
        if last:
            raise LookupError("odd")
        return result

    if owner:
        function = getattr(owner, name)
        setattr(owner, name, giving_up)
    with pytest.raises((LookupError, ValueError)):
        meet(
            transport,
            -1.0 if point == "deadline_s" else 120.0,
            "tpu" if point == "device" else "cpu",
        )
    (folder / "gave up").write_text(str(time.monotonic()))
    others = [f"{peer} has heard" for peer in range(size) if peer != victim]
    store.wait(others, timedelta(seconds=20))


@pytest.mark.covers("set-up that fails")
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("meet", [from_env, through_a_group])
@pytest.mark.parametrize("point", GIVING_UP)
def test_why_a_rank_gives_up_reaches_all_others_at_once(
    tmp_path: Path, victim: int, point: str, meet: Callable[[Any, float, str], None]
) -> None:
    launch(give_up_at, RANKS, (tmp_path, victim, point, meet), timeout_s=60)
    gave_up = float((tmp_path / "gave up").read_text())
    refused = {
        "device": "tpu; accepted: 'cpu', ",
        "deadline_s": "-1.0; it must be a number above 0",
    }
    said = (
        rf"ValueError: \w+: {point} is {refused[point]}" if point in refused else "LookupError: odd"
    )
    for rank in set(range(RANKS)) - {victim}:
        message, noticed = json.loads((tmp_path / str(rank)).read_text())
        assert re.search(f"rank {victim} of {RANKS} gave up its set-up: {said}", message), message
        assert noticed - gave_up < NOTICED_S, message


class _OtherGivesUp(Exchange):
    """Rank 1's exchange. Between its looks at the others' words and at who has failed, rank 0 comes and gives up."""

    def __init__(self, zero: Exchange, store: dist.Store) -> None:
        super().__init__(store, "test", 1, 2, 60.0)
        self._zero = [zero]

    def _read(self, key: str) -> bytes | None:
        if key.endswith("/failed") and self._zero:
            zero = self._zero.pop()
            assert zero(b"zero") == [b"zero", b"one"]
            with pytest.raises(ValueError, match="no"), zero.telling():
                raise ValueError("no")
        return super()._read(key)


def test_who_gives_up_over_a_round_does_not_keep_its_words_from_others() -> None:
    """So that each rank raises its own error over what the ranks do not agree on."""
    store = dist.HashStore()
    one = _OtherGivesUp(Exchange(store, "test", 0, 2, 60.0), store)
    assert one(b"one") == [b"zero", b"one"]
    with pytest.raises(CommError, match="rank 0 of 2 gave up its set-up: ValueError: no"):
        one(b"again")


def test_ranks_with_different_world_sizes_are_told_at_once() -> None:
    store = dist.HashStore()

    def run(rank: int) -> str:
        with pytest.raises(CommError) as caught:
            Exchange(store, "test", rank, 4 if rank == 1 else 3, 60.0)(b"a word")
        return str(caught.value)

    for message in each_rank(run, 3):
        assert re.fullmatch(
            r"WORLD_SIZE is (3 on rank 0 and 4 on rank 1|4 on rank 1 and 3 on rank 2); it must be the "
            "same on every rank",
            message,
        )


@pytest.fixture
def silent_port(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Of a socket that takes connections and never answers, where the environment says that the store is."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        for name, value in {
            "RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        }.items():  # fmt: skip
            monkeypatch.setenv(name, value)
        yield server


def test_store_that_does_not_answer_ends_at_the_deadline(silent_port: socket.socket) -> None:
    begun = time.monotonic()
    port = silent_port.getsockname()[1]
    said = f"rank 0 keeps the store at 127.0.0.1:{port}, which was not reached(: | within 0.5 s)"
    with pytest.raises(CommError, match=said):
        from_env("auto", 0.5)
    assert time.monotonic() - begun < 0.5 + NOTICED_S


WAITING = """
import faulthandler
import shardcomm
faulthandler.dump_traceback_later(50)  # for whoever has to find out why Ctrl-C was not heard
try:
    shardcomm.Communicator.from_env(deadline_s=300, device="cpu")
except KeyboardInterrupt:
    print("interrupted")
"""


def check_ends_when_interrupted(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=60)[0].strip() == "interrupted"  # long before its deadline


def start_waiting(**environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", WAITING],
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        text=True,
    )


def test_ctrl_c_is_heard_while_the_store_does_not_answer(silent_port: socket.socket) -> None:
    process = start_waiting()
    try:
        silent_port.settimeout(60)
        connection, _ = silent_port.accept()
        with connection:
            check_ends_when_interrupted(process)
    finally:
        process.kill()
        process.wait()


def test_what_ctrl_c_interrupts_as_it_begins_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the end of the process; else a thread would be left in torch's code while the interpreter ends."""
    start, over = threading.Thread.start, threading.Event()

    def start_and_be_interrupted(thread: threading.Thread) -> None:
        start(thread)
        raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", start_and_be_interrupted)
    before = set(background._threads)
    with pytest.raises(KeyboardInterrupt):
        background.Background(over.wait)
    (thread,) = background._threads - before
    over.set()
    thread.join(60)
    assert not thread.is_alive()


def test_ctrl_c_is_heard_while_a_rank_has_not_come() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    process = start_waiting(
        RANK="1", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(store.port),
        TORCHELASTIC_USE_AGENT_STORE="True",
    )  # fmt: skip
    try:
        store.wait(["attempt 0/shardcomm/0/0/1"], timedelta(seconds=60))
        check_ends_when_interrupted(process)
    finally:
        process.kill()
        process.wait()


KEEPING = """
import sys, torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""


def test_store_that_is_stopped_ends_at_the_deadline() -> None:
    keeper = subprocess.Popen(
        [sys.executable, "-c", KEEPING], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert keeper.stdout is not None
        port = int(keeper.stdout.readline())
        exchange = Exchange(
            dist.TCPStore("127.0.0.1", port, wait_for_workers=False), "test", 0, 1, 0.5
        )
        assert exchange(b"a word") == [b"a word"]
        keeper.send_signal(signal.SIGSTOP)
        os.waitpid(keeper.pid, os.WUNTRACED)  # the signal stops the store's thread some time later
        begun = time.monotonic()
        with pytest.raises(CommError, match=r"rank 0 of 1: not all ranks came .* nobody answers"):
            exchange(b"another")
        assert time.monotonic() - begun < 0.5 + NOTICED_S
    finally:
        keeper.kill()
        keeper.wait()


@pytest.mark.parametrize(
    ("name", "value", "accepted"),
    [
        ("RANK", "2", "a whole number from 0 to 1"),
        ("RANK", "-1", "a whole number from 0 to 1"),
        ("WORLD_SIZE", "two", "a whole number from 1 to 2147483647"),
        ("MASTER_PORT", "70000", "a whole number from 0 to 65535"),
    ],
)
@pytest.mark.usefixtures("silent_port")
def test_bad_variable_is_named(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, accepted: str
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(
        ValueError, match=f"environment variable {name} is {value!r}; it must be {accepted}"
    ):
        from_env("auto", 5.0)


@pytest.mark.parametrize(("name", "value"), [("LOCAL_RANK", "first"), ("LOCAL_WORLD_SIZE", "0")])
def test_bad_variable_of_this_host_is_named(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(
        ValueError, match=f"variable {name} is {value!r}; it must be a whole number"
    ):
        Communicator.from_env()


def connect_in_debug_mode() -> None:
    dist.set_debug_level(dist.DebugLevel.DETAIL)  # torch then wraps each backend
    dist.init_process_group("gloo")
    if dist.get_rank() == 0:  # torch names groups by how many of them a rank is in
        dist.new_group([0], use_local_synchronization=True)
    Communicator.from_process_group(transport="c10d", deadline_s=10).close()
    dist.destroy_process_group()


def test_ranks_in_different_numbers_of_groups_meet_in_torchs_debug_mode() -> None:
    launch(connect_in_debug_mode, 2, timeout_s=60)


def connect_over_new_groups_of_torch(backend: str) -> None:
    """With new groups of torch's own, which ranks make that are in different numbers of groups."""
    dist.init_process_group(backend)
    Communicator.from_process_group(transport="c10d", deadline_s=10).close()
    dist.new_group([0])
    with Communicator.from_process_group(transport="c10d", deadline_s=10) as comm:
        total = torch.ones(1)
        comm.all_reduce(total)
        assert total.item() == comm.size
    dist.destroy_process_group()


def test_ranks_in_different_numbers_of_groups_meet_over_any_backend() -> None:
    launch(connect_over_new_groups_of_torch, 2, ("cpu:shardcomm",), timeout_s=60)
