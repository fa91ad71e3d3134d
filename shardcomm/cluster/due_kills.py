"""The kills of a run, each carried out when it is due."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from shardcomm.cluster.hosts import Host
from shardcomm.cluster.kills import Kill
from shardcomm.cluster.on_host import OnHost
from shardcomm.cluster.pids import parent_of, pids_on, rank_of

_PAUSE_S = 0.02  # until a rank that is to be killed is looked for again


class DueKills:
    """Kills hosts and ranks of a run. Times count from when this is made.

    Args:
        kills: What is to be killed.
        hosts: The hosts.
        on_hosts: What has become of each.
        ranks_a_host: How many ranks each has.
        tell: What takes a line about each kill.

    Attributes:
        killed_s: Of each kill that has happened, by its number: after how many seconds.
    """

    def __init__(
        self,
        kills: Sequence[Kill],
        hosts: Sequence[Host],
        on_hosts: Sequence[OnHost],
        ranks_a_host: int,
        tell: Callable[[str], None],
    ) -> None:
        self.killed_s: dict[int, float] = {}
        self._kills = kills
        self._hosts = hosts
        self._on_hosts = on_hosts
        self._ranks_a_host = ranks_a_host
        self._tell = tell
        self._begin = time.monotonic()

    def missed(self) -> dict[str, str]:
        """The kills that have not happened, as they were given, and why."""
        return {
            kill.text: self._why_not(kill)
            for number, kill in enumerate(self._kills)
            if number not in self.killed_s
        }

    def _why_not(self, kill: Kill) -> str:
        on_host = self._on_host_of(kill)
        killed_s = self._host_killed_s(kill)
        if killed_s is None or (kill.after_s is not None and killed_s > kill.after_s):
            return kill.why_not
        return f"{on_host.name} had been killed before"

    def _host_killed_s(self, kill: Kill) -> float | None:
        """At how many seconds the kill's host was to be killed, or came to its step; None if it was not killed."""
        host = kill.host_of(self._ranks_a_host)
        for number, killed_s in self.killed_s.items():
            if (of_host := self._kills[number]).host == host:
                return killed_s if of_host.after_s is None else of_host.after_s
        return None

    def has_killed(self, host: Host, rank: int | None) -> bool:
        """Whether the end of a rank, or of what starts them, on this host was asked for."""
        kills = [self._kills[i] for i in self.killed_s]
        return self._on_hosts[host.number].killed or any(
            kill.rank is not None and kill.rank == rank for kill in kills
        )

    def carry_out_at(self, now: float) -> float | None:
        """Carries out what is due by its time. Returns when to look again."""
        moments = []
        for number, kill in enumerate(self._kills):
            if kill.after_s is None or number in self.killed_s or self._on_host_of(kill).killed:
                continue
            due = self._begin + kill.after_s
            if due > now:
                moments.append(due)
            elif not self._carry_out(number):
                moments.append(now + _PAUSE_S)  # the rank's process is not there yet
        return min(moments, default=None)

    def carry_out_at_step(self, line: str) -> None:
        """Carries out the kill whose number a rank has written, once it has come to the step."""
        number = int(line)
        if number not in self.killed_s:
            self._carry_out(number)

    def _carry_out(self, number: int) -> bool:
        kill, on_host = self._kills[number], self._on_host_of(self._kills[number])
        if kill.rank is not None:
            if kill.step is None and not self._kill_rank(kill.rank):
                return False
        elif on_host.killed:
            return False
        else:
            host = self._hosts[kill.host_of(self._ranks_a_host)]
            on_host.carried = host.link_bytes()
            on_host.killed = True
            host.kill()
        self.killed_s[number] = time.monotonic() - self._begin
        when = f"{self.killed_s[number]:.3f} s after the start"
        self._tell(f"shardcomm cluster: killed {kill.whom}, {when} ({kill.text})\n")
        return True

    def _on_host_of(self, kill: Kill) -> OnHost:
        return self._on_hosts[kill.host_of(self._ranks_a_host)]

    def _kill_rank(self, rank: int) -> bool:
        """Kills the rank's process, if there is one yet."""
        pids = pids_on(self._hosts[rank // self._ranks_a_host])
        of_rank = {pid for pid in pids if rank_of(pid) == rank}
        # The rank's own children have its environment, too.
        first = [pid for pid in of_rank if parent_of(pid) not in of_rank]
        for pid in first:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return bool(first)
