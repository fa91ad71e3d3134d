"""What collectives cost over several hosts whose ranks share memory, by hand: the core's seconds, and the link's."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

from shardcomm import BlockFormat, Machine, MemoryPlan, MixedPrecision, Simulation, UnitTime
from shardcomm.planner.unit_plan import UnitPlan
from shardcomm.simulate import collectives
from shardcomm.simulate.cost import Cost, Group, Move
from shardcomm.unit.mixed_precision import GatherFormatOf
from support.machines import machine

NUMEL = 1024
BYTES = 4 * NUMEL
MET, EXCHANGED = 0.5, 2.0  # seconds of a core
CHUNK = 512 * 1024


def cluster(ranks_per_host: int = 2, **changed: Any) -> Machine:
    """Memory of 2048 bytes/s, sockets of 512, and a link of 1024 bytes/s into each host."""
    return machine(
        **{
            "transport": "hosts",
            "ranks_per_host": ranks_per_host,
            "cores": ranks_per_host,
            "network_latency_s": EXCHANGED,
            "network_bytes_per_s": 1024.0,
            **changed,
        }
    )


def unit(ranks: int, strategy: str = "full_shard", numel: int = NUMEL, **options: Any) -> UnitPlan:
    model = nn.Linear(1, numel, bias=False)
    return MemoryPlan.of(model, ranks, strategy=strategy, **options).units[0]


def moves(first_s: float, copied: float, into_host: float, sent: float) -> tuple[Any, ...]:
    """The stages of a collective: all that a core does, and then what the link does."""
    core = Move("memory", first_s + copied / 2048 + sent / 512, copied)
    return ((core,), (Move("network", into_host / 1024, sent),))


def gather(ranks: int, group: Group, numel: int = NUMEL) -> Cost:
    return collectives.gather(unit(ranks, numel=numel), group, cluster(), again=False)


def test_a_gather_brings_each_part_once_into_a_host() -> None:
    part = BYTES // 4
    cost = gather(4, Group.of(4, 1, 2))
    assert cost.nbytes == 3 * part
    # A rank reads and writes its part thrice: where its host sees it, to send it, and among what comes. That is one
    # part from the other host, which it reads and writes once.
    copied = 3 * 2 * part + 2 * part
    # They meet twice, and exchange a greeting and a chunk.
    assert cost.stages == moves(2 * MET + 2 * EXCHANGED, copied, into_host=2 * part, sent=part)


def test_more_hosts_send_more_into_each() -> None:
    part = BYTES // 8
    cost = gather(8, Group.of(8, 1, 2))
    copied = 3 * 2 * part + 3 * 2 * part
    assert cost.stages == moves(
        2 * MET + 2 * EXCHANGED, copied, into_host=2 * 3 * part, sent=3 * part
    )


def test_a_reduce_brings_one_sum_a_host() -> None:
    part = BYTES // 4
    cost = collectives.reduce(unit(4), Group.of(4, 1, 2), cluster())
    assert cost.nbytes == 3 * part
    # For each host a rank reads two ranks' parts, and writes their sum. It exchanges one of the sums, and keeps the
    # other where the two then are; of both it writes the mean.
    copied = 2 * (2 * part + part) + 2 * part + (2 * part + part)
    assert cost.stages == moves(2 * MET + 2 * EXCHANGED, copied, into_host=2 * part, sent=part)


def test_sums_of_halves_cross_as_float32() -> None:
    halves = unit(4, mixed_precision=MixedPrecision(reduce_dtype=torch.bfloat16))
    cost = collectives.reduce(halves, Group.of(4, 1, 2), cluster())
    ((_,), (across,)) = cost.stages
    assert cost.nbytes == 3 * BYTES // 8
    assert across.nbytes == BYTES // 4


def test_sums_that_cross_as_bfloat16_are_rounded_and_half_as_long() -> None:
    part, crossing = BYTES // 4, BYTES // 8
    of = unit(4, mixed_precision=MixedPrecision(reduce_format=torch.bfloat16))
    cost = collectives.reduce(of, Group.of(4, 1, 2), cluster())
    # As of float32, but that the sum which the rank keeps goes where the others come as it crosses.
    copied = 2 * (2 * part + part) + 2 * crossing + (2 * part + part)
    rounded = 2 * (part + crossing)  # for either host
    core_s = 2 * MET + 2 * EXCHANGED + copied / 2048 + rounded / 4032 + crossing / 512
    core = Move("memory", core_s, copied + rounded)
    assert cost.nbytes == 3 * part  # within a host, as before
    assert cost.stages == ((core,), (Move("network", 2 * crossing / 1024, crossing),))


def test_sums_that_cross_in_a_block_format_are_encoded_and_decoded() -> None:
    """A part is 256 codes and 8 scales, in 384 bytes."""
    part, crossing = BYTES // 4, 384
    of = unit(4, mixed_precision=MixedPrecision(reduce_format=BlockFormat("mxint8")))
    cost = collectives.reduce(of, Group.of(4, 1, 2), cluster())
    copied = 2 * (2 * part + part) + 2 * crossing + (2 * part + part)
    coded = 2 * 2 * (part + crossing)  # for either host, and back
    core_s = 2 * MET + 2 * EXCHANGED + copied / 2048 + coded / 4032 + crossing / 512
    core = Move("memory", core_s, copied + coded)
    assert cost.stages == ((core,), (Move("network", 2 * crossing / 1024, crossing),))


def test_an_all_reduce_is_a_reduce_and_a_gather() -> None:
    part = BYTES // 4
    cost = collectives.all_reduce(unit(4, "no_shard"), Group.of(4, 1, 2), cluster())
    reduced = 2 * (2 * part + part) + 2 * part + (2 * part + part)
    # Its part is read and written to send it, and among what comes, as is the other host's; then every other rank's.
    gathered = 2 * 2 * part + 2 * part + 3 * 2 * part
    into_gradient = 2 * BYTES
    copied = reduced + gathered + into_gradient
    assert cost.stages == moves(
        4 * MET + 3 * EXCHANGED, copied, into_host=2 * 2 * part, sent=2 * part
    )


def test_replicas_that_are_alone_on_their_hosts_meet_nobody() -> None:
    """Three replicas of two shards each: two groups beside each other."""
    of = unit(6, "hybrid_shard", replicas=3, numel=1536)
    shard = 4 * 1536 // 2
    part = shard // 3
    cost = collectives.all_reduce(of, Group.of(3, 2, 2), cluster())
    reduced = (shard + 3 * part) + 2 * part + (3 * part + part)
    gathered = 2 * 2 * part + 2 * 2 * part + 2 * 2 * part
    into_gradient = 2 * shard
    sent = 2 * 2 * part
    copied = reduced + gathered + into_gradient
    assert cost.stages == moves(3 * EXCHANGED, copied, into_host=2 * sent, sent=sent)


def test_each_chunk_of_a_part_takes_an_exchange() -> None:
    part = 3 * CHUNK
    cost = gather(4, Group.of(4, 1, 2), numel=part)  # four parts of so many bytes
    copied = 3 * 2 * part + 2 * part
    assert cost.stages == moves(2 * MET + 4 * EXCHANGED, copied, into_host=2 * part, sent=part)


def of_formats(name: str, param: nn.Parameter) -> BlockFormat:
    return BlockFormat("mxint8" if param.ndim > 1 else "mxfp8")


@pytest.mark.parametrize(("format", "buckets"), [(BlockFormat("mxint8"), 1), (of_formats, 2)])
def test_each_bucket_of_a_unit_meets_and_exchanges(format: GatherFormatOf, buckets: int) -> None:
    """A matrix and its bias, which stays wide in the same bucket, or has a format of its own, and so a bucket."""
    wire = MixedPrecision(gather_format=format)
    of = MemoryPlan.of(nn.Linear(1, NUMEL), 4, mixed_precision=wire).units[0]
    where = cluster(**dict.fromkeys(("host_bytes_per_s", "socket_bytes_per_s"), 1e15))
    group = Group.of(4, 1, 2)
    for cost in (
        collectives.gather(of, group, where, again=False),
        collectives.reduce(of, group, where),
    ):
        ((core,), (_,)) = cost.stages
        assert core.seconds == pytest.approx(buckets * (2 * MET + 2 * EXCHANGED))


def test_a_group_within_a_host_shares_memory_alone() -> None:
    of, group = unit(4, "hybrid_shard", replicas=2), Group.of(2, 1, 2)
    for where in (cluster(), machine(transport="shm")):
        cost = collectives.gather(of, group, where, again=False)
        assert cost.stages == ((Move("memory", 2 * MET + 2 * BYTES / 2 / 2048, BYTES),),)


def turns(cost: Cost) -> list[tuple[str, float]]:
    """The stages of a collective, with the seconds of those in which its threads wait for their turns."""
    return [(move.link, move.seconds if move.link == "turn" else 0.0) for (move,) in cost.stages]


def test_threads_wait_for_their_turns_before_bytes_cross_and_behind() -> None:
    """An all-reduce is a reduce and a gather."""
    where, group, turn_s = cluster(turn_s=0.5), Group.of(4, 1, 2), 0.25

    def crossing(times: int) -> list[tuple[str, float]]:
        turn = ("turn", times * turn_s)
        return [turn, ("memory", 0.0), ("network", 0.0), turn]

    assert turns(collectives.gather(unit(4), group, where, again=False)) == crossing(1)
    assert turns(collectives.reduce(unit(4), group, where)) == crossing(1)
    assert turns(collectives.all_reduce(unit(4, "no_shard"), group, where)) == crossing(2)
    replicas = unit(4, "hybrid_shard", replicas=2)
    alone = turns(collectives.all_reduce(replicas, Group.of(2, 2, 2), where))
    assert alone == crossing(1)  # twice half of the turns, since nobody meets


def test_threads_that_find_a_free_core_wait_for_no_turn() -> None:
    """Neither do those of ranks that share memory alone."""
    group, within = Group.of(4, 1, 2), Group.of(2, 1, 2)
    for cores, waiting in ((3, 0), (2, 2), (2 / 3, 2)):
        where = cluster(cores=cores, turn_s=0.5)
        links = [link for link, _ in turns(collectives.reduce(unit(4), group, where))]
        assert links.count("turn") == waiting
    of = unit(4, "hybrid_shard", replicas=2)
    assert turns(collectives.gather(of, within, cluster(turn_s=0.5), again=False)) == [
        ("memory", 0.0)
    ]


def test_ranks_that_wait_at_other_times_leave_threads_a_part_of_their_turns() -> None:
    """A rank computes for half of the step, so that turns are a quarter as long.

    It computes for 3/4 s, of which the last quarter comes behind the first all-reduce. Of that one's turns of half a
    second an eighth passes before it crosses. Both take the link for 7/16 s, one after the other, and computation has
    ended before they have.
    """
    model = nn.Sequential(*(nn.Linear(1, NUMEL, bias=False) for _ in range(2)))
    plan = MemoryPlan.of(model, 4, units=[nn.Linear], strategy="no_shard")
    infinite = dict.fromkeys(("host_bytes_per_s", "copy_bytes_per_s", "socket_bytes_per_s"), 1e15)
    where = cluster(
        **infinite,
        host_latency_s=0.0,
        network_latency_s=0.0,
        network_bytes_per_s=BYTES * 16 / 7,
        turn_s=0.5,
    )
    times = [UnitTime(0.0, 0.0), UnitTime(1 / 8, 1 / 4), UnitTime(1 / 8, 1 / 4)]
    step = Simulation.of(plan, times, where)
    assert step.step_s == pytest.approx(1 / 2 + 1 / 8 + 2 * 7 / 16, rel=1e-3)
    assert step.compute_s == pytest.approx(step.step_s / 2, rel=1e-3)
    assert step.machine == where
    assert "turn" not in step.link_bytes


def test_a_step_is_computed_between_the_links() -> None:
    """Two hosts of two ranks on two cores: each rank has half of one for its second, and then sends beside nothing."""
    model = nn.Sequential(nn.Linear(1, NUMEL, bias=False))
    plan = MemoryPlan.of(model, 4, units=[nn.Linear], strategy="no_shard")
    infinite = dict.fromkeys(("host_bytes_per_s", "copy_bytes_per_s", "socket_bytes_per_s"), 1e15)
    where = cluster(cores=1, host_latency_s=0.0, **infinite)
    step = Simulation.of(plan, [UnitTime(0.0, 0.0), UnitTime(1.0, 2.0)], where)
    exchanges, network = 2 * 3 * EXCHANGED, 2 * 2 * BYTES / 4 / 1024
    assert step.compute_s == pytest.approx(2 * (1.0 + 2.0))
    assert step.exposed_s == pytest.approx(exchanges + network)
    assert step.link_bytes["network"] == 2 * BYTES / 4


def test_hosts_that_share_a_machine_have_a_part_of_its_cores() -> None:
    """Six ranks of three hosts on two cores: each has a third of one."""
    model = nn.Sequential(nn.Linear(1, NUMEL, bias=False))
    plan = MemoryPlan.of(model, 6, units=[nn.Linear], strategy="no_shard")
    where = cluster(cores=2 / 3, copy_bytes_per_s=1e15)
    step = Simulation.of(plan, [UnitTime(0.0, 0.0), UnitTime(1.0, 2.0)], where)
    assert step.compute_s == pytest.approx(3 * (1.0 + 2.0))


def test_hosts_that_are_not_full_are_refused() -> None:
    model = nn.Linear(1, NUMEL)
    with pytest.raises(
        ValueError, match=re.escape("ranks is 5; on several hosts it must be a multiple of the 2")
    ):
        Simulation.of(MemoryPlan.of(model, 5), [UnitTime(1.0, 2.0)], cluster())
