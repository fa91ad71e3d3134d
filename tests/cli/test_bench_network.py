"""`shardcomm bench --fit` under a launcher: what is made of what ranks of several hosts have measured, and who may not.

(Measuring a whole machine takes a minute.)
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from shardcomm import Communicator
from shardcomm.cli.bench.network import Costs, Point, _place, measured_costs, with_costs
from shardcomm.cluster import Cluster
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
        points.append(Point("gather", part, both + 8 * part / COPIED))
        points.append(Point("reduce", part, both + (2 * 3 + 2 + 3) * part / COPIED))
    points[0] = points[0]._replace(core_s=1.0)  # somebody disturbed it
    hosts = machine(
        transport="hosts", ranks_per_host=2, cores=2, host_latency_s=MET_S, host_bytes_per_s=COPIED
    )
    fitted = with_costs(hosts, 4, Costs(points, SOCKET, 1e8))
    assert fitted.network_latency_s == pytest.approx(EXCHANGE_S, rel=1e-6)
    assert fitted.socket_bytes_per_s == SOCKET
    assert replace(fitted, network_latency_s=0.0, socket_bytes_per_s=0.1, sources=hosts.sources) == replace(
        hosts, network_latency_s=0.0, socket_bytes_per_s=0.1
    )  # fmt: skip


def costs() -> tuple[tuple[int, int, int], Costs]:
    torch.set_num_threads(1)
    with Communicator.from_env() as comm:
        return tuple(_place(comm)), measured_costs(comm)  # type: ignore[return-value]


@pytest.mark.usefixtures("warm_python")
def test_ranks_of_several_hosts_measure_the_same(cluster: type[Cluster]) -> None:
    told = cluster(2, 2, "1gbit").run(costs, timeout_s=TIMEOUT_S)
    assert [place for place, _ in told] == [(2, 2, rank) for rank in range(4)]  # type: ignore[misc]
    _, first = told[0]  # type: ignore[misc]
    assert all(each == first for _, each in told)  # type: ignore[misc]
    assert first.socket_bytes_per_s > 0
    # A link brings no more than it carries; the bucket's first bytes come beside.
    assert 0 < first.link_bytes_per_s < 2 * 1e9 / 8
    assert all(point.core_s > 0 for point in first.points)


@pytest.mark.usefixtures("warm_python")
def test_ranks_of_one_host_have_no_network(tmp_path: Path) -> None:
    file = tmp_path / "here.json"
    words = ("-m", "shardcomm", "bench", "--fit", str(file))
    ran = torchrun("--standalone", "--nproc-per-node", "2", *words)
    assert ran.returncode == 1
    assert "--fit: the launcher's 2 ranks communicate over 'shm'; a network is" in ran.stderr
    assert not file.exists()
