"""What collectives cost over `hosts`: memory within a host, and sockets from host to host.

Each rank leads for its part: the ranks with its number on the other hosts exchange that part with it, so that a host's
link brings each part of a gather in once, and one partial sum a host of a reduce::

    turns | greeting | copies, sums, sockets | the link | turns
          |   core   |         core          | network  |

What goes through sockets takes a core: the kernel copies it, cuts it into packets and acknowledges them, and threads
wake each other. A part crosses in chunks, of which each takes an exchange. Chunks could be under way while cores copy
the next ones, but those are busy with computation, and so late that little of it overlaps: here nothing does.

Where ranks need all cores, threads wait for their turns on one: before bytes cross those of the stream, which meet, and
the worker that sends; behind, the worker that receives, and those of the stream again. A rank that computes goes on
until its slice ends, which is longer than what all of them do. So bytes cross late beside computation, and at once
where ranks wait. Ranks that are alone on their hosts, such as replicas, meet nobody, and wait for half of the turns.
"""

from __future__ import annotations

import math

from shardcomm.simulate.cost import MEMORY, NETWORK, TURN, Cost, Group, Move
from shardcomm.simulate.machine import Machine

_SLOT_BYTES = 8 << 20  # for a chunk of all parts; as in csrc/comm/hosts.cpp
_LEAST_CHUNK_BYTES, _MOST_CHUNK_BYTES = 1 << 10, 512 << 10  # of a part

MEETINGS = {"gather": 2, "reduce": 2, "all_reduce": 4}
"""How often the ranks of a host meet, where it has several."""

CROSSINGS = {"gather": 1, "reduce": 1, "all_reduce": 2}
"""How often bytes cross, once after the other: an all-reduce is a reduce and a gather."""


def gather(
    nbytes: int, shard: float, part: float, group: Group, machine: Machine, *, calls: int = 1
) -> Cost:
    """A rank writes its part where its host sees it and sends it; what came from the other hosts it writes there, too.

    Args:
        nbytes: Of the cost.
        shard: The bytes that a rank reads.
        part: The bytes of them that it sends, in the dtype or format of the gather.
        group: The ranks.
        machine: The machine.
        calls: How many gathers have these bytes together.
    """
    others = (group.hosts - 1) * part
    to_send = among_what_comes = 2 * part
    copied = (shard + part) + to_send + among_what_comes + 2 * others
    chunks = _chunks(part, group.ranks, calls)
    return _crossing("gather", nbytes, copied, others, calls, calls + chunks, group, machine)


def reduce(
    nbytes: int,
    full: float,
    mean: float,
    partial: float,
    group: Group,
    machine: Machine,
    *,
    crossing: float | None = None,
    coded: float = 0.0,
    calls: int = 1,
) -> Cost:
    """A rank sums the parts that it leads for over the ranks of its host, exchanges them, and sums over the hosts.

    Args:
        nbytes: Of the cost.
        full: The bytes of the rank's parts of all ranks' gradients.
        mean: The bytes of the mean that a rank writes.
        partial: The bytes of the sums of a host for one part.
        group: The ranks.
        machine: The machine.
        crossing: The bytes of these sums as they cross; None: as they are.
        coded: What it reads and writes, for each host, to code them, and to decode those that come.
        calls: How many reduces have these bytes together.
    """
    crossing = partial if crossing is None else crossing
    sums = group.hosts * partial
    among_what_comes = 2 * crossing
    copied = (full + sums) + among_what_comes + (sums + mean)
    others = (group.hosts - 1) * crossing
    chunks = _chunks(full / group.ranks, group.ranks * group.on_host, calls)
    exchanges, coded = calls + chunks, group.hosts * coded
    return _crossing("reduce", nbytes, copied, others, calls, exchanges, group, machine, coded)


def all_reduce(
    nbytes: int,
    buffer: float,
    partial: float,
    used: float,
    group: Group,
    machine: Machine,
    *,
    calls: int = 1,
) -> Cost:
    """A reduce of parts and a gather of their sums.

    Args:
        nbytes: Of the cost.
        buffer: The bytes that each rank has.
        partial: The bytes of all of them as sums are.
        used: The bytes that a rank reads and writes to use the sums.
        group: The ranks.
        machine: The machine.
        calls: How many all-reduces have these bytes together.
    """
    part, sums = buffer / group.ranks, partial / group.ranks
    copied = buffer + 2 * group.hosts * sums + 2 * sums + part  # as of a reduce
    # As of a gather, but for the part that is there.
    copied += 4 * part + 2 * (group.hosts - 1) * part
    copied += 2 * (buffer - part) + used
    others = (group.hosts - 1) * (part + sums)
    chunks = _chunks(part, group.ranks * group.on_host, calls)
    exchanges = calls + 2 * chunks
    return _crossing("all_reduce", nbytes, copied, others, calls, exchanges, group, machine)


def _chunks(part: float, blocks: int, calls: int) -> int:
    """In how many chunks a part of so many calls crosses, of which a slot of memory holds `blocks`."""
    most = min(max(_SLOT_BYTES // blocks, _LEAST_CHUNK_BYTES), _MOST_CHUNK_BYTES)
    return max(1, math.ceil(part / most)) + calls - 1  # of each call the last is not full


def _crossing(
    what: str,
    nbytes: int,
    copied: float,
    others: float,
    calls: int,
    exchanges: int,
    group: Group,
    machine: Machine,
    coded: float = 0.0,
) -> Cost:
    """The cost of a collective, or of several, whose rank copies, codes and exchanges bytes."""
    meetings = calls * MEETINGS[what] if group.on_host > 1 else 0
    core_s = meetings * machine.host_latency_s + copied / machine.host_bytes_per_s
    core_s += exchanges * machine.network_latency_s + others / machine.socket_bytes_per_s
    core_s += coded / machine.code_bytes_per_s
    into_host = others * group.on_host * group.beside
    across = Move(NETWORK, into_host / machine.network_bytes_per_s, others)
    stages: tuple[tuple[Move, ...], ...] = ((Move(MEMORY, core_s, copied + coded),), (across,))
    if machine.turn_s and machine.ranks_per_host >= machine.cores:
        turn_s = calls * CROSSINGS[what] * machine.turn_s
        if (
            group.on_host == 1 < machine.ranks_per_host
        ):  # half of the turns are those of ranks that meet
            turn_s /= 2
        turn = (Move(TURN, turn_s / 2),)
        stages = (turn, *stages, turn)
    return Cost(stages, nbytes)
