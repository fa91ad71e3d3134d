"""A Mesh: ranks in rows and columns. The ranks of a row shard a model; those of a column hold copies of one shard::

                   shard ──►
    replicate   0    1    2    3      0 to 3 hold one model between them, 4 to 7 another;
        ▼       4    5    6    7      1 and 5 hold the same rows of it, and average their gradients

One row is `full_shard`, and one column is `no_shard`. On several hosts a row is best the ranks of one host: parameters
then travel inside hosts only, and gradients travel between hosts after they were reduced to a shard. Gradients are
averaged over all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import TracebackType

import torch
from torch.distributed import ProcessGroup

from shardcomm._C import CommError
from shardcomm.arguments.dtype import movable
from shardcomm.comm.communicator import Communicator
from shardcomm.comm.rendezvous import from_mesh_group
from shardcomm.comm.words import ReduceOp
from shardcomm.stream.streams import Streams, compute_stream

Ranks = tuple[int, ...]
"""The ranks of a process group, by torch.distributed's global numbers."""


@dataclass(frozen=True)
class Mesh:
    """Ranks in rows and columns, as one of them sees them: its row shards a model, its column replicates a shard.

    Either may have one rank. [`fully_shard`][shardcomm.fully_shard] takes a Mesh for strategy "hybrid_shard", and
    raises ValueError on every rank if the groups are not the rows and columns of one table of ranks.

    Attributes:
        shard: The row: the ranks that hold a model between them.
        replicate: The column: the ranks that hold the same shard as this one.
        inner: For a model with DTensor parameters, the groups of the dims of their meshes, by the ranks in them; set by
            `fully_shard`.
        secondary: The ranks of `shard` that gather for backward among themselves; None: all. Set by `fully_shard`,
            from its `reshard_after_forward`.

    Raises:
        TypeError: `shard` or `replicate` is no Communicator.
        ValueError: They work on different devices. Or one has exact sums and both have several ranks, so that a sum
            over all of them would be rounded twice.

    Example:
        ```python
        from torch.distributed import new_group

        rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
        rows = [new_group([r]) for r in range(world)]  # each rank shards alone here
        mesh = shardcomm.Mesh(
            shard=shardcomm.Communicator.from_process_group(rows[rank]),
            replicate=shardcomm.Communicator.from_process_group(),
        )
        engine = shardcomm.fully_shard(torch.nn.Linear(64, 64), mesh, strategy="hybrid_shard")
        ```
    """

    shard: Communicator
    replicate: Communicator
    inner: Mapping[Ranks, Communicator] = field(default_factory=dict, compare=False)
    secondary: Communicator | None = None

    def __post_init__(self) -> None:
        for name in ("shard", "replicate"):
            comm = getattr(self, name)
            if not isinstance(comm, Communicator):
                raise TypeError(
                    f"Mesh: {name} is a {type(comm).__name__}; it must be a shardcomm.Communicator"
                )
        if self.shard.device != self.replicate.device:
            raise ValueError(
                f"Mesh: shard works on {self.shard.device} and replicate on {self.replicate.device}; "
                "both must work on the same device"
            )
        if (
            "exact" in (self.shard.sums, self.replicate.sums)
            and min(self.shard.size, self.replicate.size) > 1
        ):
            raise ValueError(
                f"Mesh: a sum over {self.shard.size} x {self.replicate.size} ranks is rounded in shard and again in "
                "replicate, so sums='exact' would not hold; give one communicator of all ranks, with strategy "
                "'full_shard', 'shard_grad_op' or 'no_shard', or make both with sums='fast'"
            )

    def around(self, groups: Mapping[Ranks, ProcessGroup]) -> Mesh:
        """This mesh for parameters that are DTensors over `groups`; collective.

        Args:
            groups: For each dim of a DTensor's mesh the process group, by its ranks.

        Raises:
            ValueError: The mesh has exact sums, and those over `groups` would be rounded.
        """
        if not groups:
            return self
        if "exact" in (self.shard.sums, self.replicate.sums):
            raise ValueError(
                "fully_shard: comm has sums='exact', and the model has DTensors, whose gradients are rounded over the "
                "groups of their meshes, too; make comm with sums='fast'"
            )
        made = {ranks: from_mesh_group(group, self.device) for ranks, group in groups.items()}
        return replace(self, inner=made)

    @property
    def groups(self) -> tuple[Communicator, ...]:
        """All groups in which this rank is."""
        secondary = () if self.secondary is None else (self.secondary,)
        return (self.shard, self.replicate, *secondary, *self.inner.values())

    @property
    def size(self) -> int:
        """How many ranks the rows and columns have; the ranks of `inner` are not counted."""
        return self.shard.size * self.replicate.size

    @property
    def all_ranks(self) -> int:
        """How many ranks there are, with those of `inner`."""
        return math.prod([self.size, *(comm.size for comm in self.inner.values())])

    @property
    def rank(self) -> int:
        """This rank's number, counted row by row."""
        return self.replicate.rank * self.shard.size + self.shard.rank

    @property
    def device(self) -> torch.device:
        """The device on which the ranks compute."""
        return self.shard.device

    @cached_property
    def streams(self) -> Streams:
        """The side streams of the two communicators.

        Engines over the same communicators share them, since the ranks of a group must call its collectives in one
        order.
        """
        row = self.shard.streams
        column = self.replicate.streams.reduce if self.replicate.size > 1 else None
        return Streams(self.device, row.gather, row.reduce, column)

    def broadcast(
        self, tensor: torch.Tensor, same: Iterable[Communicator] = (), *, root: int = 0
    ) -> None:
        """Copies `tensor` of rank `root` to all ranks: down its column, then along the rows; collective.

        Args:
            tensor: A contiguous tensor of any dtype.
            same: The groups of `inner` whose ranks hold the same part of it; it is copied over these, too.
            root: The rank that sends.
        """
        row, column = divmod(root, self.shard.size)
        along = [(self.replicate, row), (self.shard, column), *((comm, 0) for comm in same)]
        for comm, of in along:
            if comm.size > 1:
                comm.broadcast(movable(tensor.view(-1)), of)

    def all_reduce(self, buffer: torch.Tensor, op: ReduceOp, *, tag: int = 0) -> None:
        """Reduces `buffer` over all ranks, in place; collective.

        Args:
            buffer: A contiguous tensor, of equal size and dtype on all ranks.
            op: "sum", "avg", "max" or "min".
            tag: As in `Communicator.all_gather`.
        """
        self._all_reduce((self.shard, self.replicate), buffer, op, tag)

    def all_reduce_shards(self, buffer: torch.Tensor, op: ReduceOp, *, tag: int = 0) -> None:
        """Reduces `buffer` over this row and `inner`, in place; collective.

        For values that are equal on replicas, such as a norm of the gradients of a shard.

        Args:
            buffer: A contiguous tensor, of equal size and dtype on all ranks.
            op: "sum", "avg", "max" or "min".
            tag: As in `Communicator.all_gather`.
        """
        self._all_reduce((self.shard,), buffer, op, tag)

    def _all_reduce(
        self, groups: Sequence[Communicator], buffer: torch.Tensor, op: ReduceOp, tag: int
    ) -> None:
        """Reduces `buffer` over `groups`, after the reduces that are queued there, and over `inner`.

        Reduces may be under way: a hook in backward takes a norm while other units are reduced, and a backward through
        two models ends in one model while the other's units are reduced.
        """
        with self.failing_together:
            for comm in groups:
                if comm.size > 1:
                    compute_stream(self.device).wait(comm.streams.reduce.record())
                    comm.all_reduce(buffer, op, tag=tag)
            for comm in self.inner.values():
                comm.all_reduce(buffer, op, tag=tag)

    @cached_property
    def failing_together(self) -> FailingTogether:
        """A context for collectives of the mesh: a CommError in it ends all its groups; see `FailingTogether`."""
        return FailingTogether([self])

    def abort(self, reason: str) -> None:
        """Makes present and later collectives of the mesh's groups raise `CommError` on all their ranks.

        An engine that gets this error aborts its own groups, too. So ranks outside of this mesh's groups hear of it.

        Args:
            reason: A sentence, which the error quotes.
        """
        for comm in self.groups:
            comm.abort(reason)

    def close(self) -> None:
        """Leaves the groups `shard` and `replicate`."""
        self.shard.close()
        self.replicate.close()

    def __repr__(self) -> str:
        return f"Mesh(shard: {self.shard}, replicate: {self.replicate})"


class FailingTogether:
    """A context: a CommError that leaves it, and so has ended one group of `meshes`, ends their other groups as well.

    Otherwise the ranks of the other groups would wait for this rank, which may live on, until the deadline.
    """

    def __init__(self, meshes: Sequence[Mesh]) -> None:
        self._meshes = meshes

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if isinstance(error, CommError):
            for mesh in self._meshes:
                mesh.abort(f"another of its groups failed: {error}")
