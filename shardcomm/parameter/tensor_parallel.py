"""Tensor parallel inside, sharding outside: parameters that are DTensors over the ranks of another mesh.

`parallelize_module` gives each rank of a tensor-parallel (tp) mesh a part of a parameter. The ranks at the same place
in their tp meshes have the same part, and share out its rows like those of any other parameter::

    an 8 x 4 weight       tp 0    tp 1
    Shard(0) over tp,   ┌───────┬───────┐
    rows over dp   dp 0 │ 0..1  │ 4..5  │     The layout, gathers and reduces see a 4 x 4 tensor on each side.
                   dp 1 │ 2..3  │ 6..7  │     Names, state dicts and norms are of the 8 x 4 one.
                        └───────┴───────┘

The model computes with a DTensor around the gathered part, and the optimizer sees plain rows of it. No other module
knows DTensor.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from shardcomm.comm.communicator import Communicator
from shardcomm.comm.mesh import Ranks

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def is_dtensor(value: object) -> bool:
    """Whether `value` is a DTensor. It does not import torch's module for them, which takes a second."""
    loaded = sys.modules.get("torch.distributed.tensor")
    # While another thread imports the module, it may have no DTensor yet, and then no value is one.
    return isinstance(value, getattr(loaded, "DTensor", ()))


