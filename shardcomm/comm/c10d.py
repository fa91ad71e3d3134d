"""The `c10d` transport: collectives of any torch ProcessGroup, for hosts and devices the core does not reach."""

from __future__ import annotations

import itertools
import os
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from shardcomm import _C
from shardcomm.arguments.arrays import ArrayLike
from shardcomm.arguments.checks import check_flag
from shardcomm.arguments.dtype import core_dtype, movable
from shardcomm.arguments.scalars import check_tag, checked_scale
from shardcomm.comm import pending
from shardcomm.comm.bound_collective import BoundCollective, BoundReduction
from shardcomm.comm.communicator import Communicator
from shardcomm.comm.operands import (
    check_allocation,
    check_gather,
    check_movable,
    check_root,
    check_scatter,
    checked,
    red_op,
)
from shardcomm.comm.pending import Pending
from shardcomm.comm.receipt import Receipt
from shardcomm.comm.words import ReduceOp, Use
from shardcomm.copy.blocks import ReduceFormat, check_reduce_format
from shardcomm.copy.nonfinite import flag_address, look
from shardcomm.copy.wire_stats import WireStats
from shardcomm.meeting.comm_error import comm_error, like
from shardcomm.stream.streams import AnyEvent, AnyStream, check_stream

# The groups of processes that this one was forked from, which it never lets go of.
_of_parents: list[dict[pending.Channel, dist.ProcessGroup]] = []

# A collective of the group that it is given.
Run = Callable[[dist.ProcessGroup], None]

_OPS = {
    "sum": dist.ReduceOp(dist.ReduceOp.SUM),
    "max": dist.ReduceOp(dist.ReduceOp.MAX),
    "min": dist.ReduceOp(dist.ReduceOp.MIN),
}
_HALF = (torch.float16, torch.bfloat16)

# The path that is taken, and the reason why it is not a faster one.
_DIRECT = ("c10d", "")
_BROADCASTS = ("broadcasts", "most process groups gather equal parts alone: one broadcast a rank")
_REDUCES = ("reduces", "most process groups scatter equal parts alone: one reduce a rank")


