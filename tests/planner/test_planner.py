"""The planner against hand-computed cases, the ZeRO paper's figures, and what the engine really holds and moves."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from shardcomm import Communicator, MemoryPlan, Mesh, MixedPrecision, Policy, fully_shard
from shardcomm.layout.param_spec import Granularity
from shardcomm.models.shapes import equal_blocks
from shardcomm.parameter.plain import plain
from shardcomm.planner.footprint import Footprint
from shardcomm.schedule.triggers import Phase, Trigger
from shardcomm.unit.buffer_bytes import slot_bytes
from support.nets import Block, batch, loss_of, make
from support.thread_ranks import run_mesh, run_threads

HALF = MixedPrecision(torch.bfloat16, torch.bfloat16)
HALF_WIDE_SUMS = MixedPrecision(torch.bfloat16, torch.float32)


def chain(layers: int = 3, width: int = 32) -> nn.Module:
    """Units of width x width elements, and a root without parameters."""
    return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))


def measured(
    ranks: Communicator | Mesh, model: nn.Module, **options: Any
) -> tuple[Footprint, int, int, int]:
    """Footprint, optimizer state, and the bytes that a steady step gathers and reduces."""
    engine = fully_shard(model, ranks, **options)
    optimizer = torch.optim.AdamW(model.parameters())
    before = (0, 0)
    for step in range(2):
        before = (engine.traffic.gathered_bytes, engine.traffic.reduced_bytes)
        loss_of(model, batch(ranks.rank, step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    with plain():  # outside of an optimizer's step a parameter tells the whole's shape
        state = sum(
            value.nbytes
            for param, entry in optimizer.state.items()
            for value in entry.values()
            if value.shape == param.shape and value.dim() > 0
        )
    gathered = engine.traffic.gathered_bytes - before[0]
    reduced = engine.traffic.reduced_bytes - before[1]
    footprint = engine.footprint()
    engine.close()
    return footprint, state, gathered, reduced


def matrices_whole(name: str, param: nn.Parameter) -> Granularity:
    """Both kinds in a unit."""
    return "tensor" if param.dim() > 1 else "row"


CASES: list[tuple[str, dict[str, Any]]] = [
    ("", {}),
    ("frozen", {"mixed_precision": HALF_WIDE_SUMS, "granularity": "tensor"}),
    ("tied-across-units", {"mixed_precision": HALF, "prefetch": 0, "backward_prefetch": 2}),
    ("nested", {"units": Block, "slots": 1, "prefetch": 0, "granularity": "element"}),
    ("", {"shard_dim": "auto"}),
    ("frozen", {"cpu_offload": True, "mixed_precision": HALF_WIDE_SUMS}),
    ("", {"granularity": "tensor", "cpu_offload": True}),
    ("nested", {"units": Block, "granularity": matrices_whole}),
]


CASE_NAMES = [f"{variant or 'plain'}-{','.join(options)}" for variant, options in CASES]


def assert_as_planned(
    results: list[tuple[Footprint, int, int, int]], plan_of: Callable[[int | None], MemoryPlan]
) -> None:
    """Each rank takes what was planned for it, and the plan of no rank is that of the one which takes the most."""
    shards = len(plan_of(None).shard_bytes)
    for index, (footprint, state, gathered, reduced) in enumerate(results):
        plan = plan_of(index % shards)
        assert footprint == plan.footprint
        assert state == plan.optimizer_bytes
        assert (gathered, reduced) == (plan.gathered_bytes, plan.reduced_bytes)
        assert plan.state_bytes <= plan_of(None).state_bytes
    held = [footprint.parameter_bytes for footprint, *_ in results[:shards]]
    assert plan_of(None).shard_bytes == tuple(held)
    assert plan_of(None).imbalance == pytest.approx(max(held) / (sum(held) / shards))


@pytest.mark.covers("memory as planned")
@pytest.mark.parametrize(("variant", "options"), CASES, ids=CASE_NAMES)
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("strategy", ["no_shard", "shard_grad_op", "full_shard"])
def test_training_takes_what_was_planned_to_the_byte(
    strategy: str, ranks: int, variant: str, options: dict[str, Any]
) -> None:
    def body(comm: Communicator) -> tuple[Footprint, int, int, int]:
        return measured(comm, make(variant, width=13), strategy=strategy, **options)

    def plan_of(rank: int | None) -> MemoryPlan:
        return MemoryPlan.of(
            make(variant, width=13), ranks, strategy=strategy, rank=rank, **options
        )

    assert_as_planned(run_threads(body, ranks), plan_of)


@pytest.mark.covers("memory as planned")
@pytest.mark.parametrize(("variant", "options"), CASES, ids=CASE_NAMES)
@pytest.mark.parametrize(("replicas", "shards"), [(2, 2), (1, 2), (3, 1)])
def test_hybrid_training_takes_what_was_planned_to_the_byte(
    replicas: int, shards: int, variant: str, options: dict[str, Any]
) -> None:
    def body(mesh: Mesh) -> tuple[Footprint, int, int, int]:
        return measured(mesh, make(variant, width=13), strategy="hybrid_shard", **options)

    def plan_of(rank: int | None) -> MemoryPlan:
        return MemoryPlan.of(
            make(variant, width=13),
            replicas * shards,
            strategy="hybrid_shard",
            replicas=replicas,
            rank=rank,
            **options,
        )

    assert_as_planned(run_mesh(body, replicas, shards), plan_of)


def test_a_slot_of_another_size_than_planned_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def larger(*args: Any) -> list[int]:
        return [nbytes + 64 for nbytes in slot_bytes(*args)]

    monkeypatch.setattr("shardcomm.engine.shard_units.slot_bytes", larger)
    planned = 2 * 4 * 1024
    expected = f"slot_bytes is {planned + 2 * 64:,} and not {planned:,}; please report"

    def body(comm: Communicator) -> None:
        with pytest.raises(RuntimeError, match=expected):
            fully_shard(chain(), comm, units=nn.Linear)

    run_threads(body, 2)


def test_gradients_of_another_size_than_planned_are_refused_once_they_are_there() -> None:
    model = chain()
    engine = fully_shard(model, Communicator.local_group(1)[0], units=nn.Linear)
    unit = engine.units[2]
    reduce = unit.gradients.reduce

    def reduce_into_more(**options: Any) -> None:
        reduce(**options)
        gradients = unit.buckets[0][0].gradients
        gradients._flat = torch.cat([gradients.flat, torch.zeros(8)])

    unit.gradients.reduce = reduce_into_more  # type: ignore[method-assign]
    with engine.no_sync():
        model(torch.ones(1, 32)).sum().backward()  # leaves none
    held, planned = 4 * (3 * 1024 + 8), 4 * 3 * 1024
    with pytest.raises(RuntimeError, match=f"gradient_bytes is {held:,} and not {planned:,}"):
        model(torch.ones(1, 32)).sum().backward()


@pytest.mark.parametrize("trained", [{0, 1}, {2}, set()], ids=str)
def test_a_plan_is_not_held_against_what_was_frozen_or_thawed_since(trained: set[int]) -> None:
    model = chain()
    model[2].requires_grad_(False)
    engine = fully_shard(model, Communicator.local_group(1)[0], units=nn.Linear)
    for index, layer in enumerate(model):
        layer.requires_grad_(index in trained)
    model(torch.ones(1, 32, requires_grad=True)).sum().backward()
    assert engine.footprint().gradient_bytes == len(trained) * 4 * 1024


def test_a_model_on_the_meta_device_has_the_same_plan() -> None:
    with torch.device("meta"):
        on_meta = make()
    assert repr(MemoryPlan.of(on_meta, 3)) == repr(MemoryPlan.of(make(), 3))


def test_planning_leaves_the_model_as_it_was() -> None:
    model = make()
    params = list(model.parameters())
    MemoryPlan.of(model, 4)
    assert all(a is b for a, b in zip(params, model.parameters(), strict=True))


def test_full_shard_by_hand() -> None:
    """3 units of 1,024 elements over 4 ranks, float32; units 0 and 2 of the chain share slot 0."""
    plan = MemoryPlan.of(chain(), 4, units=nn.Linear)
    unit = 4 * 1024
    held = plan.footprint
    assert held.total_parameter_bytes == 3 * unit
    assert held.parameter_bytes == held.gradient_bytes == 3 * unit // 4
    assert held.padding_bytes == 0
    assert plan.optimizer_bytes == 2 * 3 * unit // 4
    assert plan.slot_bytes == (unit, unit, 0)
    assert plan.reduce_buffer_bytes == unit
    assert plan.full_gradient_bytes == unit  # those of the unit before are packed when its own come
    assert plan.peak_bytes == 4 * 3 * unit // 4 + 2 * unit + unit + unit
    assert plan.peak_resident_bytes == plan.peak_bytes + 3 * unit  # a unit is one page
    # Only the first is gathered twice, and 3/4 of it each time.
    assert [u.gathers for u in plan.units] == [1, 2, 1, 1]
    assert plan.gathered_bytes == 4 * unit * 3 // 4
    assert plan.reduced_bytes == 3 * unit * 3 // 4


def test_a_million_ranks_are_planned_in_seconds() -> None:
    """The 1,024 rows of a matrix are those of the first ranks, and all others have padding of the same length."""
    ranks, row, units = 2**20, 4 * 1024, 32
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(units)))
    begin_s = time.process_time()
    plan = MemoryPlan.of(model, ranks, units=nn.Linear)
    assert time.process_time() - begin_s < 20
    assert (plan.rank, plan.optimizer_bytes) == (0, 2 * units * row)
    assert plan.shard_bytes == (units * row,) * ranks
    assert plan.footprint.padding_bytes == units * (ranks - 1024) * row
    padding = MemoryPlan.of(model, ranks, units=nn.Linear, rank=1024)
    assert (padding.footprint.parameter_bytes, padding.optimizer_bytes) == (units * row, 0)


@pytest.mark.parametrize(("prefetch", "backward_prefetch"), [(0, 2), (2, 0), (2, None)])
def test_the_deeper_prefetch_takes_the_slots(prefetch: int, backward_prefetch: int | None) -> None:
    """2 units ahead of the one that computes take 3 slots, whose units are not gathered again."""
    plan = MemoryPlan.of(
        chain(5), 4, units=nn.Linear, prefetch=prefetch, backward_prefetch=backward_prefetch
    )
    unit = 4 * 1024
    assert plan.slot_bytes == (unit, unit, unit, 0)
    assert plan.gathered_bytes == (5 + 2) * unit * 3 // 4


def test_no_shard_by_hand() -> None:
    plan = MemoryPlan.of(chain(), 4, units=nn.Linear, strategy="no_shard", optimizer="momentum")
    unit = 4 * 1024
    assert plan.footprint.parameter_bytes == plan.footprint.gradient_bytes == 3 * unit
    assert plan.optimizer_bytes == 3 * unit
    assert sum(plan.slot_bytes) == plan.gathered_bytes == plan.reduce_buffer_bytes == 0
    assert plan.staging_bytes == (unit, unit)
    assert plan.reduced_bytes == 3 * 2 * unit * 3 // 4  # an all-reduce sends 2 (n - 1) / n
    assert plan.peak_resident_bytes == plan.peak_bytes + 3 * 2 * unit  # a unit is one page


def test_hybrid_shard_by_hand() -> None:
    """6 ranks: 3 replicas of 2 shards."""
    plan = MemoryPlan.of(chain(), 6, units=nn.Linear, strategy="hybrid_shard", replicas=3)
    unit = 4 * 1024
    half = unit // 2
    assert plan.footprint.parameter_bytes == plan.footprint.gradient_bytes == 3 * half
    assert plan.slot_bytes == (unit, unit, 0)
    assert plan.reduce_buffer_bytes == unit
    assert plan.staging_bytes == (half, half)
    assert plan.gathered_bytes == 4 * half
    # Half of each unit to the peer of the row, and 2 x 2/3 of the other half to the column.
    assert plan.reduced_bytes == 3 * (half + 2 * half * 2 // 3)


def test_one_bucket_takes_no_turns_in_two_staging_buffers() -> None:
    plan = MemoryPlan.of(chain(layers=1), 2, units=[], strategy="no_shard")
    assert plan.staging_bytes == (4 * 1024,)


def test_mixed_precision_by_hand() -> None:
    plan = MemoryPlan.of(
        chain(), 4, units=nn.Linear, strategy="shard_grad_op", mixed_precision=HALF
    )
    unit = 2 * 1024
    assert plan.slot_bytes == (unit, unit, unit, 0)
    assert plan.reduce_buffer_bytes == unit
    assert plan.full_gradient_bytes == unit
    assert plan.gathered_bytes == plan.reduced_bytes == 3 * unit * 3 // 4
    assert plan.footprint.parameter_bytes == 3 * 4 * 1024 // 4  # the master copy is float32


def test_one_rank_alone_packs_gradients_at_once() -> None:
    plan = MemoryPlan.of(chain(), 1, units=nn.Linear)
    assert plan.full_gradient_bytes == 4 * 1024
    assert plan.reduce_buffer_bytes == sum(plan.slot_bytes) == 0
    assert plan.gathered_bytes == plan.reduced_bytes == 0
    assert plan.peak_bytes == 16 * 3 * 1024 + 4 * 1024


def test_optimizer_state_is_that_of_the_rank_with_the_most() -> None:
    """A row of 96 on rank 0 and one of 32 on rank 1, whose shard is padded: 64 elements of padding."""
    model = nn.ParameterDict({"a": torch.zeros(1, 96), "b": torch.zeros(1, 32)})
    root = nn.Linear(1, 1, bias=False)
    root.inner = model
    del root.weight
    plan = MemoryPlan.of(root, 2)
    assert plan.footprint.parameter_bytes == 4 * 96
    assert plan.footprint.padding_bytes == 4 * 64
    assert plan.optimizer_bytes == 2 * 4 * 96


def test_frozen_parameters_have_no_gradients_and_no_state() -> None:
    model = chain()
    model[0].requires_grad_(False)
    plan = MemoryPlan.of(model, 4, units=nn.Linear)
    assert plan.footprint.gradient_bytes == 2 * 1024
    assert plan.optimizer_bytes == 2 * 2 * 1024
    assert plan.units[1].full_gradient_bytes == plan.units[1].reduce_bytes == 0


@pytest.mark.parametrize(
    ("strategy", "paper_gb"), [("no_shard", 120.0), ("full_shard", 1.9)], ids=str
)
def test_zero_paper_figure_1(strategy: str, paper_gb: float) -> None:
    """7.5e9 parameters over 64 ranks, mixed-precision Adam: 16 bytes a parameter."""
    model = equal_blocks(7_500_000_000, 32).on_meta()
    plan = MemoryPlan.of(model, 64, strategy=strategy, mixed_precision=HALF)
    assert round(plan.state_bytes / 1e9, 1) == paper_gb


def test_plan_prints_a_table() -> None:
    drawn = repr(MemoryPlan.of(chain(8), 4, units=nn.Linear))
    assert drawn.startswith("MemoryPlan: full_shard over 4 ranks")
    assert "2 x 4.10 kB" in drawn  # the slots
    assert "0 ... 5" in drawn  # equal units in one line


def test_the_schedule_is_the_engine_s() -> None:
    plan = MemoryPlan.of(chain(), 2, units=nn.Linear)
    assert plan.schedule.order[0] == Trigger(Phase.PRE_FORWARD, 0)
    assert len(plan.schedule.order) == 2 * len(plan.units)


def plan_with_policy(of_unit: str, **options: Any) -> MemoryPlan:
    model = chain()
    return MemoryPlan.of(
        model, 4, units={model.get_submodule("0"): Policy(strategy=of_unit)}, **options
    )


@pytest.mark.parametrize(
    ("make_plan", "message"),
    [
        (lambda: MemoryPlan.of(chain(), 0), "ranks is 0"),
        (
            lambda: MemoryPlan.of(chain(), 2, optimizer="adam"),
            "'adam'; accepted: 'adamw', 'momentum'",
        ),
        (lambda: MemoryPlan.of(chain(), 2, strategy="zero"), "strategy is 'zero'"),
        (lambda: MemoryPlan.of(chain(), 2, prefetch=-1), "prefetch is -1"),
        (lambda: MemoryPlan.of(chain(), 2, units=nn.GELU), "no module"),
        (lambda: MemoryPlan.of(chain(), 2, replicas=2), "replicas is 2; it is for 'hybrid_shard'"),
        (
            lambda: MemoryPlan.of(chain(), 6, strategy="hybrid_shard"),
            "'hybrid_shard', which needs replicas: .* 6 ranks",
        ),
        (lambda: MemoryPlan.of(chain(), 6, strategy="hybrid_shard", replicas=4), "replicas is 4"),
        (
            lambda: MemoryPlan.of(chain(), 6, strategy="hybrid_shard", replicas=True),
            "replicas is True; for 'hybrid_shard' it must divide the 6 ranks",
        ),
        (
            lambda: MemoryPlan.of(chain(), 2, optimizer=["adamw"]),  # type: ignore[arg-type]
            r"optimizer is \['adamw'\]; accepted: 'adamw', 'momentum', 'sgd'",
        ),
        (
            lambda: plan_with_policy("full_shard", strategy="hybrid_shard", replicas=2),
            "unit '0' has strategy 'full_shard', which needs ranks in 1 dimension, and the model's ranks, by strategy "
            "'hybrid_shard', are in 2; give the policy a comm of its own with ranks in 1",
        ),
        (
            lambda: plan_with_policy("hybrid_shard"),
            "unit '0' has strategy 'hybrid_shard', which needs ranks in 2 dimensions, .* 'full_shard', are in 1",
        ),
    ],
)
def test_bad_arguments_are_named(make_plan: Callable[[], MemoryPlan], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_plan()


@pytest.mark.covers("units that differ")
def test_units_of_other_ranks_have_slots_of_their_own() -> None:
    pair = Communicator.local_group(2)[0]
    model = chain(6)
    units = {layer: Policy(comm=pair) if layer in model[1::2] else None for layer in model}
    _, *slots = MemoryPlan.of(model, 4, units=units).schedule.slot_of  # the first is the root's
    assert len(set(slots)) == 4, "two of all ranks, and two of the pair"
    assert not set(slots[0::2]) & set(slots[1::2])
