"""What collectives cost, by hand: rings over hosts, and memory that ranks share."""

from __future__ import annotations

import pytest
from torch import nn

from shardcomm import MemoryPlan
from shardcomm.planner.unit_plan import UnitPlan
from shardcomm.simulate import collectives
from shardcomm.simulate.collectives import Group
from support.machines import machine

NUMEL = 1024
BYTES = 4 * NUMEL


def unit(ranks: int, strategy: str = "full_shard", replicas: int | None = None) -> UnitPlan:
    model = nn.Linear(1, NUMEL, bias=False)
    return MemoryPlan.of(model, ranks, strategy=strategy, replicas=replicas).units[0]


@pytest.mark.parametrize(
    ("ranks", "stride", "on_host", "group"),
    [
        (8, 1, 8, Group(8, hosts=1, beside=1)),
        (16, 1, 8, Group(16, hosts=2, beside=1)),
        (4, 1, 8, Group(4, hosts=1, beside=2)),  # two replicas in a host
        (2, 8, 8, Group(2, hosts=2, beside=8)),  # of a shard, once in each host
        (4, 4, 8, Group(4, hosts=2, beside=4)),  # of a shard, twice in each host
    ],
)
def test_where_the_ranks_of_a_group_are(
    ranks: int, stride: int, on_host: int, group: Group
) -> None:
    assert Group.of(ranks, stride, on_host) == group


def test_a_ring_within_a_host() -> None:
    cost = collectives.gather(unit(4), Group.of(4, 1, 4), machine(), again=False)
    assert cost.nbytes == BYTES * 3 // 4
    assert cost.link == "host"
    assert cost.latency_s == 3 * 0.5
    assert cost.moving_s == BYTES * 3 / 4 / 2048


def test_a_ring_over_hosts_is_as_slow_as_its_slowest_link() -> None:
    fast_network = machine(network_bytes_per_s=8192.0)
    slow_network = machine(network_bytes_per_s=1024.0)
    group = Group.of(16, 1, 8)
    for which, rate in ((fast_network, 2048), (slow_network, 1024)):
        cost = collectives.reduce(unit(16), group, which)
        assert cost.link == "network"
        assert cost.latency_s == 14 * 0.5 + 1 * 2.0
        assert cost.moving_s == BYTES * 15 / 16 / rate


def test_rings_side_by_side_share_a_hosts_network() -> None:
    """Eight pairs of replicas, one for each shard: an eighth of 2048 bytes/s for each."""
    of = unit(16, "hybrid_shard", replicas=2)
    cost = collectives.all_reduce(of, Group.of(2, 8, 8), machine())
    shard = BYTES // 8
    assert cost.nbytes == shard  # 2 (n - 1) / n of it
    assert cost.latency_s == 2 * 2.0
    assert cost.moving_s == shard / 256


def test_an_all_reduce_over_many_hosts_goes_up_and_down_a_tree() -> None:
    """Up three levels of hosts and down again, where a ring would have seven hops each way."""
    of = unit(64, "hybrid_shard", replicas=8)
    cost = collectives.all_reduce(of, Group.of(8, 8, 8), machine())
    assert cost.latency_s == 2 * 3 * 2.0
    within = collectives.all_reduce(unit(2, "no_shard"), Group.of(2, 1, 2), machine())
    assert within.latency_s == 2 * 0.5


def test_over_shm_each_rank_moves_its_part() -> None:
    shm, group = machine(transport="shm"), Group.of(4, 1, 4)
    gather = collectives.gather(unit(4), group, shm, again=False)
    assert gather.link_bytes == 2 * BYTES / 4  # it reads its shard, and writes it where all see it
    assert gather.moving_s == 2 * 0.5 + gather.link_bytes / 2048  # they meet before and after
    reduce = collectives.reduce(unit(4), group, shm)
    assert reduce.link_bytes == BYTES + BYTES / 4  # a part of each rank's, and their mean
    all_reduce = collectives.all_reduce(unit(4, "no_shard"), group, shm)
    summed, copied, into_gradient = BYTES + BYTES / 4, 2 * 3 * BYTES / 4, 2 * BYTES
    assert all_reduce.link_bytes == summed + copied + into_gradient
    assert all_reduce.moving_s == 3 * 0.5 + all_reduce.link_bytes / 2048