class C10dCommunicator(Communicator):
    """A `Communicator` over two torch groups of the same ranks.

    There are two, because a gather and a reduce may run at once and a group has one order. The groups' own timeout is
    the deadline, and their errors become `CommError`. The groups are this object's alone from now on, and `close` ends
    them. Receipts quote `reason`, which says why shared memory was not taken where it was asked for.
    """

    transport = "c10d"

    def __init__(
        self,
        gathers: dist.ProcessGroup,
        reduces: dist.ProcessGroup,
        device: torch.device,
        reason: str = "",
    ) -> None:
        self.device = device
        self.rank = gathers.rank()
        self.size = gathers.size()
        self._ranks = self.rank, self.size
        self._pid = os.getpid()
        self._groups: dict[pending.Channel, dist.ProcessGroup] = {
            "gather": gathers,
            "reduce": reduces,
        }
        # Before the interpreter ends, too: a thread of Gloo's that lets go of a tensor after that aborts the process.
        weakref.finalize(self, _let_go, self._groups, self._pid)
        self._sequence = itertools.count(1)
        self._receipts: dict[str, Receipt] = {}
        # For each channel the call that runs there: its text, its number, and when it began (time.monotonic).
        self._running: dict[pending.Channel, tuple[str, int, float]] = {}
        self._failure: _C.CommError | None = None  # from then on every collective raises it
        self._tag_names: dict[int, str] = {}
        pending.opened(self)
        self.reason = reason

    def allocate(self, numel: int, *, dtype: torch.dtype = torch.float32, use: Use) -> torch.Tensor:
        check_allocation(numel, dtype, use, self.size)
        self.check()
        return torch.zeros(numel, dtype=dtype, device=self.device)

    def all_gather(
        self,
        recv: ArrayLike,
        send: ArrayLike,
        *,
        counts: Sequence[int] | None = None,
        tag: int = 0,
        stream: AnyStream | None = None,
    ) -> Any:
        recv = self._checked("all_gather", "recv", recv)
        send = self._checked("all_gather", "send", send, written=False)
        self._gather(recv, send, counts, tag).submit(stream)
        return self._work("all_gather", stream, recv, send)

    def bind_all_gather(
        self,
        recv: ArrayLike,
        send: ArrayLike,
        *,
        counts: Sequence[int] | None = None,
        tag: int = 0,
    ) -> BoundCollective:
        recv = self._checked("all_gather", "recv", recv)
        send = self._checked("all_gather", "send", send)
        return self._gather(recv, send, counts, tag).bound(recv=recv, send=send)

    def _gather(
        self, recv: torch.Tensor, send: torch.Tensor, counts: Sequence[int] | None, tag: int
    ) -> _Call:
        lengths = check_gather("all_gather", self._ranks, counts, recv=recv, send=send)
        check_tag("all_gather", tag)
        uneven = len(set(lengths)) > 1
        recv, send = recv.detach(), send.detach()

        def run(group: dist.ProcessGroup) -> None:
            parts = torch.split(recv.view(-1), lengths)
            if not uneven:
                self._wait(group._allgather_base(recv.view(-1), send.view(-1).to(recv.dtype)))
                return
            parts[self.rank].copy_(send.view(-1))
            works = []
            for root, part in enumerate(parts):
                options = dist.BroadcastOptions()
                options.rootRank = root
                if part.numel():
                    works.append(group.broadcast([part], options))
            for work in works:
                self._wait(work)

        return _Call(self, "all_gather", run, tag, _BROADCASTS if uneven else _DIRECT)

    def reduce_scatter(
        self,
        recv: ArrayLike,
        send: ArrayLike,
        op: ReduceOp = "sum",
        *,
        counts: Sequence[int] | None = None,
        scale: float = 1.0,
        accumulate: bool = False,
        nonfinite: torch.Tensor | None = None,
        tag: int = 0,
        stream: AnyStream | None = None,
    ) -> Any:
        recv = self._checked("reduce_scatter", "recv", recv)
        send = self._checked("reduce_scatter", "send", send, written=False)
        self._reduce(recv, send, op, counts, scale, accumulate, nonfinite, tag).submit(stream)
        return self._work("reduce_scatter", stream, recv, send, nonfinite)

    def bind_reduce_scatter(
        self,
        recv: ArrayLike,
        send: ArrayLike,
        op: ReduceOp = "sum",
        *,
        counts: Sequence[int] | None = None,
        scale: float = 1.0,
        accumulate: bool = False,
        nonfinite: torch.Tensor | None = None,
        tag: int = 0,
    ) -> BoundCollective:
        recv = self._checked("reduce_scatter", "recv", recv)
        send = self._checked("reduce_scatter", "send", send)
        call = self._reduce(recv, send, op, counts, scale, accumulate, nonfinite, tag)
        return call.bound(recv=recv, send=send, nonfinite=nonfinite)

    def bind_reduction(
        self,
        recv: torch.Tensor,
        send: torch.Tensor,
        op: ReduceOp = "sum",
        *,
        counts: Sequence[int] | None = None,
        tag: int = 0,
        format: ReduceFormat | None = None,
        stats: WireStats | None = None,
    ) -> BoundReduction:
        check_reduce_format("reduce_scatter: format", format)
        self.check_codes("reduce_scatter: format", format)
        send = self._checked("reduce_scatter", "send", send)

        def reduce(
            recv: torch.Tensor, scale: float, accumulate: bool, nonfinite: torch.Tensor | None
        ) -> _Call:
            recv = self._checked("reduce_scatter", "recv", recv)
            return self._reduce(recv, send, op, counts, scale, accumulate, nonfinite, tag)

        def queue(
            stream: AnyStream,
            after: AnyStream | None,
            recv: torch.Tensor,
            scale: float,
            accumulate: bool,
            nonfinite: torch.Tensor | None,
        ) -> AnyEvent:
            return reduce(recv, scale, accumulate, nonfinite).queue(stream, after)

        reduce(recv, 1.0, False, None)  # checks
        return queue

    def _reduce(
        self,
        recv: torch.Tensor,
        send: torch.Tensor,
        op: ReduceOp,
        counts: Sequence[int] | None,
        scale: float,
        accumulate: bool,
        nonfinite: torch.Tensor | None,
        tag: int,
    ) -> _Call:
        lengths = check_scatter("reduce_scatter", self._ranks, counts, recv=recv, send=send)
        check_tag("reduce_scatter", tag)
        scale = checked_scale("reduce_scatter", scale)
        check_flag("reduce_scatter", "accumulate", accumulate)
        if scale != 1.0 and not send.is_floating_point():
            raise ValueError(f"reduce_scatter: scale is {scale}; it must be 1 for {send.dtype}")
        red_op("reduce_scatter", op)
        flag_address("reduce_scatter", nonfinite, self.device)
        uneven = len(set(lengths)) > 1
        recv, send = recv.detach(), send.detach()

        def run(group: dist.ProcessGroup) -> None:
            wire = _accumulation_dtype(send.dtype)
            reduction = _OPS["sum" if op == "avg" else op]
            if uneven:
                whole = send.flatten().to(wire, copy=True)
                total = self._reduced_part(group, whole, lengths, reduction)
            else:
                total = torch.empty(recv.numel(), dtype=wire, device=self.device)
                options = dist.ReduceScatterOptions()
                options.reduceOp = reduction
                whole = send.flatten().to(wire)
                self._wait(group._reduce_scatter_base(total, whole, options))
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

        return _Call(self, "reduce_scatter", run, tag, _REDUCES if uneven else _DIRECT)

    def _reduced_part(
        self,
        group: dist.ProcessGroup,
        send: torch.Tensor,
        lengths: Sequence[int],
        reduction: dist.ReduceOp,
    ) -> torch.Tensor:
        """This rank's part of the reduced `send`. The group reduces in place, and so overwrites `send`."""
        parts = torch.split(send, list(lengths))
        works = []
        for root, part in enumerate(parts):
            options = dist.ReduceOptions()
            options.reduceOp = reduction
            options.rootRank = root
            if part.numel():
                works.append(group.reduce([part], options))
        for work in works:
            self._wait(work)
        return parts[self.rank]

    def all_reduce(
        self,
        buffer: ArrayLike,
        op: ReduceOp = "sum",
        *,
        tag: int = 0,
        stream: AnyStream | None = None,
    ) -> Any:
        buffer = self._checked("all_reduce", "buffer", buffer)
        self._all_reduce(buffer, op, tag).submit(stream)
        return self._work("all_reduce", stream, buffer)

    def bind_all_reduce(
        self, buffer: ArrayLike, op: ReduceOp = "sum", *, tag: int = 0
    ) -> BoundCollective:
        buffer = self._checked("all_reduce", "buffer", buffer)
        return self._all_reduce(buffer, op, tag).bound(buffer=buffer)

    def _all_reduce(self, buffer: torch.Tensor, op: ReduceOp, tag: int) -> _Call:
        red_op("all_reduce", op)
        check_tag("all_reduce", tag)
        buffer = buffer.detach()

        def run(group: dist.ProcessGroup) -> None:
            total = buffer.to(_accumulation_dtype(buffer.dtype))
            options = dist.AllreduceOptions()
            options.reduceOp = _OPS["sum" if op == "avg" else op]
            self._wait(group.allreduce([total], options))
            if op == "avg":
                _divide_(total, self.size)
            if total is not buffer:
                buffer.copy_(total)

        return _Call(self, "all_reduce", run, tag)

    def broadcast(
        self, buffer: ArrayLike, root: int = 0, *, stream: AnyStream | None = None
    ) -> Any:
        buffer = checked("broadcast", "buffer", buffer, self.device)
        self._broadcast(buffer, root).submit(stream)
        return self._work("broadcast", stream, buffer)

    def bind_broadcast(self, buffer: ArrayLike, root: int = 0) -> BoundCollective:
        buffer = checked("broadcast", "buffer", buffer, self.device)
        return self._broadcast(buffer, root).bound(buffer=buffer)

    def _broadcast(self, buffer: torch.Tensor, root: int) -> _Call:
        check_movable("broadcast", "buffer", buffer)
        check_root("broadcast", root, self.size)
        flat = movable(buffer.detach().view(-1))

        def run(group: dist.ProcessGroup) -> None:
            options = dist.BroadcastOptions()
            options.rootRank = root
            self._wait(group.broadcast([flat], options))

        return _Call(self, "broadcast", run)

    def barrier(self, *, tag: int = 0, stream: AnyStream | None = None) -> Any:
        self._barrier(tag).submit(stream)
        return self._work("barrier", stream)

    def bind_barrier(self, *, tag: int = 0) -> BoundCollective:
        return self._barrier(tag).bound()

    def _barrier(self, tag: int) -> _Call:
        check_tag("barrier", tag)
        return _Call(self, "barrier", lambda group: self._wait(group.barrier()), tag)

    def _name_tag(self, tag: int, name: str) -> None:
        self._tag_names[tag] = name

    def check(self) -> None:
        if (ended := self._ended()) is not None:
            raise like(ended, str(ended))

    def _ended(self) -> _C.CommError | None:
        """Why this process can call nothing here any more; None if it can."""
        if os.getpid() == self._pid:
            return self._failure
        text = (
            f"this process was forked from rank {self.rank} (pid {self._pid}) and is not that rank: it cannot use the "
            "rank's communicator"
        )
        return comm_error("closed", text, rank=self.rank, reporter=self.rank)

    def _check_open(self, operation: str) -> None:
        """As `check`; the error begins with the operation."""
        if (ended := self._ended()) is not None:
            raise like(ended, f"{operation}: {ended}")

    def abort(self, reason: str) -> None:
        """Makes collectives raise `CommError`; see `Communicator.abort`.

        Only this rank hears the reason; the others fail when the group's connections or timeout do. Gloo closes its
        connections when a process ends, and not here.
        """
        if os.getpid() != self._pid:  # it shares the rank's connections, and is not the rank
            return
        self._fail("aborted", f"rank {self.rank} aborted: {reason}")
        for group in list(self._groups.values()):
            group.abort()

    def close(self) -> None:
        failed = self._failure is not None
        self._fail("closed", f"rank {self.rank} closed the communicator")
        pending.closed(self)
        for group in list(self._groups.values()) if os.getpid() == self._pid else ():
            if failed:
                group.abort()  # else NCCL waits for kernels of ranks that do not come
            # torch.distributed knows no group that is a backend alone, and none after its own end.
            if group in distributed_c10d._world.pg_map:
                dist.destroy_process_group(group)
        _let_go(self._groups, self._pid)

    def _fail(self, kind: Literal["aborted", "closed"], text: str) -> None:
        if self._failure is None:
            self._failure = comm_error(kind, text, rank=self.rank, reporter=self.rank)

    def receipts(self) -> list[Receipt]:
        return list(self._receipts.values())

    def pending(self) -> list[Pending]:
        now = None if self._failure else time.monotonic()
        running = [
            Pending(self.rank, os.getpid(), channel, name, sequence, now and now - since)
            for channel, (name, sequence, since) in sorted(self._running.copy().items())
        ]
        return running or [Pending(self.rank, os.getpid())]

    def _checked(
        self, operation: str, name: str, array: ArrayLike, *, written: bool = True
    ) -> torch.Tensor:
        tensor = checked(operation, name, array, self.device, written=written)
        core_dtype(tensor.dtype, f"{operation}: {name}")
        return tensor

    @staticmethod
    def _wait(work: dist.Work) -> None:
        work.wait()

    def submit(
        self,
        operation: str,
        run: Run,
        stream: AnyStream | None,
        tag: int,
        path: tuple[str, str],
    ) -> None:
        """Runs a call, or queues it on `stream`."""
        if stream is not None:
            check_stream(operation, stream)
        self._check_open(operation)
        sequence = next(self._sequence)
        requested = "shm" if self.reason else "c10d"
        taken, why = path
        reason = "; ".join(filter(None, (self.reason, why)))
        self._receipts[operation] = Receipt(operation, sequence, requested, taken, reason)

        name = self._tag_names.get(tag)
        call = operation if name is None else f"{operation} of {name}"
        channel = pending.channel_of(operation)

        def guarded() -> None:
            group = self._groups.get(channel)
            self._check_open(operation)
            assert group is not None  # it is dropped after the end alone, which the check sees
            self._running[channel] = call, sequence, time.monotonic()
            try:
                run(group)
            except RuntimeError as error:
                if (ended := self._ended()) is not None:  # which has made this call fail
                    raise like(ended, f"{operation}: {ended}") from error
                self._failure = comm_error(
                    "backend",
                    f"{call} #{sequence} failed on rank {self.rank} of {self.size}: {error}",
                    operation=operation,
                    sequence=sequence,
                    reporter=self.rank,
                )
                raise like(self._failure, str(self._failure)) from error
            finally:
                if self._failure is None:  # else `pending` goes on to tell what this rank was in
                    self._running.pop(channel, None)

        if stream is None:
            self.order.come_after_queued(channel, self.check)
            guarded()
        elif isinstance(stream, _C.Stream) and stream.handle:
            # torch's groups use torch's current stream.
            ours = torch.cuda.ExternalStream(stream.handle, self.device)  # type: ignore[no-untyped-call]
            with torch.cuda.stream(ours):
                guarded()
        else:
            stream.enqueue(guarded)


