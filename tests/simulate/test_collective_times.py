"""What collectives cost, by hand: rings over hosts, and memory that ranks share."""

from __future__ import annotations

import pytest
from torch import nn

from shardcomm import MemoryPlan
from shardcomm.planner.unit_plan import UnitPlan
from shardcomm.simulate import collectives
from shardcomm.simulate.cost import LATENCY, Group, Move
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
    moved = BYTES * 3 // 4
    assert cost.nbytes == moved
    assert cost.stages == ((Move(LATENCY, 3 * 0.5),), (Move("host", moved / 2048, moved),))


def test_a_ring_over_hosts_is_as_slow_as_its_slowest_link() -> None:
    fast_network = machine(network_bytes_per_s=8192.0)
    slow_network = machine(network_bytes_per_s=1024.0)
    group = Group.of(16, 1, 8)
    for which, rate in ((fast_network, 2048), (slow_network, 1024)):
        cost = collectives.reduce(unit(16), group, which)
        moved = BYTES * 15 // 16
        latency = Move(LATENCY, 14 * 0.5 + 1 * 2.0)
        # Of eight ranks that send it to the next, one sends it to the other host.
        links = Move("network", moved / rate, moved / 8), Move("host", 0.0, moved * 7 / 8)
        assert cost.stages == ((latency,), links)


def test_rings_side_by_side_share_a_hosts_network() -> None:
    """Eight pairs of replicas, one for each shard: an eighth of 2048 bytes/s for each."""
    of = unit(16, "hybrid_shard", replicas=2)
    cost = collectives.all_reduce(of, Group.of(2, 8, 8), machine())
    shard = BYTES // 8
    assert cost.nbytes == shard  # 2 (n - 1) / n of it
    links = Move("network", shard / 256, shard), Move("host", 0.0, 0.0)
    assert cost.stages == ((Move(LATENCY, 2 * 2.0),), links)


def test_an_all_reduce_over_many_hosts_goes_up_and_down_a_tree() -> None:
    """Up three levels of hosts and down again, where a ring would have seven hops each way."""
    of = unit(64, "hybrid_shard", replicas=8)
    cost = collectives.all_reduce(of, Group.of(8, 8, 8), machine())
    assert cost.stages[0] == (Move(LATENCY, 2 * 3 * 2.0),)
    within = collectives.all_reduce(unit(2, "no_shard"), Group.of(2, 1, 2), machine())
    assert within.stages[0] == (Move(LATENCY, 2 * 0.5),)


def test_over_shm_each_rank_moves_its_part() -> None:
    shm, group = machine(transport="shm"), Group.of(4, 1, 4)
    # In a gather it reads its shard, and writes it where all see it.
    gather = collectives.gather(unit(4), group, shm, again=False)
    assert gather.stages == (memory(2, 2 * BYTES / 4),)
    # In a reduce it reads a part of each rank's, and writes their mean.
    reduce = collectives.reduce(unit(4), group, shm)
    assert reduce.stages == (memory(2, BYTES + BYTES / 4),)
    all_reduce = collectives.all_reduce(unit(4, "no_shard"), group, shm)
    summed, copied, into_gradient = BYTES + BYTES / 4, 2 * 3 * BYTES / 4, 2 * BYTES
    assert all_reduce.stages == (memory(3, summed + copied + into_gradient),)


def test_over_shm_a_rank_moves_its_own_part_where_parts_differ() -> None:
    """One has the weight, which is three times the bias: it reads the gradients of both, and writes their mean."""
    (of,) = MemoryPlan.of(nn.Linear(3, NUMEL), 2, granularity="tensor").units
    reduce = collectives.reduce(of, Group.of(2, 1, 2), machine(transport="shm"))
    assert reduce.stages == (memory(2, 2 * 3 * BYTES + 3 * BYTES),)


def test_a_rank_alone_moves_its_own_gradients() -> None:
    shm, alone = machine(transport="shm"), Group.of(1, 1, 1)
    ((reduce,),) = collectives.reduce(unit(1), alone, shm).stages
    assert reduce.nbytes == 2 * BYTES  # it reads them, and writes them as their mean
    ((all_reduce,),) = collectives.all_reduce(unit(1, "no_shard"), alone, shm).stages
    assert all_reduce.nbytes == 2 * BYTES + 2 * BYTES  # the same, and into the gradient


def memory(meetings: int, moved: float) -> tuple[Move]:
    """What a core does by itself: it meets others, half a second each, and copies."""
    return (Move("memory", meetings * 0.5 + moved / 2048, moved),)
