"""Pools: the ranks over which units are sharded, as a plan knows them."""

from __future__ import annotations

from typing import NamedTuple

from shardcomm.comm.mesh import Mesh


class Pool(NamedTuple):
    """The ranks over which some units are sharded, which share their memory: a mesh, as a plan knows it.

    Attributes:
        number: A number that tells pools of the same sizes apart.
        replicas: How many ranks hold each shard.
        shards: How many shards there are.
        rank: The shard of the rank for which the plan is.
        secondary: How many ranks gather for backward among themselves; 0: all.
    """

    number: int
    replicas: int
    shards: int
    rank: int
    secondary: int = 0

    @classmethod
    def of(cls, mesh: Mesh, number: int) -> Pool:
        """The ranks of `mesh`, for the rank that calls."""
        return cls(
            number,
            mesh.replicate.size,
            mesh.shard.size,
            mesh.shard.rank,
            mesh.secondary.size if mesh.secondary else 0,
        )
