"""`shardcomm bench --fit` under a launcher: what is made of what ranks of several hosts have measured, and who may not.

(Measuring a whole machine takes a minute, so that ranks here take another one's figures for their host.)
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from shardcomm import Communicator, Machine
from shardcomm.cli.bench import network
from shardcomm.cli.bench.network import (
    Costs,
    Point,
    _place,
    _with_exchanges,
    measured_costs,
    with_network,
)
from shardcomm.cluster import Cluster
from shardcomm.simulate.cost import Group
from support.commands import torchrun
from support.machines import machine

TIMEOUT_S = 120.0
MET_S, EXCHANGE_S, SOCKET = 1e-4, 4e-4, 1e9
COPIED = 1e10  # bytes/s


def test_what_is_left_of_the_time_on_a_core_is_the_exchanges() -> None:
    """Two hosts of two ranks, by hand: a rank meets twice, copies, sends its part, and greets before each chunk."""
    points = []
    for part, chunks in ((1 << 12, 1), (1 << 19, 1), (1 << 20, 2)):
        both = 2 * MET_S + (1 + chunks) * EXCHANGE_S + part / SOCKET
        # Of a gather it reads and writes its part thrice, and the other's once; of a reduce it reads both ranks' parts
        # for each host and writes a sum, copies one of them, and reads the two of its part to write their mean.
        points.append(Point("gather", part, both + 8 * part / COPIED, 0.0))
        points.append(Point("reduce", part, both + (2 * 3 + 2 + 3) * part / COPIED, 0.0))
    points[0] = points[0]._replace(core_s=1.0)  # somebody disturbed it
    hosts = machine(
        transport="hosts",
        ranks_per_host=2,
        cores=2,
        host_latency_s=MET_S,
        host_bytes_per_s=COPIED,
        network_latency_s=0.0,
        socket_bytes_per_s=SOCKET,
    )
    fitted = _with_exchanges(hosts, Group.of(4, 1, 2), points)
    assert fitted.network_latency_s == pytest.approx(EXCHANGE_S, rel=1e-6)
    unknown = {"network_latency_s": 0.0, "sources": hosts.sources}
    assert replace(fitted, **unknown) == replace(hosts, **unknown)


def test_what_more_bytes_take_longer_is_sockets_and_the_link() -> None:
    """Two hosts of two ranks: what a rank sends takes its core, and what both send the link."""
    points, link = [], 5e8
    for part in (1 << 12, 1 << 19, 1 << 21):
        sent_s, crossed_s = part / SOCKET, 2 * part / link
        points.append(Point("gather", part, sent_s + 8 * part / COPIED, MET_S + crossed_s))
        points.append(Point("reduce", part, sent_s + 11 * part / COPIED, MET_S + crossed_s))
    here = machine(
        transport="shm",
        ranks_per_host=2,
        cores=1,
        host_latency_s=0.0,
        host_bytes_per_s=COPIED,
        socket_bytes_per_s=0.0,
        network_bytes_per_s=0.0,
    )
    hosts = with_network(here, 4, Costs(points, turn_s=0.02))
    assert hosts.transport == "hosts"
    assert hosts.socket_bytes_per_s == pytest.approx(SOCKET, rel=1e-5)
    assert hosts.network_bytes_per_s == pytest.approx(link)
    assert hosts.network_latency_s == pytest.approx(0.0, abs=1e-9)
    assert hosts.turn_s == 0.02


def fitted() -> tuple[tuple[int, int, int], Costs, Machine | None]:
    """`measured_hosts` with figures of another host; where the rank is, and what it measured and made."""
    network.measured_machine = lambda name: replace(
        machine(
            transport="shm",
            cores=2,
            flops_per_s=1e11,
            copy_bytes_per_s=1e10,
            host_bytes_per_s=1e10,
            host_latency_s=2e-5,
        ),
        name=name,
    )
    told: list[Costs] = []

    def told_costs(comm: Communicator) -> Costs:
        told.append(measured_costs(comm))
        return told[0]

    network.measured_costs = told_costs
    made = network.measured_hosts("two hosts")
    with Communicator.from_env() as comm:
        return tuple(_place(comm)), told[0], made  # type: ignore[return-value]


@pytest.mark.usefixtures("warm_python")
def test_ranks_of_several_hosts_make_one_machine(cluster: type[Cluster]) -> None:
    told = cluster(2, 2, "10gbit").run(fitted, timeout_s=TIMEOUT_S)
    assert [place for place, *_ in told] == [(2, 2, rank) for rank in range(4)]  # type: ignore[misc]
    _, first, made = told[0]  # type: ignore[misc]
    assert all(costs == first for _, costs, _ in told)  # type: ignore[misc]
    assert [made for *_, made in told[1:]] == [None] * 3  # type: ignore[misc]
    assert all(point.core_s > 0 for point in first.points)

    assert (made.name, made.transport, made.ranks_per_host) == ("two hosts", "hosts", 2)
    assert made.cores == len(os.sched_getaffinity(0)) / 2
    assert made.crowding >= 1
    # A link brings no more than it carries; the bucket's first bytes come beside.
    assert 0 < made.network_bytes_per_s < 2 * 1e10 / 8
    assert made.socket_bytes_per_s > 0
    # Four ranks compute; on fewer cores threads wait until a slice ends.
    assert made.turn_s == first.turn_s
    assert made.cores >= 2 or made.turn_s > 1e-3
    # Beside the other host's figures, a fast one has nothing left for exchanges.
    assert 0 <= made.network_latency_s < 0.05


@pytest.mark.usefixtures("warm_python")
def test_ranks_of_one_host_have_no_network(tmp_path: Path) -> None:
    file = tmp_path / "here.json"
    words = ("-m", "shardcomm", "bench", "--fit", str(file))
    ran = torchrun("--standalone", "--nproc-per-node", "2", *words)
    assert ran.returncode == 1
    assert "--fit: the launcher's 2 ranks communicate over 'shm'; a network is" in ran.stderr
    assert not file.exists()
