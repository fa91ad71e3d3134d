"""The processes of a host, as /proc shows them to this process."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from shardcomm.cluster.hosts import Host


def pids_on(host: Host) -> list[int]:
    """The processes of a host, as this process numbers them."""
    own = os.stat(f"/proc/{host.namespaces.pid}/ns/pid_for_children").st_ino
    pids = []
    for name in os.listdir("/proc"):
        with suppress(OSError):
            if name.isdigit() and os.stat(f"/proc/{name}/ns/pid").st_ino == own:
                pids.append(int(name))
    return pids


def rank_of(pid: int) -> int | None:
    """The rank that the process or one above it is, as its environment says. A program may say anything there."""
    with suppress(OSError, ValueError):
        for entry in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            if entry.startswith(b"RANK="):
                return int(entry.removeprefix(b"RANK="))
    return None


def parent_of(pid: int) -> int:
    """The process that has started this one; 0 if it has ended."""
    with suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return 0
