"""Collectives between ranks, on tensors and on what can be seen as one (NumPy, CuPy, JAX, Numba arrays).

One interface, several transports::

    shm    processes of one host (the default on a CPU)   compiled core: shared windows, futexes
    nccl   CUDA, one or many hosts (the default there)    NCCL, with the core's copies and sums around it
    local  N ranks as threads of one process              compiled core: memory of a CPU or of one GPU
    c10d   whatever torch.distributed reaches             any ProcessGroup

Every rank calls the same collectives in the same order. Given a `stream`, each is queued there and returns at once,
with the event of its end; until then it holds on to its tensors. Without one it is part of what torch computes: on
a CPU it blocks until this rank's part is done, on a GPU it goes to the current stream.

A rank that died, called something else or did not come within the deadline raises `CommError` on every surviving
rank; after that the communicator only raises.

Gathers (`all_gather`, `broadcast`, `barrier`) and reduces (`reduce_scatter`, `all_reduce`) are separate channels:
one of each may run at once.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from functools import cached_property
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self

import torch

from shardcomm import _C
from shardcomm.arrays import ArrayLike, as_tensor
from shardcomm.dtype import core_dtype
from shardcomm.nonfinite import flag_address
from shardcomm.streams import Event, Stream, Streams, compute_stream, keep_until

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

ReduceOp = Literal["sum", "avg", "max", "min"]
Use = Literal["gather", "reduce"]
Transport = Literal["auto", "shm", "nccl", "c10d", "local"]

RED_OPS = {"sum": _C.RedOp.sum, "avg": _C.RedOp.avg, "max": _C.RedOp.max, "min": _C.RedOp.min}
USES = {"gather": _C.Use.gather, "reduce": _C.Use.reduce}

DEADLINE_S = 300.0

_CPU = torch.device("cpu")


class Receipt(NamedTuple):
    """How the latest collective of a kind went; `reason` says why a faster path was not taken."""

    operation: str
    sequence: int
    requested: str
    taken: str
    reason: str


class Communicator(ABC):
    """A group of ranks and the collectives between them. Also a context manager that closes itself."""

    rank: int
    size: int
    transport: str
    device: torch.device
    """Where the tensors it takes, and those it allocates, are."""

    @cached_property
    def streams(self) -> Streams:
        """Where whoever uses it queues its collectives: gathers need one order on all ranks, and so do reduces."""
        return Streams(self.device)

    @staticmethod
    def from_env(
        *,
        deadline_s: float = DEADLINE_S,
        transport: Transport = "auto",
        device: torch.device | str | None = None,
    ) -> Communicator:
        """The group that torchrun (or any launcher that sets the same variables) started.

        Reads RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT; without RANK and WORLD_SIZE the group is this process
        alone. `device`: "cpu", or "cuda" for GPU number LOCAL_RANK; by default that GPU where each rank of the host has
        one and NCCL is there, else the CPU. `transport` "auto" takes nccl on GPUs; on CPUs shm when all ranks share a
        host, else c10d over Gloo.

        Raises:
            ValueError: an environment variable is missing, or the transport is not for these ranks or this device.
            CudaError: NCCL or CUDA refused, or is not there.
            CommError: a rank did not come within `deadline_s` seconds.
        """
        from shardcomm import rendezvous  # noqa: PLC0415  (it builds on this module)

        return rendezvous.from_env(deadline_s, transport, device)

    @staticmethod
    def from_process_group(
        group: ProcessGroup | None = None,
        *,
        deadline_s: float | None = None,
        transport: Transport = "auto",
        device: torch.device | str | None = None,
    ) -> Communicator:
        """The ranks of a torch ProcessGroup (default: the default group), which stays untouched.

        `transport` "c10d" runs the collectives through two new groups of the same ranks and backend; "local" is for
        ranks that are threads of one process. `device`: by default the current GPU for a group of NCCL's, else the CPU.
        `deadline_s`: by default the group's own timeout, which a program may have made long for a rank that is late.
        """
        from shardcomm import rendezvous  # noqa: PLC0415

        return rendezvous.from_process_group(group, deadline_s, transport, device)

    @staticmethod
    def local_group(
        size: int, *, deadline_s: float = DEADLINE_S, device: torch.device | str = "cpu"
    ) -> list[Communicator]:
        """`size` communicators of this process, one for each of as many threads, all on one device.

        On a GPU, threads that run backwards at once need `torch.autograd.set_multithreading_enabled(False)`: autograd
        has one thread for each GPU, where the first rank's backward would wait for the second's, behind it.

        Raises:
            ValueError: `size` is less than 1, or `device` is neither a CPU nor a CUDA GPU.
            CudaError: there is no such GPU, or this build of shardcomm has no CUDA.
        """
        if not isinstance(size, int) or size < 1:
            raise ValueError(f"local_group: size is {size!r}; it must be at least 1")
        check_deadline("local_group", deadline_s)
        where = core_device("local_group", device)
        index = -1 if where.type == "cpu" else where.index
        return [
            CoreCommunicator(core, where) for core in _C.make_local_group(size, deadline_s, index)
        ]

    @abstractmethod
    def allocate(self, numel: int, *, dtype: torch.dtype = torch.float32, use: Use) -> torch.Tensor:
        """Zeroed communication memory, as a flat tensor; collective (same arguments on every rank).

        `use="gather"`: for the output of `all_gather`; one window that all ranks of the host share where the
        transport has one, so a rank must not write into it by itself. `use="reduce"`: for the input of
        `reduce_scatter` or the buffer of `all_reduce`; this rank's own, the others only read it inside a collective.
        """

    @abstractmethod
    def all_gather(
        self,
        recv: ArrayLike,
        send: torch.Tensor,
        *,
        tag: int = 0,
        stream: Stream | None = None,
    ) -> Event | None:
        """recv[r * n : (r + 1) * n] = `send` of rank r, converted to recv's dtype; n = send.numel().

        In place (nothing is copied for this rank) when `send` is that part of `recv`. Ranks that give different
        tags have called different collectives, which raises; it tells gathers of equal size apart.
        """

    @abstractmethod
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
        """recv = this rank's n elements of `send` reduced over all ranks; n = recv.numel().

        f16 and bf16 are summed in f32, multiplied by `scale`, and rounded once, to recv's dtype. `accumulate` adds to
        what recv holds. `nonfinite`: one int32 element, set to 1 if an element of the result in `recv` is NaN or Inf
        (also by overflow of a sum or of recv's dtype), and else left as it is. What writes the result looks; where
        that is not ours (c10d; nccl with neither conversion nor scale nor accumulation) the result is read again.
        """

    @abstractmethod
    def all_reduce(
        self, buffer: ArrayLike, op: ReduceOp = "sum", *, stream: Stream | None = None
    ) -> Event | None:
        """Reduces `buffer` over all ranks in place; the result is bitwise the same on each."""

    @abstractmethod
    def broadcast(
        self, buffer: ArrayLike, root: int = 0, *, stream: Stream | None = None
    ) -> Event | None:
        """Copies `buffer` of rank `root` to all."""

    @abstractmethod
    def barrier(self, *, tag: int = 0, stream: Stream | None = None) -> Event | None:
        """Returns when every rank has called it; on a `stream`, what comes later there starts then. `tag`: as in
        `all_gather`."""

    @abstractmethod
    def abort(self, reason: str) -> None:
        """Makes every rank's present and later collectives raise `CommError` with this reason."""

    @abstractmethod
    def close(self) -> None:
        """Leaves the group; allocated memory stays valid as long as a tensor refers to it."""

    @abstractmethod
    def receipts(self) -> list[Receipt]:
        """The path that the latest collective of each kind took, and why not a faster one."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Communicator({self.transport}, rank {self.rank} of {self.size})"


class CoreCommunicator(Communicator):
    """The transports of the compiled core: `shm`, `local` and `nccl`."""

    def __init__(self, core: _C.Communicator, device: torch.device = _CPU) -> None:
        self._core = core
        self.device = device
        self.rank = core.rank
        self.size = core.size
        self.transport = core.transport

    def allocate(self, numel: int, *, dtype: torch.dtype = torch.float32, use: Use) -> torch.Tensor:
        check_allocation(numel, dtype, use)
        if numel == 0:
            return torch.empty(0, dtype=dtype, device=self.device)
        memory = self._core.allocate(numel * dtype.itemsize, USES[use])
        if self.device.type == "cpu":
            return torch.frombuffer(memory, dtype=dtype)
        return torch.as_tensor(memory, device=self.device).view(dtype)

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
        self._core.all_gather(
            send.data_ptr(),
            core_dtype(send.dtype),
            recv.data_ptr(),
            core_dtype(recv.dtype),
            send.numel(),
            tag,
            self._on(stream),
        )
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
        self._core.reduce_scatter(
            send.data_ptr(),
            core_dtype(send.dtype),
            recv.data_ptr(),
            core_dtype(recv.dtype),
            scale,
            accumulate,
            recv.numel(),
            red_op("reduce_scatter", op),
            tag,
            flag_address("reduce_scatter", nonfinite, self.device),
            self._on(stream),
        )
        return queued(stream, recv, send, nonfinite)

    def all_reduce(
        self, buffer: ArrayLike, op: ReduceOp = "sum", *, stream: Stream | None = None
    ) -> Event | None:
        buffer = checked("all_reduce", "buffer", buffer, self.device)
        self._core.all_reduce(
            buffer.data_ptr(),
            core_dtype(buffer.dtype),
            buffer.numel(),
            red_op("all_reduce", op),
            self._on(stream),
        )
        return queued(stream, buffer)

    def broadcast(
        self, buffer: ArrayLike, root: int = 0, *, stream: Stream | None = None
    ) -> Event | None:
        buffer = checked("broadcast", "buffer", buffer, self.device)
        check_root(root, self.size)
        self._core.broadcast(
            buffer.data_ptr(), buffer.numel() * buffer.element_size(), root, self._on(stream)
        )
        return queued(stream, buffer)

    def barrier(self, *, tag: int = 0, stream: Stream | None = None) -> Event | None:
        on = self._on(stream)
        self._core.barrier(tag, on)
        if stream is None and on is not None:
            on.record().wait()
        return queued(stream)

    def abort(self, reason: str) -> None:
        self._core.abort(reason)

    def close(self) -> None:
        self._core.close()

    def receipts(self) -> list[Receipt]:
        return [Receipt(*receipt) for receipt in self._core.receipts()]

    def _on(self, stream: Stream | None) -> Any:
        if stream is not None or self.device.type == "cpu":
            return stream
        return compute_stream(self.device)


def check_allocation(numel: int, dtype: torch.dtype, use: str) -> None:
    """ValueError, or TypeError for a dtype that is none, unless `allocate` can be called so."""
    if use not in USES:
        raise ValueError(f"allocate: use is {use!r}; accepted: 'gather', 'reduce'")
    if not isinstance(numel, int) or not 0 <= numel < 1 << 56:
        raise ValueError(f"allocate: numel is {numel!r}; it must be a whole number of at least 0")
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"allocate: dtype is {dtype!r}; it must be a torch.dtype")


def queued(stream: Stream | None, *tensors: torch.Tensor | None) -> Event | None:
    """The end of what was queued on `stream`, until which its `tensors` are kept; None without a stream."""
    if stream is None:
        return None
    event = stream.record()
    keep_until(event, *tensors)
    return event


def red_op(operation: str, op: str) -> _C.RedOp:
    """The core's reduction of this name; ValueError for another."""
    if not isinstance(op, str) or op not in RED_OPS:
        raise ValueError(f"{operation}: op is {op!r}; accepted: {', '.join(map(repr, RED_OPS))}")
    return RED_OPS[op]


def core_device(operation: str, device: torch.device | str) -> torch.device:
    """`device` with its index; ValueError unless it is one that the core can drive, CudaError if it is not there."""
    where = torch.device(device)
    if where.type not in ("cpu", "cuda"):
        raise ValueError(f"{operation}: device is {where}; accepted: 'cpu', 'cuda', 'cuda:N'")
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


def check_deadline(operation: str, deadline_s: float) -> None:
    """ValueError unless it is a number of seconds."""
    if not (isinstance(deadline_s, (int, float)) and 0 < deadline_s < math.inf):
        raise ValueError(f"{operation}: deadline_s is {deadline_s!r}; it must be a number above 0")


def checked(operation: str, name: str, array: ArrayLike, device: torch.device) -> torch.Tensor:
    """`array` as a tensor; TypeError if it is none, ValueError unless it is contiguous and on `device`."""
    tensor = as_tensor(f"{operation}: {name}", array, written=name != "send")
    if not tensor.is_contiguous():
        raise ValueError(
            f"{operation}: {name} has strides {tensor.stride()} for shape {tuple(tensor.shape)}; "
            "it must be contiguous"
        )
    if tensor.device != device:
        raise ValueError(
            f"{operation}: {name} is on {tensor.device}; this communicator works on {device}"
        )
    return tensor


def check_sizes(
    operation: str, size: int, *, recv: torch.Tensor, send: torch.Tensor, whole: str
) -> None:
    """ValueError unless the one named `whole` holds one of the other for each of `size` ranks."""
    full, part = (recv, send) if whole == "recv" else (send, recv)
    if full.numel() != size * part.numel():
        raise ValueError(
            f"{operation}: recv has {recv.numel()} elements and send has {send.numel()}; with {size} ranks "
            f"{whole} must have {size} x {part.numel()} = {size * part.numel()}"
        )


def check_root(root: int, size: int) -> None:
    """ValueError unless `root` is a rank."""
    if not (isinstance(root, int) and 0 <= root < size):
        raise ValueError(f"broadcast: root is {root!r}; it must be a rank, 0 to {size - 1}")
