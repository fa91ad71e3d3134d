"""The planner: what a model costs each rank, in memory and in communication, before anything is allocated.

It groups, lays out and schedules by the functions that the engine runs, so its figures are the engine's, to the byte
(which is checked when it is set up, and again when its first gradients are there). What a rank holds, for P parameters
of 4 bytes over N ranks with AdamW::

                 no_shard     shard_grad_op   full_shard
    parameters   4 P          4 P / N         4 P / N      shards: what the optimizer updates
    gradients    4 P          4 P / N         4 P / N      of the shards
    optimizer    8 P          8 P / N         8 P / N      two moments
    slots        -            4 P             a few units  full parameters (2 bytes each in bf16)

`hybrid_shard` is `full_shard` over N / replicas ranks. Secondary shards come on top where H ranks gather for backward:
4 P / H. So do buffers to reduce in, of the size of a unit, and, during backward, the full gradients of one or two. The
first three lines make the usual 16 bytes a parameter: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training
Trillion Parameter Models", arXiv 1910.02054, figure 1. (It counts weights and gradients in fp16 beside an fp32 copy:
2 + 2 + 12.)
"""

from __future__ import annotations

import mmap
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardcomm.arguments.scalars import is_whole
from shardcomm.comm.mesh import Mesh
from shardcomm.planner.footprint import Footprint
from shardcomm.planner.table import drawn
from shardcomm.schedule.schedule import Phase, Schedule, Trigger, Verb
from shardcomm.schedule.strategy import Strategy
from shardcomm.trace import traffic
from shardcomm.unit.groups import (
    BucketGroup,
    GranularityOf,
    Pool,
    ShardDimOf,
    group_units,
    offload_bytes,
    reduce_buffer_bytes,
    secondary_bytes,
    slot_bytes,
    staging_bytes,
)
from shardcomm.unit.mixed_precision import MixedPrecision
from shardcomm.unit.owners import OwnerCost
from shardcomm.unit.policy import Policy
from shardcomm.unit.unit import UnitParams, Units, find_units, registration_order

OPTIMIZERS: Mapping[str, int] = {"adamw": 2, "momentum": 1, "sgd": 0}
"""Tensors of state that an optimizer of torch keeps for each parameter, in its shape and dtype."""


@dataclass(frozen=True)
class UnitPlan:
    """What one unit costs a rank, in bytes.

    Attributes:
        numel: parameters of the whole unit.
        parameter_bytes, gradient_bytes: of the rank's shard, padding included.
        padding_bytes: of all ranks' shards together.
        full_bytes: of its full parameters, in the slot; 0 where the shard is all of them.
        full_gradient_bytes: of the gradients that backward leaves, until they are packed.
        gather_bytes: received from the others in one gather.
        secondary_bytes: of its secondary shard; 0 without one.
        regather_bytes: received in each gather of a step but the first, which with a secondary shard is from the host.
        gathers: how many of them there are in a step.
        reduce_bytes: sent to the others in the step's reduce-scatter.
        all_reduce_bytes: sent to the replicas in the step's all-reduce.
    """

    name: str
    numel: int
    parameter_bytes: int
    gradient_bytes: int
    padding_bytes: int
    full_bytes: int
    full_gradient_bytes: int
    gather_bytes: int
    secondary_bytes: int
    regather_bytes: int
    gathers: int
    reduce_bytes: int
    all_reduce_bytes: int

    @property
    def gathered_bytes(self) -> int:
        """Received from the others by the gathers of a step."""
        again = max(self.gathers - 1, 0)
        return (self.gathers - again) * self.gather_bytes + again * self.regather_bytes

    @classmethod
    def of(
        cls,
        name: str,
        groups: Sequence[BucketGroup],
        pool: Pool,
        secondary_bytes: int,
        gathers: int,
    ) -> UnitPlan:
        """From the unit's buckets-to-be."""
        rank = pool.rank
        trained = [group for group in groups if group.trainable]
        gather_bytes = sum(
            (group.layout.flat_numel - group.layout.shard_numels[rank]) * group.param_dtype.itemsize
            for group in groups
        )
        regather_bytes = gather_bytes
        if secondary_bytes:
            place = rank % pool.secondary
            regather_bytes = sum(
                group.full_bytes - group.secondary_bytes(pool.secondary)[place] for group in groups
            )
        return cls(
            name=name,
            numel=sum(group.layout.numel for group in groups),
            parameter_bytes=sum(group.shard_bytes[rank] for group in groups),
            gradient_bytes=sum(group.shard_bytes[rank] for group in trained),
            padding_bytes=sum(group.layout.padding * group.dtype.itemsize for group in groups),
            full_bytes=sum(group.full_bytes for group in groups if group.needs_slot),
            full_gradient_bytes=sum(
                group.layout.numel * group.param_dtype.itemsize for group in trained
            ),
            gather_bytes=gather_bytes,
            secondary_bytes=secondary_bytes,
            regather_bytes=regather_bytes,
            gathers=gathers,
            reduce_bytes=sum(
                group.reduced_bytes - group.reduced_shard_bytes[rank] for group in trained
            ),
            all_reduce_bytes=sum(
                traffic.all_reduce_bytes(group.reduced_shard_bytes[rank], pool.replicas)
                for group in trained
            ),
        )


