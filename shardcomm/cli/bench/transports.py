"""The transports that carry the collectives: each that can be used here is opened, the others have a reason why not."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from shardcomm import _C
from shardcomm.cli.bench.case import Collectives
from shardcomm.cli.bench.options import BenchOptions
from shardcomm.comm import nccl, own_device
from shardcomm.comm.communicator import Communicator
from shardcomm.comm.words import ReduceOp, Use
from shardcomm.meeting.launchers import launched
from shardcomm.meeting.store import env_store
from shardcomm.stream.streams import start_stream

T = TypeVar("T")

TRANSPORTS = (
    "shm",
    "local",
    "local:cuda",
    "nccl",
    "hosts",
    "c10d:gloo",
    "torch:gloo",
    "torch:nccl",
)

_RANKS_OF = {
    "shm": "the ranks are on several hosts, or do not see each other's processes",
    "hosts": "it takes several hosts with equally many ranks",
}
"""Why these cannot be used where all ranks together have taken another transport."""

_TORCH_OPS = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.AVG,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
}
# Torch renamed these functions after 2.11, and warns of the old names.
_torch_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_torch_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Unusable(Exception):
    """A transport, or an operation on it, cannot be used here. The message says why."""


class Ranks(ABC):
    """The ranks of a transport, as one process of the run sees them."""

    def __init__(self, transport: str, device: torch.device) -> None:
        self.transport = transport
        self.device = device

    @abstractmethod
    def run(self, fn: Callable[[Collectives, Communicator], T]) -> T | None:
        """Calls fn(collectives, control) on every rank.

        `control` has the same ranks, and tensors on the CPU. It is for communication that is not measured.

        Returns:
            What fn returned on rank 0; processes other than 0 may get None.
        """

    @abstractmethod
    def close(self) -> None:
        """Leaves the group."""


class ProcessRanks(Ranks):
    """The ranks of a transport whose ranks are processes, of which this one is one."""

    def __init__(self, transport: str, on: Collectives, control: Communicator) -> None:
        super().__init__(transport, on.device)
        self._on = on
        self._control = control

    def run(self, fn: Callable[[Collectives, Communicator], T]) -> T:
        """See Ranks."""
        return fn(self._on, self._control)

    def close(self) -> None:
        """See Ranks."""
        self._on.close()


class ThreadRanks(Ranks):
    """The ranks of a transport whose ranks are threads. Process 0 has them, and the other processes wait."""

    def __init__(
        self, transport: str, control: Communicator, device: torch.device, options: BenchOptions
    ) -> None:
        super().__init__(transport, device)
        self._outer = control
        self._deadline_s = options.deadline_s
        self._comms: list[Communicator] = []
        if control.rank == 0:
            local, size = Communicator.local_group, control.size
            self._comms = local(size, deadline_s=options.deadline_s, device=device)
            self._controls = local(size, deadline_s=options.deadline_s)
            self._threads = ThreadPoolExecutor(size, initializer=start_stream, initargs=(device,))

    def run(self, fn: Callable[[Collectives, Communicator], T]) -> T | None:
        """See Ranks."""
        futures = self._start_threads(fn) if self._comms else []
        self._wait(futures)
        errors = [error for future in futures if (error := future.exception()) is not None]
        for error in sorted(errors, key=lambda error: isinstance(error, _C.CommError)):
            raise error  # a rank's own error comes before the CommErrors that follow from it
        return futures[0].result() if futures else None

    def _wait(self, futures: Sequence[Future[T]]) -> None:
        """Waits until process 0's threads have ended.

        Process 0 often tells the others that they have not, so that no wait times out.
        """
        going = torch.ones(1, dtype=torch.int32)
        while going:
            if self._comms:
                going.fill_(len(wait(futures, self._deadline_s / 4).not_done))
            self._outer.broadcast(going)

    def _start_threads(self, fn: Callable[[Collectives, Communicator], T]) -> list[Future[T]]:
        started = threading.Barrier(len(self._comms))  # one thread each

        def body(comm: Communicator, control: Communicator) -> T:
            started.wait()
            try:
                return fn(comm, control)
            except BaseException as error:
                for each in (comm, control):
                    each.abort(f"{type(error).__name__}: {error}")
                raise

        return [
            self._threads.submit(body, *pair)
            for pair in zip(self._comms, self._controls, strict=True)
        ]

    def close(self) -> None:
        """See Ranks."""
        if self._comms:
            self._threads.shutdown()
            for comm in (*self._comms, *self._controls):
                comm.close()


class TorchCollectives:
    """The functions of torch.distributed, which are called directly."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.rank, self.size, self.device = group.rank(), group.size(), device
        self._group = group

    def allocate(self, numel: int, *, dtype: torch.dtype, use: Use) -> torch.Tensor:
        """Allocates ordinary memory, since torch.distributed has no other."""
        return torch.zeros(numel, dtype=dtype, device=self.device)

    def all_gather(self, recv: torch.Tensor, send: torch.Tensor) -> object:
        """See Collectives."""
        return _torch_all_gather(recv, send, group=self._group)

    def reduce_scatter(self, recv: torch.Tensor, send: torch.Tensor, op: ReduceOp) -> object:
        """See Collectives."""
        return _torch_reduce_scatter(recv, send, _TORCH_OPS[op], group=self._group)

    def all_reduce(self, buffer: torch.Tensor, op: ReduceOp) -> object:
        """See Collectives."""
        return dist.all_reduce(buffer, _TORCH_OPS[op], group=self._group)

    def broadcast(self, buffer: torch.Tensor, root: int) -> object:
        """See Collectives."""
        return dist.broadcast(buffer, group_src=root, group=self._group)

    def close(self) -> None:
        """See Collectives."""
        dist.destroy_process_group(self._group)


