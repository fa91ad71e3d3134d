"""Set-up: from a model's units to sharded units, with their communication memory and rank 0's values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from shardcomm.bucket import Bucket
from shardcomm.communicator import Communicator
from shardcomm.layout import Granularity, Layout, ParamSpec
from shardcomm.mixed_precision import MixedPrecision
from shardcomm.schedule import Strategy
from shardcomm.sharded_unit import ShardedUnit
from shardcomm.streams import Streams
from shardcomm.unit import OwnedParam, UnitParams

GranularityOf = Granularity | Callable[[str, nn.Parameter], Granularity]


@dataclass(frozen=True)
class _Group:
    """Parameters that share a bucket, its layout, and its dtypes."""

    params: list[OwnedParam]
    layout: Layout
    dtype: torch.dtype
    param_dtype: torch.dtype
    reduce_dtype: torch.dtype

    @property
    def full_bytes(self) -> int:
        return self.layout.flat_numel * self.param_dtype.itemsize

    @property
    def needs_slot(self) -> bool:
        return self.layout.world_size > 1 or self.param_dtype != self.dtype


def shard_units(
    units: Sequence[UnitParams],
    comm: Communicator,
    strategy: Strategy,
    mixed_precision: MixedPrecision,
    slot_of: Sequence[int],
    granularity: GranularityOf,
    streams: Streams,
) -> list[ShardedUnit]:
    """Shards `units` over `comm`; collective. Unit i computes in slot `slot_of[i]`.

    At any moment at most one unit exists in full besides what the model held before.
    """
    alone = Communicator.local_group(1, device=comm.device)[0]
    shard_comm, replicas = (comm, None) if strategy.shard_params else (alone, comm)
    groups = [_group(unit, shard_comm.size, mixed_precision, granularity) for unit in units]

    slot_bytes = [0] * (max(slot_of, default=-1) + 1)
    for slot, unit_groups in zip(slot_of, groups, strict=True):
        wanted = sum(group.full_bytes for group in unit_groups if group.needs_slot)
        slot_bytes[slot] = max(slot_bytes[slot], wanted)
    slots = [shard_comm.allocate(n, dtype=torch.uint8, use="gather") for n in slot_bytes]
    # One reduce buffer serves all: the reduce stream packs into it only when the reduce before has ended.
    reduce_bytes = max(
        (g.layout.flat_numel * g.reduce_dtype.itemsize for gs in groups for g in gs), default=0
    )
    reduce_buffer = comm.allocate(reduce_bytes, dtype=torch.uint8, use="reduce")

    sharded = []
    for index, (unit, unit_groups) in enumerate(zip(units, groups, strict=True)):
        materialize(unit, comm.device)
        free = slots[slot_of[index]]
        buckets = []
        for group in unit_groups:
            full = None
            if group.needs_slot:
                full, free = free[: group.full_bytes], free[group.full_bytes :]
            reduce_numel = group.layout.flat_numel * group.reduce_dtype.itemsize
            bucket = Bucket(
                group.layout,
                shard_comm,
                dtype=group.dtype,
                param_dtype=group.param_dtype,
                reduce_dtype=group.reduce_dtype,
                full_buffer=None if full is None else full.view(group.param_dtype),
                reduce_buffer=reduce_buffer[:reduce_numel].view(group.reduce_dtype),
                replicas=replicas,
                streams=streams,
                tag=index + 1,
            )
            _load(bucket, group.params, comm)
            buckets.append((bucket, group.params))
        sharded.append(ShardedUnit(index, unit.name, unit.module, slot_of[index], buckets))
    return sharded


def materialize(unit: UnitParams, device: torch.device) -> None:
    """Gives parameters on the meta device memory on `device`, and initial values by their `reset_parameters`.

    Raises:
        ValueError: a module with such parameters has no `reset_parameters`.
    """
    modules = dict.fromkeys(
        module for owned in unit.params if owned.param.is_meta for module, _ in owned.places
    )
    for module in modules:
        reset = getattr(module, "reset_parameters", None)
        if reset is None:
            raise ValueError(
                f"fully_shard: {type(module).__name__} in unit {unit.name!r} has parameters on the meta device and "
                f"no reset_parameters() to initialise them; add one, or build the model on {device}"
            )
        module.to_empty(device=device, recurse=False)
        reset()
    for owned in unit.params:
        module, attribute = owned.places[0]
        param = module._parameters[attribute]
        assert param is not None
        owned.param = param


def _load(bucket: Bucket, params: Sequence[OwnedParam], comm: Communicator) -> None:
    """Keeps this rank's rows of rank 0's values, and lets go of the full ones."""
    values = [owned.param.detach().to(comm.device).contiguous() for owned in params]
    if comm.size > 1:
        for value in values:
            comm.broadcast(value, root=0)
    bucket.load(values)


def _group(
    unit: UnitParams, world_size: int, precision: MixedPrecision, granularity: GranularityOf
) -> list[_Group]:
    """A bucket for each dtype; frozen parameters apart, since they are never reduced."""
    by_kind: dict[tuple[torch.dtype, bool], list[OwnedParam]] = {}
    for owned in unit.params:
        by_kind.setdefault((owned.param.dtype, owned.param.requires_grad), []).append(owned)
    groups = []
    for (dtype, _), params in by_kind.items():
        param_dtype = precision.param_dtype or dtype
        if not dtype.is_floating_point:
            param_dtype = dtype
        reduce_dtype = precision.reduce_dtype or param_dtype
        layout = Layout.plan(
            [
                ParamSpec(owned.name, tuple(owned.param.shape), _granularity(granularity, owned))
                for owned in params
            ],
            world_size,
            itemsize=min(dtype.itemsize, param_dtype.itemsize, reduce_dtype.itemsize),
        )
        groups.append(_Group(params, layout, dtype, param_dtype, reduce_dtype))
    return groups


def _granularity(granularity: GranularityOf, owned: OwnedParam) -> Granularity:
    return granularity(owned.name, owned.param) if callable(granularity) else granularity
