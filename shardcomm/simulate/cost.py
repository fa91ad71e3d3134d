"""What a collective costs, and who takes part in it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

MEMORY = "memory"
"""Of CPUs: a core copies, and does what else it does for a collective."""

HOST = "host"
"""A rank's link within its host."""

NETWORK = "network"
"""A host's link to the others."""

LATENCY = "latency"
"""In place of a link: time that passes, and takes nothing from others."""

TURN = "turn"
"""In place of a link: time until threads get their turns on cores on which ranks compute. It passes while the rank
computes, takes nothing from others, and is over at once where the rank does not compute."""

NO_LINKS = (LATENCY, TURN)
"""What stands in place of a link."""


class Move(NamedTuple):
    """What one link does for a collective.

    Attributes:
        link: `MEMORY`, `HOST`, `NETWORK`, `LATENCY` or `TURN`.
        seconds: How long it takes alone.
        nbytes: The bytes that a rank moves over it: of `MEMORY`, those that it reads and writes; of `NETWORK`, what its
            host moves by the ranks of the host.
    """

    link: str
    seconds: float
    nbytes: float = 0.0


class Cost(NamedTuple):
    """What a collective costs.

    Attributes:
        stages: What comes one after the other. The moves of a stage go on at once, each over a link of its own, and the
            stage ends with the last of them.
        nbytes: The bytes that a rank receives (a gather) or sends, as the planner and a trace count them.
    """

    stages: tuple[tuple[Move, ...], ...]
    nbytes: int


@dataclass(frozen=True)
class Group:
    """Ranks that communicate with each other.

    Attributes:
        ranks: How many they are.
        hosts: On how many hosts.
        beside: How many such groups there are on a host, which communicate at the same time.
    """

    ranks: int
    hosts: int
    beside: int

    @classmethod
    def of(cls, ranks: int, stride: int, on_host: int) -> Group:
        """The group of every `stride`-th rank, of which `on_host` ranks in a row are on a host."""
        ranks_a_host = min(ranks, max(1, on_host // stride))
        return cls(ranks, -(-ranks // ranks_a_host), max(1, on_host // ranks_a_host))

    @property
    def on_host(self) -> int:
        """How many of them are on a host."""
        return self.ranks // self.hosts
