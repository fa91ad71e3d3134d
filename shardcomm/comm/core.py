"""The transports of the compiled core: `shm`, `local` and `nccl`."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from torch.utils.dlpack import from_dlpack

from shardcomm import _C
from shardcomm.arguments.arrays import ArrayLike
from shardcomm.arguments.checks import check_flag
from shardcomm.arguments.dtype import core_dtype, wire_dtype
from shardcomm.arguments.scalars import check_tag, checked_scale
from shardcomm.comm import pending
from shardcomm.comm.bound_collective import BoundCollective, BoundReduction
from shardcomm.comm.communicator import Communicator
from shardcomm.comm.operands import (
    check_allocation,
    check_movable,
    check_root,
    checked,
    checked_parts,
    red_op,
)
from shardcomm.comm.pending import Pending
from shardcomm.comm.receipt import Receipt, Sharing
from shardcomm.comm.words import ReduceOp, Use
from shardcomm.copy.blocks import ReduceFormat, check_reduce_format, core_coding
from shardcomm.copy.nonfinite import flag_address
from shardcomm.copy.wire_stats import WireStats
from shardcomm.stream.streams import AnyEvent, AnyStream, check_stream, compute_stream, on_host

_Parts = int | tuple[int, ...]  # the length of each rank's part: of all, or one for each

_CPU = torch.device("cpu")
_CALLS = _C.TensorCalls(torch.Tensor)  # usual calls, which need none of the checks below
_USES = {"gather": _C.Use.gather, "reduce": _C.Use.reduce}


class CoreCommunicator(Communicator):
    """A `Communicator` whose collectives the compiled `core` runs."""

    def __init__(self, core: _C.Communicator, device: torch.device = _CPU) -> None:
        self._core = core
        self.device = device
        self._on_host = on_host(device)
        self.rank = core.rank
        self.size = core.size
        self._ranks = core.rank, core.size
        self.transport = core.transport
        self.sums = "exact" if core.exact_sums else "fast"
        self.codes_reduces = core.codes_reduces
        pending.opened(self)

    def allocate(self, numel: int, *, dtype: torch.dtype = torch.float32, use: Use) -> torch.Tensor:
        check_allocation(numel, dtype, use, self.size)
        if numel == 0:
            return torch.empty(0, dtype=dtype, device=self.device)
        if not self._on_host and self._on(None).capturing:
            raise RuntimeError(
                "allocate: the current stream is captured in a CUDA graph, and ranks cannot agree on memory meanwhile; "
                "run the step once before it is captured"
            )
        self.order.come_after_queued(use, self.check)
        memory = self._core.allocate(numel * dtype.itemsize, _USES[use])
        if self.device.type == "cpu":
            return from_dlpack(memory.as_dlpack()).view(dtype)
        return torch.as_tensor(memory, device=self.device).view(dtype)

    def sharing(self, memory: torch.Tensor, *, tag: int = 0) -> Sharing:
        place = memory.data_ptr(), memory.nbytes
        index, ranks = self._core.sharers(*place)
        if ranks == 1:
            return Sharing(index, ranks, None)
        call = _C.BoundCollective.sharing(self._core, *place, tag)
        return Sharing(index, ranks, self._bound("barrier", call, memory=memory))

    def all_gather(
        self,
        recv: ArrayLike,
        send: ArrayLike,
        *,
        counts: Sequence[int] | None = None,
        tag: int = 0,
        stream: AnyStream | None = None,
    ) -> Any:
        usual = counts is None and type(tag) is int and tag == 0
        usual = usual and stream is None and self._on_host and "gather" not in self.order.last
        if usual and _CALLS.all_gather(self._core, recv, send):
            return None
        recv = checked("all_gather", "recv", recv, self.device)
        send = checked("all_gather", "send", send, self.device, written=False)
        args = self._gather(recv, send, counts, tag)
        self._run("all_gather", _C.BoundCollective.all_gather(self._core, *args), stream)
        return self._work("all_gather", stream, recv, send)

    def bind_all_gather(
        self,
        recv: ArrayLike,
        send: ArrayLike,
        *,
        counts: Sequence[int] | None = None,
        tag: int = 0,
    ) -> BoundCollective:
        recv = checked("all_gather", "recv", recv, self.device)
        send = checked("all_gather", "send", send, self.device)
        call = _C.BoundCollective.all_gather(self._core, *self._gather(recv, send, counts, tag))
        return self._bound("all_gather", call, recv=recv, send=send)

    def _gather(
        self, recv: torch.Tensor, send: torch.Tensor, counts: Sequence[int] | None, tag: int
    ) -> tuple[int, _C.DType, int, _C.DType, _Parts, int]:
        """The core's arguments."""
        parts = checked_parts("all_gather", self._ranks, counts, recv=recv, send=send, whole="recv")
        check_tag("all_gather", tag)
        send_dtype = core_dtype(send.dtype, "all_gather: send")
        recv_dtype = core_dtype(recv.dtype, "all_gather: recv")
        addresses = send.data_ptr(), send_dtype, recv.data_ptr(), recv_dtype
        return *addresses, parts, tag

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
        usual = counts is None and nonfinite is None and accumulate is False
        usual = usual and type(tag) is int and tag == 0
        usual = usual and type(scale) is float and scale == 1.0 and stream is None
        usual = usual and self._on_host and "reduce" not in self.order.last
        if usual and _CALLS.reduce_scatter(self._core, recv, send, red_op("reduce_scatter", op)):
            return None
        recv = checked("reduce_scatter", "recv", recv, self.device)
        send = checked("reduce_scatter", "send", send, self.device, written=False)
        args = self._reduce(recv, send, op, counts, scale, accumulate, nonfinite, tag)
        self._run("reduce_scatter", _C.BoundCollective.reduce_scatter(self._core, *args), stream)
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
        recv = checked("reduce_scatter", "recv", recv, self.device)
        send = checked("reduce_scatter", "send", send, self.device)
        call = _C.BoundCollective.reduce_scatter(
            self._core, *self._reduce(recv, send, op, counts, scale, accumulate, nonfinite, tag)
        )
        return self._bound("reduce_scatter", call, recv=recv, send=send, nonfinite=nonfinite)

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
    ) -> tuple[int, _C.DType, int, _C.DType, float, bool, _Parts, _C.RedOp, int, int]:
        """The core's arguments."""
        parts = checked_parts(
            "reduce_scatter", self._ranks, counts, recv=recv, send=send, whole="send"
        )
        check_tag("reduce_scatter", tag)
        if type(scale) is not float or scale != 1.0:
            scale = checked_scale("reduce_scatter", scale)
        if accumulate is not False:
            check_flag("reduce_scatter", "accumulate", accumulate)
        send_dtype = core_dtype(send.dtype, "reduce_scatter: send")
        recv_dtype = core_dtype(recv.dtype, "reduce_scatter: recv")
        addresses = send.data_ptr(), send_dtype, recv.data_ptr(), recv_dtype
        flag = flag_address("reduce_scatter", nonfinite, self.device)
        return *addresses, scale, accumulate, parts, red_op("reduce_scatter", op), tag, flag

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
        recv = checked("reduce_scatter", "recv", recv, self.device)
        send = checked("reduce_scatter", "send", send, self.device)
        parts = checked_parts(
            "reduce_scatter", self._ranks, counts, recv=recv, send=send, whole="send"
        )
        check_tag("reduce_scatter", tag)
        check_reduce_format("reduce_scatter: format", format)
        self.check_codes("reduce_scatter: format", format)
        bound: Any = _C.BoundReduction(
            self._core,
            send.data_ptr(),
            core_dtype(send.dtype, "reduce_scatter: send"),
            core_dtype(recv.dtype, "reduce_scatter: recv"),
            parts,
            red_op("reduce_scatter", op),
            tag,
            core_coding(format, stats),
        )
        numel, dtype = recv.numel(), recv.dtype

        def queue(
            stream: AnyStream,
            after: AnyStream | None,
            recv: torch.Tensor,
            scale: float,
            accumulate: bool,
            nonfinite: torch.Tensor | None,
        ) -> AnyEvent:
            if recv.dtype is not dtype or recv.numel() != numel or not recv.is_contiguous():
                raise ValueError(
                    f"reduce_scatter: recv has {recv.numel()} elements of {recv.dtype}, strides {recv.stride()}; it "
                    f"was bound with {numel} of {dtype}, contiguous"
                )
            flag = (
                0 if nonfinite is None else flag_address("reduce_scatter", nonfinite, self.device)
            )
            return bound.queue(stream, after, recv.data_ptr(), scale, accumulate, flag)  # type: ignore[no-any-return]

        return queue

    def all_reduce(
        self,
        buffer: ArrayLike,
        op: ReduceOp = "sum",
        *,
        tag: int = 0,
        stream: AnyStream | None = None,
    ) -> Any:
        usual = type(tag) is int and tag == 0 and stream is None
        usual = usual and self._on_host and "reduce" not in self.order.last
        if usual and _CALLS.all_reduce(self._core, buffer, red_op("all_reduce", op)):
            return None
        buffer = checked("all_reduce", "buffer", buffer, self.device)
        args = self._all_reduce(buffer, op, tag)
        self._run("all_reduce", _C.BoundCollective.all_reduce(self._core, *args), stream)
        return self._work("all_reduce", stream, buffer)

    def bind_all_reduce(
        self, buffer: ArrayLike, op: ReduceOp = "sum", *, tag: int = 0
    ) -> BoundCollective:
        buffer = checked("all_reduce", "buffer", buffer, self.device)
        call = _C.BoundCollective.all_reduce(self._core, *self._all_reduce(buffer, op, tag))
        return self._bound("all_reduce", call, buffer=buffer)

    def _all_reduce(
        self, buffer: torch.Tensor, op: ReduceOp, tag: int
    ) -> tuple[int, _C.DType, int, _C.RedOp, int]:
        """The core's arguments."""
        check_tag("all_reduce", tag)
        where = buffer.data_ptr(), core_dtype(buffer.dtype, "all_reduce: buffer"), buffer.numel()
        return *where, red_op("all_reduce", op), tag

    def broadcast(
        self, buffer: ArrayLike, root: int = 0, *, stream: AnyStream | None = None
    ) -> Any:
        check_root("broadcast", root, self.size)
        usual = stream is None and self._on_host and "gather" not in self.order.last
        if usual and _CALLS.broadcast(self._core, buffer, root):
            return None
        buffer = checked("broadcast", "buffer", buffer, self.device)
        call = _C.BoundCollective.broadcast(self._core, *self._broadcast(buffer, root))
        self._run("broadcast", call, stream)
        return self._work("broadcast", stream, buffer)

    def bind_broadcast(self, buffer: ArrayLike, root: int = 0) -> BoundCollective:
        buffer = checked("broadcast", "buffer", buffer, self.device)
        call = _C.BoundCollective.broadcast(self._core, *self._broadcast(buffer, root))
        return self._bound("broadcast", call, buffer=buffer)

    def _broadcast(self, buffer: torch.Tensor, root: int) -> tuple[int, _C.DType, int, int]:
        """The core's arguments."""
        check_movable("broadcast", "buffer", buffer)
        check_root("broadcast", root, self.size)
        dtype, items = wire_dtype(buffer.dtype)
        return buffer.data_ptr(), dtype, buffer.numel() * items, root

    def barrier(self, *, tag: int = 0, stream: AnyStream | None = None) -> Any:
        check_tag("barrier", tag)
        call = self._barrier if tag == 0 else _C.BoundCollective.barrier(self._core, tag)
        on = self._run("barrier", call, stream)
        if stream is None and on is not None:
            self._wait_for(on)
        return self._work("barrier", stream)

    @cached_property
    def _barrier(self) -> _C.BoundCollective:
        return _C.BoundCollective.barrier(self._core, 0)

    def bind_barrier(self, *, tag: int = 0) -> BoundCollective:
        check_tag("barrier", tag)
        call: Any = _C.BoundCollective.barrier(self._core, tag)
        if self._on_host:
            return self._bound("barrier", call)

        def run() -> None:
            on = self._on(None)
            call.enqueue(on)
            self._wait_for(on)

        return BoundCollective(self, "barrier", run, call.queue)

    def _wait_for(self, stream: Any) -> None:
        """Waits for the barrier that `stream` was given last."""
        reached = stream.record()
        pause_s = 20e-6
        while not (stream.capturing or reached.query()):  # behind work that no abort may end
            self._core.check()
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 1e-3)
        reached.wait()  # raises what CUDA did, and in a capture that the host cannot wait
        self._core.check()  # a barrier that was aborted has ended too

    def _bound(self, operation: str, call: Any, **operands: torch.Tensor | None) -> BoundCollective:
        """Any: the core's collective takes the core's own streams."""
        run = call.__call__ if self._on_host else lambda: call.enqueue(self._on(None))
        return BoundCollective(self, operation, run, call.queue, **operands)

    def _name_tag(self, tag: int, name: str) -> None:
        self._core.name_tag(tag, _in_utf8(name))

    def check(self) -> None:
        self._core.check()

    def abort(self, reason: str) -> None:
        self._core.abort(_in_utf8(reason))

    def close(self) -> None:
        self._core.close()
        pending.closed(self)

    def receipts(self) -> list[Receipt]:
        return [Receipt(*receipt) for receipt in self._core.receipts()]

    def pending(self) -> list[Pending]:
        own_pid = os.getpid() if self.transport == "local" else None
        return pending.from_core(self._core.pending(), own_pid)

    def _run(self, operation: str, call: _C.BoundCollective, stream: AnyStream | None) -> Any:
        """Runs `call` on `stream` or, without one, on torch's current one, and returns that; on a CPU, here."""
        if stream is not None:
            check_stream(operation, stream)
        on = self._on(stream)
        if on is None:
            self.order.come_after_queued(pending.channel_of(operation), self.check)
            call()
        else:
            call.enqueue(on)
        return on

    def _on(self, stream: AnyStream | None) -> Any:
        if stream is not None:
            return stream
        if self._on_host:
            return None
        return compute_stream(self.device)


def _in_utf8(text: str) -> str:
    # The text may hold what UTF-8 cannot, a file's name for instance.
    return str(text).encode(errors="backslashreplace").decode()


def core_device(operation: str, device: torch.device | str) -> torch.device:
    """`device` with its index.

    Raises:
        ValueError: The core cannot drive such a device.
        CudaError: This process has no such GPU.
    """
    try:
        where = torch.device(device)
    except (RuntimeError, TypeError):
        where = None
    if where is None or where.type not in ("cpu", "cuda"):
        raise ValueError(f"{operation}: device is {device}; accepted: 'cpu', 'cuda', 'cuda:N'")
    if where.type == "cpu":
        return where
    status = _C.cuda_status()
    if not status.available:
        raise _C.CudaError(f"{operation}: device is {where}: {status.reason}")
    if where.index is None:
        where = torch.device("cuda", torch.cuda.current_device())
    if where.index >= status.devices:
        raise ValueError(
            f"{operation}: device is {where}; this process has {status.devices} GPUs, counted from 0"
        )
    return where
