"""Set-up: from a model's units to sharded units, with their communication memory and rank 0's values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import cycle

import torch

from shardcomm.bucket.block_gather import BlockWire
from shardcomm.bucket.bucket import Bucket
from shardcomm.bucket.offload import Offload
from shardcomm.bucket.secondary_shard import SecondaryShard
from shardcomm.bucket.staging import Staging
from shardcomm.comm.mesh import Mesh
from shardcomm.engine.materialization import materialize_unit, move_buffers
from shardcomm.parameter.holders import Holders
from shardcomm.parameter.tensor_parallel import local, with_same
from shardcomm.sharded.sharded_unit import ShardedUnit
from shardcomm.unit.buffer_bytes import (
    offload_bytes,
    reduce_buffer_bytes,
    slot_bytes,
    staging_bytes,
    wire_bytes,
)
from shardcomm.unit.grouped_unit import GroupedUnit, by_pool
from shardcomm.unit.mixed_precision import MixedPrecision
from shardcomm.unit.pool import Pool
from shardcomm.unit.unit import OwnedParam, UnitParams


class _Memory:
    """The communication memory of the units of one mesh.

    One reduce buffer serves all units: the gradients of a unit's buckets are packed into it one behind the other, only
    when the reduces of the unit before have ended.
    """

    def __init__(self, mesh: Mesh, units: Sequence[GroupedUnit]) -> None:
        self._mesh = mesh
        self._reduce_buffer: torch.Tensor | None = None
        if nbytes := reduce_buffer_bytes(units):
            self._reduce_buffer = mesh.shard.allocate(nbytes, dtype=torch.uint8, use="reduce")
        sent, received = wire_bytes(units)
        self._wire = BlockWire(mesh.shard, sent, received) if received else None
        staging = [
            Staging(mesh.replicate.allocate(nbytes, dtype=torch.uint8, use="reduce"))
            for nbytes in staging_bytes(units)
        ]
        self._next_staging = cycle(staging or [None])
        # One for each mesh, since each has streams of its own.
        shard_bytes = offload_bytes(units)
        self._offload = Offload(mesh.device, shard_bytes) if shard_bytes else None

    def buckets(self, unit: GroupedUnit, slot: torch.Tensor) -> list[Bucket]:
        """A bucket for each group of `unit`, whose full parameters lie in `slot` one behind the other."""
        mesh = self._mesh
        tag, replica_tag = (
            comm.tag(f"unit {unit.unit.name!r}") for comm in (mesh.shard, mesh.replicate)
        )
        buckets, free = [], self._reduce_buffer
        for group in unit.groups:
            full = reduced = None
            if group.needs_slot:
                full, slot = slot[: group.full_bytes], slot[group.full_bytes :]
            if free is not None:
                reduced = free[: group.reduced_bytes].view(group.reduce_dtype)
                free = free[group.reduced_bytes :]
            buckets.append(
                Bucket(
                    group.layout,
                    mesh.shard,
                    dtype=group.dtype,
                    param_dtype=group.param_dtype,
                    reduce_dtype=group.reduce_dtype,
                    gather_format=group.gather_format,
                    coded=group.coded,
                    reduce_format=group.reduce_format,
                    full_buffer=None if full is None else full.view(group.param_dtype),
                    reduce_buffer=reduced,
                    replicas=mesh.replicate,
                    wire=self._wire,
                    staging=next(self._next_staging),
                    offload=self._offload if group.cpu_offload else None,
                    streams=mesh.streams,
                    tag=tag,
                    replica_tag=replica_tag,
                )
            )
        return buckets


def shard_units(
    units: Sequence[GroupedUnit], holders: Mapping[Pool, Holders], slot_of: Sequence[int]
) -> list[ShardedUnit]:
    """Shards `units`; collective.

    At any moment at most one unit exists in full besides what the model held before.

    Args:
        units: The model's units, the model itself first.
        holders: The ranks that hold the parameters of each pool's units.
        slot_of: The slot of each unit.
    """
    pool_of = {slot: unit.pool for unit, slot in zip(units, slot_of, strict=True)}
    slots = [
        _slot(holders[pool_of[slot]].mesh, nbytes)
        for slot, nbytes in enumerate(slot_bytes(units, slot_of))
    ]
    memory = {pool: _Memory(holders[pool].mesh, its) for pool, its in by_pool(units).items()}
    users = Counter(slot_of)
    device = holders[units[0].pool].mesh.device
    move_buffers(units[0].unit.module, device)
    sharded = []
    for index, (grouped, slot) in enumerate(zip(units, slot_of, strict=True)):
        unit, ranks = grouped.unit, holders[grouped.pool]
        materialize_unit(unit, device)
        buckets = memory[grouped.pool].buckets(grouped, slots[slot])
        for bucket, group in zip(buckets, grouped.groups, strict=True):
            _load(bucket, group.params, ranks)
        secondary = None
        if ranks.mesh.secondary is not None and users[slot] > 1:
            secondary = SecondaryShard(
                buckets,
                ranks.mesh.secondary,
                ranks.mesh.streams,
                ranks.mesh.secondary.tag(f"unit {unit.name!r}"),
            )
        precision = grouped.policy.mixed_precision or MixedPrecision()
        sharded.append(
            ShardedUnit(
                index,
                unit.name,
                unit.module,
                slot,
                [(b, g.params) for b, g in zip(buckets, grouped.groups, strict=True)],
                ranks,
                secondary=secondary,
                input_dtype=precision.input_dtype,
                output_dtype=_output_dtype(unit, precision, is_root=index == 0),
            )
        )
    return sharded


def _slot(mesh: Mesh, nbytes: int) -> torch.Tensor:
    """The memory of one slot, into which units are gathered."""
    if mesh.secondary is not None and mesh.shard.transport in ("shm", "local"):
        # Not a window, which both groups of ranks would share: one group may gather into it for backward while the
        # other still computes with what is in it.
        return torch.zeros(nbytes, dtype=torch.uint8, device=mesh.device)
    return mesh.shard.allocate(nbytes, dtype=torch.uint8, use="gather")


def _output_dtype(
    unit: UnitParams, precision: MixedPrecision, *, is_root: bool
) -> torch.dtype | None:
    """The dtype of a unit's outputs: `fully_shard`'s for the model itself, and a unit's own policy's for that unit."""
    own = unit.policy.mixed_precision is not None
    return precision.output_dtype if is_root or own else None


def _load(bucket: Bucket, params: Sequence[OwnedParam], holders: Holders) -> None:
    """Loads this rank's rows of rank 0's values into `bucket`; collective."""
    values = [
        local(owned.param).detach().to(bucket.comm.device).resolve_neg().resolve_conj().contiguous()
        for owned in params
    ]
    for owned, value in zip(params, values, strict=True):
        same = with_same(owned.distribution, holders.everyone.inner)
        holders.mesh.broadcast(value, same)
    bucket.load(values)
