"""The groups of this host: found through what processes have open, and read from the memory that their ranks share."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Literal

from shardcomm import _C
from shardcomm.comm.pending import Pending, from_core
from shardcomm.process import processes

State = Literal["running", "waiting", "stopped", "closed", "dead", "not attached"]


@dataclass(frozen=True)
class Rank:
    """One rank as it was seen. `calls` are the collectives that it is in; there may be none."""

    rank: int
    pid: int | None
    state: State
    calls: list[Pending]


@dataclass(frozen=True)
class ShmGroup:
    """A group of `shm`, or the ranks of this host in a group of `hosts`.

    `id` is the number of its memory; `failure` says why it has failed, "" if it has not. `hosts` says on how many hosts
    the group has as many ranks, and `host` is the number of this one; 0 and 0: it is of this host alone.
    """

    id: int
    ranks: list[Rank]
    failure: str
    hosts: int
    host: int


@dataclass
class Found:
    """The result of one look. `notes` are sentences about processes that could not be looked into."""

    groups: list[ShmGroup] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def find() -> Found:
    """Looks at all processes of this host that this user may look into."""
    found = Found()
    seen: set[int] = set()
    unreadable = 0
    for pid in processes.pids():
        try:
            for label, fd in processes.memory_files(pid):
                if label == _C.group_label:
                    _read(pid, fd, seen, found)
        except PermissionError:
            unreadable += not processes.is_kernel_thread(pid)
    if unreadable:
        found.notes.append(
            f"processes that could not be looked into: {unreadable}; their own users see their groups, and so does "
            "root outside of containers"
        )
    return found


def _read(pid: int, fd: int, seen: set[int], found: Found) -> None:
    memory = processes.open_of(pid, fd, os.O_RDONLY)
    if memory is None:
        return
    try:
        number = os.fstat(memory).st_ino
        if number in seen:
            return
        seen.add(number)
        if not processes.is_of_this_namespace(pid):
            note = f"process {pid} is of a group in a container; `shardcomm ps` inside it tells of that group"
            if note not in found.notes:  # a process may be of several groups
                found.notes.append(note)
            return
        report = _C.read_group(memory)
    except _C.CommError as error:
        found.notes.append(f"process {pid}: {error}")
        return
    finally:
        os.close(memory)
    group = ShmGroup(number, _ranks(report), report.failure, report.hosts, report.host)
    if any(rank.state not in ("closed", "dead") for rank in group.ranks):
        found.groups.append(group)


def _ranks(report: _C.GroupReport) -> list[Rank]:
    ranks = []
    pending = from_core(report.pending)
    for number, pid, start, attached, closed in report.ranks:
        calls = [each for each in pending if each.rank == number and each.call]
        alive = processes.state(pid, start) if pid else None
        state: State = "running"
        if pid and alive is None:
            state = "dead"
        elif closed:
            state = "closed"
        elif alive in ("T", "t"):
            state = "stopped"
        elif not attached:
            state = "not attached"
        elif any(call.waiting_s is not None for call in calls):
            state = "waiting"
        ranks.append(Rank(number, pid or None, state, calls))
    return ranks