@dataclass(frozen=True)
class Distribution:
    """How a parameter that is a DTensor lies over the ranks of its own mesh.

    Attributes:
        shape: The shape of the whole.
        offsets: Where this rank's part begins in the whole.
        mesh: The DTensor's mesh.
        placements: A Shard or a Replicate for each dim of `mesh`.
        cut_over: The groups of ranks that hold different parts.
    """

    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    mesh: DeviceMesh
    placements: tuple[Any, ...]
    cut_over: frozenset[Ranks]

    @staticmethod
    def of(name: str, param: torch.Tensor) -> Distribution | None:
        """The distribution of the parameter `name`; None if it is a plain one.

        Raises:
            ValueError: The parameter is placed in another way than by Shard and Replicate, or cut over ranks that are
                in another order than their group has them.
        """
        if not is_dtensor(param):
            return None
        from torch.distributed.tensor import Replicate, Shard  # noqa: PLC0415
        from torch.distributed.tensor._utils import (  # noqa: PLC0415
            compute_local_shape_and_global_offset,
        )

        tensor: Any = param
        mesh, placements = tensor.device_mesh, tuple(tensor.placements)
        for placement in placements:
            if type(placement) not in (Shard, Replicate):
                raise ValueError(
                    f"parameter {name!r} is a DTensor placed by {placement!r} over {mesh}; accepted: "
                    "Shard and Replicate, as parallelize_module gives them"
                )
        shape = tuple(tensor.shape)
        _, offsets = compute_local_shape_and_global_offset(shape, mesh, placements)
        cut = [_ranks(mesh, dim) for dim, each in enumerate(placements) if type(each) is Shard]
        for dim, each in enumerate(placements):
            given = _given_ranks(mesh, dim)
            # Collectives cut and join in the group's order, and `offsets` and masks of embeddings are of the mesh's.
            if type(each) is Shard and given != _ranks(mesh, dim):
                raise ValueError(
                    f"parameter {name!r} is a DTensor cut over a DeviceMesh of the ranks {list(given)}, in this order; "
                    f"the group that torch makes of them is {list(_ranks(mesh, dim))}, and DTensor takes parts by "
                    "either: give parallelize_module a DeviceMesh whose ranks are in ascending order"
                )
        return Distribution(shape, tuple(offsets), mesh, placements, frozenset(cut))

    @property
    def facts(self) -> dict[str, str]:
        """The facts in which the ranks must agree that share out this part."""
        return {
            "whole shape": str(self.shape),
            "placements": str(self.placements),
            "place in its own DeviceMesh": str(self.mesh.get_coordinate()),
        }

    @property
    def place(self) -> list[tuple[Ranks, int]]:
        """For each dim of the mesh, its group's ranks and the number of this rank's part; 0 if all have the same."""
        sharded = [_ranks(self.mesh, dim) in self.cut_over for dim in range(self.mesh.ndim)]
        return [
            (_ranks(self.mesh, dim), self.mesh.get_local_rank(dim) if cut else 0)
            for dim, cut in enumerate(sharded)
        ]

    @property
    def groups(self) -> dict[Ranks, dist.ProcessGroup]:
        """The process group of each dim of the mesh, by its ranks."""
        return {_ranks(self.mesh, dim): self.mesh.get_group(dim) for dim in range(self.mesh.ndim)}

    def dtensor(self, part: torch.Tensor) -> torch.Tensor:
        """The DTensor whose part on this rank is `part`, in the same memory."""
        from torch.distributed.tensor import DTensor  # noqa: PLC0415

        # The dims, in the order in which they lie in the part's memory.
        order = sorted(range(part.dim()), key=part.stride, reverse=True)
        sizes = [self.shape[dim] for dim in order]
        whole = torch.empty(sizes, device="meta").permute(*map(order.index, range(part.dim())))
        made: torch.Tensor = DTensor.from_local(
            part,
            self.mesh,
            self.placements,
            run_check=False,
            shape=torch.Size(self.shape),
            stride=whole.stride(),
        )
        return made

    def whole(self, part: torch.Tensor) -> torch.Tensor:
        """The whole tensor of which this rank has `part`; collective over the mesh."""
        with torch.no_grad():
            dtensor: Any = self.dtensor(part.to(self.mesh.device_type))
            full: torch.Tensor = dtensor.full_tensor()
        return full.to(part.device)

    def part_of(self, gradient: torch.Tensor) -> torch.Tensor:
        """This rank's part of a gradient; collective if autograd has left a sum over the mesh to be taken."""
        if not is_dtensor(gradient):
            return gradient
        placed: Any = gradient
        if placed.placements != self.placements:
            placed = placed.redistribute(placements=self.placements)
        return local(placed)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a DTensor, in the same memory and without history. Another tensor is returned as it is."""
    if not is_dtensor(tensor):
        return tensor
    with torch.no_grad():
        dtensor: Any = tensor
        part: Any = dtensor.to_local()
    waited: torch.Tensor = part.wait() if hasattr(part, "wait") else part
    return waited


def full(tensor: torch.Tensor) -> torch.Tensor:
    """The whole of a DTensor; collective. Another tensor is returned as it is."""
    return tensor.full_tensor() if is_dtensor(tensor) else tensor  # type: ignore[attr-defined]


def shown(part: torch.Tensor, how: Distribution | None, *, requires_grad: bool) -> nn.Parameter:
    """The parameter with which a model computes, in the memory of `part`."""
    return nn.Parameter(part if how is None else how.dtensor(part), requires_grad=requires_grad)


def inner_groups(how: Iterable[Distribution | None]) -> dict[Ranks, dist.ProcessGroup]:
    """The groups of the meshes of all DTensors of a model, in an order that is the same on all ranks.

    Raises:
        ValueError: Two groups have more than this rank in common, so that norms would be summed twice.
    """
    groups: dict[Ranks, dist.ProcessGroup] = {}
    for each in how:
        if each is not None:
            groups |= each.groups
    groups = {ranks: group for ranks, group in groups.items() if len(ranks) > 1}
    for ranks in groups:
        for other in groups:
            if ranks != other and len({*ranks} & {*other}) > 1:
                raise ValueError(
                    f"parameters are DTensors over ranks {list(ranks)}, and others over {list(other)}; "
                    "accepted: DeviceMeshes of which each two dims are one, or have one rank in common"
                )
    return groups


def with_same(how: Distribution | None, groups: Mapping[Ranks, Communicator]) -> list[Communicator]:
    """The groups whose ranks have the same part of a parameter with this distribution."""
    cut_over = frozenset() if how is None else how.cut_over
    return [comm for ranks, comm in groups.items() if ranks not in cut_over]


def _given_ranks(mesh: DeviceMesh, dim: int) -> Ranks:
    """The ranks of this rank's group along `dim`, in the order of the mesh."""
    place = mesh.get_coordinate()
    assert place is not None  # a rank that has a part is in the mesh
    along = tuple(slice(None) if at == dim else index for at, index in enumerate(place))
    return tuple(mesh.mesh[along].tolist())


def _ranks(mesh: DeviceMesh, dim: int) -> Ranks:
    return tuple(dist.get_process_group_ranks(mesh.get_group(dim)))
