"""What has become of a host."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from shardcomm.cluster.links import LinkBytes

_KEPT_LINES = 60  # for an error


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
