"""From the ranks that `fully_shard` is given, the Mesh of each unit and the ranks that gather it for backward."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch.distributed import get_rank
from torch.distributed.device_mesh import DeviceMesh

from shardcomm.comm.agreement import Item, difference
from shardcomm.comm.communicator import Communicator
from shardcomm.comm.mesh import Mesh
from shardcomm.comm.rendezvous import from_mesh_group, from_ranks_of
from shardcomm.schedule.strategy import Strategy
from shardcomm.unit.policy import Policy

_SEVERAL = "of several shard.rank or shard.size"


def mesh_of(policy: Policy) -> Mesh:
    """The mesh of a policy that leaves nothing open; collective where `meshes_of` is, and it raises the same."""
    mesh = _laid_over(policy.comm, Strategy.named(policy.strategy or ""))
    if secondary := _secondary_of(policy, mesh):
        mesh = replace(mesh, secondary=secondary)
    return mesh


def meshes_of(policies: Sequence[Policy], rest: Policy, main: Mesh) -> list[Mesh]:
    """The mesh of each unit. Units with the same ranks, laid over them alike, share one object.

    Collective where a policy's `comm` is a DeviceMesh, or its `reshard_after_forward` a number.

    Raises:
        TypeError: The ranks are given as something else than a strategy accepts; the message says what it accepts.
        ValueError: The ranks are not what a strategy needs, or cannot gather; the message says what is needed.
    """
    made = [(rest, main)]

    def of(policy: Policy) -> Mesh:
        for other, mesh in made:
            if other.ranks == policy.ranks:
                return mesh
        mesh = mesh_of(policy)
        made.append((policy, mesh))
        return mesh

    meshes = [of(policy) for policy in policies]
    for mesh in meshes:
        if mesh.device != main.device:
            raise ValueError(
                f"a policy's comm works on {mesh.device} and fully_shard's on {main.device}; all must "
                "work on the same device"
            )
        if mesh.size > main.size:
            raise ValueError(
                f"a policy's comm has {mesh.size} ranks and fully_shard's {main.size}; a policy's ranks "
                "must be some of these"
            )
    return meshes


def made_for(mesh: Mesh, policy: Policy) -> Iterator[Mesh | Communicator]:
    """The groups that `meshes_of` made for `policy`, which the engine must leave at its end."""
    if isinstance(policy.comm, DeviceMesh):
        yield mesh
    if mesh.secondary is not None and mesh.secondary is not policy.reshard_after_forward:
        yield mesh.secondary


def check_secondary(mesh: Mesh) -> None:
    """Checks that this rank gathers for backward with ranks that hold the same parameters; collective.

    Raises:
        ValueError: On every rank, if one rank would gather with ranks that hold other parameters than itself.
    """
    assert mesh.secondary is not None
    run = torch.tensor([secrets.randbits(62)], dtype=torch.int64, device=mesh.device)
    mesh.shard.broadcast(run)
    runs = run.new_empty(mesh.secondary.size)
    mesh.secondary.all_gather(runs, run)
    is_within = (runs == run).all().to(torch.int32).view(1)
    mesh.shard.all_reduce(is_within, "min")
    if not is_within.item():
        raise ValueError(
            "reshard_after_forward has ranks that are none of comm's, on this rank or another; give each "
            "rank the Communicator of some of comm's ranks, such as those of its host"
        )


def check_crossing(name: str, meshes: Iterable[Mesh]) -> None:
    """Checks that `meshes`, which somebody made of two groups, are rows and columns; collective on all of them.

    Args:
        name: What the error calls them.
        meshes: The meshes.

    Raises:
        ValueError: On every rank of a mesh whose groups are something else, so that its groups stay usable.
    """
    # All of them first: other ranks of a mesh wait for this one, also if it is to raise for another mesh.
    faults = [_fault_of(mesh) for mesh in meshes]
    for fault in filter(None, faults):
        raise ValueError(
            f"{name} is a Mesh whose groups are not the rows and columns of one table of ranks: {fault}; give each "
            "rank as shard the ranks of its row, and as replicate those at its place in all the rows, such as shard "
            "[0, 1] or [2, 3] and replicate [0, 2] or [1, 3], or give a DeviceMesh of 2 dimensions"
        )


def _fault_of(mesh: Mesh) -> str:
    """In what the groups of `mesh` are not rows and columns, as this rank's two show it; "" if they are. Collective.

    What they show is enough. Suppose that in each column of a row, all ranks are at the column's place in rows of one
    size, and that the columns go through the same rows in one order. Then these rows have no other columns, and so are
    a whole table. So in what is no table, each rank's row or column shows it, and every rank hears of it here.
    """
    row, column = mesh.shard, mesh.replicate
    with mesh.failing_together:
        mark = torch.tensor([secrets.randbits(32)], dtype=torch.int64, device=mesh.device)
        row.broadcast(mark)
        rows = mark.new_empty(column.size)
        column.all_gather(rows, mark)
        places = {"ranks whose shard.rank is": row.rank, "ranks whose shard.size is": row.size}
        in_column = difference([column], [_item("replicate", places)])
        columns = {
            "ranks whose replicate.size is": column.size,
            "ranks whose replicate.rank is": column.rank,
            "ranks whose replicate is": _SEVERAL if in_column else "right",
            "ranks whose replicate is of the rows": ", ".join(
                f"#{one:08x}" for one in rows.tolist()
            ),
        }
        in_row = difference([row], [_item("shard", columns)])
    return in_column or in_row


def _item(name: str, facts: Mapping[str, object]) -> Item:
    return Item(name, {noun: str(fact) for noun, fact in facts.items()})


def _laid_over(ranks: object, strategy: Strategy) -> Mesh:
    """The rows and columns of `ranks` as `strategy` lays a model over them; collective for a DeviceMesh.

    Raises:
        TypeError: `ranks` is none of the accepted types.
        ValueError: `ranks` has other dimensions than the strategy needs, or is a DeviceMesh without this rank.
    """
    if not isinstance(ranks, Communicator | DeviceMesh | Mesh):
        raise TypeError(
            f"comm is a {type(ranks).__name__}; it must be a shardcomm.Communicator, for instance "
            "Communicator.from_env() or Communicator.from_process_group(group), a torch DeviceMesh or a "
            "shardcomm.Mesh"
        )
    dims = ranks.ndim if isinstance(ranks, DeviceMesh) else 1 + isinstance(ranks, Mesh)
    if strategy.hybrid and dims != 2:
        raise ValueError(
            f"strategy {strategy.name!r} needs ranks in 2 dimensions, and comm has {dims}; give a "
            "DeviceMesh of 2 dimensions (the first replicates, the second shards) or a shardcomm.Mesh"
        )
    if not strategy.hybrid and dims != 1:
        raise ValueError(
            f"strategy {strategy.name!r} needs ranks in 1 dimension, and comm has {dims}; give a "
            "Communicator or a DeviceMesh of 1 dimension, or take strategy='hybrid_shard'"
        )
    if isinstance(ranks, Mesh):
        return ranks
    if isinstance(ranks, DeviceMesh) and ranks.get_coordinate() is None:
        raise ValueError(
            f"comm is a DeviceMesh of shape {tuple(ranks.shape)} without this rank, {get_rank()}; call fully_shard on "
            "the ranks of comm alone, or give this rank a DeviceMesh that has it"
        )
    if isinstance(ranks, DeviceMesh) and strategy.hybrid:
        _check_order(ranks)
        return Mesh(shard=_of_dim(ranks, 1), replicate=_of_dim(ranks, 0))
    comm = _of_dim(ranks, 0) if isinstance(ranks, DeviceMesh) else ranks
    alone = Communicator.local_group(1, device=comm.device)[0]
    return Mesh(comm, alone) if strategy.shard_params else Mesh(alone, comm)


def _check_order(ranks: DeviceMesh) -> None:
    """Checks that the ranks of each column hold one shard: torch's groups have their ranks in ascending order.

    Raises:
        ValueError: On every rank of the DeviceMesh, if one rank of a row has other places in it than another row's has.
    """
    table = ranks.mesh
    in_row, in_column = (table.argsort(dim).argsort(dim) for dim in (1, 0))
    if not ((in_row == in_row[:1]).all() and (in_column == in_column[:, :1]).all()):
        in_order = table.flatten().sort().values.view_as(table)
        raise ValueError(
            f"comm is a DeviceMesh of the ranks {table.tolist()}; the groups that torch makes of them have their ranks "
            "in ascending order, in which the ranks of a column would hold different shards: give one in whose rows, "
            f"and in whose columns, the ranks are in the same order, such as {in_order.tolist()}"
        )


def _secondary_of(policy: Policy, mesh: Mesh) -> Communicator | None:
    """The ranks of `mesh` that gather a unit of `policy` for backward; None: all. Collective for a number.

    Raises:
        ValueError: `policy` gives a number from which no group can be made, or ranks that cannot gather for `mesh`.
    """
    given, size = policy.reshard_after_forward, policy.secondary_ranks(mesh.shard.size)
    if not size:
        return None
    if isinstance(given, Communicator):
        if given.device != mesh.device:
            raise ValueError(
                f"reshard_after_forward works on {given.device} and comm on {mesh.device}; both must "
                "work on the same device"
            )
        return given
    if not isinstance(policy.comm, DeviceMesh):
        raise ValueError(
            f"reshard_after_forward is {given}, and comm is not a DeviceMesh, from which groups of that "
            "size could be made; give a shardcomm.Communicator, such as that of the ranks of this rank's host"
        )
    return _run_of(policy.comm, size)


def _run_of(mesh: DeviceMesh, size: int) -> Communicator:
    """This rank and its neighbours: its run of `size` consecutive ranks of those that shard over `mesh`; collective."""
    row = mesh.get_group(mesh.ndim - 1)
    first = row.rank() // size * size
    return from_ranks_of(row, range(first, first + size), mesh.device_type)


def _of_dim(mesh: DeviceMesh, dim: int) -> Communicator:
    return from_mesh_group(mesh.get_group(dim), mesh.device_type)