@dataclass(frozen=True, repr=False)
class MemoryPlan:
    """Bytes per rank; made by `MemoryPlan.of`, printed as a table. Where ranks differ, of the one that holds the most.

    Activations are not in it, nor what the optimizer's step allocates for itself (torch's foreach AdamW on a GPU: the
    parameters once more). Every module is taken to run once a step, in the order of registration.

    Attributes:
        ranks: all; `replicas` groups of them hold the model each.
        rank: which of the ranks that hold a model between them this is of: the one that holds the most.
        shard_bytes: the parameters, padding included, of each rank that holds a part of the model.
        units: what each costs, the model itself first.
        slot_bytes: of each slot.
        reduce_buffer_bytes: where gradients are packed to be reduced.
        staging_bytes: where they are all-reduced among replicas: the sizes of the buffers.
        host_bytes: of the parameters, gradients and optimizer state, what is in host memory by `cpu_offload`. (torch
            rounds pinned blocks up.)
        offload_bytes: of the device, through which they then pass.
        full_gradient_bytes: unsharded gradients that backward has at most at one time.
        optimizer_bytes: state of the elements that the rank holds; step counters are not counted.
        total_parameter_bytes: the whole model, once.
        schedule: of a step.
    """

    ranks: int
    replicas: int
    strategy: str
    optimizer: str
    rank: int
    shard_bytes: tuple[int, ...]
    units: tuple[UnitPlan, ...]
    slot_bytes: tuple[int, ...]
    reduce_buffer_bytes: int
    staging_bytes: tuple[int, ...]
    host_bytes: int
    offload_bytes: int
    full_gradient_bytes: int
    optimizer_bytes: int
    total_parameter_bytes: int
    schedule: Schedule

    @classmethod
    def of(
        cls,
        model: nn.Module,
        ranks: int,
        *,
        units: Units = None,
        ignored_params: Iterable[nn.Parameter] = (),
        strategy: str = "full_shard",
        replicas: int | None = None,
        mixed_precision: MixedPrecision | None = None,
        prefetch: int = 1,
        backward_prefetch: int | None = None,
        slots: int | None = None,
        granularity: GranularityOf = "row",
        shard_dim: ShardDimOf = 0,
        owner_cost: OwnerCost | None = None,
        cpu_offload: bool = False,
        reshard_after_forward: int | None = None,
        optimizer: str = "adamw",
        rank: int | None = None,
    ) -> MemoryPlan:
        """What `fully_shard` with the same arguments on `ranks` ranks will take; nothing is allocated or changed.

        Args:
            model: on any device, for instance meta.
            reshard_after_forward: how many ranks gather for backward among themselves, such as those of a host.
            replicas: for "hybrid_shard", which needs it: how many times the ranks hold the model.
            optimizer: one of `OPTIMIZERS`.
            rank: of the ranks that hold a model between them; None: the one that holds the most.

        Raises:
            TypeError, ValueError: an argument is not of its type, or out of its range; for the rest, as `fully_shard`.
        """
        if not is_whole(ranks, 1):
            raise ValueError(f"ranks is {ranks!r}; it must be a whole number above 0, below 2**31")
        if not isinstance(model, nn.Module):
            raise TypeError(f"model is a {type(model).__name__}; it must be a torch.nn.Module")
        if optimizer not in OPTIMIZERS:
            raise ValueError(
                f"optimizer is {optimizer!r}; accepted: {', '.join(map(repr, OPTIMIZERS))}"
            )
        how = Strategy.named(strategy)
        sizes = _mesh(how, ranks, replicas)
        if rank is not None and not is_whole(rank, 0, sizes[1] - 1):
            raise ValueError(
                f"rank is {rank!r}; it must be None or one of the {sizes[1]} that hold a model, from 0 on"
            )
        found = find_units(model, units, ignored_params)
        back = prefetch if backward_prefetch is None else backward_prefetch
        precision = mixed_precision or MixedPrecision()
        rest = Policy(None, how.name, precision, prefetch, back, cpu_offload, reshard_after_forward)
        policies = policies_of(found, rest)
        main = Pool(0, *sizes, 0 if rank is None else rank, rest.secondary_ranks(sizes[1]))
        pools = _pools(found, rest, main, ranks, replicas)
        schedule = schedule_units(
            registration_order(found), policies=policies, pools=pools, slots=slots
        )
        groups = group_units(found, policies, pools, granularity, shard_dim, owner_cost)
        if rank is None:
            most = {
                pool: pool._replace(rank=_most_loaded(pool, pools, groups, optimizer))
                for pool in dict.fromkeys(pools)
            }
            pools = [most[pool] for pool in pools]
        return cls.of_groups(found, groups, rest, schedule, pools, ranks, optimizer)

    @classmethod
    def of_groups(
        cls,
        units: Sequence[UnitParams],
        groups: Sequence[Sequence[BucketGroup]],
        rest: Policy,
        schedule: Schedule,
        pools: Sequence[Pool],
        ranks: int,
        optimizer: str = "adamw",
    ) -> MemoryPlan:
        """As `of`, of what has been found, laid out and scheduled already.

        Args:
            rest: the policy of what has none of its own.
            pools: over which ranks each unit is sharded.
            ranks: all.
        """
        gathers = schedule.gathers()
        secondary = secondary_bytes(groups, schedule.slot_of, pools)
        main = next((pool for pool in pools if pool.number == 0), pools[0])
        held = np.zeros(main.shards, dtype=np.int64)
        reduce_buffers, staging, state, on_host = 0, [], 0, 0
        for pool in dict.fromkeys(pools):
            its = pool.of(pools, groups)
            everything = _held_bytes([group for unit in its for group in unit], pool.shards)
            held += everything if pool == main else everything[pool.rank]
            reduce_buffers += reduce_buffer_bytes(its, pool.shards)
            staging += staging_bytes(its, pool.replicas)
            state += int(_state_bytes(its, pool, optimizer)[pool.rank])
            offloaded = [[group for group in unit if group.cpu_offload] for unit in its]
            on_host += int(_load(offloaded, pool, optimizer)[pool.rank])
        planned = tuple(
            UnitPlan.of(unit.name, unit_groups, pool, secondary[index], gathers[index])
            for index, (unit, unit_groups, pool) in enumerate(
                zip(units, groups, pools, strict=True)
            )
        )
        return cls(
            ranks=ranks,
            replicas=main.replicas,
            strategy=rest.strategy or "",
            optimizer=optimizer,
            rank=main.rank,
            shard_bytes=tuple(held.tolist()),
            units=planned,
            slot_bytes=tuple(slot_bytes(groups, schedule.slot_of)),
            reduce_buffer_bytes=reduce_buffers,
            staging_bytes=tuple(staging),
            host_bytes=on_host,
            offload_bytes=2 * offload_bytes(groups),
            full_gradient_bytes=_most_full_gradients(planned, schedule),
            optimizer_bytes=state,
            total_parameter_bytes=sum(
                group.layout.numel * group.dtype.itemsize for unit in groups for group in unit
            ),
            schedule=schedule,
        )

    @property
    def footprint(self) -> Footprint:
        """What `engine.footprint()` says after a step."""
        return Footprint(
            parameter_bytes=sum(unit.parameter_bytes for unit in self.units),
            gradient_bytes=sum(unit.gradient_bytes for unit in self.units),
            slot_bytes=sum(self.slot_bytes),
            secondary_bytes=self.secondary_bytes,
            reduce_buffer_bytes=self.reduce_buffer_bytes,
            staging_bytes=sum(self.staging_bytes),
            offload_bytes=self.offload_bytes,
            padding_bytes=sum(unit.padding_bytes for unit in self.units),
            total_parameter_bytes=self.total_parameter_bytes,
        )

    @property
    def secondary_bytes(self) -> int:
        """Secondary shards."""
        return sum(unit.secondary_bytes for unit in self.units)

    @property
    def imbalance(self) -> float:
        """The parameter bytes of the rank that holds the most, by the mean of all; 1 where all hold as many."""
        held = self.shard_bytes
        return max(held) * len(held) / sum(held) if any(held) else 1.0

    @property
    def state_bytes(self) -> int:
        """Parameters, gradients and optimizer state: what the usual tables count."""
        held = self.footprint
        return held.parameter_bytes + held.gradient_bytes + self.optimizer_bytes

    @property
    def peak_bytes(self) -> int:
        """The most that a rank's device holds at one time: in a backward that adds to the gradients of an earlier one.

        In one that starts without any, less by the shard of the unit whose gradient comes last.
        """
        on_device = self.state_bytes - self.host_bytes
        return on_device + self.buffer_bytes + self.full_gradient_bytes

    @property
    def buffer_bytes(self) -> int:
        """Of the device: slots, secondary shards, the reduce buffer, staging buffers, and those of `cpu_offload`."""
        staging_bytes = sum(self.staging_bytes) + self.offload_bytes
        gathered_bytes = sum(self.slot_bytes) + self.secondary_bytes
        return gathered_bytes + self.reduce_buffer_bytes + staging_bytes

    @property
    def peak_resident_bytes(self) -> int:
        """The same as the system counts it for a process over shm.

        It maps the reduce and staging buffers of the others on its host, all of them here, too, and the secondary
        shards of those that it gathers with for backward. Slots all share, or each has its own.
        """
        shard_ranks = self.ranks // self.replicas
        peers = (shard_ranks - 1) * _pages(self.reduce_buffer_bytes)
        peers += sum(unit.regather_bytes for unit in self.units if unit.secondary_bytes)
        peers += (self.replicas - 1) * sum(map(_pages, self.staging_bytes))
        return self.peak_bytes + self.host_bytes + peers

    @property
    def gathered_bytes(self) -> int:
        """Received from the others by the gathers of a step."""
        return sum(unit.gathered_bytes for unit in self.units)

    @property
    def reduced_bytes(self) -> int:
        """Sent to the others by the reduces of a step, and to the replicas by the all-reduces."""
        return sum(unit.reduce_bytes + unit.all_reduce_bytes for unit in self.units)

    def as_json(self) -> dict[str, Any]:
        """All figures; the schedule as its drawing."""
        held = asdict(self.footprint)
        derived = (
            "peak_bytes",
            "peak_resident_bytes",
            "gathered_bytes",
            "reduced_bytes",
        )
        return {
            "ranks": self.ranks,
            "replicas": self.replicas,
            "strategy": self.strategy,
            "optimizer": self.optimizer,
            "rank": self.rank,
            "imbalance": self.imbalance,
            "shard_bytes": list(self.shard_bytes),
            "host_bytes": self.host_bytes,
            **held,
            "optimizer_bytes": self.optimizer_bytes,
            "full_gradient_bytes": self.full_gradient_bytes,
            "state_bytes": self.state_bytes,
            **{name: getattr(self, name) for name in derived},
            "slots": list(self.slot_bytes),
            "units": [
                asdict(unit) | {"slot": slot}
                for unit, slot in zip(self.units, self.schedule.slot_of, strict=True)
            ],
            "schedule": repr(self.schedule).splitlines(),
        }

    def __repr__(self) -> str:
        return drawn(self)


