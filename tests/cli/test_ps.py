"""`shardcomm ps`: who waits, in what and where, told by whoever asks, with nobody disturbed."""

from __future__ import annotations

import faulthandler
import json
import os
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch

from shardcomm import _C, CommError, Communicator, Stream, enable_stack_dumps
from shardcomm.cli.ps import groups, stacks
from shardcomm.cli.ps.command import screen
from shardcomm.comm import introduction
from shardcomm.comm.core import CoreCommunicator
from support.commands import command
from support.gates import DEADLINE_S, Gate, launched, until, wait_at
from support.ranks_of_groups import group_of, pids_in, say_pid, wait_for_rank_1

RANKS = 3
NOBODY = 65533  # not 65534, as whom other tests run ranks beside this one


def ps(*options: str) -> str:
    done = command("ps", *options)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def states(pid: int) -> list[str]:
    group = group_of(pid)
    return [rank.state for rank in group.ranks] if group else []


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


def test_a_group_of_one_rank_has_one_rank() -> None:
    alone = groups.ShmGroup(7, [groups.Rank(0, 1, "running", [])], "", 0, 0)
    assert screen(groups.Found([alone]), None).startswith("group 7: 1 rank\n")


def test_where_there_are_no_groups_it_says_what_it_does_not_see() -> None:
    assert "by Gloo or NCCL alone is not seen" in screen(groups.Found(), None)


def look_as_nobody(folder: Path) -> list[str]:
    if say_pid(folder) == 0:
        with Communicator.from_env(deadline_s=DEADLINE_S, transport="shm"):
            wait_at(folder / "gate")
        return []
    with Communicator.from_env(deadline_s=DEADLINE_S, transport="shm"):
        pass  # this rank has closed its memory, so that a group could only be found in the other rank
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
