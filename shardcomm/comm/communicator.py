"""Collectives between ranks, on tensors and on what can be seen as one (NumPy, CuPy, JAX, Numba arrays).

One interface, several transports::

    shm    processes of one host (the default on a CPU)   compiled core: shared windows, futexes
    nccl   CUDA, one or many hosts (the default there)    NCCL, with the core's copies and sums around it
    local  N ranks as threads of one process              compiled core: memory of a CPU or of one GPU
    c10d   whatever torch.distributed reaches             any ProcessGroup

Every rank calls the same collectives in the same order. Given a `stream`, each is queued there and at once returns a
`Work` to wait for; until its end it holds on to its tensors. Without a stream it is part of what torch computes, and
returns nothing: on a CPU it blocks until this rank's part is done, on a GPU it goes to the current stream.

A rank that died, called something else or did not come within the deadline raises `CommError` on every surviving
rank; after that the communicator only raises.

Gathers (`all_gather`, `broadcast`, `barrier`) and reduces (`reduce_scatter`, `all_reduce`) are separate channels:
one of each may run at once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from functools import cached_property
from types import TracebackType
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol, Self, overload

import torch

from shardcomm.arguments.arrays import ArrayLike
from shardcomm.comm.pending import Pending
from shardcomm.stream.streams import Event, Stream, Streams
from shardcomm.stream.work import Work

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

ReduceOp = Literal["sum", "avg", "max", "min"]
Use = Literal["gather", "reduce"]
Transport = Literal["auto", "shm", "nccl", "c10d", "local"]
CtaPolicy = Literal["default", "efficiency", "zero"]

DEADLINE_S = 300.0
FIRST_NAMED_TAG = 1 << 32  # what callers choose themselves is less


class Receipt(NamedTuple):
    """How the latest collective of a kind went; `reason` says why a faster path was not taken."""

    operation: str
    sequence: int
    requested: str
    taken: str
    reason: str


class BoundGather(Protocol):
    """An all-gather with its operands; see `Communicator.bind_all_gather`."""

    def __call__(self, stream: Stream, after: Stream | None, /) -> Event:
        """Queues it on `stream`, after all that `after` was given so far; the event of its end."""


class BoundReduce(Protocol):
    """A reduce-scatter with its operands; see `Communicator.bind_reduce_scatter`."""

    def __call__(
        self,
        stream: Stream,
        after: Stream | None,
        recv: torch.Tensor,
        scale: float,
        accumulate: bool,
        nonfinite: torch.Tensor | None,
        /,
    ) -> Event:
        """As `BoundGather`, into a `recv` like the one that it was bound with."""


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

    def tag(self, name: str) -> int:
        """A tag of its own, which errors and `pending` call `name`: "all_gather(f32, count 4) of unit 'blocks.3' #41".

        Every rank asks for the same names in the same order. One that was given before, as by another engine, gets a
        number: "unit 'blocks.3' (2)". Of the first 1,024 tags the names are kept.
        """
        tag = FIRST_NAMED_TAG + self._names_given.total()
        self._names_given[name] += 1
        again = self._names_given[name]
        self._name_tag(tag, f"{name} ({again})" if again > 1 else name)
        return tag

    @cached_property
    def _names_given(self) -> Counter[str]:
        return Counter()

    @abstractmethod
    def _name_tag(self, tag: int, name: str) -> None:
        """Has sentences about calls with `tag` speak of `name`."""

    @staticmethod
    def from_env(
        *,
        deadline_s: float = DEADLINE_S,
        transport: Transport = "auto",
        device: torch.device | str | None = None,
        cta_policy: CtaPolicy = "default",
    ) -> Communicator:
        """The group that torchrun, Open MPI's or MPICH's mpirun, or Slurm's srun started.

        What each launcher sets in the environment stands in `shardcomm.meeting.launchers`; without any, the group is
        this process alone. Ranks meet at MASTER_ADDR and MASTER_PORT. Where they are not set, ranks of one host need
        neither, and those of srun meet on its first host.

        `device`: "cpu", or "cuda" for the GPU whose number is the rank's among those of its host; by default that GPU
        where each rank of the host has one and NCCL is there, else the CPU. `transport` "auto" takes nccl on GPUs; on
        CPUs shm when all ranks share a host, else c10d over Gloo. It also takes c10d, with a warning on every rank,
        where one rank of the host cannot map the others' memory. Receipts say why.

        SHARDCOMM_RUN_SECRET, where it is set, is one string for all ranks: it seals what they show each other.

        `cta_policy`: how much of the GPU NCCL may take (its NCCL_CTA_POLICY). "zero" has copy engines, and no SM, do
        the gathers among ranks of one host into memory of `allocate(use="gather")`; it needs NCCL 2.28, "efficiency"
        2.27. NCCL's environment variable of that name goes before it.

        Raises:
            ValueError: an environment variable is missing or wrong, or the launcher is not known, or was started by
                another so that there would be several groups, or Slurm has several tasks and srun did not start this
                one; or the transport is not for these ranks or this device, or there is no such `cta_policy` here.
            CudaError: NCCL or CUDA refused, or is not there.
            CommError: a rank did not come within `deadline_s` seconds, or died or raised an error meanwhile, or has
                another WORLD_SIZE, or cannot share memory (`transport="shm"`), or somebody else wrote into the store.
        """
        from shardcomm.comm import rendezvous  # noqa: PLC0415  (it builds on this module)

        return rendezvous.from_env(deadline_s, transport, device, cta_policy)

    @staticmethod
    def from_process_group(
        group: ProcessGroup | None = None,
        *,
        deadline_s: float | None = None,
        transport: Transport = "auto",
        device: torch.device | str | None = None,
        cta_policy: CtaPolicy = "default",
    ) -> Communicator:
        """The ranks of a torch ProcessGroup (default: the default group), which stays untouched.

        `transport` "c10d" runs the collectives through two new groups of the same ranks and backend; "local" is for
        ranks that are threads of one process. `device`: by default the current GPU for a group of NCCL's, else the CPU.
        `deadline_s`: by default the group's own timeout, which a program may have made long for a rank that is late.
        `cta_policy`: as in `from_env`.

        Raises:
            ValueError, CudaError, CommError: as `from_env`.
        """
        from shardcomm.comm import rendezvous  # noqa: PLC0415

        return rendezvous.from_process_group(group, deadline_s, transport, device, cta_policy)

    @staticmethod
    def local_group(
        size: int, *, deadline_s: float = DEADLINE_S, device: torch.device | str = "cpu"
    ) -> list[Communicator]:
        """`size` communicators of this process, one for each of as many threads, all on one device.

        On a GPU, threads that run backwards at once need `torch.autograd.set_multithreading_enabled(False)`: autograd
        has one thread for each GPU, where the first rank's backward would wait for the second's, behind it. On a CPU
        each thread has torch's threads of its own: `torch.set_num_threads(1)` keeps them off each other's cores.

        Raises:
            ValueError: `size` is less than 1, or `device` is neither a CPU nor a CUDA GPU.
            CudaError: there is no such GPU, or this build of shardcomm has no CUDA.
        """
        from shardcomm.comm import rendezvous  # noqa: PLC0415

        return rendezvous.local_group(size, deadline_s, device)

    @abstractmethod
    def allocate(self, numel: int, *, dtype: torch.dtype = torch.float32, use: Use) -> torch.Tensor:
        """Zeroed communication memory, as a flat tensor; collective (same arguments on every rank).

        `use="gather"`: for the output of `all_gather`; one window that all ranks of the host share where the
        transport has one, so a rank must not write into it by itself. `use="reduce"`: for the input of
        `reduce_scatter` or the buffer of `all_reduce`; this rank's own, the others only read it inside a collective.
        """

    @overload
    def all_gather(
        self,
        recv: ArrayLike,
        send: torch.Tensor,
        *,
        counts: Sequence[int] | None = ...,
        tag: int = ...,
        stream: None = ...,
    ) -> None: ...
    @overload
    def all_gather(
        self,
        recv: ArrayLike,
        send: torch.Tensor,
        *,
        counts: Sequence[int] | None = ...,
        tag: int = ...,
        stream: Stream,
    ) -> Work: ...
    @abstractmethod
    def all_gather(
        self,
        recv: ArrayLike,
        send: torch.Tensor,
        *,
        counts: Sequence[int] | None = None,
        tag: int = 0,
        stream: Stream | None = None,
    ) -> Work | None:
        """recv[r * n : (r + 1) * n] = `send` of rank r, converted to recv's dtype; n = send.numel().

        With `counts` the parts are as long as those say: `send` has counts[rank] elements, 0 or more, `recv` has
        sum(counts), and rank r's part begins at sum(counts[:r]). All ranks give the same.

        In place (nothing is copied for this rank) when `send` is its part of `recv`, of recv's dtype: the
        one way in which the two may overlap, as in NCCL. Memory of `allocate(use="gather")` must be given from the same
        place on every rank. Ranks that give different tags have called different collectives, which raises; it tells
        gathers of equal size apart.

        `send` may be a lazily negated view (Tensor.is_neg), of which a copy is sent. `recv` may not, nor the buffers of
        the other collectives.

        Raises:
            TypeError: an argument is no array, is sparse or quantised, or of a dtype that the transport does not move;
                or `counts` is no list.
            ValueError: one is not contiguous, on another device or of another size, or overlaps the other; or `counts`
                are not one whole number for each rank, or `tag` is none of 64 bits.
            CommError: a rank died, called something else, did not come in time, or closed the communicator. Other
                `counts` than another rank's are noticed where ranks share memory (`shm`, `local`).
        """

    @overload
    def reduce_scatter(
        self,
        recv: ArrayLike,
        send: torch.Tensor,
        op: ReduceOp = ...,
        *,
        counts: Sequence[int] | None = ...,
        scale: float = ...,
        accumulate: bool = ...,
        nonfinite: torch.Tensor | None = ...,
        tag: int = ...,
        stream: None = ...,
    ) -> None: ...
    @overload
    def reduce_scatter(
        self,
        recv: ArrayLike,
        send: torch.Tensor,
        op: ReduceOp = ...,
        *,
        counts: Sequence[int] | None = ...,
        scale: float = ...,
        accumulate: bool = ...,
        nonfinite: torch.Tensor | None = ...,
        tag: int = ...,
        stream: Stream,
    ) -> Work: ...
    @abstractmethod
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
    ) -> Work | None:
        """recv = this rank's n elements of `send` reduced over all ranks; n = recv.numel(). `counts`: as `all_gather`.

        In place when `recv` is this rank's part of `send`, of send's dtype: the one way in which the two may
        overlap, as in NCCL, since the other ranks read the rest of `send`. Neither may be in memory of
        `allocate(use="gather")`, where all ranks have one value. Threads that share tensors see to it themselves that
        `recv` of one is not what another sends.

        f16 and bf16 are summed in f32, multiplied by `scale`, and rounded once, to recv's dtype. `accumulate` adds to
        what recv holds. `nonfinite`: one int32 element, set to 1 if an element of the result in `recv` is NaN or Inf
        (also by overflow of a sum or of recv's dtype), and else left as it is. What writes the result looks; where
        that is not ours (c10d; nccl with neither conversion nor scale nor accumulation) the result is read again.

        Raises:
            TypeError, ValueError, CommError: as `all_gather`; ValueError also for a `scale` that is no finite number
                of float32's, and for an `op` or a `nonfinite` that is none.
        """

    def bind_all_gather(
        self,
        recv: torch.Tensor,
        send: torch.Tensor,
        *,
        counts: Sequence[int] | None = None,
        tag: int = 0,
    ) -> BoundGather:
        """`all_gather` of the same tensors in every step: checked here, and never again.

        Who queues it keeps the tensors until it has ended.
        """

        def queue(stream: Stream, after: Stream | None) -> Event:
            if after is not None:
                stream.wait(after.record())
            event = self.all_gather(recv, send, counts=counts, tag=tag, stream=stream).event
            assert event is not None
            return event

        return queue

    def bind_reduce_scatter(
        self,
        recv: torch.Tensor,
        send: torch.Tensor,
        op: ReduceOp = "sum",
        *,
        counts: Sequence[int] | None = None,
        tag: int = 0,
    ) -> BoundReduce:
        """`reduce_scatter` as `bind_all_gather`."""

        def queue(
            stream: Stream,
            after: Stream | None,
            recv: torch.Tensor,
            scale: float,
            accumulate: bool,
            nonfinite: torch.Tensor | None,
        ) -> Event:
            if after is not None:
                stream.wait(after.record())
            event = self.reduce_scatter(
                recv,
                send,
                op,
                counts=counts,
                scale=scale,
                accumulate=accumulate,
                nonfinite=nonfinite,
                tag=tag,
                stream=stream,
            ).event
            assert event is not None
            return event

        return queue

    @overload
    def all_reduce(
        self,
        buffer: ArrayLike,
        op: ReduceOp = ...,
        *,
        tag: int = ...,
        stream: None = ...,
    ) -> None: ...
    @overload
    def all_reduce(
        self,
        buffer: ArrayLike,
        op: ReduceOp = ...,
        *,
        tag: int = ...,
        stream: Stream,
    ) -> Work: ...
    @abstractmethod
    def all_reduce(
        self,
        buffer: ArrayLike,
        op: ReduceOp = "sum",
        *,
        tag: int = 0,
        stream: Stream | None = None,
    ) -> Work | None:
        """Reduces `buffer` over all ranks in place; the result is bitwise the same on each.

        `buffer` may not be in memory of `allocate(use="gather")`, where all ranks have one value. `tag`: as in
        `all_gather`. Raises as `reduce_scatter`.
        """

    @overload
    def broadcast(
        self,
        buffer: ArrayLike,
        root: int = ...,
        *,
        stream: None = ...,
    ) -> None: ...
    @overload
    def broadcast(
        self,
        buffer: ArrayLike,
        root: int = ...,
        *,
        stream: Stream,
    ) -> Work: ...
    @abstractmethod
    def broadcast(
        self, buffer: ArrayLike, root: int = 0, *, stream: Stream | None = None
    ) -> Work | None:
        """Copies `buffer`, of any dtype, of rank `root` to all.

        Raises as `all_gather`, and ValueError for a `root` that is no rank.
        """

    @overload
    def barrier(
        self,
        *,
        tag: int = ...,
        stream: None = ...,
    ) -> None: ...
    @overload
    def barrier(
        self,
        *,
        tag: int = ...,
        stream: Stream,
    ) -> Work: ...
    @abstractmethod
    def barrier(self, *, tag: int = 0, stream: Stream | None = None) -> Work | None:
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

    @abstractmethod
    def pending(self) -> list[Pending]:
        """What each rank is in, in the order of ranks; a rank that is in two collectives is there twice.

        `shm` and `local` tell it of every rank of the group, from the memory that the ranks share: nobody is stopped,
        and nobody takes part. `nccl` and `c10d` know of this rank alone. Any thread may ask, and a signal handler, also
        while this rank is in a collective, and after a failure, when it tells what the ranks were in.
        """

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