def policies_of(units: Sequence[UnitParams], rest: Policy) -> list[Policy]:
    """Each unit's, with nothing left open."""
    return [unit.policy.over(rest) for unit in units]


def schedule_units(
    order: Sequence[Trigger],
    *,
    policies: Sequence[Policy],
    pools: Sequence[Pool],
    slots: int | Sequence[int] | None,
    backward: bool = True,
) -> Schedule:
    """A step of units of these policies, which leave nothing open, and pools; for the rest see `Schedule.plan`."""
    given: dict[str, Any] = {
        name: [getattr(policy, name) for policy in policies]
        for name in ("strategy", "cpu_offload", "prefetch", "backward_prefetch")
    }
    strategies = map(Strategy.named, given.pop("strategy"))
    return Schedule.plan(
        order,
        [
            strategy.scheduled(cpu_offload=offload)
            for strategy, offload in zip(strategies, given.pop("cpu_offload"), strict=True)
        ],
        pools=[pool.number for pool in pools],
        **given,
        slots=slots,
        backward=backward,
    )


def _mesh(strategy: Strategy, ranks: int, replicas: int | None) -> tuple[int, int]:
    """How many replicas, and shards of each."""
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
    if not isinstance(replicas, int) or replicas < 1 or ranks % replicas:
        raise ValueError(
            f"replicas is {replicas!r}; for 'hybrid_shard' it must divide the {ranks} ranks"
        )
    return replicas, ranks // replicas


