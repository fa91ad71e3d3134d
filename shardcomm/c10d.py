"""The `c10d` transport: collectives of any torch ProcessGroup, for hosts and devices the core does not reach."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from shardcomm import _C, pending
from shardcomm.arrays import ArrayLike
from shardcomm.communicator import Communicator, Receipt, ReduceOp, Use
from shardcomm.nonfinite import flag_address, look
from shardcomm.operands import check_allocation, check_root, check_sizes, checked, queued, red_op
from shardcomm.pending import Pending
from shardcomm.streams import Event, Stream

_OPS = {
    "sum": dist.ReduceOp(dist.ReduceOp.SUM),
    "max": dist.ReduceOp(dist.ReduceOp.MAX),
    "min": dist.ReduceOp(dist.ReduceOp.MIN),
}
_HALF = (torch.float16, torch.bfloat16)


class C10dCommunicator(Communicator):
    """Runs on two groups of the same ranks, since a gather and a reduce may run at once and a group has one order.

    The groups' own timeout is the deadline. What they raise becomes `CommError`. They are not closed with this: they
    belong to their maker.
    """

    transport = "c10d"

    def __init__(
        self, gathers: dist.ProcessGroup, reduces: dist.ProcessGroup, device: torch.device
    ) -> None:
        self.device = device
        self.rank = gathers.rank()
        self.size = gathers.size()
        self._gathers = gathers
        self._reduces = reduces
        self._sequence = itertools.count(1)
        self._receipts: dict[str, Receipt] = {}
        self._running: dict[pending.Channel, tuple[str, int, float]] = {}  # ..., since when
        self._failure: str | None = None
        pending.opened(self)

    def allocate(self, numel: int, *, dtype: torch.dtype = torch.float32, use: Use) -> torch.Tensor:
        check_allocation(numel, dtype, use)
        return torch.zeros(numel, dtype=dtype, device=self.device)

    def all_gather(
        self,
        recv: ArrayLike,
        send: torch.Tensor,
        *,
        tag: int = 0,
        stream: Stream | None = None,
    ) -> Event | None:
        recv = checked("all_gather", "recv", recv, self.device)
        send = checked("all_gather", "send", send, self.device)
        check_sizes("all_gather", self.size, recv=recv, send=send, whole="recv")

        def run() -> None:
            self._wait(
                self._gathers.allgather([list(recv.chunk(self.size))], [send.to(recv.dtype)])
            )

        self._submit("all_gather", run, stream)
        return queued(stream, recv, send)

    def reduce_scatter(
        self,
        recv: ArrayLike,
        send: torch.Tensor,
        op: ReduceOp = "sum",
        *,
        scale: float = 1.0,
        accumulate: bool = False,
        nonfinite: torch.Tensor | None = None,
        tag: int = 0,
        stream: Stream | None = None,
    ) -> Event | None:
        recv = checked("reduce_scatter", "recv", recv, self.device)
        send = checked("reduce_scatter", "send", send, self.device)
        check_sizes("reduce_scatter", self.size, recv=recv, send=send, whole="send")
        red_op("reduce_scatter", op)
        flag_address("reduce_scatter", nonfinite, self.device)

        def run() -> None:
            wire = _accumulation_dtype(send.dtype)
            total = torch.empty(recv.numel(), dtype=wire, device=self.device)
            options = dist.ReduceScatterOptions()
            options.reduceOp = _OPS["sum" if op == "avg" else op]
            self._wait(self._reduces._reduce_scatter_base(total, send.flatten().to(wire), options))
            if op == "avg":
                _divide_(total, self.size)
            if scale != 1.0:
                total *= scale
            flat = recv.view(-1)
            if accumulate:
                total += flat
            flat.copy_(total)
            if nonfinite is not None:
                look(flat, nonfinite)

        self._submit("reduce_scatter", run, stream)
        return queued(stream, recv, send, nonfinite)

    def all_reduce(
        self, buffer: ArrayLike, op: ReduceOp = "sum", *, stream: Stream | None = None
    ) -> Event | None:
        buffer = checked("all_reduce", "buffer", buffer, self.device)
        red_op("all_reduce", op)

        def run() -> None:
            total = buffer.to(_accumulation_dtype(buffer.dtype))
            options = dist.AllreduceOptions()
            options.reduceOp = _OPS["sum" if op == "avg" else op]
            self._wait(self._reduces.allreduce([total], options))
            if op == "avg":
                _divide_(total, self.size)
            if total is not buffer:
                buffer.copy_(total)

        self._submit("all_reduce", run, stream)
        return queued(stream, buffer)

    def broadcast(
        self, buffer: ArrayLike, root: int = 0, *, stream: Stream | None = None
    ) -> Event | None:
        buffer = checked("broadcast", "buffer", buffer, self.device)
        check_root(root, self.size)

        def run() -> None:
            options = dist.BroadcastOptions()
            options.rootRank = root
            self._wait(self._gathers.broadcast([buffer], options))

        self._submit("broadcast", run, stream)
        return queued(stream, buffer)

    def barrier(self, *, tag: int = 0, stream: Stream | None = None) -> Event | None:
        self._submit("barrier", lambda: self._wait(self._gathers.barrier()), stream)
        return queued(stream)

    def abort(self, reason: str) -> None:
        """Only this rank hears the reason; the others fail when the group's connections or timeout do.

        Gloo closes connections when a process ends, not here.
        """
        self._failure = self._failure or f"rank {self.rank} aborted: {reason}"
        self._gathers.abort()
        self._reduces.abort()

    def close(self) -> None:
        self._failure = self._failure or f"rank {self.rank} closed the communicator"
        pending.closed(self)

    def receipts(self) -> list[Receipt]:
        return list(self._receipts.values())

    def pending(self) -> list[Pending]:
        now = None if self._failure else time.monotonic()
        running = [
            Pending(self.rank, os.getpid(), channel, name, sequence, now and now - since)
            for channel, (name, sequence, since) in sorted(self._running.copy().items())
        ]
        return running or [Pending(self.rank, os.getpid())]

    @staticmethod
    def _wait(work: dist.Work) -> None:
        work.wait()

    def _submit(self, operation: str, run: Callable[[], None], stream: Stream | None) -> None:
        if self._failure is not None:
            raise _C.CommError(f"{operation}: {self._failure}")
        sequence = next(self._sequence)
        self._receipts[operation] = Receipt(operation, sequence, "c10d", "c10d", "")

        channel: pending.Channel = "reduce" if "reduce" in operation else "gather"

        def guarded() -> None:
            self._running[channel] = operation, sequence, time.monotonic()
            try:
                run()
            except RuntimeError as error:
                self._failure = (
                    f"{operation} #{sequence} failed on rank {self.rank} of {self.size}: {error}"
                )
                raise _C.CommError(self._failure) from error
            finally:
                if self._failure is None:  # else it tells what this rank was in
                    self._running.pop(channel, None)

        if stream is None:
            guarded()
        elif isinstance(stream, _C.Stream) and stream.handle:
            # torch's groups work on the stream that is torch's current one.
            ours = torch.cuda.ExternalStream(stream.handle, self.device)  # type: ignore[no-untyped-call]
            with torch.cuda.stream(ours):
                guarded()
        else:
            stream.enqueue(guarded)


def _divide_(total: torch.Tensor, ranks: int) -> None:
    total.div_(ranks, rounding_mode=None if total.is_floating_point() else "trunc")


def _accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    # A ProcessGroup sums in the dtype it is given; halves would be rounded once per rank.
    return torch.float32 if dtype in _HALF else dtype
