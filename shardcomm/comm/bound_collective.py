"""Collectives that are bound to their operands: checked once, and then run in every step.

MPI calls them persistent collectives: MPI_Allgather_init binds one, and MPI_Start runs it (MPI 4.0, section 6.13).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn, Protocol

import torch

from shardcomm.comm.pending import channel_of
from shardcomm.stream.streams import (
    AnyEvent,
    AnyStream,
    check_stream,
    computing,
    keep_until,
    on_host,
)
from shardcomm.stream.work import Work

if TYPE_CHECKING:
    from shardcomm.comm.communicator import Communicator


Run = Callable[[], None]
"""Does what the plain collective without a stream does, with arguments that have been checked."""


class Queue(Protocol):
    """Queues a collective whose arguments have been checked."""

    def __call__(self, stream: AnyStream, after: AnyStream | None, /) -> AnyEvent:
        """On `stream`, after all work that `after` has been given so far; returns the event of the collective's end."""


class BoundCollective:
    """A collective that is bound to its operands, and that runs as often as you like.

    `Communicator.bind_all_gather` and its siblings make it, and check the arguments then. A call does what the plain
    collective without a stream does: on a CPU it blocks until this rank's part is done, and on a GPU it goes to the
    current stream. `start(stream)` does what the plain collective with a stream does. Ranks may mix bound and plain
    calls, as long as they call the same collectives in the same order.

    What is bound is the operands' memory, with the number of elements and the dtype that they had. The object keeps
    that memory. If an operand has moved to other memory since, as by `tensor.resize_`, `tensor.set_`, `tensor.data =
    ...` or `tensor.untyped_storage().resize_`, each call raises ValueError: bind again. It cannot see two things. An
    operand that has another shape now, in the same memory, is used as it was when it was bound. And the storage of an
    operand must not be resized twice, where the second size may be a smaller one at the old address.

    Attributes:
        operation: The collective's name, "all_gather" for instance.
        queue: Queues the collective on a stream after all work that another stream, or None, has been given so far, and
            returns the event of its end: `queue(stream, after)`. It is for callers who own the operands, as `Bucket`
            does: it does not look whether these have moved, and they must live until that end.

    Example:
        ```python
        full = comm.allocate(comm.size * 4, use="gather")
        shard = torch.zeros(4)
        gather = comm.bind_all_gather(full, shard)
        for step in range(3):
            shard.fill_(step)
            gather()
        gather.start(comm.streams.gather).wait()
        ```
    """

    __slots__ = (
        "_comm", "_compute", "_operands", "_queued", "_run", "_storages", "operation", "queue",
    )  # fmt: skip

    def __init__(
        self,
        comm: Communicator,
        operation: str,
        run: Run,
        queue: Queue,
        **operands: torch.Tensor | None,
    ) -> None:
        self.operation = operation
        self.queue = queue
        self._run = run
        self._comm = comm
        self._queued = (
            comm.order.last
        )  # looked at in each call, which takes less than a microsecond
        self._compute = None if on_host(comm.device) else computing(comm.device)
        given = {name: tensor for name, tensor in operands.items() if tensor is not None}
        self._operands = [(tensor, tensor.data_ptr(), name) for name, tensor in given.items()]
        # A tensor may be given other memory while what was bound still runs in the old one.
        self._storages = [tensor.untyped_storage() for tensor in given.values()]

    def __call__(self) -> None:
        """Runs the collective, as a part of what torch computes.

        Raises:
            ValueError: An operand has moved to other memory.
            CommError: A rank died, called something else, did not come in time, or closed the communicator.
        """
        for tensor, address, name in self._operands:
            if tensor.data_ptr() != address:
                self._refuse(name)
        if self._queued:
            self._comm.order.come_after_queued(channel_of(self.operation), self._comm.check)
        self._run()

    def start(self, stream: AnyStream) -> Work:
        """Queues the collective on `stream`, and returns at once.

        Args:
            stream: Where it is queued, as in the plain collective.

        Returns:
            The Work to wait for. The operands are kept until the collective has ended.

        Raises:
            TypeError: `stream` is no `shardcomm.Stream`. Without one, call the object itself.
            ValueError: An operand has moved to other memory.
            CommError: As a call; a stream of a CPU raises it when the Work is waited for.
        """
        if stream is None:
            raise TypeError(
                f"{self.operation}: start was given no stream; call the bound collective itself, which makes it a part "
                "of what torch computes"
            )
        check_stream(self.operation, stream)
        for tensor, address, name in self._operands:
            if tensor.data_ptr() != address:
                self._refuse(name)
        event = self.queue(stream, None)
        keep_until(event, self._operands, self._storages)
        self._comm.order.queued(self.operation, event)
        return Work(event, self._compute)

    def _refuse(self, name: str) -> NoReturn:
        raise ValueError(
            f"{self.operation}: {name} has moved to other memory since it was bound (by resize_, set_, .data = or "
            "its storage's resize_); bind the collective again"
        )

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError(
            "a BoundCollective cannot be copied or pickled: it is bound to memory of this process; call "
            f"comm.bind_{self.operation} again"
        )

    def __repr__(self) -> str:
        operands = ", ".join(
            f"{name} of {tensor.numel()} {tensor.dtype}" for tensor, _, name in self._operands
        )
        return f"BoundCollective({self.operation}({operands}), {self._comm})"


class BoundReduction(Protocol):
    """A reduce-scatter that is bound to what it sends; see `Communicator.bind_reduction`."""

    def __call__(
        self,
        stream: AnyStream,
        after: AnyStream | None,
        recv: torch.Tensor,
        scale: float,
        accumulate: bool,
        nonfinite: torch.Tensor | None,
        /,
    ) -> AnyEvent:
        """Queues it on `stream`, after all work that `after` has been given so far; returns its end's event."""