def _pools(
    units: Sequence[UnitParams], rest: Policy, main: Pool, ranks: int, replicas: int | None
) -> list[Pool]:
    """Of each unit: `main`, unless its own policy has other ranks or another strategy."""
    policies = policies_of(units, rest)
    made = {rest.ranks: main}
    for policy in policies:
        if policy.ranks in made:
            continue
        comm, name = policy.comm, policy.strategy
        how = Strategy.named(name or "")
        if comm is None:
            sizes = _mesh(how, ranks, replicas)
        elif isinstance(comm, Mesh):
            sizes = comm.replicate.size, comm.shard.size
        elif isinstance(comm, DeviceMesh):
            shape = tuple(comm.shape)
            sizes = (shape[0], shape[1]) if how.hybrid else _mesh(how, shape[0], None)
        else:
            sizes = _mesh(how, comm.size, None)
        made[policy.ranks] = Pool(len(made), *sizes, 0, policy.secondary_ranks(sizes[1]))
    return [made[policy.ranks] for policy in policies]


def _state_bytes(
    groups: Sequence[Sequence[BucketGroup]], pool: Pool, optimizer: str
) -> npt.NDArray[np.int64]:
    return OPTIMIZERS[optimizer] * _trained_bytes(groups, pool.shards)


def _load(
    groups: Sequence[Sequence[BucketGroup]], pool: Pool, optimizer: str
) -> npt.NDArray[np.int64]:
    """Parameters, gradients and optimizer state of each of the pool's ranks."""
    flat = [group for unit in groups for group in unit]
    trained = _held_bytes([group for group in flat if group.trainable], pool.shards)
    return _held_bytes(flat, pool.shards) + trained + _state_bytes(groups, pool, optimizer)


