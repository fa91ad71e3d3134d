"""Processes of this host as /proc shows them."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path


def pids() -> list[int]:
    """Of all processes that are there."""
    return sorted(int(name) for name in os.listdir("/proc") if name.isdigit())


def memory_files(pid: int) -> Iterator[tuple[str, int]]:
    """Label and descriptor of each memory file (memfd) that the process has open.

    Raises:
        PermissionError: this user must not look into the process.
    """
    folder = f"/proc/{pid}/fd"
    try:
        for name in os.listdir(folder):
            found = re.fullmatch(r"/memfd:(.*) \(deleted\)", os.readlink(f"{folder}/{name}"))
            if found:
                yield found[1], int(name)
    except (FileNotFoundError, ProcessLookupError):
        return  # it has closed it, or has ended


def open_of(pid: int, fd: int, flags: int) -> int | None:
    """What the process has open as `fd`, opened here; None if it has closed it, or ended."""
    try:
        return os.open(f"/proc/{pid}/fd/{fd}", flags | os.O_CLOEXEC)
    except (FileNotFoundError, ProcessLookupError):
        return None


def state(pid: int, start: int) -> str | None:
    """The process's state, a letter as in proc_pid_stat(5); None if it has ended.

    `start`: when it began (field 22); another process that has been given its number is not it.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" or int(fields[19]) != start else fields[0]


def handles(pid: int, number: int) -> bool:
    """Whether the process has a handler for a signal."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    caught = re.search(r"^SigCgt:\s*([0-9a-f]+)", status, re.MULTILINE)
    return caught is not None and bool(int(caught[1], 16) >> (number - 1) & 1)


def is_of_this_namespace(pid: int) -> bool:
    """Whether its group's process numbers are those that are seen here."""
    try:
        return os.readlink(f"/proc/{pid}/ns/pid") == os.readlink("/proc/self/ns/pid")
    except OSError:
        return False


def is_kernel_thread(pid: int) -> bool:
    """Whether it is no program at all: nothing was executed in it."""
    try:
        return not Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return True
