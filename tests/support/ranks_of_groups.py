"""Ranks of other processes over shared memory, as `shardcomm ps` sees them."""

from __future__ import annotations

import os
from pathlib import Path

from shardcomm.cli.ps import groups
from support.gates import until


def group_of(pid: int) -> groups.ShmGroup | None:
    """The one group that the process is a rank of, if there is one."""
    found = [g for g in groups.find().groups if pid in [rank.pid for rank in g.ranks]]
    assert len(found) <= 1
    return found[0] if found else None


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
