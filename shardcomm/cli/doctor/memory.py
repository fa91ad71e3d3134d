"""The limits of the memory that processes of a host share.

A window is an unnamed file in memory (memfd), which rank 0 makes at its full size and the others open through
/proc/PID/fd. /dev/shm is not used, so its size does not matter.
"""

from __future__ import annotations

import os
import resource
from pathlib import Path
from typing import Any

_NO_LIMIT = 1 << 60  # the first version of cgroups says so with a number near 2^63


def shared_memory() -> dict[str, dict[str, Any]]:
    """Each limit's `value` and `meaning`. Values are bytes (None: no limit); that of the PID namespace is its name."""

    def limit(value: int | str | None, meaning: str) -> dict[str, Any]:
        return {"value": value, "meaning": meaning}

    return {
        "available memory": limit(_available(), "an allocation of more is refused"),
        "cgroup's limit": limit(
            cgroup_limit(Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")),
            "of all that runs in it; an allocation of more than is left is refused",
        ),
        "address space": limit(
            _ulimit(resource.RLIMIT_AS),
            "ulimit -v; a rank maps a gather buffer once, a reduce buffer once for each rank",
        ),
        "file size": limit(_ulimit(resource.RLIMIT_FSIZE), "ulimit -f; a window counts as a file"),
        "locked memory": limit(
            _ulimit(resource.RLIMIT_MEMLOCK), "ulimit -l; only NCCL over InfiniBand locks any"
        ),
        "PID namespace": limit(
            os.readlink("/proc/self/ns/pid"), "ranks must share it, and their user, to share memory"
        ),
    }


def cgroup_limit(membership: Path, mount: Path) -> int | None:
    """The smallest limit in bytes of a process' memory cgroup and those around it; None if there is none.

    Args:
        membership: The process's /proc/PID/cgroup, with lines as `0::/folder` (version 2) or `4:memory:/folder`
            (version 1).
        mount: Where the hierarchies are mounted.
    """
    limits = []
    for line in membership.read_text().splitlines():
        _, controllers, folder = line.split(":", 2)
        if controllers == "":
            root, name = mount, "memory.max"
        elif "memory" in controllers.split(","):
            root, name = mount / "memory", "memory.limit_in_bytes"
        else:
            continue
        own = root / folder.lstrip("/")
        for group in (own, *own.parents):
            if group.is_relative_to(root) and (group / name).exists():
                limits.append((group / name).read_text().strip())
    numbers = [int(limit) for limit in limits if limit != "max" and int(limit) < _NO_LIMIT]
    return min(numbers, default=None)


def _available() -> int | None:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _ulimit(which: int) -> int | None:
    soft, _ = resource.getrlimit(which)
    return None if soft == resource.RLIM_INFINITY else soft
