"""Steps on the clock, by hand; what always holds of them; and that they are the engine's."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from shardcomm import (
    STRATEGIES,
    BlockFormat,
    Communicator,
    MemoryPlan,
    Mesh,
    MixedPrecision,
    Policy,
    Simulation,
    UnitTime,
    fully_shard,
)
from shardcomm.models.shapes import SHAPES
from shardcomm.trace.timeline import COMMUNICATION, Span
from support.machines import machine
from support.nets import batch, loss_of, make
from support.thread_ranks import run_mesh, run_threads

WIDTH = 32  # a unit has 4096 bytes: 1 s of a link for one of two ranks, and 0.25 s to pack
TIMES = [UnitTime(0.0, 0.0), *[UnitTime(1.0, 2.0)] * 3]


def chain(layers: int = 3) -> nn.Module:
    """A root without parameters, and units of equal size."""
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))


def plan(ranks: int = 2, layers: int = 3, **options: Any) -> MemoryPlan:
    return MemoryPlan.of(chain(layers), ranks, units=[nn.Linear], **options)


def times(step: Simulation, row: str) -> list[tuple[str, float, float]]:
    return [(span.name, span.begin_s, span.end_s) for span in step.spans if span.row == row]


def test_without_prefetch_every_gather_is_waited_for() -> None:
    step = Simulation.of(plan(prefetch=0), TIMES, machine())
    # In backward a unit's reduce and the next one's gather share the link: 0.5 s of latency, and 2 s for the bytes.
    assert times(step, "gather") == [
        ("0", 0.0, 1.5),
        ("1", 2.5, 4.0),
        ("2", 5.0, 6.5),
        ("1", 9.75, 12.25),
        ("0", 14.5, 17.0),
    ]
    assert times(step, "reduce") == [
        ("2", 9.75, 12.25),
        ("1", 14.5, 17.0),
        ("0", 19.25, 20.75),
    ]
    assert (step.step_s, step.compute_s, step.exposed_s) == (20.75, 9.75, 11.0)


def test_with_prefetch_gathers_go_on_beside_computation() -> None:
    step = Simulation.of(plan(prefetch=1), TIMES, machine())
    assert times(step, "gather") == [
        ("0", 0.0, 1.5),
        ("1", 1.5, 3.0),
        ("2", 3.0, 4.5),
        ("0", 7.75, 10.25),
    ]
    assert times(step, "compute") == [
        ("forward 0", 1.5, 2.5),
        ("forward 1", 3.0, 4.0),
        ("forward 2", 4.5, 5.5),
        ("forward (root)", 5.5, 5.5),  # which computes nothing
        ("backward (root)", 5.5, 5.5),
        ("backward 2", 5.5, 7.5),
        ("pack 2", 7.5, 7.75),
        ("backward 1", 7.75, 9.75),
        ("pack 1", 10.25, 10.5),  # once the reduce before has left the buffer
        ("backward 0", 10.5, 12.5),
        ("pack 0", 12.5, 12.75),
    ]
    assert (step.step_s, step.exposed_s) == (14.25, 4.5)


def test_data_parallel_ranks_all_reduce_beside_backward() -> None:
    step = Simulation.of(plan(strategy="no_shard"), TIMES, machine())
    assert times(step, "all_reduce") == [
        ("2", 5.25, 8.25),
        ("1", 8.25, 11.25),
        ("0", 11.25, 14.25),
    ]
    assert (step.step_s, step.exposed_s) == (14.25, 4.5)
    assert step.link_bytes == {"host": 3 * 4096}


def test_replicas_all_reduce_after_their_reduce() -> None:
    """Two replicas of two ranks, on a host: an all-reduce has 2048 bytes, as many as a reduce, and twice the hops."""
    step = Simulation.of(
        plan(4, layers=1, strategy="hybrid_shard", replicas=2), TIMES[:2], machine()
    )
    assert times(step, "gather") == [("0", 0.0, 1.5)]
    assert times(step, "reduce") == [("0", 4.75, 6.25)]
    assert times(step, "all_reduce") == [("0", 6.25, 8.25)]
    assert step.step_s == 8.25


def test_a_fast_link_hides_all_communication() -> None:
    step = Simulation.of(plan(), TIMES, machine(host_bytes_per_s=1e15, host_latency_s=0.0))
    assert step.exposed_s < 1e-9
    assert step.step_s == pytest.approx(9.75)


def test_contention_slows_what_is_computed_beside_moving_bytes() -> None:
    """Of a backward of 2 s, 1 s is done in the latency of the all-reduce, and 1 s at half speed beside its bytes."""
    step = Simulation.of(plan(layers=2, strategy="no_shard"), TIMES[:3], machine(contention=0.5))
    assert times(step, "all_reduce")[0] == ("1", 4.25, 7.25)
    assert times(step, "compute")[-2:] == [("backward 0", 4.25, 7.25), ("pack 0", 7.25, 7.5)]


def test_four_ranks_on_two_cores_compute_at_half_speed() -> None:
    alone = Simulation.of(plan(1), TIMES, machine(transport="shm", cores=2))
    crowd = machine(transport="shm", cores=2, host_bytes_per_s=1e15, host_latency_s=0.0)
    assert alone.step_s == 9.75
    assert Simulation.of(plan(4), TIMES, crowd).step_s == pytest.approx(2 * 9.75)
    lossy = replace(crowd, crowding=1.5)
    assert Simulation.of(plan(4), TIMES, lossy).step_s == pytest.approx(3 * 9.75)
    assert Simulation.of(plan(2), TIMES, lossy).step_s == pytest.approx(9.75)  # a core for each


def test_the_slowest_rank_makes_the_step() -> None:
    assert Simulation.of(plan(1), TIMES, machine(), slowest=2.0).step_s == 2 * 9.75


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_one_rank_does_not_communicate(strategy: str) -> None:
    replicas = 1 if STRATEGIES[strategy].hybrid else None
    step = Simulation.of(plan(1, strategy=strategy, replicas=replicas), TIMES, machine())
    assert step.link_bytes == {}
    assert step.exposed_s == 0
    assert step.step_s == 9.75


seconds = st.floats(0, 10).map(lambda value: round(value, 3))
machines = st.builds(
    machine,
    host_latency_s=st.sampled_from([0.0, 0.1, 0.5]),
    host_bytes_per_s=st.floats(1e3, 1e5),
    network_bytes_per_s=st.floats(1e3, 1e5),
    copy_bytes_per_s=st.floats(1e4, 1e6),
    contention=st.floats(0, 0.5),
)
unit_times = st.lists(st.builds(UnitTime, seconds, seconds), min_size=5, max_size=5)
configurations = st.sampled_from(
    [
        {"ranks": 2, "strategy": "full_shard", "prefetch": 0},
        {"ranks": 8, "strategy": "full_shard", "prefetch": 2},
        {"ranks": 8, "strategy": "full_shard", "reshard_after_forward": 2},
        {"ranks": 16, "strategy": "shard_grad_op"},
        {"ranks": 16, "strategy": "hybrid_shard", "replicas": 2},
        {"ranks": 16, "strategy": "no_shard"},
    ]
)


@given(configurations, unit_times, machines)
def test_a_step_is_computation_and_exposed_communication(
    options: dict[str, Any], of_units: list[UnitTime], where: Any
) -> None:
    step = Simulation.of(plan(layers=4, **options), of_units, where)
    assert step.compute_s + step.exposed_s == pytest.approx(step.step_s, abs=1e-9)
    figures = step.timeline().figures()[0]
    assert figures.total_s == step.step_s
    assert figures.exposed_s == pytest.approx(step.exposed_s, abs=1e-9)
    assert (figures.gathered_bytes, figures.reduced_bytes) == (
        step.plan.gathered_bytes,
        step.plan.reduced_bytes,
    )


@given(configurations, unit_times, machines)
def test_a_step_is_neither_shorter_than_its_parts_nor_longer_than_their_sum(
    options: dict[str, Any], of_units: list[UnitTime], where: Any
) -> None:
    """Whatever slows another goes on itself, so that at every moment a second's work is done in a second."""
    step = Simulation.of(plan(layers=4, **options), of_units, where)
    packs = [2 * unit.full_gradient_bytes / where.copy_bytes_per_s for unit in step.plan.units]
    computed = sum(map(sum, of_units)) + sum(packs)
    alone = Simulation.of(plan(layers=4, **options), [UnitTime(0, 0)] * 5, where)
    busy = {row: sum(e - b for _, b, e in times(step, row)) for row in COMMUNICATION}
    assert step.step_s >= max(computed, *busy.values()) - 1e-9
    assert step.step_s <= computed + alone.step_s + 1e-9


