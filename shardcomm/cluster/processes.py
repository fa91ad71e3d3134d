"""Processes on hosts: started, heard line by line, killed when it is time, and waited for."""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal

from shardcomm.cluster.hosts import Host
from shardcomm.cluster.kills import Kill
from shardcomm.cluster.links import LinkBytes

Stream = Literal["stdout", "stderr"]
Write = Callable[[Stream, str], None]
"""Takes a line of a host's output, or of the cluster's own, with its end."""

_CHUNK_BYTES = 1 << 16
_KEPT_LINES = 60  # of each host, for an error
_PAUSE_S = 0.02  # until a rank that is to be killed is looked for again
_LOOK_S = 0.5  # until it is looked again whether a host has ranks
_IDLE_S = 10.0  # for how long a host is seen without ranks before it is ended


@dataclass
class Process:
    """A process on a host, and how it has ended.

    Attributes:
        host: Its host.
        rank: The rank that it is; None if it starts ranks.
        status: Its exit status, negative for a signal; None while it runs.
    """

    host: Host
    rank: int | None
    status: int | None = None


@dataclass
class OnHost:
    """What has become of a host.

    Attributes:
        name: Its name.
        address: Its address.
        killed: Whether it was killed, as was asked for.
        carried: What its link has carried.
        last_lines: The end of its output.
    """

    name: str
    address: str
    killed: bool = False
    carried: LinkBytes = field(default=LinkBytes(0, 0))
    last_lines: deque[str] = field(default_factory=lambda: deque(maxlen=_KEPT_LINES))


