"""What lies in /dev/shm, where the processes of a machine share memory by names."""

from __future__ import annotations

import os


def shared_names() -> set[str]:
    """All names but those of multiprocessing's semaphores, which any Python program of the machine may make."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith("sem.mp-")}
