"""What hosts on one machine could leave behind: namespaces with processes, interfaces, mounts."""

from __future__ import annotations

import os
from pathlib import Path

STAY = "readlink /proc/self/ns/net /proc/self/ns/pid; exec sleep infinity"
"""Says in which namespaces it is, and stays."""


def in_use() -> set[str]:
    """The network and PID namespaces of all processes."""
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        for kind in ("net", "pid", "pid_for_children"):
            try:
                found.add(os.readlink(process / "ns" / kind))
            except OSError:  # it has ended
                continue
    return found


def interfaces() -> list[str]:
    """The network interfaces of this process's namespace."""
    return sorted(os.listdir("/sys/class/net"))


def mounts() -> list[str]:
    """What this process sees mounted."""
    return sorted(Path("/proc/self/mountinfo").read_text().splitlines())
