"""The processes of this host, as /proc shows them."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path


def pids() -> list[int]:
    """The numbers of all processes that are there."""
    return sorted(int(name) for name in os.listdir("/proc") if name.isdigit())


def memory_files(pid: int) -> Iterator[tuple[str, int]]:
    """The label and descriptor of each memory file (memfd) that the process has open.

    Raises:
        PermissionError: This user may not look into the process.
    """
    folder = f"/proc/{pid}/fd"
    with suppress(FileNotFoundError, ProcessLookupError):  # the process has ended
        for name in os.listdir(folder):
            # It may have closed that one. Of this process the listing itself was one.
            with suppress(FileNotFoundError):
                found = re.fullmatch(r"/memfd:(.*) \(deleted\)", os.readlink(f"{folder}/{name}"))
                if found:
                    yield found[1], int(name)


def open_of(pid: int, fd: int, flags: int) -> int | None:
    """Opens here the file that the process has open as `fd`; None if it has closed it, or has ended."""
    try:
        return os.open(f"/proc/{pid}/fd/{fd}", flags | os.O_CLOEXEC)
    except (FileNotFoundError, ProcessLookupError):
        return None


def state(pid: int, start: int) -> str | None:
    """The process's state, a letter as in proc_pid_stat(5); None if it has ended.

    Args:
        pid: The process's number.
        start: When it began (field 22), since another process may have been given its number.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" or int(fields[19]) != start else fields[0]


def handles(pid: int, number: int) -> bool:
    """Whether the process has a handler for the signal `number`."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    caught = re.search(r"^SigCgt:\s*([0-9a-f]+)", status, re.MULTILINE)
    return caught is not None and bool(int(caught[1], 16) >> (number - 1) & 1)


def is_of_this_namespace(pid: int) -> bool:
    """Whether the process is in this process namespace, so that its group's process numbers mean the same here."""
    try:
        return os.readlink(f"/proc/{pid}/ns/pid") == os.readlink("/proc/self/ns/pid")
    except OSError:
        return False


def is_kernel_thread(pid: int) -> bool:
    """Whether it is a thread of the kernel, in which no program was executed."""
    try:
        return not Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return True