@given(unit_times, st.floats(1e3, 1e5), st.floats(1, 10))
def test_data_parallel_ranks_lose_nothing_by_a_faster_link(
    of_units: list[UnitTime], rate: float, factor: float
) -> None:
    """One channel, in which nothing overtakes. (With two, work that is done earlier may get in another's way.)"""
    data_parallel = plan(layers=4, strategy="no_shard")
    slow, fast = (
        Simulation.of(data_parallel, of_units, machine(host_bytes_per_s=each)).step_s
        for each in (rate, rate * factor)
    )
    assert fast <= slow + 1e-9


@given(configurations, unit_times)
def test_what_is_twice_as_slow_in_everything_takes_twice_as_long(
    options: dict[str, Any], of_units: list[UnitTime]
) -> None:
    slower = machine(
        host_latency_s=1.0,
        network_latency_s=4.0,
        host_bytes_per_s=1024.0,
        network_bytes_per_s=1024.0,
        copy_bytes_per_s=16384.0,
    )
    planned = plan(layers=4, **options)
    twice = [UnitTime(2 * forward, 2 * backward) for forward, backward in of_units]
    step, slow = Simulation.of(planned, of_units, machine()), Simulation.of(planned, twice, slower)
    assert slow.step_s == pytest.approx(2 * step.step_s)


