"""What units hold, measured from their tensors: what the planner's footprint says before there are any."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from shardcomm.planner.footprint import Footprint
from shardcomm.sharded.sharded_unit import ShardedUnit


def measured(units: Iterable[ShardedUnit]) -> Footprint:
    """What `units` hold, measured from their tensors."""
    units = list(units)
    buckets = [bucket for unit in units for bucket, _ in unit.buckets]
    return Footprint(
        parameter_bytes=sum(bucket.shard.nbytes for bucket in buckets),
        gradient_bytes=sum(bucket.gradients.nbytes for bucket in buckets),
        slot_bytes=_memory(b.full for b in buckets if b.full is not b.shard),
        secondary_bytes=sum(
            unit.full.secondary.memory.nbytes for unit in units if unit.full.secondary
        ),
        wire_bytes=sum(
            wire.nbytes for wire in {b.gathering.wire for b in buckets} if wire is not None
        ),
        reduce_buffer_bytes=_memory(
            b.reduction.buffer for b in buckets if b.reduction.buffer is not None
        ),
        staging_bytes=_memory(
            b.reduction.among_replicas.staging.memory for b in buckets if b.reduction.among_replicas
        ),
        offload_bytes=sum(offload.nbytes for offload in {b.offload for b in buckets} if offload),
        padding_bytes=sum(bucket.layout.padding * bucket.shard.itemsize for bucket in buckets),
        total_parameter_bytes=sum(
            bucket.layout.numel * bucket.shard.itemsize for bucket in buckets
        ),
    )


def _memory(tensors: Iterable[torch.Tensor]) -> int:
    """The bytes of the memory of `tensors`; memory that several share counts once."""
    storages = {s._cdata: s.nbytes() for s in (t.untyped_storage() for t in tensors)}
    return sum(storages.values())
