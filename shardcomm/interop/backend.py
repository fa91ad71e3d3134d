"""The `shardcomm` backend of torch.distributed: its collectives on CPU tensors, through shared memory.

    import shardcomm
    torch.distributed.init_process_group("cpu:shardcomm")  # or "cpu:shardcomm,cuda:nccl"

Everything that a program then does through torch.distributed (FSDP, DDP, DTensor, collectives by hand) uses it, without
a change to the program:

    all_gather*, broadcast, barrier          the communicator's gathers    ─┐ two channels: asynchronous collectives
    reduce_scatter*, all_reduce              the communicator's reduces    ─┘ of the two kinds run at once
    gather, scatter                          gathers too: an all_gather, a broadcast, of which a rank takes its part
    all other collectives, send and recv     Gloo over the same store
    tensors on a CUDA GPU                    NCCL

torch.distributed exchanges objects by these collectives, and torch.distributed.checkpoint plans by such exchanges. So a
rank that dies meanwhile is noticed as in any other collective.

If the ranks are on several hosts, or cannot share memory, everything goes to Gloo. `receipts` says which way each
collective went, and why.

The way of a collective depends only on what all ranks agree on: the collective, the dtype and the reduction. A tensor
that is not contiguous, is a lazily negated or conjugated view, or overlaps the result takes the same way, through a
copy.
"""

from __future__ import annotations

import atexit
import functools
import itertools
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, Store
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from shardcomm.arguments.dtype import core_dtype, movable
from shardcomm.comm import rendezvous
from shardcomm.comm.c10d import C10dCommunicator
from shardcomm.comm.communicator import Communicator, Receipt
from shardcomm.comm.operands import check_root, is_part, overlap
from shardcomm.interop.call_queue import CallQueue, Flat, Run, copy_all, do
from shardcomm.interop.collectives import OPS
from shardcomm.meeting.exchange import StoreExchange
from shardcomm.stream.streams import Stream

NAME = "shardcomm"

_CPU = torch.device("cpu")
# torch's stubs give neither the options that the methods get, nor all of their forms.
_ProcessGroup: Any = dist.ProcessGroup


def receipts(group: dist.ProcessGroup | None = None) -> list[Receipt]:
    """The path that the latest collective of each kind took in a group of this backend, and why not a faster one.

    Args:
        group: A group that was made with "cpu:shardcomm". None: the default group.

    Raises:
        ValueError: The group is of another backend, or there is no default group.

    Example:
        ```text
        torch.distributed.init_process_group("cpu:shardcomm")
        torch.distributed.all_reduce(torch.ones(4))
        print(shardcomm.backend.receipts())
        ```
    """
    if group is None:
        if not dist.is_initialized():
            raise ValueError(
                "receipts: there is no default group; call torch.distributed.init_process_group first"
            )
        group = dist.group.WORLD
    if not isinstance(group, ShardcommGroup):
        raise ValueError(
            f"receipts: the group's backend is {dist.get_backend(group)!r}; accepted: a group made with "
            f"'cpu:{NAME}'"
        )
    return group.receipts()


def _delegated(name: str) -> Callable[..., Any]:
    """A method that delegates a collective which the communicator does not have."""

    def method(self: ShardcommGroup, *args: Any) -> Any:
        return self._delegate(name, f"{self._comm.transport} has no {name}", *args)

    return method


