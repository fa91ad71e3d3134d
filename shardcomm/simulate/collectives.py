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
parts as well. Over `hosts` the ranks of one host do that, and those of several what `over_hosts` says.

Each bucket of a unit is gathered and reduced by itself, so that a unit with several has the latency of as many.

A rank alone gathers, to cast its parameters. It makes no reduce and no all-reduce: its packed gradients are the mean.
"""

from __future__ import annotations

import math

from shardcomm.planner.unit_plan import UnitPlan
from shardcomm.simulate import over_hosts
from shardcomm.simulate.cost import HOST, LATENCY, MEMORY, NETWORK, Cost, Group, Move
from shardcomm.simulate.machine import Machine

MEETINGS = {"gather": 2, "reduce": 2, "all_reduce": 3}
"""How often the ranks of a collective over shm meet."""


def gather(unit: UnitPlan, group: Group, machine: Machine, *, again: bool) -> Cost:
    """A gather of the unit; `again`: any but the first of a step, which may be among fewer ranks."""
    secondary = again and unit.secondary_bytes > 0
    nbytes = unit.regather_bytes if secondary else unit.gather_bytes
    if group.ranks == 1:  # a cast
        cast = unit.parameter_bytes + unit.full_bytes
        return Cost(((Move(MEMORY, cast / machine.copy_bytes_per_s, cast),),), 0)
    if machine.transport == "nccl":
        return _ring(nbytes, unit.buckets, group, machine)
    part = nbytes / (group.ranks - 1)
    if secondary:
        shard: float = unit.secondary_bytes
    else:
        shard = part if unit.encoding_bytes else unit.parameter_bytes
    if group.hosts > 1:
        return over_hosts.gather(nbytes, shard, part, group, machine, calls=unit.buckets)
    return _shared("gather", nbytes, unit.buckets, moved_by_gather(shard, part), machine)


def coding(unit: UnitPlan, group: Group, machine: Machine) -> Cost:
    """The encoding of a rank's part before a gather in a block format, and the decoding of all parts after it.

    Ranks that share memory decode one part each of all that their host has, and meet once more.
    """
    sharers = group.on_host if machine.transport != "nccl" else 1
    moved = unit.encoding_bytes + unit.decoding_bytes / sharers
    met_s = machine.host_latency_s if sharers > 1 else 0.0
    return Cost(((Move(MEMORY, met_s + moved / machine.code_bytes_per_s, moved),),), 0)


def reduce(unit: UnitPlan, group: Group, machine: Machine) -> Cost:
    """The reduce-scatter of the unit's gradients."""
    nbytes = unit.reduce_bytes
    if machine.transport == "nccl":
        return _ring(nbytes, unit.reduced_buckets, group, machine)
    full = group.ranks * _reduced_part(unit)
    if group.hosts > 1:
        return over_hosts.reduce(
            nbytes,
            full,
            unit.gradient_bytes,
            unit.partial_bytes,
            group,
            machine,
            crossing=unit.crossing_bytes,
            coded=unit.sum_coding_bytes,
            calls=unit.reduced_buckets,
        )
    moved = moved_by_reduce(full, unit.gradient_bytes)
    return _shared("reduce", nbytes, unit.reduced_buckets, moved, machine)


def all_reduce(unit: UnitPlan, group: Group, machine: Machine) -> Cost:
    """The all-reduce of the gradients of a rank's shard, and their way into the gradient."""
    nbytes = unit.all_reduce_bytes
    if machine.transport == "nccl":
        (latency,), *moves = _ring(nbytes, 1, group, machine).stages
        latency_s = 2 * unit.reduced_buckets * min(latency.seconds, _tree_latency_s(group, machine))
        return Cost(((Move(LATENCY, latency_s),), *moves), nbytes)
    shard = _reduced_part(unit)
    used = shard + unit.gradient_bytes
    if group.hosts > 1:
        calls = unit.reduced_buckets
        return over_hosts.all_reduce(
            nbytes, shard, unit.partial_bytes, used, group, machine, calls=calls
        )
    moved = moved_by_all_reduce(shard, group.ranks) + used
    return _shared("all_reduce", nbytes, unit.reduced_buckets, moved, machine)


def _reduced_part(unit: UnitPlan) -> int:
    """The bytes of a rank's part of the packed gradients."""
    return unit.packed_gradient_bytes - unit.reduce_bytes


def moved_by_gather(shard: float, part: float) -> float:
    """Over shm, the bytes that a rank reads, its shard, and writes, its part of the full parameters."""
    return shard + part


def moved_by_reduce(full: float, mean: float) -> float:
    """Over shm, the bytes that a rank reads, its part of each rank's gradients, and writes, their mean."""
    return full + mean


def moved_by_all_reduce(buffer: float, ranks: int) -> float:
    """Over shm, the bytes that a rank reads and writes: it sums its part of each buffer, and copies the others'."""
    part = buffer / ranks
    return (buffer + part) + 2 * (buffer - part)


def pack_s(unit: UnitPlan, machine: Machine) -> float:
    """The seconds in which a rank copies a unit's gradients to where they are reduced."""
    return 2 * unit.full_gradient_bytes / machine.copy_bytes_per_s


def _ring(nbytes: int, calls: int, group: Group, machine: Machine) -> Cost:
    """`nbytes` through all ranks, in so many calls one after the other.

    Over hosts, one of a host's ranks sends over the network; the others send inside the host meanwhile, which takes no
    time of its own.
    """
    across = group.hosts - 1
    latency_s = (group.ranks - 1 - across) * machine.host_latency_s
    rate = machine.host_bytes_per_s
    moves: tuple[Move, ...] = (Move(HOST, nbytes / rate, nbytes),)
    if across:
        latency_s += across * machine.network_latency_s
        rate = min(rate, machine.network_bytes_per_s / group.beside)
        out = nbytes / group.on_host
        moves = (Move(NETWORK, nbytes / rate, out), Move(HOST, 0.0, nbytes - out))
    return Cost(((Move(LATENCY, calls * latency_s),), moves), nbytes)


def _tree_latency_s(group: Group, machine: Machine) -> float:
    """From the ranks of a host to one of them, and up a binary tree of hosts; as NCCL estimates it."""
    in_host = (group.on_host - 1) * machine.host_latency_s
    return in_host + math.ceil(math.log2(group.hosts)) * machine.network_latency_s


def _shared(what: str, nbytes: int, calls: int, moved: float, machine: Machine) -> Cost:
    met_s = calls * MEETINGS[what] * machine.host_latency_s  # on the core on which it copies
    return Cost(((Move(MEMORY, met_s + moved / machine.host_bytes_per_s, moved),),), nbytes)