def collectives_of(spans: tuple[Span, ...] | list[Span]) -> dict[str, list[tuple[str, int]]]:
    """For each row of communication its units and bytes, in order."""
    return {
        row: [(s.name, s.nbytes) for s in spans if s.row == row and s.nbytes]
        for row in COMMUNICATION
    }


def traced(
    ranks: Communicator | Mesh, **options: Any
) -> tuple[dict[str, list[tuple[str, int]]], int, int]:
    """The collectives of the engine's second step, and the bytes that its traffic counts in it."""
    model = make()
    engine = fully_shard(model, ranks, **options)
    loss_of(model, batch(ranks.rank, 0)).backward()
    before = engine.traffic.gathered_bytes, engine.traffic.reduced_bytes
    with engine.trace() as trace:
        loss_of(model, batch(ranks.rank, 1)).backward()
    after = engine.traffic.gathered_bytes, engine.traffic.reduced_bytes
    return collectives_of(trace.spans()), after[0] - before[0], after[1] - before[1]


@pytest.mark.parametrize(
    "options",
    [
        {"strategy": "full_shard"},
        {"strategy": "full_shard", "prefetch": 0},
        {"strategy": "full_shard", "prefetch": 2, "slots": 2},
        {"strategy": "shard_grad_op"},
        {"strategy": "no_shard"},
        {
            "strategy": "full_shard",
            "mixed_precision": MixedPrecision(torch.bfloat16, torch.bfloat16),
        },
    ],
)
def test_the_simulated_collectives_are_the_engines(options: dict[str, Any]) -> None:
    def body(comm: Communicator) -> Any:
        return traced(comm, **options)

    seen, gathered, reduced = run_threads(body, 2)[0]
    planned = MemoryPlan.of(make(), 2, rank=0, **options)
    step = Simulation.of(planned, [UnitTime(1, 2)] * len(planned.units), machine())
    assert collectives_of(step.spans) == seen
    figures = step.timeline().figures()[0]
    assert (figures.gathered_bytes, figures.reduced_bytes) == (gathered, reduced)


def test_the_simulated_collectives_of_replicas_are_the_engines() -> None:
    def body(mesh: Mesh) -> Any:
        return traced(mesh, strategy="hybrid_shard")

    seen, gathered, reduced = run_mesh(body, 2, 2)[0]
    planned = MemoryPlan.of(make(), 4, strategy="hybrid_shard", replicas=2, rank=0)
    step = Simulation.of(planned, [UnitTime(1, 2)] * len(planned.units), machine())
    assert collectives_of(step.spans) == seen
    figures = step.timeline().figures()[0]
    assert (figures.gathered_bytes, figures.reduced_bytes) == (gathered, reduced)


def test_data_parallel_ranks_cast_what_they_compute_with() -> None:
    """Once a step, before a unit's forward: 4,096 bytes are read, and half as many written, at 32,768 a second."""
    half = MixedPrecision(torch.bfloat16)
    step = Simulation.of(plan(strategy="no_shard", mixed_precision=half), TIMES, machine())
    cast = 6144 / 32768
    assert times(step, "gather") == [
        ("0", 0.0, cast),
        ("1", cast + 1.0, 2 * cast + 1.0),
        ("2", 2 * cast + 2.0, 3 * cast + 2.0),
    ]
    assert times(step, "waiting")[:3] == [
        (f"gather {n}", b, e) for n, b, e in times(step, "gather")
    ]
    assert step.link_bytes["memory"] == 3 * 6144


