"""Links between hosts: as slow as `tc` makes them, and the bytes that they have carried."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

DEVICE = "eth0"
"""The host's end of its link."""

# The packets of a TCP connection come to the bucket in pieces of up to 64 KiB, which it must hold. What waits for it is
# not dropped: times then tell of bandwidth alone.
_BUCKET = "burst 256k limit 64mb"
_WAITING_PACKETS = 1_000_000  # in a delay; more would be dropped


class LinkBytes(NamedTuple):
    """What has come into a host over its link, and gone out, with the headers of packets as the kernel counts them."""

    received: int
    sent: int


@dataclass(frozen=True)
class Link:
    """A link between a host and the switch.

    Attributes:
        bits_per_s: What it carries, in each direction.
        delay_s: How long a packet is under way from a host to another; 0 for no more than it takes.
    """

    bits_per_s: int
    delay_s: float = 0.0

    def at_switch(self, port: str) -> str:
        """The command that shapes what the switch sends."""
        return f"tc qdisc add dev {port} root {self._bucket}"

    def at_host(self) -> str:
        """The command that shapes what the host sends, behind its delay if there is one."""
        where = "parent 1:" if self.delay_s else "root"
        return f"tc qdisc add dev {DEVICE} {where} {self._bucket}"

    def delay(self) -> str:
        """The command that delays what the host sends, before it is shaped. Not every kernel has netem."""
        wait = f"delay {self.delay_s * 1e6:.0f}us limit {_WAITING_PACKETS}"
        return f"tc qdisc add dev {DEVICE} root handle 1: netem {wait}"

    @property
    def _bucket(self) -> str:
        return f"tbf rate {self.bits_per_s}bit {_BUCKET}"


def link_bytes(process: int | str = "self") -> LinkBytes:
    """What has gone over the link of the host on which a process is: this one, or that of a pid.

    Raises:
        LookupError: The process is on no host of a cluster.
    """
    for line in Path(f"/proc/{process}/net/dev").read_text().splitlines():
        interface, _, counters = line.partition(":")
        if interface.strip() == DEVICE:
            received, sent = (int(counters.split()[column]) for column in (0, 8))
            return LinkBytes(received, sent)
    raise LookupError(f"process {process} is in a network without {DEVICE}")