class ShardcommGroup(_ProcessGroup):  # type: ignore[misc]
    """A group of torch.distributed over this backend. `init_process_group` and `new_group` make it; collective."""

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        # A program may destroy its groups and make new ones over one store, in which the old groups' keys still are.
        store = PrefixStore(f"{NAME}/{store.add(f'made by {rank}', 1)}", store)
        self._gathers = CallQueue()
        self._reduces = CallQueue()
        self._sequence = itertools.count(1)
        self._receipts: dict[str, Receipt] = {}
        self._others = dist.ProcessGroup(store, rank, size)
        self._not_shared = ""  # why collectives go to Gloo

        @functools.cache
        def gloo() -> ProcessGroupGloo:
            return ProcessGroupGloo(PrefixStore("gloo", store), rank, size, timeout)

        def through_gloo(reason: str) -> Communicator:
            self._not_shared = reason
            groups = cast("dist.ProcessGroup", gloo())
            return C10dCommunicator(groups, groups, _CPU, reason)

        # Before Gloo connects, since the exchange hears of ranks that die meanwhile.
        exchange = StoreExchange(store, "connect", rank, size, timeout.total_seconds())
        with exchange.telling():
            self._comm = rendezvous.connect(exchange, "auto", _CPU, through_gloo)
            self._add(_CPU, dist.ProcessGroup.BackendType.GLOO, exchange.wait_for(gloo))
        if torch.cuda.is_available() and dist.is_nccl_available():
            # A group that is made in Python has to serve all devices, since torch makes no second backend beside it.
            # NCCL connects at its first use.
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout
            nccl = dist.ProcessGroupNCCL(PrefixStore("nccl", store), rank, size, options)
            self._add(torch.device("cuda"), dist.ProcessGroup.BackendType.NCCL, nccl)
        _groups.add(self)

    def receipts(self) -> list[Receipt]:
        """See `receipts`."""
        return [*self._comm.receipts(), *self._receipts.values()]

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any) -> dist.Work:
        """output[r * n : (r + 1) * n] = `input` of rank r, flat; n = input.numel()."""
        if reason := self._no_move(input):
            return self._delegate("_allgather_base", reason, output, input, opts)
        run = self._gather("all_gather_into_tensor", [output], input)
        return self._gathers.begin(run, opts.asyncOp, [output])

    def all_gather_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any
    ) -> dist.Work:
        """Runs one `all_gather_single` for each pair."""
        if reason := self._no_move(*inputs):
            return self._delegate("allgather_into_tensor_coalesced", reason, outputs, inputs, opts)
        runs = [
            self._gather("all_gather_into_tensor", [output], input)
            for output, input in zip(outputs, inputs, strict=True)
        ]
        return self._gathers.begin(_all(runs), opts.asyncOp, outputs)

    def allgather(
        self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any
    ) -> dist.Work:
        """outputs[0][r] = inputs[0] of rank r."""
        if reason := self._no_move(*inputs):
            return self._delegate("allgather", reason, outputs, inputs, opts)
        [gathered], [input] = outputs, inputs
        self._check_list("all_gather", "tensor_list", gathered)
        if any(tensor.numel() != input.numel() for tensor in gathered):
            raise ValueError(
                f"all_gather: tensor_list has tensors of {[tensor.numel() for tensor in gathered]} elements, and the "
                f"input has {input.numel()}; all must have as many"
            )
        run = self._gather("all_gather", gathered, input)
        return self._gathers.begin(run, opts.asyncOp, gathered)

    def broadcast(self, tensors: list[torch.Tensor], opts: Any) -> dist.Work:
        """Copies the tensors of rank `opts.rootRank` to all."""
        if reason := self._no_move(*tensors):
            return self._delegate("broadcast", reason, tensors, opts)
        check_root("broadcast", opts.rootRank, self._comm.size)
        buffers = [Flat([tensor]) for tensor in tensors]

        def run(stream: Stream | None) -> None:
            for buffer in buffers:
                buffer.load(stream)
                self._comm.broadcast(buffer.flat, opts.rootRank, stream=stream)
                buffer.store(stream)

        return self._gathers.begin(run, opts.asyncOp, tensors)

    def gather(
        self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any
    ) -> dist.Work:
        """On rank `opts.rootRank`, outputs[0][r] = inputs[0] of rank r."""
        if reason := self._no_move(*inputs):
            return self._delegate("gather", reason, outputs, inputs, opts)
        check_root("gather", opts.rootRank, self._comm.size)
        [input] = inputs
        if self._comm.rank == opts.rootRank:
            [gathered] = outputs
            self._check_list("gather", "gather_list", gathered)
        else:
            gathered = list(input.new_empty((self._comm.size, *input.shape)))  # which nobody reads
        # The tag tells the call from a gather to another root, and from an all_gather.
        run = self._gather("gather", gathered, input, tag=1 + opts.rootRank)
        return self._gathers.begin(run, opts.asyncOp, gathered)

    def scatter(
        self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], opts: Any
    ) -> dist.Work:
        """outputs[0] = inputs[0][this rank] of rank `opts.rootRank`."""
        if reason := self._no_move(*outputs):
            return self._delegate("scatter", reason, outputs, inputs, opts)
        check_root("scatter", opts.rootRank, self._comm.size)
        [output] = outputs
        is_root = self._comm.rank == opts.rootRank
        if is_root:
            [parts] = inputs
            self._check_list("scatter", "scatter_list", parts)
        else:
            parts = list(output.new_empty((self._comm.size, *output.shape)))
        self._check("scatter", [output], parts, "input")
        all_parts, own = Flat(parts), parts[self._comm.rank]

        def run(stream: Stream | None) -> None:
            if is_root:
                all_parts.load(stream)
            self._comm.broadcast(all_parts.flat, opts.rootRank, stream=stream)
            do(stream, lambda: copy_all([(output.detach(), own.detach())]))

        return self._gathers.begin(run, opts.asyncOp, [output])

    def barrier(self, opts: Any) -> dist.Work:
        """Ends when every rank has called it and its earlier collectives have finished."""
        if reason := self._no_move():
            return self._delegate("barrier", reason, opts)
        reduces = self._reduces.last
        if not opts.asyncOp:
            self._reduces.drain()
            reduces = None

        def run(stream: Stream | None) -> None:
            if stream is not None and reduces is not None:
                stream.wait(reduces)
            do(stream, self._comm.barrier)

        return self._gathers.begin(run, opts.asyncOp, [])

    def reduce_scatter_single(
        self, output: torch.Tensor, input: torch.Tensor, opts: Any
    ) -> dist.Work:
        """Output = this rank's part of `input`, flat, reduced over all ranks."""
        if reason := self._no_reduction(opts.reduceOp, input):
            return self._delegate("_reduce_scatter_base", reason, output, input, opts)
        run = self._scatter("reduce_scatter_tensor", output, [input], opts)
        return self._reduces.begin(run, opts.asyncOp, [output])

    def reduce_scatter_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any
    ) -> dist.Work:
        """Runs one `reduce_scatter_single` for each pair."""
        if reason := self._no_reduction(opts.reduceOp, *inputs):
            return self._delegate("reduce_scatter_tensor_coalesced", reason, outputs, inputs, opts)
        runs = [
            self._scatter("reduce_scatter_tensor", output, [input], opts)
            for output, input in zip(outputs, inputs, strict=True)
        ]
        return self._reduces.begin(_all(runs), opts.asyncOp, outputs)

    def reduce_scatter(
        self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], opts: Any
    ) -> dist.Work:
        """outputs[0] = inputs[0][this rank] reduced over all ranks."""
        [output], [parts] = outputs, inputs
        self._check_list("reduce_scatter", "input_list", parts)
        reason = self._no_reduction(opts.reduceOp, *parts)
        if len({part.numel() for part in parts}) > 1:
            reason = reason or "the parts are of different sizes"
        if reason:
            return self._delegate("reduce_scatter", reason, outputs, inputs, opts)
        run = self._scatter("reduce_scatter", output, parts, opts)
        return self._reduces.begin(run, opts.asyncOp, outputs)

    def allreduce(self, tensors: list[torch.Tensor], opts: Any) -> dist.Work:
        """Reduces each of `tensors` over all ranks, in place."""
        return self._reduce_all("allreduce", tensors, opts)

    def allreduce_coalesced(self, tensors: list[torch.Tensor], opts: Any) -> dist.Work:
        """As `allreduce`."""
        return self._reduce_all("allreduce_coalesced", tensors, opts)

    allgather_coalesced = _delegated("allgather_coalesced")
    all_to_all_single = _delegated("all_to_all_single")
    alltoall = _delegated("alltoall")
    alltoall_base = _delegated("alltoall_base")
    recv = _delegated("recv")
    recv_anysource = _delegated("recv_anysource")
    reduce = _delegated("reduce")
    send = _delegated("send")

    # The names that torch calls up to 2.12.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def abort(self) -> None:
        """Makes every rank's present and later collectives raise."""
        self._comm.abort("torch.distributed aborted the group")
        self._others.abort()

    def shutdown(self) -> None:
        """Leaves the group when all collectives that were begun have ended; `destroy_process_group` calls it."""
        self._gathers.stop()
        self._reduces.stop()
        self._comm.close()
        self._others.shutdown()

    def leave(self) -> None:
        """Leaves the group at once: collectives that have not finished fail, on the other ranks too."""
        self._comm.close()
        self._gathers.stop()
        self._reduces.stop()

    def getBackendName(self) -> str:
        """The name under which it is registered."""
        return NAME

    def _add(self, device: torch.device, kind: Any, backend: Any) -> None:
        # To the group that collectives are delegated to, and to this one, which torch asks for a device's backend.
        for group in (self._others, self):
            group._register_backend(device, kind, backend)
            if device == _CPU:
                group._set_default_backend(kind)

    def _delegate(self, name: str, reason: str, *args: Any) -> dist.Work:
        on_gpu = any(
            isinstance(leaf, torch.Tensor) and leaf.is_cuda for leaf in pytree.tree_leaves(args)
        )
        taken = "nccl" if on_gpu else "gloo"
        self._receipts[name] = Receipt(name, next(self._sequence), "shm", taken, reason)
        work: dist.Work = getattr(self._others, name)(*args)
        return work

    def _no_move(self, *tensors: torch.Tensor) -> str:
        """Why the communicator does not move these tensors; empty if it does."""
        if self._not_shared:
            return self._not_shared
        for tensor in tensors:
            if tensor.device != _CPU:
                return f"a tensor is on {tensor.device}"
            if tensor.layout != torch.strided:
                return f"a tensor's layout is {tensor.layout}"
            if tensor.is_quantized:
                return f"a tensor is quantised ({tensor.dtype})"
            if is_traceable_wrapper_subclass(tensor):
                return f"a {type(tensor).__name__} has no memory of its own"
        return ""

    def _no_reduction(self, op: Any, *tensors: torch.Tensor) -> str:
        """Why the communicator does not reduce these tensors; empty if it does."""
        reason = self._no_move(*tensors)
        if reason == self._not_shared and op.op == dist.ReduceOp.AVG:
            # Gloo itself has no averages of integers; the communicator over Gloo has, as it has over shared memory.
            reason = "" if not any(tensor.is_floating_point() for tensor in tensors) else reason
        if reason:
            return reason
        if op.op not in OPS:
            return f"shm has no {op.op.name}"
        for tensor in tensors:
            try:
                core_dtype(tensor.dtype)
            except TypeError as error:
                return str(error)
        return ""

    def _gather(
        self, operation: str, outputs: list[torch.Tensor], input: torch.Tensor, tag: int = 0
    ) -> Run:
        self._check(operation, outputs, [input], "output")
        recv, send = Flat(outputs), Flat([input])
        if overlap(recv.flat, send.flat) and not is_part(
            send.flat, recv.flat, self._comm.rank * send.flat.numel()
        ):
            send = Flat([input], copied=True)

        def run(stream: Stream | None) -> None:
            send.load(stream)
            self._comm.all_gather(movable(recv.flat), movable(send.flat), tag=tag, stream=stream)
            recv.store(stream)

        return run

    def _scatter(
        self, operation: str, output: torch.Tensor, inputs: list[torch.Tensor], opts: Any
    ) -> Run:
        self._check(operation, [output], inputs, "input")
        recv, send = Flat([output]), Flat(inputs)
        if overlap(recv.flat, send.flat) and not is_part(
            recv.flat, send.flat, self._comm.rank * recv.flat.numel()
        ):
            send = Flat(inputs, copied=True)

        def run(stream: Stream | None) -> None:
            send.load(stream)
            self._comm.reduce_scatter(recv.flat, send.flat, OPS[opts.reduceOp.op], stream=stream)
            recv.store(stream)

        return run

    def _reduce_all(self, name: str, tensors: list[torch.Tensor], opts: Any) -> dist.Work:
        if reason := self._no_reduction(opts.reduceOp, *tensors):
            return self._delegate(name, reason, tensors, opts)
        buffers = [Flat([tensor]) for tensor in tensors]

        def run(stream: Stream | None) -> None:
            for buffer in buffers:
                buffer.load(stream)
                self._comm.all_reduce(buffer.flat, OPS[opts.reduceOp.op], stream=stream)
                buffer.store(stream)

        return self._reduces.begin(run, opts.asyncOp, tensors)

    def _check(
        self,
        operation: str,
        outputs: list[torch.Tensor],
        inputs: list[torch.Tensor],
        whole: str,
    ) -> None:
        """ValueError unless all tensors have one dtype and device, and their sizes fit the number of ranks.

        `whole` names the side, "output" or "input", that holds the parts of all ranks.
        """
        kinds = {(str(tensor.dtype), str(tensor.device)) for tensor in (*outputs, *inputs)}
        if len(kinds) > 1:
            raise ValueError(
                f"{operation}: the tensors are {' and '.join(map(' on '.join, sorted(kinds)))}; all must have one "
                "dtype and be on the CPU"
            )
        sizes = [sum(tensor.numel() for tensor in tensors) for tensors in (outputs, inputs)]
        full, part = sizes if whole == "output" else reversed(sizes)
        if full != part * self._comm.size:
            raise ValueError(
                f"{operation}: the output has {sizes[0]} elements and the input has {sizes[1]}; with "
                f"{self._comm.size} ranks the {whole} must have {self._comm.size} x {part} = {self._comm.size * part}"
            )

    def _check_list(self, operation: str, name: str, tensors: list[torch.Tensor]) -> None:
        if len(tensors) != self._comm.size:
            raise ValueError(
                f"{operation}: {name} has {len(tensors)} tensors; it must have one for each of {self._comm.size} ranks"
            )


def _all(runs: list[Run]) -> Run:
    def run(stream: Stream | None) -> None:
        for each in runs:
            each(stream)

    return run


@atexit.register
def _leave_all() -> None:
    # A stream's thread that needs the interpreter after the interpreter's end would abort the process.
    for group in list(_groups):
        group.leave()


_groups: weakref.WeakSet[ShardcommGroup] = weakref.WeakSet()

dist.Backend.register_backend(NAME, ShardcommGroup, devices=["cpu"])
