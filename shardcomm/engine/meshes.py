"""Meshes: from the ranks that `fully_shard` is given, the Mesh of each unit and who gathers it for backward."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from shardcomm.comm.communicator import Communicator
from shardcomm.comm.mesh import Mesh
from shardcomm.comm.rendezvous import timeout_s
from shardcomm.schedule.strategy import Strategy
from shardcomm.unit.policy import Policy


def meshes_of(policies: Sequence[Policy], rest: Policy) -> tuple[list[Mesh], Mesh]:
    """The mesh of each unit, the same object for the same ranks and strategy; and that of all ranks.

    Collective where a policy's `comm` is a DeviceMesh, or its `reshard_after_forward` a number.

    Raises:
        TypeError, ValueError: the ranks are not what a strategy needs, or cannot gather; the message says what is.
    """
    made: list[tuple[Policy, Mesh]] = []

    def of(policy: Policy) -> Mesh:
        for other, mesh in made:
            if other.ranks == policy.ranks:
                return mesh
        assert policy.comm is not None
        assert policy.strategy is not None
        mesh = _mesh_of(policy.comm, Strategy.named(policy.strategy))
        if secondary := _secondary_of(policy, mesh):
            mesh = replace(mesh, secondary=secondary)
        made.append((policy, mesh))
        return mesh

    main = of(rest)
    meshes = [of(policy) for policy in policies]
    for mesh in meshes:
        if mesh.device != main.device:
            raise ValueError(
                f"fully_shard: a policy's comm works on {mesh.device} and fully_shard's on {main.device}; all must "
                "work on the same device"
            )
        if mesh.size > main.size:
            raise ValueError(
                f"fully_shard: a policy's comm has {mesh.size} ranks and fully_shard's {main.size}; a policy's ranks "
                "must be some of these"
            )
    return meshes, main


def made_for(mesh: Mesh, policy: Policy) -> Iterator[Mesh | Communicator]:
    """The groups that were made for `policy`, and are ours to leave."""
    if isinstance(policy.comm, DeviceMesh):
        yield mesh
    if mesh.secondary is not None and mesh.secondary is not policy.reshard_after_forward:
        yield mesh.secondary


def check_secondary(mesh: Mesh) -> None:
    """ValueError on every rank if one would gather with ranks that hold other parameters than it; collective."""
    assert mesh.secondary is not None
    run = torch.tensor([secrets.randbits(62)], dtype=torch.int64, device=mesh.device)
    mesh.shard.broadcast(run)
    runs = run.new_empty(mesh.secondary.size)
    mesh.secondary.all_gather(runs, run)
    is_within = (runs == run).all().to(torch.int32).view(1)
    mesh.shard.all_reduce(is_within, "min")
    if not is_within.item():
        raise ValueError(
            "fully_shard: reshard_after_forward has ranks that are none of comm's, on this rank or another; give each "
            "rank the Communicator of some of comm's ranks, such as those of its host"
        )


def _mesh_of(ranks: Communicator | DeviceMesh | Mesh, strategy: Strategy) -> Mesh:
    """`ranks` as `strategy` lays a model over them; collective for a DeviceMesh.

    Raises:
        TypeError, ValueError: they are not what the strategy needs; the message says what is.
    """
    if not isinstance(ranks, Communicator | DeviceMesh | Mesh):
        raise TypeError(
            f"fully_shard: comm is a {type(ranks).__name__}; it must be a shardcomm.Communicator, for instance "
            "Communicator.from_env() or Communicator.from_process_group(group), a torch DeviceMesh or a "
            "shardcomm.Mesh"
        )
    dims = ranks.ndim if isinstance(ranks, DeviceMesh) else 1 + isinstance(ranks, Mesh)
    if strategy.hybrid and dims != 2:
        raise ValueError(
            f"fully_shard: strategy {strategy.name!r} needs ranks in 2 dimensions, and comm has {dims}; give a "
            "DeviceMesh of 2 dimensions (the first replicates, the second shards) or a shardcomm.Mesh"
        )
    if not strategy.hybrid and dims != 1:
        raise ValueError(
            f"fully_shard: strategy {strategy.name!r} needs ranks in 1 dimension, and comm has {dims}; give a "
            "Communicator or a DeviceMesh of 1 dimension, or take strategy='hybrid_shard'"
        )
    if isinstance(ranks, Mesh):
        return ranks
    if isinstance(ranks, DeviceMesh) and strategy.hybrid:
        return Mesh(shard=_of_dim(ranks, 1), replicate=_of_dim(ranks, 0))
    comm = _of_dim(ranks, 0) if isinstance(ranks, DeviceMesh) else ranks
    alone = Communicator.local_group(1, device=comm.device)[0]
    return Mesh(comm, alone) if strategy.shard_params else Mesh(alone, comm)


def _secondary_of(policy: Policy, mesh: Mesh) -> Communicator | None:
    """The ranks of `mesh` that a unit of `policy` is gathered on for backward; None: all. Collective for a number.

    Raises:
        ValueError: `policy` does not say which, or ranks that cannot gather for `mesh`.
    """
    given, size = policy.reshard_after_forward, policy.secondary_ranks(mesh.shard.size)
    if not size:
        return None
    if isinstance(given, Communicator):
        if given.device != mesh.device:
            raise ValueError(
                f"fully_shard: reshard_after_forward works on {given.device} and comm on {mesh.device}; both must "
                "work on the same device"
            )
        return given
    if not isinstance(policy.comm, DeviceMesh):
        raise ValueError(
            f"fully_shard: reshard_after_forward is {given}, and comm is not a DeviceMesh, of which such groups can be "
            "made; give the shardcomm.Communicator of the ranks of this one's host"
        )
    return _run_of(policy.comm, size)


def _run_of(mesh: DeviceMesh, size: int) -> Communicator:
    """The run of `size` ranks that this one is in, of those that shard a model over `mesh`; collective."""
    row = mesh.get_group(mesh.ndim - 1)
    first = row.rank() // size * size
    group = dist.new_group(
        dist.get_process_group_ranks(row)[first : first + size],
        timeout=timedelta(seconds=timeout_s(row, torch.device(mesh.device_type))),
        backend=dist.get_backend(row),
        use_local_synchronization=True,
    )
    return _of_group(group, mesh.device_type)


def _of_dim(mesh: DeviceMesh, dim: int) -> Communicator:
    return _of_group(mesh.get_group(dim), mesh.device_type)


def _of_group(group: ProcessGroup, device: str) -> Communicator:
    return Communicator.from_process_group(group, device=device)
