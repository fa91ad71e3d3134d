"""Holders: the ranks that hold the elements of some parameters between them, and the other ranks of the model."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch

from shardcomm._C import CommError
from shardcomm.comm.communicator import Communicator
from shardcomm.comm.mesh import Mesh, Ranks
from shardcomm.comm.words import ReduceOp
from shardcomm.meeting.comm_error import like
from shardcomm.parameter.tensor_parallel import Distribution


@dataclass(frozen=True, eq=False)
class Holders:
    """The ranks that hold the elements of some parameters between them, and the ranks of the whole model.

    Attributes:
        mesh: The ranks that hold these parameters. Other ranks may hold other ones, such as other experts, which count
            with these in everything that is said of the whole model, such as its norm.
        everyone: The ranks of the whole model.
        experts: The groups of ranks of `everyone` that hold other parts of some parameters, which are DTensors over
            expert meshes.
        differs: Whether ranks of `everyone` have other parameters of the model, such as other experts.
    """

    mesh: Mesh
    everyone: Mesh
    experts: Mapping[Ranks, Communicator] = field(default_factory=dict)
    differs: bool = False
    _of_parts: dict[frozenset[Ranks], Holders] = field(default_factory=dict)

    def of(self, how: Distribution | None) -> Holders:
        """The holders of a parameter with this distribution; the same object for all parameters with it."""
        cut = frozenset() if how is None else how.cut_over.intersection(self.experts)
        if not cut:
            return self
        if cut not in self._of_parts:
            inner = {**self.mesh.inner, **{ranks: self.experts[ranks] for ranks in cut}}
            self._of_parts[cut] = Holders(
                replace(self.mesh, inner=inner), self.everyone, differs=self.differs
            )
        return self._of_parts[cut]

    @property
    def is_first(self) -> bool:
        """Whether this rank is the first of the holders, which speaks where all of them know the same."""
        mesh = self.mesh
        return all(comm.rank == 0 for comm in (mesh.shard, mesh.replicate, *mesh.inner.values()))

    def combine(self, buffer: torch.Tensor, op: ReduceOp) -> None:
        """Reduces `buffer` in place: each rank gives a value for its part of the model.

        If several ranks hold the same part, one of them gives it.
        """
        if self.mesh is self.everyone:
            self.mesh.all_reduce_shards(buffer, op)
            return
        if not self.speaks(op):
            buffer.zero_()
        self.everyone.all_reduce(buffer, op)

    def speaks(self, op: ReduceOp) -> bool:
        """Whether this rank gives its value to a reduce over all ranks. To a sum, one of several replicas gives it."""
        return op != "sum" or self.mesh.replicate.rank == 0


def complete(
    all_reduce: Callable[..., None], buffer: torch.Tensor, op: ReduceOp, what: str
) -> None:
    """Reduces `buffer` by `all_reduce`, a mesh's, which completes `what`: the norm of something, for instance.

    The ranks must agree about `what`: the tag is a number that stands for it.
    """
    tag = zlib.crc32(what.encode())  # smaller than those of units
    try:
        all_reduce(buffer, op, tag=tag)
    except CommError as error:
        raise like(error, f"{what} (tag {tag}), which every rank must read: {error}") from error
