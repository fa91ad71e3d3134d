"""Processes on hosts: started, heard line by line, and waited for."""

from __future__ import annotations

import os
import selectors
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from typing import Literal

from shardcomm.cluster.due_kills import DueKills
from shardcomm.cluster.hosts import Host
from shardcomm.cluster.idle_hosts import IdleHosts
from shardcomm.cluster.kills import Kill
from shardcomm.cluster.on_host import OnHost

Stream = Literal["stdout", "stderr"]
Write = Callable[[Stream, str], None]
"""Takes a line of a host's output, or of the cluster's own, with its end."""

_CHUNK_BYTES = 1 << 16


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
        kills: What was and is to be killed.
    """

    def __init__(
        self, hosts: Sequence[Host], ranks_a_host: int, kills: Sequence[Kill], write: Write
    ) -> None:
        self.all: list[Process] = []
        self.failed: list[Process] = []
        self.on_hosts = [OnHost(host.name, host.address) for host in hosts]
        tell = partial(write, "stderr")
        self.kills = DueKills(kills, hosts, self.on_hosts, ranks_a_host, tell)
        self._idle_hosts = IdleHosts(self.on_hosts, tell)
        self._hosts = hosts
        self._write = write
        self._opened = ExitStack()
        self._selector = self._opened.enter_context(selectors.DefaultSelector())
        self._running = 0
        self._begin = time.monotonic()
        # The ranks of a host write there to which deadly step they have come.
        self._read_steps = [
            self._read(host.namespaces.written_inside, self.kills.carry_out_at_step)
            for host in hosts
        ]

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
            for read in (self._read_steps[host.number], *readers):
                read()
            process.status = self._idle_hosts.ended.get(host.number, opened.wait())
            self._running -= 1
            if process.status and not self.kills.has_killed(host, rank):
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
        late: list[str] = []
        while self._running:
            if self.failed and grace_s is not None and grace_end is None:
                grace_end = time.monotonic() + grace_s
            now = time.monotonic()
            if grace_end is not None and now >= grace_end:
                break
            if end is not None and now >= end:
                late = [process.host.name for process in self.all if process.status is None]
                break
            due = end, grace_end, self.kills.carry_out_at(now), self._end_idle_hosts(now)
            moments = [each for each in due if each is not None]
            for key, _ in self._selector.select(min(moments) - now if moments else None):
                if key.fd in self._selector.get_map():  # another's end may have unregistered it
                    key.data()
        for host, on_host in zip(self._hosts, self.on_hosts, strict=True):
            if not on_host.killed and host.number not in self._idle_hosts.ended:
                on_host.carried = host.link_bytes()
        if late:
            raise TimeoutError(
                f"after {timeout_s:g} s these hosts still ran: {', '.join(dict.fromkeys(late))}"
            )

    def close(self) -> None:
        """Lets go of what was read from. The processes end with their hosts."""
        self._opened.close()

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

    def _end_idle_hosts(self, now: float) -> float | None:
        """Ends hosts that wait for one that has failed or was killed. Returns when to look again."""
        if not self.failed and not any(each.killed for each in self.on_hosts):
            return None
        running = [each.host for each in self.all if each.rank is None and each.status is None]
        return self._idle_hosts.look_at(running, now) if running else None