def _most_loaded(
    pool: Pool, pools: Sequence[Pool], groups: Sequence[Sequence[BucketGroup]], optimizer: str
) -> int:
    return int(np.argmax(_load(pool.of(pools, groups), pool, optimizer)))


def _pages(nbytes: int) -> int:
    """As memory is mapped, in whole pages."""
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE


def _most_full_gradients(units: Sequence[UnitPlan], schedule: Schedule) -> int:
    """Full gradients are there from a unit's backward until REDUCE has packed them.

    A unit that contains others has all of its own from its first backward.
    """
    alive: set[int] = set()
    most = 0
    for trigger in schedule.triggers():
        if trigger.phase is Phase.PRE_BACKWARD:
            alive.add(trigger.unit)
        most = max(most, sum(units[unit].full_gradient_bytes for unit in alive))
        alive -= {a.unit for a in schedule.actions[trigger] if a.verb is Verb.REDUCE}
    return most


def _held_bytes(groups: Sequence[BucketGroup], ranks: int) -> npt.NDArray[np.int64]:
    """Of each rank's shards of these, padding included."""
    return sum((np.array(group.shard_bytes) for group in groups), np.zeros(ranks, dtype=np.int64))


def _trained_bytes(groups: Sequence[Sequence[BucketGroup]], ranks: int) -> npt.NDArray[np.int64]:
    """Of trainable parameters, without padding, on each rank."""
    trained = [group for unit in groups for group in unit if group.trainable]
    held = _held_bytes(trained, ranks)
    for group in trained:
        starts = group.layout.starts
        for start, stop in group.layout.gaps():
            first = bisect_right(starts, start) - 1
            for rank in range(first, bisect_left(starts, stop)):
                here = min(stop, starts[rank + 1]) - max(start, starts[rank])
                held[rank] -= here * group.dtype.itemsize
    return held
