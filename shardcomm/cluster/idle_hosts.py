"""Hosts where torchrun waits for that of another host, which has failed or was killed: they are ended.

torchrun would wait for five minutes after the end of its ranks, and longer if they have not begun.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from shardcomm.cluster.hosts import Host
from shardcomm.cluster.on_host import OnHost
from shardcomm.cluster.pids import pids_on, rank_of

_LOOK_S = 0.5  # until it is looked again whether a host has ranks
_IDLE_S = 10.0  # for how long a host is seen without ranks before it is ended


class IdleHosts:
    """Ends hosts that have been without ranks for a while.

    Args:
        on_hosts: What has become of each host.
        tell: What takes a line about each host that is ended.

    Attributes:
        ended: Of each host that was ended, by its number: the status of its torchrun.
    """

    def __init__(self, on_hosts: Sequence[OnHost], tell: Callable[[str], None]) -> None:
        self.ended: dict[int, int] = {}
        self._on_hosts = on_hosts
        self._tell = tell
        self._busy_at: dict[int, float] = {}  # of a host, when it had ranks, or was first looked at
        self._with_ranks: set[int] = set()  # hosts that were seen with ranks

    def look_at(self, running: Iterable[Host], now: float) -> float:
        """Ends those hosts whose torchrun runs without ranks. Returns when to look again."""
        for host in running:
            number = host.number
            if number in self.ended or self._on_hosts[number].killed:
                continue
            has_ranks = any(rank_of(pid) is not None for pid in pids_on(host))
            began = number in self._busy_at
            if has_ranks or not began:
                self._busy_at[number] = now
            if has_ranks:
                self._with_ranks.add(number)
            elif began and now - self._busy_at[number] >= _IDLE_S:
                self._end(host)
        return now + _LOOK_S

    def _end(self, host: Host) -> None:
        never = host.number not in self._with_ranks
        self.ended[host.number] = int(never)
        self._on_hosts[host.number].carried = host.link_bytes()
        host.namespaces.end()
        what = "where no rank was seen" if never else "whose ranks had ended"
        self._tell(
            f"shardcomm cluster: ended {host.name}, {what}, and whose torchrun waited for another host's\n"
        )