class Processes:
    """The processes of one run on hosts.

    Args:
        hosts: The hosts.
        ranks_a_host: How many ranks each has.
        kills: What is to be killed.
        write: What takes the lines of output, each with its host's name before it.

    Attributes:
        all: The processes, in the order in which they were started.
        failed: Those that ended with another status than 0 and were not to be killed, in the order of their ends.
        on_hosts: Of each host, what has become of it.
        killed_s: Of each kill that has happened, by its number: after how many seconds.
    """

    def __init__(
        self, hosts: Sequence[Host], ranks_a_host: int, kills: Sequence[Kill], write: Write
    ) -> None:
        self.all: list[Process] = []
        self.failed: list[Process] = []
        self.on_hosts = [OnHost(host.name, host.address) for host in hosts]
        self.killed_s: dict[int, float] = {}
        self._busy_at: dict[int, float] = {}  # of a host, when it had ranks, or was first looked at
        self._with_ranks: set[int] = set()  # hosts that were seen with ranks
        self._ended: dict[int, int] = {}  # of a host that was ended, its torchrun's status
        self._hosts = hosts
        self._ranks_a_host = ranks_a_host
        self._kills = kills
        self._write = write
        self._opened = ExitStack()
        self._selector = self._opened.enter_context(selectors.DefaultSelector())
        self._running = 0
        self._begin = time.monotonic()
        # The ranks of a host write there to which deadly step they have come.
        self._told = [self._read(host.namespaces.told, self._on_deadly_step) for host in hosts]

    def start(
        self,
        host: Host,
        command: Sequence[str],
        env: Mapping[str, str],
        *,
        rank: int | None = None,
        pass_fds: Sequence[int] = (),
    ) -> None:
        """Starts a process."""
        opened = host.start(
            *command, env=env, pass_fds=pass_fds, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        process = Process(host, rank)
        assert opened.stdout
        assert opened.stderr
        readers = (
            self._read(opened.stdout.fileno(), partial(self._line, host, "stdout")),
            self._read(opened.stderr.fileno(), partial(self._line, host, "stderr")),
        )

        def on_end() -> None:
            self._selector.unregister(end)
            for read in (self._told[host.number], *readers):
                read()
            process.status = self._ended.get(host.number, opened.wait())
            self._running -= 1
            if process.status and not self._was_to_be_killed(process):
                self.failed.append(process)

        end = os.pidfd_open(opened.pid)
        self._opened.callback(os.close, end)
        self._selector.register(end, selectors.EVENT_READ, on_end)
        self._running += 1
        self.all.append(process)

    def wait(self, timeout_s: float | None, grace_s: float | None) -> None:
        """Waits for the ends of all processes.

        Args:
            timeout_s: How long at most; None: any time.
            grace_s: How long the others may still run after one has failed; None: any time.

        Raises:
            TimeoutError: Processes still run after `timeout_s`.
        """
        end = None if timeout_s is None else self._begin + timeout_s
        grace_end = None
        while self._running:
            if self.failed and grace_s is not None and grace_end is None:
                grace_end = time.monotonic() + grace_s
            now = time.monotonic()
            if grace_end is not None and now >= grace_end:
                break
            if end is not None and now >= end:
                late = [process.host.name for process in self.all if process.status is None]
                raise TimeoutError(
                    f"after {timeout_s:g} s these hosts still ran: {', '.join(dict.fromkeys(late))}"
                )
            due = end, grace_end, self._kill_due(now), self._end_idle_hosts(now)
            moments = [each for each in due if each is not None]
            for key, _ in self._selector.select(min(moments) - now if moments else None):
                if key.fd in self._selector.get_map():  # another's end may have unregistered it
                    key.data()
        for host, on_host in zip(self._hosts, self.on_hosts, strict=True):
            if not on_host.killed and host.number not in self._ended:
                on_host.carried = host.link_bytes()

    def close(self) -> None:
        """Lets go of what was read from. The processes end with their hosts."""
        self._opened.close()

    def missed(self) -> list[Kill]:
        """The kills that have not happened."""
        return [kill for i, kill in enumerate(self._kills) if i not in self.killed_s]

    def _read(self, pipe: int, take: Callable[[str], None]) -> Callable[[], None]:
        """Has `take` called with each line that comes through a pipe. Returns what reads all that is there."""
        os.set_blocking(pipe, False)
        begun = bytearray()

        def read() -> None:
            with suppress(BlockingIOError):
                while piece := os.read(pipe, _CHUNK_BYTES):
                    *lines, rest = (begun + piece).split(b"\n")
                    begun[:] = rest
                    for line in lines:
                        take(line.decode(errors="replace"))
                if begun:
                    take(begun.decode(errors="replace"))
                    begun.clear()
                if pipe in self._selector.get_map():
                    self._selector.unregister(pipe)

        self._selector.register(pipe, selectors.EVENT_READ, read)
        return read

    def _line(self, host: Host, stream: Stream, line: str) -> None:
        self.on_hosts[host.number].last_lines.append(line)
        self._write(stream, f"[{host.name}] {line}\n")

    def _on_deadly_step(self, line: str) -> None:
        number = int(line)
        if number not in self.killed_s:
            self._carry_out(number)

    def _kill_due(self, now: float) -> float | None:
        """Carries out what is due. Returns when to look again."""
        moments = []
        for number, kill in enumerate(self._kills):
            if kill.after_s is None or number in self.killed_s:
                continue
            due = self._begin + kill.after_s
            if due > now:
                moments.append(due)
            elif not self._carry_out(number):
                moments.append(now + _PAUSE_S)  # the rank's process is not there yet
        return min(moments, default=None)

    def _end_idle_hosts(self, now: float) -> float | None:
        """Ends hosts where torchrun waits for that of another host, which has failed or was killed.

        torchrun would wait for five minutes after the end of its ranks, and longer if they have not begun. Returns when
        to look again.
        """
        if not self.failed and not any(each.killed for each in self.on_hosts):
            return None
        waiting = [each for each in self.all if each.rank is None and each.status is None]
        for process in waiting:
            host, number = process.host, process.host.number
            if number in self._ended or self.on_hosts[number].killed:
                continue
            has_ranks = any(_rank_of(pid) is not None for pid in _pids_on(host))
            began = number in self._busy_at
            if has_ranks or not began:
                self._busy_at[number] = now
            if has_ranks:
                self._with_ranks.add(number)
            elif began and now - self._busy_at[number] >= _IDLE_S:
                self._end_idle(host)
        return now + _LOOK_S if waiting else None

    def _end_idle(self, host: Host) -> None:
        never = host.number not in self._with_ranks
        self._ended[host.number] = int(never)
        self.on_hosts[host.number].carried = host.link_bytes()
        host.namespaces.end()
        what = "which never had ranks" if never else "whose ranks had ended"
        self._write(
            "stderr",
            f"shardcomm cluster: ended {host.name}, {what}, and whose torchrun waited for another host's\n",
        )

    def _carry_out(self, number: int) -> bool:
        kill = self._kills[number]
        if kill.rank is not None:
            if kill.step is None and not self._kill_rank(kill.rank):
                return False
        else:
            assert kill.host is not None
            host, on_host = self._hosts[kill.host], self.on_hosts[kill.host]
            if not on_host.killed:
                on_host.carried = host.link_bytes()
                on_host.killed = True
                host.kill()
        self.killed_s[number] = time.monotonic() - self._begin
        when = f"{self.killed_s[number]:.3f} s after the start"
        self._write("stderr", f"shardcomm cluster: killed {kill.whom}, {when} ({kill.text})\n")
        return True

    def _kill_rank(self, rank: int) -> bool:
        """Kills the rank's process, if there is one yet."""
        pids = _pids_on(self._hosts[rank // self._ranks_a_host])
        of_rank = {pid for pid in pids if _rank_of(pid) == rank}
        # The rank's own children have its environment, too.
        first = [pid for pid in of_rank if _parent(pid) not in of_rank]
        for pid in first:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return bool(first)

    def _was_to_be_killed(self, process: Process) -> bool:
        """Whether its host's kill, or its own, has ended the process."""
        kills = [self._kills[i] for i in self.killed_s]
        return self.on_hosts[process.host.number].killed or any(
            kill.rank is not None and kill.rank == process.rank for kill in kills
        )


def _pids_on(host: Host) -> list[int]:
    """The processes of a host, as this process numbers them."""
    own = os.stat(f"/proc/{host.namespaces.pid}/ns/pid_for_children").st_ino
    pids = []
    for name in os.listdir("/proc"):
        with suppress(OSError):
            if name.isdigit() and os.stat(f"/proc/{name}/ns/pid").st_ino == own:
                pids.append(int(name))
    return pids


def _rank_of(pid: int) -> int | None:
    """The rank that the process or one above it is, as its environment says."""
    with suppress(OSError):
        for entry in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            if entry.startswith(b"RANK="):
                return int(entry.removeprefix(b"RANK="))
    return None


def _parent(pid: int) -> int:
    with suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return 0
