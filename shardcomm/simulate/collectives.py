"""What a collective costs: a latency, and the seconds that a link is busy with its bytes.

Over `nccl` a collective is a ring through all its ranks. (n - 1) / n of the bytes pass each link, at the speed of the
slowest. A host's network cards are shared by the groups that go through the host at once::

    full_shard, 2 hosts of 4      one ring of 8: every card for it        a hop: host 6, network 1
    hybrid_shard, 2 replicas      a ring of 4 in each host (gather)       a hop: host 3
                                  four rings of 2 across (all-reduce): a quarter of the cards for each

The ranks of an all-reduce may also form a tree, whose latency grows with the logarithm of the hosts. NCCL takes it
where that is lower. Its gathers and reduces of several ranks a host are rings.

Over `shm` nothing is sent. Ranks read and write memory, and meet: in a gather each rank writes its shard where all see
it, in a reduce it reads its part of everybody's gradients and writes the mean, in an all-reduce it copies the others'
parts as well.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from shardcomm.planner.unit_plan import UnitPlan
from shardcomm.simulate.machine import Machine


class Cost(NamedTuple):
    """What a collective costs.

    Attributes:
        latency_s: The seconds before bytes move, in which it takes nothing from others.
        moving_s: The seconds in which its link, alone, moves the bytes.
        link: The link: "memory", "host" or "network".
        nbytes: The bytes that a rank receives (a gather) or sends, as the planner and a trace count them.
        link_bytes: The bytes that a rank moves over `link`; of "memory", those that it reads and writes.
    """

    latency_s: float
    moving_s: float
    link: str
    nbytes: int
    link_bytes: float


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


MEETINGS = {"gather": 2, "reduce": 2, "all_reduce": 3}
"""How often the ranks of a collective over shm meet."""


def gather(unit: UnitPlan, group: Group, machine: Machine, *, again: bool) -> Cost:
    """A gather of the unit; `again`: any but the first of a step, which may be among fewer ranks."""
    secondary = again and unit.secondary_bytes > 0
    nbytes = unit.regather_bytes if secondary else unit.gather_bytes
    if group.ranks == 1:  # a cast
        cast = unit.parameter_bytes + unit.full_bytes
        return Cost(0.0, cast / machine.copy_bytes_per_s, "memory", 0, cast)
    if machine.transport == "nccl":
        return _ring(nbytes, group, machine)
    part = nbytes / (group.ranks - 1)
    if secondary:
        shard: float = unit.secondary_bytes
    else:
        shard = part if unit.encoding_bytes else unit.parameter_bytes
    return _shared("gather", nbytes, moved_by_gather(shard, part), machine)


def coding(unit: UnitPlan, group: Group, machine: Machine) -> Cost:
    """The encoding of a rank's part before a gather in a block format, and the decoding of all parts after it.

    Over shm each rank decodes one part, and they meet once more.
    """
    shared = machine.transport == "shm"
    moved = unit.encoding_bytes + unit.decoding_bytes / (group.ranks if shared else 1)
    met_s = machine.host_latency_s if shared else 0.0
    return Cost(0.0, met_s + moved / machine.code_bytes_per_s, "memory", 0, moved)


def reduce(unit: UnitPlan, group: Group, machine: Machine) -> Cost:
    """The reduce-scatter of the unit's gradients."""
    nbytes = unit.reduce_bytes
    if machine.transport == "nccl":
        return _ring(nbytes, group, machine)
    full = nbytes * group.ranks / (group.ranks - 1)
    return _shared("reduce", nbytes, moved_by_reduce(full, unit.gradient_bytes), machine)


def all_reduce(unit: UnitPlan, group: Group, machine: Machine) -> Cost:
    """The all-reduce of the gradients of a rank's shard, and their way into the gradient."""
    nbytes = unit.all_reduce_bytes
    if machine.transport == "nccl":
        cost = _ring(nbytes, group, machine)
        latency_s = 2 * min(cost.latency_s, _tree_latency_s(group, machine))
        return cost._replace(latency_s=latency_s)
    shard = nbytes * group.ranks / (2 * (group.ranks - 1))
    moved = moved_by_all_reduce(shard, group.ranks) + shard + unit.gradient_bytes
    return _shared("all_reduce", nbytes, moved, machine)


def moved_by_gather(shard: float, part: float) -> float:
    """Over shm, the bytes that a rank reads, its shard, and writes, its part of the full parameters."""
    return shard + part


def moved_by_reduce(full: float, mean: float) -> float:
    """Over shm, the bytes that a rank reads, its part of each rank's `full` gradients, and writes, their mean."""
    return full + mean


def moved_by_all_reduce(buffer: float, ranks: int) -> float:
    """Over shm, the bytes that a rank reads and writes: it sums its part of each buffer, and copies the others'."""
    part = buffer / ranks
    return (buffer + part) + 2 * (buffer - part)


def pack_s(unit: UnitPlan, machine: Machine) -> float:
    """The seconds in which a rank copies a unit's gradients to where they are reduced."""
    return 2 * unit.full_gradient_bytes / machine.copy_bytes_per_s


def _ring(nbytes: int, group: Group, machine: Machine) -> Cost:
    across = group.hosts - 1
    latency_s = (group.ranks - 1 - across) * machine.host_latency_s
    if not across:
        return Cost(latency_s, nbytes / machine.host_bytes_per_s, "host", nbytes, nbytes)
    latency_s += across * machine.network_latency_s
    rate = min(machine.host_bytes_per_s, machine.network_bytes_per_s / group.beside)
    return Cost(latency_s, nbytes / rate, "network", nbytes, nbytes)


def _tree_latency_s(group: Group, machine: Machine) -> float:
    """From the ranks of a host to one of them, and up a binary tree of hosts; as NCCL estimates it."""
    in_host = (group.ranks // group.hosts - 1) * machine.host_latency_s
    return in_host + math.ceil(math.log2(group.hosts)) * machine.network_latency_s


def _shared(what: str, nbytes: int, moved: float, machine: Machine) -> Cost:
    met_s = MEETINGS[what] * machine.host_latency_s  # on the core on which it copies
    return Cost(0.0, met_s + moved / machine.host_bytes_per_s, "memory", nbytes, moved)