@dataclass(frozen=True)
class _Call:
    """A collective with its arguments, which have been checked."""

    comm: C10dCommunicator
    operation: str
    run: Run
    tag: int = 0
    path: tuple[str, str] = _DIRECT

    def submit(self, stream: AnyStream | None = None) -> None:
        self.comm.submit(self.operation, self.run, stream, self.tag, self.path)

    def queue(self, stream: AnyStream, after: AnyStream | None) -> AnyEvent:
        if after is not None:
            stream.wait(after.record())
        self.submit(stream)
        return stream.record()

    def bound(self, **operands: torch.Tensor | None) -> BoundCollective:
        return BoundCollective(self.comm, self.operation, self.submit, self.queue, **operands)


def _let_go(groups: dict[pending.Channel, dist.ProcessGroup], pid: int) -> None:
    """Ends groups that nothing else holds; not in a forked child, which would wait for threads that it has not."""
    if os.getpid() == pid:
        groups.clear()
    else:
        _of_parents.append(groups.copy())


def _divide_(total: torch.Tensor, ranks: int) -> None:
    total.div_(ranks, rounding_mode=None if total.is_floating_point() else "trunc")


def _accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    # A ProcessGroup sums in the dtype it is given; halves would be rounded once per rank.
    return torch.float32 if dtype in _HALF else dtype
