"""What `shardcomm cluster` tells at its end: of each host, how it ended and what its link has carried."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from shardcomm.cli.options import opened
from shardcomm.cluster.cluster import Cluster
from shardcomm.cluster.kills import Kill
from shardcomm.cluster.processes import Processes


@dataclass(frozen=True)
class HostLine:
    """A host's line of the table.

    Attributes:
        host: Its name.
        address: Its address.
        status: The exit status of its torchrun, 128 and more for a signal; None if it was killed, or still ran.
        killed: Whether it was killed, as was asked for.
        received_bytes: What came over its link.
        sent_bytes: What went over its link.
    """

    host: str
    address: str
    status: int | None
    killed: bool
    received_bytes: int
    sent_bytes: int

    @property
    def end(self) -> str:
        """How it ended, in a word."""
        if self.killed:
            return "killed"
        return "still ran" if self.status is None else str(self.status)


@dataclass(frozen=True)
class Report:
    """The table.

    Attributes:
        cluster: The cluster.
        status: The command's exit status: that of the first torchrun that failed, or 1 if something else did.
        lines: A line for each host.
        killed_s: Of each kill that has happened, by its text: after how many seconds.
    """

    cluster: Cluster
    status: int
    lines: list[HostLine]
    killed_s: dict[str, float]

    @staticmethod
    def of(
        cluster: Cluster, kills: Sequence[Kill], processes: Processes, *, failed: bool
    ) -> Report:
        """What has become of the hosts; `failed`: whether the time was over, or a kill has not happened."""
        statuses = [_as_of_shell(each.status) for each in processes.all]
        lines = [
            HostLine(host.name, host.address, None if host.killed else status, host.killed, *host.carried)
            for host, status in zip(processes.on_hosts, statuses, strict=True)
        ]  # fmt: skip
        first = _as_of_shell(processes.failed[0].status) if processes.failed else 0
        killed_s = {kills[i].text: seconds for i, seconds in processes.kills.killed_s.items()}
        return Report(cluster, first or int(failed), lines, killed_s)

    def table(self) -> str:
        """The table as text, in MB of a million bytes."""
        rows = [("host", "address", "status", "received MB", "sent MB")]
        rows += [
            (line.host, line.address, line.end, _megabytes(line.received_bytes), _megabytes(line.sent_bytes))
            for line in self.lines
        ]  # fmt: skip
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join(_row(row, widths) for row in rows)

    def write_json(self, path: str | None) -> None:
        """Writes the table to a file (- for stdout, None for nowhere)."""
        if path is None:
            return
        content = {
            "ranks_a_host": self.cluster.ranks,
            "rate": self.cluster.rate,
            "delay": self.cluster.delay,
            "status": self.status,
            "killed_s": self.killed_s,
            "hosts": [asdict(line) for line in self.lines],
        }
        with opened(path) as file:
            print(json.dumps(content, indent=1), file=file)


def _row(row: tuple[str, ...], widths: list[int]) -> str:
    """Its figures, the last two, are at the right of their columns."""
    padded = [
        f"{text:>{width}}" if column >= 3 else f"{text:<{width}}"
        for column, (text, width) in enumerate(zip(row, widths, strict=True))
    ]
    return "  ".join(padded)


def _megabytes(count: int) -> str:
    return f"{count / 1e6:.3f}"


def _as_of_shell(status: int | None) -> int | None:
    return 128 - status if status is not None and status < 0 else status
