"""Namespaces that have no name, and so cannot outlive their maker.

Namespaces live as long as a `cat` that reads from a pipe of the maker's. When the maker closes the pipe, or is killed,
the `cat` ends. It is the first process of its PID namespace, so the kernel then kills all others in there. When a
namespace has no process any more, the kernel removes it, and its interfaces and mounts with it.

Root is not needed where users may make namespaces of their own.
"""

from __future__ import annotations

import functools
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

REFUSED = "this process cannot make hosts on this machine"

_PROGRAMS = {
    "ip": "iproute2", "tc": "iproute2", "nsenter": "util-linux", "unshare": "util-linux", "mount": "mount",
    "hostname": "hostname",
}  # fmt: skip
_LOOK_S = 0.05  # between looks whether the processes inside have ended
_CAPABILITIES = {"CAP_NET_ADMIN": 12, "CAP_SYS_ADMIN": 21}  # and their bits

# Gives the namespaces a /dev/shm, a name, and an /etc/hosts whose file has no name any more.
_SET_UP = """
mount -t tmpfs tmpfs /dev/shm
hostname "$0"
if [ -e /etc/hosts ]; then
  printf '%s' "$1" >/dev/shm/hosts
  mount --bind /dev/shm/hosts /etc/hosts
  rm /dev/shm/hosts
fi
echo
exec cat
"""


class NoHostsError(RuntimeError):
    """This process cannot make hosts. The message is a sentence that says why."""


@dataclass(frozen=True)
class Namespaces:
    """A network, processes, mounts, a host name and IPC of their own; see `new_namespaces`."""

    _holder: subprocess.Popen[bytes]
    _waiting: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def add(self, waiting: subprocess.Popen[bytes]) -> None:
        """Takes note of a process outside that waits for one inside, as a command that begins `within` does."""
        self._waiting.append(waiting)

    @property
    def pid(self) -> int:
        """A process in the network."""
        return self._holder.pid

    @property
    def written_inside(self) -> int:
        """The reading end of a pipe; who is inside writes to it as /proc/1/fd/1."""
        assert self._holder.stdout
        return self._holder.stdout.fileno()

    def entering(self) -> list[str]:
        """The beginning of a command that a process outside runs in the network, as one outside."""
        user = [] if _is_privileged() else ["--user", "--preserve-credentials"]
        return ["nsenter", f"--target={self.pid}", *user, "--net"]

    def within(self) -> list[str]:
        """The beginning of a command that becomes a process inside, which ends with the namespaces at the latest.

        It starts in this process's folder. Who enters other mounts is in their root at first.
        """
        processes = f"--pid=/proc/{self.pid}/ns/pid_for_children"
        entering = [*self.entering(), "--mount", "--uts", "--ipc", processes]
        return [*entering, "env", f"--chdir={os.getcwd()}"]

    def set_up(self, *commands: str) -> None:
        """Runs commands in the network.

        Raises:
            NoHostsError: One has failed.
        """
        script = [*self.entering(), "sh", "-ec", "\n".join(commands)]
        done = subprocess.run(script, capture_output=True, text=True, check=False)
        if done.returncode:
            raise NoHostsError(f"{REFUSED}: {_last_line(done.stderr)}")

    def end(self) -> None:
        """Ends all processes inside. Returns when they have ended."""
        assert self._holder.stdin
        self._holder.stdin.close()
        # unshare ends after the first process inside, and that one once all others have been waited for. nsenter waits
        # for those that it has started, and stops itself where one of them is stopped.
        while not _ends(self._holder, _LOOK_S):
            for each in self._waiting:
                each.send_signal(signal.SIGCONT)


@contextmanager
def new_namespaces(
    name: str, names: str = "", within: Namespaces | None = None
) -> Iterator[Namespaces]:
    """Makes namespaces, which end with the context or with this process.

    Args:
        name: The host name inside.
        names: The content of /etc/hosts inside.
        within: The namespaces whose user makes them, where this process is not root.

    Raises:
        NoHostsError: This process may not make namespaces, or a program is missing.
    """
    for program, package in _PROGRAMS.items():
        if shutil.which(program) is None:
            raise NoHostsError(f"{REFUSED}: {program} not found (Debian: {package})")
    user = [] if within or _is_privileged() else ["--user", "--map-root-user"]
    own = ["--net", "--mount", "--uts", "--ipc", "--pid", "--fork", "--kill-child", "--mount-proc"]
    command = [*(within.entering() if within else []), "unshare", *user, *own]
    with subprocess.Popen(
        [*command, "sh", "-ec", _SET_UP, name, names],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0,
        start_new_session=True,  # Ctrl-C is for the maker
    ) as holder:  # fmt: skip
        assert holder.stdin
        assert holder.stdout
        assert holder.stderr
        made = Namespaces(holder)
        try:
            if not holder.stdout.read(1):
                reason = _last_line(holder.stderr.read().decode(errors="replace"))
                raise NoHostsError(f"{REFUSED}: {reason}; {_what_is_needed()}")
            yield made
        finally:
            made.end()


def _ends(process: subprocess.Popen[bytes], within_s: float) -> bool:
    """Whether the process has ended; waits up to `within_s` seconds for that."""
    with suppress(subprocess.TimeoutExpired):
        process.wait(within_s)
    return process.returncode is not None


@functools.cache
def _is_privileged() -> bool:
    """Whether root's own rights suffice. A user namespace is needed where they do not."""
    return os.geteuid() == 0 and not _missing_capabilities()


def _missing_capabilities() -> list[str]:
    status = Path("/proc/self/status").read_text()
    effective = re.search(r"^CapEff:\s*([0-9a-f]+)$", status, re.MULTILINE)
    bits = int(effective[1], 16) if effective else 0
    return [name for name, bit in _CAPABILITIES.items() if not bits >> bit & 1]


def _what_is_needed() -> str:
    if missing := _missing_capabilities():
        return f"it needs {' and '.join(missing)}, or a kernel that lets users make user namespaces"
    return (
        "it has CAP_NET_ADMIN and CAP_SYS_ADMIN, so that something else forbids it, such as seccomp"
    )


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["no reason given"])[-1]
