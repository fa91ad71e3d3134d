"""What the policies of units come to: over which ranks each is sharded, and in which schedule they run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from shardcomm.arguments.scalars import is_whole
from shardcomm.comm.mesh import Mesh
from shardcomm.schedule.schedule import Schedule
from shardcomm.schedule.strategy import Strategy
from shardcomm.schedule.triggers import Trigger
from shardcomm.unit.grouped_unit import GroupedUnit
from shardcomm.unit.policy import Policy
from shardcomm.unit.pool import Pool
from shardcomm.unit.unit import UnitParams


def policies_of(units: Sequence[UnitParams], rest: Policy) -> list[Policy]:
    """The policy of each unit, with nothing left open."""
    return [unit.policy.over(rest) for unit in units]


def schedule_units(
    order: Sequence[Trigger],
    units: Sequence[GroupedUnit],
    rest: Policy,
    *,
    slots: int | Sequence[int] | None,
    backward: bool = True,
) -> Schedule:
    """The schedule of a step.

    Args:
        order: As in `Schedule.plan`.
        units: The model's units, the model itself first.
        rest: The policy of units that have none of their own.
        slots: As in `Schedule.plan`.
        backward: As in `Schedule.plan`.
    """
    given: dict[str, Any] = {
        name: [getattr(unit.policy, name) for unit in units]
        for name in ("strategy", "cpu_offload", "prefetch", "backward_prefetch")
    }
    strategies = map(Strategy.named, given.pop("strategy"))
    return Schedule.plan(
        order,
        [
            strategy.scheduled(cpu_offload=offload)
            for strategy, offload in zip(strategies, given.pop("cpu_offload"), strict=True)
        ],
        pools=[unit.pool.number for unit in units],
        **given,
        slots=slots,
        at_end=may_be_left_out(units, rest),
        backward=backward,
    )


def may_be_left_out(units: Sequence[GroupedUnit], rest: Policy) -> list[int]:
    """The units that a forward may leave out on some of their ranks, such as experts to which no token came.

    They have ranks of their own, each of which has all of the unit: nobody waits for another to gather it.
    """
    return [
        index
        for index, unit in enumerate(units)
        if unit.policy.comm is not rest.comm and unit.pool.shards == 1 and unit.pool.replicas > 1
    ]


def replicas_and_shards(strategy: Strategy, ranks: int, replicas: int | None) -> tuple[int, int]:
    """How many replicas of the model there are, and how many shards each has."""
    if not strategy.hybrid:
        if replicas is not None:
            raise ValueError(
                f"replicas is {replicas!r}; it is for 'hybrid_shard', and strategy is {strategy.name!r}"
            )
        return (1, ranks) if strategy.shard_params else (ranks, 1)
    if replicas is None:
        raise ValueError(
            f"strategy is 'hybrid_shard', which needs replicas: a number that divides the {ranks} ranks"
        )
    if not is_whole(replicas, 1) or ranks % replicas:
        raise ValueError(
            f"replicas is {replicas!r}; for 'hybrid_shard' it must divide the {ranks} ranks"
        )
    return replicas, ranks // replicas


def pools_of(
    units: Sequence[UnitParams], rest: Policy, main: Pool, ranks: int, replicas: int | None
) -> list[Pool]:
    """The pool of each unit: `main`, unless its own policy has other ranks or another strategy."""
    policies = policies_of(units, rest)
    made = {rest.ranks: main}
    for unit, policy in zip(units, policies, strict=True):
        if policy.ranks in made:
            continue
        comm = policy.comm
        how = Strategy.named(policy.strategy or "")
        if comm is None:
            _check_dims(unit, how, Strategy.named(rest.strategy or ""))
            sizes = replicas_and_shards(how, ranks, replicas)
        elif isinstance(comm, Mesh):
            sizes = comm.replicate.size, comm.shard.size
        elif isinstance(comm, DeviceMesh):
            shape = tuple(comm.shape)
            sizes = (shape[0], shape[1]) if how.hybrid else replicas_and_shards(how, shape[0], None)
        else:
            sizes = replicas_and_shards(how, comm.size, None)
        made[policy.ranks] = Pool(len(made), *sizes, 0, policy.secondary_ranks(sizes[1]))
    return [made[policy.ranks] for policy in policies]


def _check_dims(unit: UnitParams, own: Strategy, of_model: Strategy) -> None:
    """ValueError if the unit's `own` strategy, on the model's ranks, is not for as many dims as the model's is."""
    if own.hybrid == of_model.hybrid:
        return
    needed, given = (2, 1) if own.hybrid else (1, 2)
    raise ValueError(
        f"the policy of unit {unit.name!r} has strategy {own.name!r}, which needs ranks in {needed} "
        f"dimension{'s' if needed > 1 else ''}, and the model's ranks, by strategy {of_model.name!r}, are in {given}; "
        f"give the policy a comm of its own with ranks in {needed}"
    )
