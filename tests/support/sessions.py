"""The processes of a session: all of them, its ranks, and whether they end."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

DEADLINE_S = 10.0


def members(session: int) -> list[int]:
    """Processes of a session, but zombies."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[3]) == session and fields[0] != "Z":
                found.append(int(entry.name))
    return found


def wait_for_end(session: int) -> bool:
    """Whether all processes of the session end within a few seconds."""
    end = time.monotonic() + DEADLINE_S
    while members(session):
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


def ranks_of(process: subprocess.Popen[str]) -> list[int]:
    """Its rank processes, told by the communication memory they map."""
    return [
        pid for pid in members(process.pid)
        if "memfd:shardcomm" in Path(f"/proc/{pid}/maps").read_text()
    ]  # fmt: skip
