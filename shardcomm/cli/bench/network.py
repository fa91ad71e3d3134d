"""Measures what lies between hosts, for a simulation: a launcher has started equally many ranks on each of them.

ranks_per_host, cores  as they are; hosts that are one machine share its cores
crowding               a GPT on all ranks, over the same on as many of them as there are cores, in turns
socket_bytes_per_s     what gathers and reduces of more bytes take longer of a core, less their copies in memory (a
                       process's time on a core is the same over slow links and fast ones)
network_bytes_per_s    what they take longer until their end
network_latency_s      gathers and reduces of several sizes: what else they take of a core
turn_s                 a small gather while all ranks compute, less the same while none does
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from shardcomm import _C
from shardcomm.cli.bench.machine import crowding, measured_machine
from shardcomm.comm.communicator import Communicator
from shardcomm.simulate import over_hosts
from shardcomm.simulate.cost import Group
from shardcomm.simulate.machine import Machine

DEADLINE_S = 300.0
"""How long the other ranks wait while rank 0 measures its host."""

_PARTS = tuple(1 << power for power in (12, 16, 19, 20, 21))  # bytes of a rank
_FEW, _MORE = 1 << 19, 1 << 21  # two of these, as large as units are
_ROUNDS, _BYTES_A_ROUND, _MOST_CALLS = 5, 1 << 24, 20
_MOST_RATE = 1e15
_TURNS = 40  # rounds; a turn is now short and now long
_SMALL = 1 << 12  # bytes of a rank
_BEFORE_S = 0.004  # of computation, so that slices begin at different times


class Point(NamedTuple):
    """A collective that was measured.

    Attributes:
        what: "gather" or "reduce".
        part: The bytes of a rank's part.
        core_s: The seconds that a rank's process was on a core, the mean of the ranks.
        seconds: The seconds until its end on the slowest rank.
    """

    what: str
    part: int
    core_s: float
    seconds: float


class Costs(NamedTuple):
    """What was measured between hosts.

    Attributes:
        points: Collectives over `hosts`.
        turn_s: As a machine has it.
    """

    points: list[Point]
    turn_s: float


class _Place(NamedTuple):
    """Where a rank is.

    Attributes:
        ranks: How many ranks its host has.
        hosts: How many hosts share the host's machine.
        number: The rank's number among those of that machine.
    """

    ranks: int
    hosts: int
    number: int


def measured_hosts(name: str) -> Machine | None:
    """Measures the hosts of a launcher's ranks; collective. Returns the machine on rank 0, and None on the others.

    Takes a minute, and more where links are slow.

    Raises:
        ValueError: The ranks do not communicate over `hosts`; the message says what they must be.
        CommError: A rank failed.
        RankError: A rank failed in the measurement of rank 0's host.
    """
    torch.set_num_threads(1)
    with Communicator.from_env(deadline_s=DEADLINE_S) as comm:
        if comm.transport != "hosts":
            raise ValueError(
                f"the launcher's {comm.size} ranks communicate over {comm.transport!r}; a network is measured between "
                "CPU hosts of equally many ranks (and one host without a launcher)"
            )
        here = measured_machine(name) if comm.rank == 0 else None
        place, cores = _place(comm), len(os.sched_getaffinity(0))
        on_machine = place.hosts * place.ranks
        slower = crowding(comm, place.number, few=min(cores, on_machine), all_=on_machine)
        costs = measured_costs(comm)
    if here is None:
        return None
    measured = "measured by `shardcomm bench --fit`"
    shared = f" by the {place.hosts} hosts that share them" if place.hosts > 1 else ""
    machine = replace(
        here,
        ranks_per_host=place.ranks,
        cores=cores / place.hosts,
        crowding=slower,
        sources={
            **here.sources,
            "ranks_per_host": "the launcher's",
            "cores": f"the cores that this process may use{shared}",
            "crowding": f"{measured}: a GPT on {on_machine} ranks and on {min(cores, on_machine)}",
            "network_burst_bytes": "not measured: 0, as of a link without a bucket",
        },
    )
    return with_network(machine, comm.size, costs)


def with_network(machine: Machine, ranks: int, costs: Costs) -> Machine:
    """The machine as one of several hosts, of which `ranks` ranks have measured the network."""
    measured = "measured by `shardcomm bench --fit`"
    group = Group.of(ranks, 1, machine.ranks_per_host)
    known = replace(
        machine,
        transport="hosts",
        network_latency_s=0.0,
        network_bytes_per_s=_MOST_RATE,
        socket_bytes_per_s=_MOST_RATE,
        turn_s=costs.turn_s,
        sources={
            **machine.sources,
            "network_bytes_per_s": f"{measured}: gathers and reduces of more and of fewer bytes",
            "socket_bytes_per_s": f"{measured}: the same, in time on a core",
            "turn_s": f"{measured}: small gathers beside computation",
        },
    )
    # What further chunks take is in the rates: an exchange of few bytes takes hardly anything of a core.
    others, longer_s, in_sockets_s = 0, 0.0, 0.0
    for point in costs.points:
        sign = {_MORE: 1, _FEW: -1}.get(point.part, 0)
        others += sign * (group.hosts - 1) * point.part
        longer_s += sign * point.seconds
        in_sockets_s += sign * (point.core_s - _core_s(point, group, known))
    rates = replace(
        known,
        network_bytes_per_s=_rate(group.on_host * others, longer_s),
        socket_bytes_per_s=_rate(others, in_sockets_s),
    )
    return _with_exchanges(rates, group, costs.points)


def _with_exchanges(machine: Machine, group: Group, points: Sequence[Point]) -> Machine:
    """The machine, of which all else is known, with what an exchange takes of a core."""
    exchanges_s = []
    for point in points:
        known_s = _core_s(point, group, machine)
        exchanges = _core_s(point, group, replace(machine, network_latency_s=1.0)) - known_s
        exchanges_s.append((point.core_s - known_s) / exchanges)
    measured = "measured by `shardcomm bench --fit`"
    each = ", ".join(f"{seconds * 1e6:.0f}" for seconds in exchanges_s)
    return replace(
        machine,
        network_latency_s=max(0.0, statistics.median(exchanges_s)),
        sources={
            **machine.sources,
            "network_latency_s": f"{measured}: gathers and reduces; the median of {each} us",
        },
    )


def _core_s(point: Point, group: Group, machine: Machine) -> float:
    """The seconds of a core that the simulation has for what was measured."""
    part = float(point.part)
    if point.what == "gather":
        cost = over_hosts.gather(0, part, part, group, machine)
    else:
        cost = over_hosts.reduce(0, group.ranks * part, part, part, group, machine)
    return sum(move.seconds for stage in cost.stages for move in stage if move.link == "memory")


def measured_costs(comm: Communicator) -> Costs:
    """What a rank measures between hosts; collective, and the same on all ranks."""
    points = []
    for size in _PARTS:
        part = torch.ones(size // 4)
        full = comm.allocate(comm.size * part.numel(), use="gather")
        sent = comm.allocate(comm.size * part.numel(), use="reduce").fill_(1)
        calls = {
            "gather": partial(comm.all_gather, full, part),
            "reduce": partial(comm.reduce_scatter, part, sent, "avg"),
        }
        for what, call in calls.items():
            points.append(Point(what, size, *_times(comm, call, size)))
    return Costs(points, _turn_s(comm))


def _turn_s(comm: Communicator) -> float:
    """How much longer a small gather takes while all ranks compute than while none does; collective."""
    beside, alone = (_gather_s(comm, computing=computing) for computing in (True, False))
    return max(0.0, beside - alone)


def _gather_s(comm: Communicator, *, computing: bool) -> float:
    """The seconds of a small gather on the slowest rank, the median of the rounds."""
    part = torch.ones(_SMALL // 4)
    full = comm.allocate(comm.size * part.numel(), use="gather")
    matrix = torch.ones(256, 256)  # whose product takes well under a slice
    caller, stream = _C.Stream.caller(), comm.streams.gather
    seconds = torch.empty(_TURNS)
    for round_ in range(_TURNS):
        comm.barrier()
        since = time.perf_counter()
        while computing and time.perf_counter() - since < _BEFORE_S:
            torch.mm(matrix, matrix)
        begin = caller.record(timed=True)
        comm.all_gather(full, part, stream=stream)
        end = stream.record(timed=True)
        # Another gather ends when all ranks have ended the first; until then nobody may pause.
        last = comm.all_gather(full, part, stream=stream)
        while computing and not last.is_completed():
            torch.mm(matrix, matrix)
        last.wait()
        seconds[round_] = end.seconds_since(begin)
    comm.all_reduce(seconds, "max")
    return float(seconds.median())


def _rate(nbytes: int, seconds: float) -> float:
    """Bytes in a second; the most that a machine may have where noise left no time."""
    return min(nbytes / seconds, _MOST_RATE) if seconds > 0 else _MOST_RATE


class _Taken(NamedTuple):
    """The seconds of a call: on a core, the mean of the ranks, and until its end on the slowest."""

    core_s: float
    seconds: float


def _times(comm: Communicator, call: Callable[[], object], size: int) -> _Taken:
    """The medians of some rounds of a call whose parts have `size` bytes; collective."""
    many = max(1, min(_MOST_CALLS, _BYTES_A_ROUND // size))
    rounds = []
    for _ in range(1 + _ROUNDS):
        comm.barrier()
        begin, on_core = time.perf_counter(), time.process_time()
        for _ in range(many):
            call()
        core_s = torch.tensor((time.process_time() - on_core) / many)
        seconds = torch.tensor((time.perf_counter() - begin) / many)
        comm.all_reduce(core_s, "avg")
        comm.all_reduce(seconds, "max")
        rounds.append(_Taken(float(core_s), float(seconds)))
    return _Taken(*map(statistics.median, zip(*rounds[1:], strict=True)))


def _place(comm: Communicator) -> _Place:
    """Hosts are of one machine if the same kernel runs on them, and one if they see the same shared memory."""
    kernel = int(Path("/proc/sys/kernel/random/boot_id").read_text()[:8], 16)
    host = os.stat("/dev/shm").st_dev
    places = torch.empty(2 * comm.size, dtype=torch.int64)
    comm.all_gather(places, torch.tensor([kernel, host]))
    of_ranks = [tuple(place) for place in places.view(-1, 2).tolist()]
    on_machine = [rank for rank, (its_kernel, _) in enumerate(of_ranks) if its_kernel == kernel]
    return _Place(
        ranks=of_ranks.count((kernel, host)),
        hosts=len({of_ranks[rank] for rank in on_machine}),
        number=on_machine.index(comm.rank),
    )
