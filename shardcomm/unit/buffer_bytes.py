"""How many bytes the buffers take that units share. Pure arithmetic.

The engine allocates these sizes, and the planner adds them up before anything is allocated.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from shardcomm.schedule.planning import REDUCES_IN_FLIGHT
from shardcomm.unit.grouped_unit import GroupedUnit


def slot_bytes(units: Sequence[GroupedUnit], slot_of: Sequence[int]) -> list[int]:
    """The size of each slot in bytes: that of the largest unit that uses it. `slot_of` has the slot of each unit."""
    sizes = [0] * (max(slot_of, default=-1) + 1)
    for unit, slot in zip(units, slot_of, strict=True):
        wanted = sum(group.full_bytes for group in unit.groups if group.needs_slot)
        sizes[slot] = max(sizes[slot], wanted)
    return sizes


def secondary_bytes(units: Sequence[GroupedUnit], slot_of: Sequence[int]) -> list[int]:
    """The size of each unit's secondary shard in bytes.

    It is 0 for a unit that has a slot for itself, which is not released before backward.
    """
    users = Counter(slot_of)
    return [
        sum(max(group.secondary_bytes(unit.pool.secondary)) for group in unit.groups)
        if unit.pool.secondary and users[slot] > 1
        else 0
        for unit, slot in zip(units, slot_of, strict=True)
    ]


def reduce_buffer_bytes(units: Sequence[GroupedUnit]) -> int:
    """The size of a pool's reduce buffer in bytes; 0 if there is one shard, whose gradients need no reduce."""
    if units[0].pool.shards == 1:
        return 0
    return max(sum(group.reduced_bytes for group in unit.groups) for unit in units)


def wire_bytes(units: Sequence[GroupedUnit]) -> tuple[int, int]:
    """The bytes of the memory that a pool's gathers in block formats send from, and receive into; 0 and 0 without."""
    parts = [group.sent_bytes for unit in units for group in unit.groups if group.codes_gathers]
    return max(map(max, parts), default=0), max(map(sum, parts), default=0)


def staging_bytes(units: Sequence[GroupedUnit]) -> list[int]:
    """The size of each staging buffer of a pool in bytes. Buckets use them in turn; without replicas there are none."""
    if units[0].pool.replicas == 1:
        return []
    buckets = [group for unit in units for group in unit.groups]
    largest = max((max(group.reduced_shard_bytes) for group in buckets), default=0)
    # More than one, since the next unit's gradients come while one unit's shard is all-reduced; and as many as a unit
    # has buckets, all of which are reduced before the first is all-reduced.
    at_once = max(REDUCES_IN_FLIGHT, *(len(unit.groups) for unit in units))
    return [largest] * min(at_once, len(buckets))


def offload_bytes(units: Sequence[GroupedUnit]) -> int:
    """The size in bytes of the device's memory through which offloaded shards pass; gradients have as much again.

    Frozen parameters count, too, since they may be thawed later.
    """
    offloaded = (group for unit in units for group in unit.groups if group.cpu_offload)
    return max((max(group.shard_bytes) for group in offloaded), default=0)