def test_the_simulated_casts_are_the_engines() -> None:
    options: dict[str, Any] = {
        "strategy": "no_shard",
        "mixed_precision": MixedPrecision(torch.bfloat16),
    }

    def body(comm: Communicator) -> list[str]:
        model = make()
        engine = fully_shard(model, comm, **options)
        loss_of(model, batch(comm.rank, 0)).backward()
        with engine.trace() as trace:
            loss_of(model, batch(comm.rank, 1)).backward()
        return [span.name for span in trace.spans() if span.row == "gather"]

    planned = MemoryPlan.of(make(), 2, **options)
    step = Simulation.of(planned, [UnitTime(1, 2)] * len(planned.units), machine())
    assert run_threads(body, 2)[0] == [name for name, _, _ in times(step, "gather")]


def test_16384_ranks_are_simulated() -> None:
    model = SHAPES["gpt2"].on_meta()
    planned = MemoryPlan.of(model, 16384, strategy="hybrid_shard", replicas=2048)
    step = Simulation.of(planned, [UnitTime(0.01, 0.02)] * 13, machine(network_bytes_per_s=1e12))
    assert step.exposed_s > 0
    assert step.link_bytes.keys() == {"host", "network"}


@pytest.mark.parametrize(
    ("ranks", "changed", "message"),
    [
        (9, {"transport": "shm"}, "ranks is 9; machine 'made' is one host, of 8 ranks at most"),
        (16, {"network_bytes_per_s": 0}, "is one host, of 8 ranks at most"),
        (12, {}, "ranks is 12; on several hosts it must be a multiple of the 8 ranks of a host"),
    ],
)
def test_ranks_that_the_machine_has_not_are_refused(
    ranks: int, changed: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Simulation.of(plan(ranks), TIMES, machine(**changed))


@pytest.mark.parametrize(
    ("ranks", "options", "message"),
    [
        (
            24,
            {"strategy": "hybrid_shard", "replicas": 8},
            "groups of 3 ranks, by replicas, .* 8 ranks",
        ),
        (24, {"strategy": "hybrid_shard", "replicas": 2}, "groups of 12 ranks, by replicas"),
        (24, {"reshard_after_forward": 3}, "groups of 3 ranks, by reshard_after_forward"),
    ],
)
def test_groups_of_which_some_would_lie_on_two_hosts_are_refused(
    ranks: int, options: dict[str, Any], message: str
) -> None:
    """Ranks 6 and 7 of the third group of 3 are on the first host, and rank 8 is on the second."""
    with pytest.raises(ValueError, match=message):
        Simulation.of(plan(ranks, **options), TIMES, machine())
    assert Simulation.of(plan(ranks, **options), TIMES, machine(ranks_per_host=24)).step_s > 0


@pytest.mark.parametrize(
    "options",
    [
        {"strategy": "hybrid_shard", "replicas": 3},
        {"strategy": "hybrid_shard", "replicas": 6, "reshard_after_forward": 2},
        {"reshard_after_forward": 8},
    ],
)
def test_groups_that_fill_hosts_or_divide_them_are_simulated(options: dict[str, Any]) -> None:
    assert Simulation.of(plan(24, **options), TIMES, machine()).step_s > 0


def test_times_of_other_units_are_refused() -> None:
    with pytest.raises(ValueError, match="times has 2 entries; the plan has 4 units"):
        Simulation.of(plan(), TIMES[:2], machine())


@pytest.mark.parametrize(
    "time",
    [
        (math.nan, 1.0),
        (1.0, -1.0),
        (math.inf, 1.0),
        (10**400, 1.0),
        (None, 1.0),
        (1.0, "2"),
        (True, 1.0),
        (torch.tensor(1.0), 1.0),
    ],
    ids=lambda time: f"{time[0]!s:.9}, {time[1]!s}",
)
def test_times_that_are_none_are_refused(time: tuple[Any, Any]) -> None:
    with pytest.raises(
        ValueError, match=r"times has UnitTime.* for unit '2'; both must be numbers"
    ):
        Simulation.of(plan(), [*TIMES[:3], UnitTime(*time)], machine())


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"plan": "x"}, "plan is a str; it must be a shardcomm.MemoryPlan"),
        ({"machine": "8xH100"}, "machine is a str; it must be a shardcomm.Machine"),
        ({"times": 1.0}, "times is a float; it must be a list or a tuple"),
        ({"times": [1, 2, 3, 4]}, r"times of unit '\(root\)' is a int; it must be a .*UnitTime"),
    ],
)
def test_arguments_of_other_types_are_refused(changed: dict[str, Any], sentence: str) -> None:
    with pytest.raises(TypeError, match=f"^Simulation.of: {sentence}"):
        Simulation.of(**{"plan": plan(), "times": TIMES, "machine": machine()} | changed)