def open_transport(name: str, control: Communicator, options: BenchOptions) -> Ranks:
    """Connects the ranks of `control` over a transport; collective.

    Raises:
        Unusable: A rank cannot use the transport. It is raised on every rank.
    """
    reason = _why_not(name, control)
    if name == "local:cuda" and options.graph_launches and control.size > 1:
        reason = reason or (
            "-G: its ranks wait for one another's streams, which a CUDA graph of one rank cannot hold"
        )
    usable = torch.tensor(0 if reason else 1, dtype=torch.int32)
    control.all_reduce(usable, "min")
    if not usable:
        raise Unusable(reason or "another rank cannot use it")
    if name == "local":
        return ThreadRanks(name, control, torch.device("cpu"), options)
    if name == "local:cuda":
        return ThreadRanks(name, control, torch.device("cuda", 0), options)
    return ProcessRanks(name, _connect(name, options), control)


def _why_not(name: str, control: Communicator) -> str | None:
    """The reason why this rank cannot use the transport; None if it can."""
    if name in _RANKS_OF and control.transport != name:
        return _RANKS_OF[name]
    if name in ("nccl", "torch:nccl", "local:cuda"):
        cuda = _C.cuda_status()
        if name != "torch:nccl" and not cuda.available:
            return cuda.reason
        if name == "torch:nccl" and not (torch.cuda.is_available() and dist.is_nccl_available()):
            return "this torch has no NCCL, or finds no GPU"
        library = nccl.status()
        if name == "nccl" and not library.available:
            return library.reason
        ranks_here = launched().local_size or 1
        if name != "local:cuda" and ranks_here > torch.cuda.device_count():
            return f"{ranks_here} ranks need {ranks_here} GPUs, this host has {torch.cuda.device_count()}"
    return None


def _connect(name: str, options: BenchOptions) -> Collectives:
    deadline_s = options.deadline_s
    if name == "shm":
        return Communicator.from_env(deadline_s=deadline_s, transport="shm", device="cpu")
    if name == "hosts":
        return Communicator.from_env(deadline_s=deadline_s, transport="hosts", device="cpu")
    if name == "c10d:gloo":
        return Communicator.from_env(deadline_s=deadline_s, transport="c10d", device="cpu")
    if name == "nccl":
        return Communicator.from_env(deadline_s=deadline_s, transport="nccl", device="cuda")
    backend = name.removeprefix("torch:")
    device = torch.device("cpu")
    if backend == "nccl":
        device = own_device.own_gpu(launched(), torch.cuda.device_count())
        own_device.take(device)
    timeout = timedelta(seconds=deadline_s)
    if not dist.is_initialized():
        store, rank, size = env_store(timeout)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
        return TorchCollectives(dist.distributed_c10d._get_default_group(), device)
    return TorchCollectives(dist.new_group(backend=backend, timeout=timeout), device)


def check_operation(name: str, transport: str, options: BenchOptions) -> None:
    """Raises Unusable unless `transport` has the operation `name` as `options` want it."""
    if transport.startswith("torch:") and name in ("gather", "reduce"):
        raise Unusable("torch.distributed has no such operation")
    takes_op = name in ("reduce_scatter", "all_reduce")
    if transport == "torch:gloo" and takes_op and options.redop == "avg":
        raise Unusable("Gloo has no average")
