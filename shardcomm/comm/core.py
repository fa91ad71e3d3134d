"""The transports of the compiled core: `shm`, `local` and `nccl`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch

from shardcomm import _C
from shardcomm.arguments.arrays import ArrayLike
from shardcomm.arguments.checks import check_flag
from shardcomm.arguments.dtype import core_dtype
from shardcomm.arguments.scalars import check_tag, checked_scale
from shardcomm.comm import pending
from shardcomm.comm.communicator import (
    BoundGather,
    BoundReduce,
    Communicator,
    Receipt,
    ReduceOp,
    Use,
)
from shardcomm.comm.operands import (
    check_allocation,
    check_movable,
    check_root,
    checked,
    checked_parts,
    queued,
    red_op,
)
from shardcomm.comm.pending import Pending
from shardcomm.copy.nonfinite import flag_address
from shardcomm.stream.streams import Event, Stream, check_stream, compute_stream, on_host

_CPU = torch.device("cpu")
_USES = {"gather": _C.Use.gather, "reduce": _C.Use.reduce}


class CoreCommunicator(Communicator):
    """See `Communicator`; `core` does it."""

    def __init__(self, core: _C.Communicator, device: torch.device = _CPU) -> None:
        self._core = core
        self.device = device
        self._on_host = on_host(device)
        self.rank = core.rank
        self.size = core.size
        self._ranks = core.rank, core.size
        self.transport = core.transport
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
        memory = self._core.allocate(numel * dtype.itemsize, _USES[use])
        if self.device.type == "cpu":
            return torch.frombuffer(memory, dtype=dtype)
        return torch.as_tensor(memory, device=self.device).view(dtype)

    def all_gather(
        self,
        recv: ArrayLike,
        send: torch.Tensor,
        *,
        counts: Sequence[int] | None = None,
        tag: int = 0,
        stream: Stream | None = None,
    ) -> Any:
        recv = checked("all_gather", "recv", recv, self.device)
        send = checked("all_gather", "send", send, self.device, written=False)
        parts = checked_parts("all_gather", self._ranks, counts, recv=recv, send=send, whole="recv")
        if tag != 0:
            check_tag("all_gather", tag)
        self._core.all_gather(
            send.data_ptr(),
            core_dtype(send.dtype),
            recv.data_ptr(),
            core_dtype(recv.dtype),
            parts,
            tag,
            self._on(stream),
        )
        return queued(self.device, stream, recv, send)

    def reduce_scatter(
        self,
        recv: ArrayLike,
        send: torch.Tensor,
        op: ReduceOp = "sum",
        *,
        counts: Sequence[int] | None = None,
        scale: float = 1.0,
        accumulate: bool = False,
        nonfinite: torch.Tensor | None = None,
        tag: int = 0,
        stream: Stream | None = None,
    ) -> Any:
        recv = checked("reduce_scatter", "recv", recv, self.device)
        send = checked("reduce_scatter", "send", send, self.device, written=False)
        parts = checked_parts(
            "reduce_scatter", self._ranks, counts, recv=recv, send=send, whole="send"
        )
        if tag != 0:
            check_tag("reduce_scatter", tag)
        if type(scale) is not float or scale != 1.0:
            scale = checked_scale("reduce_scatter", scale)
        if accumulate is not False:
            check_flag("reduce_scatter", "accumulate", accumulate)
        self._core.reduce_scatter(
            send.data_ptr(),
            core_dtype(send.dtype),
            recv.data_ptr(),
            core_dtype(recv.dtype),
            scale,
            accumulate,
            parts,
            red_op("reduce_scatter", op),
            tag,
            flag_address("reduce_scatter", nonfinite, self.device),
            self._on(stream),
        )
        return queued(self.device, stream, recv, send, nonfinite)

    def bind_all_gather(
        self,
        recv: torch.Tensor,
        send: torch.Tensor,
        *,
        counts: Sequence[int] | None = None,
        tag: int = 0,
    ) -> BoundGather:
        recv = checked("all_gather", "recv", recv, self.device)
        send = checked("all_gather", "send", send, self.device)
        parts = checked_parts("all_gather", self._ranks, counts, recv=recv, send=send, whole="recv")
        check_tag("all_gather", tag)
        bound: Any = _C.BoundGather(  # Any: it takes the core's own streams
            self._core,
            send.data_ptr(),
            core_dtype(send.dtype),
            recv.data_ptr(),
            core_dtype(recv.dtype),
            parts,
            tag,
        )
        return bound.queue  # type: ignore[no-any-return]

    def bind_reduce_scatter(
        self,
        recv: torch.Tensor,
        send: torch.Tensor,
        op: ReduceOp = "sum",
        *,
        counts: Sequence[int] | None = None,
        tag: int = 0,
    ) -> BoundReduce:
        recv = checked("reduce_scatter", "recv", recv, self.device)
        send = checked("reduce_scatter", "send", send, self.device)
        parts = checked_parts(
            "reduce_scatter", self._ranks, counts, recv=recv, send=send, whole="send"
        )
        check_tag("reduce_scatter", tag)
        bound: Any = _C.BoundReduce(
            self._core,
            send.data_ptr(),
            core_dtype(send.dtype),
            core_dtype(recv.dtype),
            parts,
            red_op("reduce_scatter", op),
            tag,
        )
        numel, dtype = recv.numel(), recv.dtype

        def queue(
            stream: Stream,
            after: Stream | None,
            recv: torch.Tensor,
            scale: float,
            accumulate: bool,
            nonfinite: torch.Tensor | None,
        ) -> Event:
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
        stream: Stream | None = None,
    ) -> Any:
        buffer = checked("all_reduce", "buffer", buffer, self.device)
        if tag != 0:
            check_tag("all_reduce", tag)
        self._core.all_reduce(
            buffer.data_ptr(),
            core_dtype(buffer.dtype),
            buffer.numel(),
            red_op("all_reduce", op),
            tag,
            self._on(stream),
        )
        return queued(self.device, stream, buffer)

    def broadcast(self, buffer: ArrayLike, root: int = 0, *, stream: Stream | None = None) -> Any:
        buffer = checked("broadcast", "buffer", buffer, self.device)
        check_movable("broadcast", "buffer", buffer)
        check_root(root, self.size)
        self._core.broadcast(
            buffer.data_ptr(), buffer.numel() * buffer.element_size(), root, self._on(stream)
        )
        return queued(self.device, stream, buffer)

    def barrier(self, *, tag: int = 0, stream: Stream | None = None) -> Any:
        on = self._on(stream)
        if tag != 0:
            check_tag("barrier", tag)
        self._core.barrier(tag, on)
        if stream is None and on is not None:
            on.record().wait()
            self._core.check()  # a barrier that was aborted has ended too
        return queued(self.device, stream)

    def _name_tag(self, tag: int, name: str) -> None:
        self._core.name_tag(tag, _in_utf8(name))

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

    def _on(self, stream: Stream | None) -> Any:
        if stream is not None:
            check_stream(self.transport, stream)
            return stream
        if self._on_host:
            return None
        return compute_stream(self.device)


def _in_utf8(text: str) -> str:
    # It need not be what UTF-8 can hold: a file's name, say.
    return str(text).encode(errors="backslashreplace").decode()


def core_device(operation: str, device: torch.device | str) -> torch.device:
    """`device` with its index; ValueError unless it is one that the core can drive, CudaError if it is not there."""
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
