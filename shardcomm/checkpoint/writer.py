"""Which save a directory of checkpoints belongs to: the one that began last. `writer.json` there names it::

    {"folder": "step-00000300.5f3a09c2.partial", "host": "node7", "pid": 4711, "process": "9d0c41e6b2a87f35"}

Two runs on one directory, such as a job that was submitted twice, thus find out about each other: the one that began
earlier sees another name there, and fails. There is no lock. Some network file systems have none, or one that holds
inside a host only, and a host that is gone may leave a lock behind.
"""

from __future__ import annotations

import json
import os
import platform
import secrets
from dataclasses import asdict, dataclass
from pathlib import Path

from shardcomm.checkpoint.manifest import CheckpointError

_FILE = "writer.json"
_PROCESS = secrets.token_hex(8)  # pids and names of hosts come again


@dataclass(frozen=True)
class Writer:
    """A save, and the process of its rank 0.

    Attributes:
        folder: The name of the partial folder, which no other save has.
        host: The host's name.
        pid: The process's number there.
        process: What tells it from other processes of that host and number. Forked ones share it.
    """

    folder: str
    host: str
    pid: int
    process: str

    @classmethod
    def here(cls, folder: str) -> Writer:
        """The save of this process into the partial folder of this name."""
        return cls(folder, platform.node(), os.getpid(), _PROCESS)

    @classmethod
    def of(cls, directory: Path) -> Writer | None:
        """The save that `directory` belongs to; None if there was none yet, or the file is none of ours.

        Raises:
            OSError: The file is there, and cannot be read.
        """
        try:
            return cls(**json.loads((directory / _FILE).read_bytes()))
        except (FileNotFoundError, ValueError, TypeError):
            return None

    @property
    def is_of_this_process(self) -> bool:
        """Whether this process saves, or has saved."""
        return self == Writer.here(self.folder)

    def take(self, directory: Path) -> None:
        """Makes `directory` belong to this save."""
        unnamed = directory / f"{_FILE}.{secrets.token_hex(4)}"
        try:
            unnamed.write_text(json.dumps(asdict(self)) + "\n")
            unnamed.replace(directory / _FILE)
        finally:
            unnamed.unlink(missing_ok=True)


def check_writer(what: str, directory: Path, folder: str | None = None) -> None:
    """Checks that no save of another run has begun in `directory`.

    Args:
        what: Says what was not done; the message begins with it.
        directory: The directory of checkpoints.
        folder: The name of a partial folder: no save has begun but that into it. None: no save of another process.

    Raises:
        CheckpointError: Another save has begun. The message names its process.
        OSError: `directory` cannot be read.
    """
    last = Writer.of(directory)
    if last is None or last.folder == folder or (folder is None and last.is_of_this_process):
        return
    who = f"another run (process {last.pid} on host {last.host})"
    if last.is_of_this_process:
        who = "another Checkpoints of this process"
    raise CheckpointError(
        f"{what}: {who} saves into {directory}, and began later; a folder is for one run: end one of the two, or give "
        "it another folder"
    )
