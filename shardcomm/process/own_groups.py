"""What the ranks of this process's groups are in."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress

from shardcomm import _C
from shardcomm.comm import pending
from shardcomm.process import processes


def report() -> str:
    """What the ranks of the groups of this process are in, one line for each rank.

    Groups of `shm` and `hosts` are read from the memory that their ranks share, as `shardcomm ps` reads it. So it tells
    of those of the torch.distributed backend and of the C library, too. Of other groups it tells of those that Python
    has made. It takes no lock, and raises nothing, so that signal handlers may call it.
    """
    return "".join(f"{line}\n" for line in [*_shared(), *pending.report()])


def _shared() -> Iterator[str]:
    own_pid = os.getpid()
    try:
        memories = _memories(own_pid)
    except OSError as error:
        yield f"groups of shm and hosts cannot be read: {error}"
        return
    for fd in memories:
        try:
            group = _C.read_group(fd)
        except _C.CommError:  # it is not ready yet, or was closed meanwhile
            continue
        size = len(group.ranks) * max(1, group.hosts)
        own = [number for number, pid, _, _, closed in group.ranks if pid == own_pid and not closed]
        if own and size > 1:
            transport = "hosts" if group.hosts else "shm"
            calls = pending.from_core(group.pending)
            yield from pending.lines(transport, size, f"this is {own[0]}", calls)


def _memories(own_pid: int) -> list[int]:
    """A descriptor of each group's memory. OSError if this process can open no more files to look."""
    found: dict[int, int] = {}
    for label, fd in processes.memory_files(own_pid):
        if label == _C.group_label:
            with suppress(OSError):  # another thread has closed it
                found[os.fstat(fd).st_ino] = fd
    return list(found.values())
