"""A Mesh: ranks in rows and columns. A row shards a model, a column holds copies of the same shard::

                   shard ──►
    replicate   0    1    2    3      0 to 3 hold one model between them, 4 to 7 another;
        ▼       4    5    6    7      1 and 5 hold the same rows of it, and average their gradients

One row is `full_shard`, one column `no_shard`. On several hosts a row is best the ranks of one: parameters then travel
inside hosts only, and gradients between hosts after they were reduced to a shard. Gradients are averaged over all.
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
from shardcomm.comm.communicator import Communicator, ReduceOp
from shardcomm.stream.streams import Streams, compute_stream

Ranks = tuple[int, ...]
"""Of a process group, as torch.distributed counts them."""


@dataclass(frozen=True)
class Mesh:
    """The two groups of this rank: its row and its column. Either may be of one rank.

    Attributes:
        shard: the ranks that hold a model between them.
        replicate: the ranks that hold the same shard as this one.
        inner: of a model with DTensor parameters, the ranks of their meshes' dims, each with this one in a mesh of its
            own; set by `fully_shard`.
        secondary: those ranks of `shard` that gather for backward among themselves; None: all. Set by `fully_shard`,
            from its `reshard_after_forward`.
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

    def around(self, groups: Mapping[Ranks, ProcessGroup]) -> Mesh:
        """This mesh, of parameters which are DTensors over `groups`; collective."""
        if not groups:
            return self
        made = {
            ranks: Communicator.from_process_group(group, device=self.device.type)
            for ranks, group in groups.items()
        }
        return replace(self, inner=made)

    @property
    def groups(self) -> tuple[Communicator, ...]:
        """All of this rank's."""
        secondary = () if self.secondary is None else (self.secondary,)
        return (self.shard, self.replicate, *secondary, *self.inner.values())

    @property
    def size(self) -> int:
        """All ranks, but those of `inner`."""
        return self.shard.size * self.replicate.size

    @property
    def all_ranks(self) -> int:
        """Their number, with those of `inner`."""
        return math.prod([self.size, *(comm.size for comm in self.inner.values())])

    @property
    def rank(self) -> int:
        """Counted row by row."""
        return self.replicate.rank * self.shard.size + self.shard.rank

    @property
    def device(self) -> torch.device:
        """Where the ranks compute."""
        return self.shard.device

    @cached_property
    def streams(self) -> Streams:
        """Those of the communicators, which engines share: what a group calls needs one order on all its ranks."""
        row = self.shard.streams
        column = self.replicate.streams.reduce if self.replicate.size > 1 else None
        return Streams(self.device, row.gather, row.reduce, column)

    def broadcast(
        self, tensor: torch.Tensor, same: Iterable[Communicator] = (), *, root: int = 0
    ) -> None:
        """Copies the contiguous `tensor`, of any dtype, of rank `root` to all: down its column, then along the rows.

        Then over `same`, those of `inner` whose ranks have the same of it.
        """
        row, column = divmod(root, self.shard.size)
        along = [(self.replicate, row), (self.shard, column), *((comm, 0) for comm in same)]
        for comm, of in along:
            if comm.size > 1:
                comm.broadcast(movable(tensor.view(-1)), of)

    def all_reduce(self, buffer: torch.Tensor, op: ReduceOp) -> None:
        """Reduces `buffer` over all ranks in place."""
        self._all_reduce((self.shard, self.replicate), buffer, op)

    def all_reduce_shards(self, buffer: torch.Tensor, op: ReduceOp) -> None:
        """Reduces in place what replicas have the same of, such as a norm of gradients: over one row, and `inner`."""
        self._all_reduce((self.shard,), buffer, op)

    def _all_reduce(
        self, groups: Sequence[Communicator], buffer: torch.Tensor, op: ReduceOp
    ) -> None:
        """Over `groups`, after the reduces that are queued there, and over `inner`.

        A hook in backward takes a norm while reduces of other units are under way, and a backward that goes through two
        models ends in one while the other's are.
        """
        with self.failing_together:
            for comm in groups:
                if comm.size > 1:
                    compute_stream(self.device).wait(comm.streams.reduce.record())
                    comm.all_reduce(buffer, op)
            for comm in self.inner.values():
                comm.all_reduce(buffer, op)

    @cached_property
    def failing_together(self) -> FailingTogether:
        """`with mesh.failing_together:` goes around what may raise CommError; see `FailingTogether`."""
        return FailingTogether([self])

    def abort(self, reason: str) -> None:
        """Makes present and later collectives of its groups raise `CommError` with this reason, on all their ranks.

        An engine there then does the same, so that the ranks which are in none of the groups hear of it too.
        """
        for comm in self.groups:
            comm.abort(reason)

    def close(self) -> None:
        """Leaves both groups."""
        self.shard.close()
        self.replicate.close()

    def __repr__(self) -> str:
        return f"Mesh(shard: {self.shard}, replicate: {self.replicate})"


class FailingTogether:
    """A CommError that leaves this context has ended one group of `meshes`; it ends the others as well.

    Else the others' ranks would wait until the deadline for this one, which may live on.
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
                mesh.abort(f"its other group failed: {error}")
