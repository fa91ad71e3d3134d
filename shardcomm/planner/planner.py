"""The planner: what a model costs each rank, in memory and in communication, before anything is allocated.

It groups, lays out and schedules by the functions that the engine runs, so that its figures are the engine's, to the
byte. The engine checks that when it is set up, and again when its first gradients are there. What a rank holds, for P
parameters of 4 bytes over N ranks with AdamW::

                 no_shard     shard_grad_op   full_shard
    parameters   4 P          4 P / N         4 P / N      shards: what the optimizer updates
    gradients    4 P          4 P / N         4 P / N      of the shards
    optimizer    8 P          8 P / N         8 P / N      two moments
    slots        -            4 P             a few units  full parameters (2 bytes each in bf16)

`hybrid_shard` is `full_shard` over N / replicas ranks. If H ranks gather for backward, secondary shards come on top:
4 P / H. So do the buffers in which gradients are reduced, of the size of a unit, and during backward the full gradients
of one or two units. The first three lines make the usual 16 bytes a parameter: Rajbhandari et al., "ZeRO: Memory
Optimizations Toward Training Trillion Parameter Models", arXiv 1910.02054, figure 1. (The paper counts weights and
gradients in fp16 beside an fp32 copy: 2 + 2 + 12.)
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from torch import nn

from shardcomm.arguments.scalars import is_whole
from shardcomm.planner.footprint import Footprint
from shardcomm.planner.policies import policies_of, pools_of, replicas_and_shards, schedule_units
from shardcomm.planner.rank_bytes import OPTIMIZERS, held_bytes, load, most_loaded, state_bytes
from shardcomm.planner.table import drawn
from shardcomm.planner.unit_plan import UnitPlan
from shardcomm.schedule.schedule import Schedule
from shardcomm.schedule.strategy import Strategy
from shardcomm.schedule.triggers import Phase, Verb
from shardcomm.unit.buffer_bytes import (
    offload_bytes,
    reduce_buffer_bytes,
    secondary_bytes,
    slot_bytes,
    staging_bytes,
    wire_bytes,
)
from shardcomm.unit.grouped_unit import GroupedUnit, by_pool
from shardcomm.unit.groups import GranularityOf, ShardDimOf, group_units
from shardcomm.unit.mixed_precision import MixedPrecision
from shardcomm.unit.owners import OwnerCost
from shardcomm.unit.policy import Policy
from shardcomm.unit.pool import Pool
from shardcomm.unit.unit import Units, find_units, registration_order


@dataclass(frozen=True, repr=False)
class MemoryPlan:
    """The bytes that a model takes on a rank, before anything is allocated. `MemoryPlan.of` makes it.

    `print` shows it as a table. Where ranks differ, it is of the rank that holds the most. Activations are not in it,
    and neither is what the optimizer's step allocates for itself (for torch's foreach AdamW on a GPU, the parameters
    once more). Every module is taken to run once in a step, in the order of registration, and backward is taken to
    come to every unit. In truth it does not come to frozen units in front of all trained ones: their gathers in
    backward are counted, though only those happen that are made ahead.

    Attributes:
        ranks: How many ranks there are; `replicas` groups of them hold the model each.
        replicas: How many times the ranks hold the model.
        strategy: The strategy's name.
        optimizer: The optimizer's name.
        rank: The rank that it is of, among those that hold a model between them.
        shard_bytes: The parameters, padding included, of each rank that holds a part of the model.
        units: What each unit costs, the model itself first.
        slot_bytes: The size of each slot.
        wire_bytes: The buffers of gathers in a block format.
        reduce_buffer_bytes: The buffers in which gradients are packed to be reduced.
        staging_bytes: The sizes of the buffers in which they are all-reduced among replicas.
        host_bytes: The part of parameters, gradients and optimizer state that is in host memory by `cpu_offload`.
            (Torch rounds pinned blocks up.)
        offload_bytes: The device's memory through which these then pass.
        full_gradient_bytes: The most that unsharded gradients take at one time in backward.
        optimizer_bytes: The optimizer's state of the elements that the rank holds, without step counters.
        total_parameter_bytes: The parameters of the whole model, once.
        schedule: The schedule of a step.

    Example:
        ```python
        with torch.device("meta"):
            model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(8)))
        plan = shardcomm.MemoryPlan.of(model, ranks=8, units=[torch.nn.Linear])
        print(plan)
        assert plan.peak_bytes < 80e9
        ```
    """

    ranks: int
    replicas: int
    strategy: str
    optimizer: str
    rank: int
    shard_bytes: tuple[int, ...]
    units: tuple[UnitPlan, ...]
    slot_bytes: tuple[int, ...]
    wire_bytes: int
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
        """Plans what `fully_shard` with the same arguments will take. Nothing is allocated or changed.

        Args:
            model: The model, on any device, for instance meta.
            ranks: How many ranks there will be.
            units: As in `fully_shard`.
            ignored_params: As in `fully_shard`.
            strategy: As in `fully_shard`.
            replicas: How many times the ranks hold the model; "hybrid_shard" needs it, and no other strategy takes it.
            mixed_precision: As in `fully_shard`.
            prefetch: As in `fully_shard`.
            backward_prefetch: As in `fully_shard`.
            slots: As in `fully_shard`.
            granularity: As in `fully_shard`.
            shard_dim: As in `fully_shard`.
            owner_cost: As in `fully_shard`.
            cpu_offload: As in `fully_shard`.
            reshard_after_forward: How many ranks gather for backward among themselves, such as those of a host.
            optimizer: The optimizer, whose state is counted: "adamw", "momentum" or "sgd".
            rank: The rank to plan for, among those that hold a model between them. None: the one that holds the most.

        Returns:
            The plan for one rank.

        Raises:
            TypeError: An argument is not of its type; or as `fully_shard`.
            ValueError: An argument is out of its range; or as `fully_shard`.
        """
        if not is_whole(ranks, 1):
            raise ValueError(f"ranks is {ranks!r}; it must be a whole number above 0, below 2**31")
        if not isinstance(model, nn.Module):
            raise TypeError(f"model is a {type(model).__name__}; it must be a torch.nn.Module")
        if optimizer not in tuple(OPTIMIZERS):  # what is no text may have no hash
            raise ValueError(
                f"optimizer is {optimizer!r}; accepted: {', '.join(map(repr, OPTIMIZERS))}"
            )
        how = Strategy.named(strategy)
        sizes = replicas_and_shards(how, ranks, replicas)
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
        pools = pools_of(found, rest, main, ranks, replicas)
        grouped = group_units(found, policies, pools, granularity, shard_dim, owner_cost)
        schedule = schedule_units(registration_order(found), grouped, rest, slots=slots)
        if rank is None:
            most = {
                pool: pool._replace(rank=most_loaded(its, optimizer))
                for pool, its in by_pool(grouped).items()
            }
            grouped = [replace(unit, pool=most[unit.pool]) for unit in grouped]
        return cls.of_units(grouped, rest, schedule, ranks, optimizer)

    @classmethod
    def of_units(
        cls,
        units: Sequence[GroupedUnit],
        rest: Policy,
        schedule: Schedule,
        ranks: int,
        optimizer: str = "adamw",
    ) -> MemoryPlan:
        """As `of`, for units that have been grouped and scheduled already.

        Args:
            units: The model's units, the model itself first.
            rest: The policy of units that have none of their own.
            schedule: The schedule of a step.
            ranks: How many ranks there are.
            optimizer: As in `of`.
        """
        gathers = schedule.gathers()
        secondary = secondary_bytes(units, schedule.slot_of)
        pools = by_pool(units)
        main = next((pool for pool in pools if pool.number == 0), units[0].pool)
        held = np.zeros(main.shards, dtype=np.int64)
        wire, reduce_buffers, staging, offload, state, on_host = 0, 0, [], 0, 0, 0
        for pool, its in pools.items():
            groups = [group for unit in its for group in unit.groups]
            everything = held_bytes(groups, pool.shards)
            held += everything if pool == main else everything[pool.rank]
            wire += sum(wire_bytes(its))
            reduce_buffers += reduce_buffer_bytes(its)
            staging += staging_bytes(its)
            offload += 2 * offload_bytes(its)
            state += int(state_bytes(groups, pool.shards, optimizer)[pool.rank])
            offloaded = [group for group in groups if group.cpu_offload]
            on_host += int(load(offloaded, pool.shards, optimizer)[pool.rank])
        planned = tuple(
            UnitPlan.of(unit, secondary[index], gathers[index]) for index, unit in enumerate(units)
        )
        return cls(
            ranks=ranks,
            replicas=main.replicas,
            strategy=rest.strategy or "",
            optimizer=optimizer,
            rank=main.rank,
            shard_bytes=tuple(held.tolist()),
            units=planned,
            slot_bytes=tuple(slot_bytes(units, schedule.slot_of)),
            wire_bytes=wire,
            reduce_buffer_bytes=reduce_buffers,
            staging_bytes=tuple(staging),
            host_bytes=on_host,
            offload_bytes=offload,
            full_gradient_bytes=_most_full_gradients(planned, schedule),
            optimizer_bytes=state,
            total_parameter_bytes=sum(
                group.layout.numel * group.dtype.itemsize for unit in units for group in unit.groups
            ),
            schedule=schedule,
        )

    @property
    def footprint(self) -> Footprint:
        """The figures that `engine.footprint()` gives after a step."""
        return Footprint(
            parameter_bytes=sum(unit.parameter_bytes for unit in self.units),
            gradient_bytes=sum(unit.gradient_bytes for unit in self.units),
            slot_bytes=sum(self.slot_bytes),
            secondary_bytes=self.secondary_bytes,
            wire_bytes=self.wire_bytes,
            reduce_buffer_bytes=self.reduce_buffer_bytes,
            staging_bytes=sum(self.staging_bytes),
            offload_bytes=self.offload_bytes,
            padding_bytes=sum(unit.padding_bytes for unit in self.units),
            total_parameter_bytes=self.total_parameter_bytes,
        )

    @property
    def secondary_bytes(self) -> int:
        """The bytes of the secondary shards."""
        return sum(unit.secondary_bytes for unit in self.units)

    @property
    def imbalance(self) -> float:
        """How unevenly ranks hold the parameters: the most bytes on a rank over the mean; 1 if all hold as many."""
        held = self.shard_bytes
        return max(held) * len(held) / sum(held) if any(held) else 1.0

    @property
    def state_bytes(self) -> int:
        """The bytes of parameters, gradients and optimizer state, which the usual tables count."""
        held = self.footprint
        return held.parameter_bytes + held.gradient_bytes + self.optimizer_bytes

    @property
    def peak_bytes(self) -> int:
        """The most bytes that a rank's device holds at one time: in a backward that adds to earlier gradients.

        A backward after `zero_grad()` holds less, by the gradient shard of the unit that is reduced last.
        """
        on_device = self.state_bytes - self.host_bytes
        return on_device + self.buffer_bytes + self.full_gradient_bytes

    @property
    def buffer_bytes(self) -> int:
        """The device's bytes in buffers: slots, secondary shards, those of the collectives, and `cpu_offload`'s."""
        staging_bytes = sum(self.staging_bytes) + self.offload_bytes
        gathered_bytes = sum(self.slot_bytes) + self.secondary_bytes + self.wire_bytes
        return gathered_bytes + self.reduce_buffer_bytes + staging_bytes

    @property
    def peak_resident_bytes(self) -> int:
        """The peak as the system counts it for a process over shm, if all ranks are on one host.

        A process also maps the reduce and staging buffers of the other ranks on its host, and the secondary shards of
        the ranks with which it gathers for backward. Slots are shared, or each process has its own.
        """
        shard_ranks = self.ranks // self.replicas
        peers = (shard_ranks - 1) * _pages(self.reduce_buffer_bytes)
        peers += sum(unit.regather_bytes for unit in self.units if unit.secondary_bytes)
        peers += (self.replicas - 1) * sum(map(_pages, self.staging_bytes))
        return self.peak_bytes + self.host_bytes + peers

    @property
    def gathered_bytes(self) -> int:
        """The bytes that a rank receives from the others in the gathers of a step."""
        return sum(unit.gathered_bytes for unit in self.units)

    @property
    def reduced_bytes(self) -> int:
        """The bytes that a rank sends in a step: to the others in its reduces, and to replicas in its all-reduces."""
        return sum(unit.reduce_bytes + unit.all_reduce_bytes for unit in self.units)

    def as_json(self) -> dict[str, Any]:
        """All figures as a dict for a JSON file; the schedule is in it as its drawing.

        Returns:
            The figures by name, of memory and of communication in bytes.
        """
        return {
            "ranks": self.ranks,
            "replicas": self.replicas,
            "strategy": self.strategy,
            "optimizer": self.optimizer,
            "rank": self.rank,
            "imbalance": self.imbalance,
            "shard_bytes": list(self.shard_bytes),
            "host_bytes": self.host_bytes,
            **asdict(self.footprint),
            "optimizer_bytes": self.optimizer_bytes,
            "full_gradient_bytes": self.full_gradient_bytes,
            "state_bytes": self.state_bytes,
            "peak_bytes": self.peak_bytes,
            "peak_resident_bytes": self.peak_resident_bytes,
            "gathered_bytes": self.gathered_bytes,
            "reduced_bytes": self.reduced_bytes,
            "slots": list(self.slot_bytes),
            "units": [
                asdict(unit) | {"slot": slot}
                for unit, slot in zip(self.units, self.schedule.slot_of, strict=True)
            ],
            "schedule": repr(self.schedule).splitlines(),
        }

    def __repr__(self) -> str:
        return drawn(self)


def _pages(nbytes: int) -> int:
    """`nbytes` rounded up to whole pages, in which memory is mapped."""
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE


def _most_full_gradients(units: Sequence[UnitPlan], schedule: Schedule) -> int:
    """The most bytes of full gradients that are there at one time.

    A unit's full gradients are there from its backward until REDUCE has packed them. A unit that contains others has
    all of its own from its first backward on.
    """
    alive: set[int] = set()
    most = 0
    for trigger in schedule.triggers():
        if trigger.phase is Phase.PRE_BACKWARD:
            alive.add(trigger.unit)
        most = max(most, sum(units[unit].full_gradient_bytes for unit in alive))
        alive -= {a.unit for a in schedule.actions[trigger] if a.verb is Verb.REDUCE}
    return most