@pytest.mark.parametrize("slowest", [0.0, -1.0, math.nan, math.inf, True, None, "x"])
def test_a_factor_that_is_none_is_refused(slowest: Any) -> None:
    with pytest.raises(ValueError, match=f"slowest is {slowest!r}; it must be a number above 0"):
        Simulation.of(plan(), TIMES, machine(), slowest=slowest)


def test_an_offloaded_plan_is_refused() -> None:
    with pytest.raises(ValueError, match="parameters in host memory, whose copies are not"):
        Simulation.of(plan(cpu_offload=True), TIMES, machine())


@pytest.mark.parametrize(
    ("ranks", "policy"),
    [
        (2, Policy(comm=Communicator.local_group(1)[0])),  # a rank alone, which reduces nothing
        (1, Policy(comm=Communicator.local_group(2)[0])),
        (2, Policy(strategy="no_shard")),  # among sharded units, of which none is all-reduced
    ],
    ids=["on one rank of two", "on two ranks of one", "not sharded"],
)
def test_a_plan_with_a_unit_on_other_ranks_is_refused(ranks: int, policy: Policy) -> None:
    model = chain(2)
    first, second = model.children()
    planned = MemoryPlan.of(model, ranks, units={first: None, second: policy})
    with pytest.raises(ValueError, match="plan has unit '1' laid over ranks in another way"):
        Simulation.of(planned, TIMES[:3], machine())


def in_blocks(**options: Any) -> MemoryPlan:
    return plan(mixed_precision=MixedPrecision(gather_format=BlockFormat("mxint8")), **options)


def test_a_gather_in_a_block_format_moves_fewer_bytes_and_is_coded() -> None:
    """A part is 512 codes and 16 scales, in 640 bytes.

    A rank encodes 2,048 bytes to 640, and decodes twice 640 to 4,096: 8,064 bytes, at 4,032 a second.
    """
    step = Simulation.of(in_blocks(prefetch=0), TIMES, machine())
    moved = 0.5 + 640 / 2048
    assert times(step, "gather")[:3] == [
        ("0", 0.0, moved),
        ("0", moved, moved + 2.0),
        ("1", moved + 3.0, 2 * moved + 3.0),
    ]
    assert times(step, "compute")[0] == ("forward 0", moved + 2.0, moved + 3.0)
    gathers = 5  # the last unit of the forward stays
    assert step.plan.gathered_bytes == gathers * 640
    assert step.link_bytes["memory"] == gathers * 8064


def test_over_shared_memory_a_coded_part_is_read_and_written() -> None:
    shm = machine(transport="shm", cores=8, host_latency_s=0.0)
    step = Simulation.of(in_blocks(prefetch=0), TIMES, shm)
    (_, begin, moved), (_, again, coded), *_ = times(step, "gather")
    # A rank encodes 2,048 bytes to 640, and decodes 640 to 2,048; the other rank decodes the rest.
    assert (begin, moved, again) == (0.0, 2 * 640 / 2048, moved)
    assert coded == pytest.approx(moved + 2 * 2688 / 4032)


def test_gathers_from_a_secondary_shard_are_not_coded() -> None:
    on_two_hosts = machine(ranks_per_host=2, network_latency_s=0.5)
    step = Simulation.of(
        in_blocks(ranks=4, prefetch=0, reshard_after_forward=2), TIMES, on_two_hosts
    )
    spans = [name for name, _, _ in times(step, "gather")]
    assert spans == ["0", "0", "1", "1", "2", "2", "1", "0"]


@pytest.mark.parametrize(
    ("options", "where"),
    [
        ({"ranks": 4}, {"transport": "nccl", "ranks_per_host": 2}),
        ({"ranks": 2}, {"transport": "hosts", "ranks_per_host": 2, "cores": 2}),  # one host
        ({"ranks": 4, "strategy": "no_shard"}, {"transport": "hosts", "ranks_per_host": 2, "cores": 2}),
    ],
    ids=["nccl", "one host", "replicas"],
)  # fmt: skip
def test_sums_that_never_cross_in_a_format_are_refused(
    options: dict[str, Any], where: dict[str, Any]
) -> None:
    wire = MixedPrecision(reduce_format=BlockFormat("mxint8"))
    with pytest.raises(ValueError, match="plan has a reduce_format, in which the sums of hosts"):
        Simulation.of(plan(mixed_precision=wire, **options), TIMES, machine(**where))
