"""A grouped unit: all that decides what a unit takes, and where, in one record."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardcomm.unit.bucket_group import BucketGroup
from shardcomm.unit.policy import Policy
from shardcomm.unit.pool import Pool
from shardcomm.unit.unit import UnitParams


@dataclass(frozen=True)
class GroupedUnit:
    """A unit whose parameters are grouped into buckets.

    Attributes:
        unit: The unit and its parameters.
        policy: Its policy, with nothing left open.
        pool: The ranks over which it is sharded.
        groups: Its parameters, in a group for each bucket.
    """

    unit: UnitParams
    policy: Policy
    pool: Pool
    groups: Sequence[BucketGroup]


def by_pool(units: Sequence[GroupedUnit]) -> dict[Pool, list[GroupedUnit]]:
    """The units of each pool."""
    pools: dict[Pool, list[GroupedUnit]] = {}
    for unit in units:
        pools.setdefault(unit.pool, []).append(unit)
    return pools
