"""Collectives between ranks, on tensors and on what can be seen as one (NumPy, CuPy, JAX, Numba arrays).

One interface, several transports::

    shm    processes of one host (the default on a CPU)   compiled core: shared windows, futexes
    nccl   CUDA, one or many hosts (the default there)    NCCL, with the core's copies and sums around it
    hosts  several CPU hosts with several ranks each      shm on each host, TCP between them
    local  N ranks as threads of one process              compiled core: memory of a CPU or of one GPU
    c10d   whatever torch.distributed reaches             any ProcessGroup

The docstrings here are the contract of all transports. `core.py` and `c10d.py` implement it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from functools import cached_property
from types import TracebackType
from typing import TYPE_CHECKING, NoReturn, Self, overload

import torch

from shardcomm.arguments.arrays import ArrayLike
from shardcomm.comm.bound_collective import BoundCollective, BoundReduction
from shardcomm.comm.call_order import CallOrder
from shardcomm.comm.operands import keep_memory_until
from shardcomm.comm.pending import Pending
from shardcomm.comm.receipt import Receipt, Sharing
from shardcomm.comm.words import (
    DEADLINE_S,
    FIRST_NAMED_TAG,
    CtaPolicy,
    ReduceOp,
    Sums,
    Transport,
    Use,
)
from shardcomm.copy.blocks import ReduceFormat
from shardcomm.copy.wire_stats import WireStats
from shardcomm.stream.streams import AnyStream, Streams, computing, on_host
from shardcomm.stream.work import Work

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class Communicator(ABC):
    """A group of ranks, as one of them sees it, and the collectives between them.

    Made by `from_env` (the ranks that a launcher started), `from_process_group` (the ranks of a torch group) or
    `local_group` (threads of this process). As a context manager it closes itself at the end.

    Every rank calls the same collectives in the same order. A collective with a `stream` is queued there, and at once
    returns a [`Work`][shardcomm.Work] to wait for; it keeps its tensors alive until its end. Without a stream a
    collective is part of what torch computes, and returns None: on a CPU it blocks until this rank's part is done,
    after what was queued on its channel before, and on a GPU it goes to the current stream.

    If a rank dies, calls something else or does not come within the deadline, every surviving rank raises
    [`CommError`][shardcomm.CommError], and the communicator only raises from then on.

    Gathers (`all_gather`, `broadcast`, `barrier`) and reduces (`reduce_scatter`, `all_reduce`) are separate channels: a
    gather and a reduce may run at once.

    Operands are contiguous tensors, or arrays of other libraries that can be seen as such (NumPy, CuPy, JAX, Numba), of
    any shape: their elements count in order.

    Attributes:
        rank: This rank's number, 0 to `size` - 1.
        size: How many ranks the group has.
        transport: What carries the collectives: "shm", "nccl", "hosts", "c10d" or "local".
        device: The device of the tensors that it takes and allocates.
        sums: How it sums floats: "fast" or "exact".
        codes_reduces: Whether partial sums cross between hosts, and can do so in fewer bytes; see `bind_reduction`.

    Example:
        ```python
        with shardcomm.Communicator.from_env() as comm:
            full = comm.allocate(comm.size * 4, use="gather")
            comm.all_gather(full, torch.full((4,), float(comm.rank)))
            grad = torch.empty(4)
            comm.reduce_scatter(grad, torch.ones(comm.size * 4), "avg")
        ```
    """

    rank: int
    size: int
    transport: str
    device: torch.device
    sums: Sums = "fast"
    codes_reduces: bool = False

    @cached_property
    def streams(self) -> Streams:
        """Side streams for collectives. Every rank must queue its gathers in one order, and its reduces in one order.

        Engines and buckets over this communicator share them, which keeps that order.
        """
        return Streams(self.device)

    def tag(self, name: str) -> int:
        """A new tag, which errors and `pending` call `name`: "all_gather(f32, count 4) of unit 'blocks.3' #41".

        Every rank asks for the same names in the same order. A name that is asked for again, as by another engine, gets
        a number: "unit 'blocks.3' (2)". The names of the first 1,024 tags are kept.

        Args:
            name: What the sentences call the collectives with this tag.

        Returns:
            A number for the argument `tag` of collectives.
        """
        tag = FIRST_NAMED_TAG + self._names_given.total()
        self._names_given[name] += 1
        again = self._names_given[name]
        self._name_tag(tag, f"{name} ({again})" if again > 1 else name)
        return tag

    @cached_property
    def _names_given(self) -> Counter[str]:
        return Counter()

    @cached_property
    def order(self) -> CallOrder:
        """What is queued; callers of `BoundCollective.queue` tell it."""
        return CallOrder(on_host(self.device))

    def _work(
        self, operation: str, stream: AnyStream | None, *tensors: torch.Tensor | None
    ) -> Work | None:
        """The Work of a collective that was queued on `stream`, with these operands; None without a stream."""
        if stream is None:
            return None
        event = stream.record()
        keep_memory_until(event, *tensors)
        self.order.queued(operation, event)
        return Work(event, None if on_host(self.device) else computing(self.device))

    @abstractmethod
    def _name_tag(self, tag: int, name: str) -> None:
        """Makes sentences about calls with `tag` name `name`."""

    @staticmethod
    def from_env(
        *,
        deadline_s: float = DEADLINE_S,
        transport: Transport = "auto",
        device: torch.device | str | None = None,
        cta_policy: CtaPolicy = "default",
        sums: Sums = "fast",
    ) -> Communicator:
        """Joins the group that torchrun, Open MPI's or MPICH's mpirun, or Slurm's srun started; collective.

        The module `shardcomm.meeting.launchers` lists what each launcher sets in the environment. Without a launcher
        the group is this process alone. Ranks meet at MASTER_ADDR and MASTER_PORT. If these are not set, ranks of one
        host meet without them, and ranks of srun meet on its first host.

        If the environment variable SHARDCOMM_RUN_SECRET is set, it must be the same string on all ranks: it seals the
        messages by which they introduce themselves.

        Args:
            deadline_s: How long a rank waits for another one, in set-up and in every collective, in seconds.
            transport: What carries the collectives. "auto" takes nccl on GPUs. On CPUs it takes shm when all ranks
                share a host; hosts when there are several with equally many ranks, which are numbered host by host;
                and else c10d over Gloo. It also takes c10d, with a warning on every rank, where a rank
                cannot map the memory of others on its host. Receipts say why.
            device: "cpu"; or "cuda" for the GPU whose number is this rank's among the ranks of its host; or a
                `torch.device`. None: that GPU if each rank of the host has one and NCCL is there, else the CPU, with a
                warning if there are GPUs. A GPU becomes torch's current device.
            cta_policy: How much of the GPU NCCL may take (its NCCL_CTA_POLICY). With "zero", copy engines and no SMs do
                the gathers among ranks of one host into memory of `allocate(use="gather")`. "zero" needs NCCL 2.28,
                and "efficiency" 2.27. If the environment variable NCCL_CTA_POLICY is set, it wins.
            sums: How "sum" and "avg" of floats are rounded, the same on all ranks. "fast": at each addition, in an
                order that is always the same where the transport is shm, hosts or local. "exact": once, from the exact
                sum of all ranks, so that no order of ranks changes a bit; shm, and local on a CPU, can do that.

        Returns:
            The communicator of this rank, in the group of all ranks.

        Raises:
            ValueError: An environment variable is missing or wrong. Or the launcher is not known, or another launcher
                started it, so that there would be several groups. Or Slurm has several tasks and srun did not start
                this one. Or the transport is not for these ranks or this device, or has no exact sums, or this NCCL has
                no such `cta_policy`.
            CudaError: NCCL or CUDA refused, or is not there.
            CommError: A rank did not come within `deadline_s`, or died or raised an error meanwhile, or has another
                WORLD_SIZE, or cannot share memory (`transport="shm"`); or somebody else wrote into the store.
        """
        from shardcomm.comm import rendezvous  # noqa: PLC0415  (it builds on this module)

        return rendezvous.from_env(deadline_s, transport, device, cta_policy, sums)

    @staticmethod
    def from_process_group(
        group: ProcessGroup | None = None,
        *,
        deadline_s: float | None = None,
        transport: Transport = "auto",
        device: torch.device | str | None = None,
        cta_policy: CtaPolicy = "default",
        sums: Sums = "fast",
    ) -> Communicator:
        """Joins the ranks of a torch ProcessGroup, which stays as it is; collective.

        Args:
            group: A group of which this rank is part. None: the default group.
            deadline_s: How long a rank waits for another one, in seconds. None: the group's own timeout, which a
                program may have made long for a rank that is late.
            transport: As in `from_env`. "c10d" runs the collectives through two new groups of the same ranks and
                backend; "local" is for ranks that are threads of one process.
            device: As in `from_env`. None: a GPU for transport "nccl", and for a group that sends GPUs' tensors
                through NCCL unless the transport is "shm" or "hosts"; else the CPU. "cuda" is the GPU to which the
                group is bound (`init_process_group(device_id=...)`), or the current one.
            cta_policy: As in `from_env`.
            sums: As in `from_env`.

        Returns:
            The communicator of this rank, with the rank and size that it has in `group`.

        Raises:
            TypeError: `group` is no ProcessGroup of this rank.
            ValueError: There is no default group; transport is "c10d" and the group has no backend for `device`; or as
                `from_env`.
            CudaError: As `from_env`.
            CommError: As `from_env`.
        """
        from shardcomm.comm import rendezvous  # noqa: PLC0415

        return rendezvous.from_process_group(group, deadline_s, transport, device, cta_policy, sums)

    @staticmethod
    def local_group(
        size: int,
        *,
        deadline_s: float = DEADLINE_S,
        device: torch.device | str = "cpu",
        sums: Sums = "fast",
    ) -> list[Communicator]:
        """Makes a group whose ranks are threads of this process, all on one device.

        On a GPU, threads that run backwards at once need `torch.autograd.set_multithreading_enabled(False)`. Otherwise
        autograd runs all of them in its one thread for that GPU, where the first rank's backward would wait for the
        second's, which is queued behind it. On a CPU each thread has torch's threads of its own:
        `torch.set_num_threads(1)` keeps them off each other's cores.

        Args:
            size: How many ranks the group has; at least 1.
            deadline_s: How long a rank waits for another one, in seconds.
            device: "cpu", "cuda" for the current GPU, or "cuda:N".
            sums: As in `from_env`; "exact" on a CPU alone.

        Returns:
            The communicators in the order of ranks, one for each thread.

        Raises:
            ValueError: `size` is less than 1, or `device` is neither a CPU nor a CUDA GPU, or has no such `sums`.
            CudaError: There is no such GPU, or this build of shardcomm has no CUDA.

        Example:
            ```python
            from concurrent.futures import ThreadPoolExecutor

            def total(comm):
                buffer = torch.tensor([float(comm.rank)])
                comm.all_reduce(buffer)
                return buffer.item()

            with ThreadPoolExecutor(2) as threads:
                group = shardcomm.Communicator.local_group(2)
                assert list(threads.map(total, group)) == [1.0, 1.0]
            ```
        """
        from shardcomm.comm import rendezvous  # noqa: PLC0415

        return rendezvous.local_group(size, deadline_s, device, sums)

    @abstractmethod
    def allocate(self, numel: int, *, dtype: torch.dtype = torch.float32, use: Use) -> torch.Tensor:
        """Allocates communication memory, in which collectives are fastest; collective, with the same arguments.

        Args:
            numel: How many elements; 0 or more.
            dtype: Their dtype; not a quantised one.
            use: "gather" is for the output of `all_gather`. Where the transport has one, it is a window that all ranks
                of the host share, so that a rank must not write into it by itself. "reduce" is for the input of
                `reduce_scatter` or the buffer of `all_reduce`. It is this rank's own; the other ranks only read it, and
                only inside a collective. Over NCCL, an operand lies in communication memory on all ranks or on none.

        Returns:
            A flat tensor of zeros on `device`. Its memory stays valid as long as a tensor refers to it, also after
            `close`.

        Raises:
            ValueError: `use` or `numel` is not as described.
            TypeError: `dtype` is no dtype, or a quantised one.
            RuntimeError: The current stream is captured in a CUDA graph, while ranks cannot agree on memory.
            CommError: As `all_gather`.
        """

    @overload
    def all_gather(
        self,
        recv: ArrayLike,
        send: ArrayLike,
        *,
        counts: Sequence[int] | None = ...,
        tag: int = ...,
        stream: None = ...,
    ) -> None: ...
    @overload
    def all_gather(
        self,
        recv: ArrayLike,
        send: ArrayLike,
        *,
        counts: Sequence[int] | None = ...,
        tag: int = ...,
        stream: AnyStream,
    ) -> Work: ...
    @abstractmethod
    def all_gather(
        self,
        recv: ArrayLike,
        send: ArrayLike,
        *,
        counts: Sequence[int] | None = None,
        tag: int = 0,
        stream: AnyStream | None = None,
    ) -> Work | None:
        """Gathers `send` of every rank into `recv`, in rank order, converted to the dtype of `recv`.

        With n = send.numel(), recv[r * n : (r + 1) * n] becomes `send` of rank r. The gather is in place (nothing is
        copied for this rank) when `send` is this rank's part of `recv`, of recv's dtype. That is the only way in which
        the two may overlap, as in NCCL.

        Args:
            recv: Where the parts go, `size` * n elements. Memory of `allocate(use="gather")` must be given from the
                same place on every rank.
            send: This rank's part, n elements. A lazily negated view (Tensor.is_neg) is copied first, here and in
                `reduce_scatter`. An operand that is written may not be such a view, in any collective.
            counts: The length of each rank's part in elements, where they differ, 0 or more; the same on all ranks.
                `send` then has counts[rank] elements, `recv` has sum(counts), and rank r's part begins at
                sum(counts[:r]). None: all parts are equally long.
            tag: A number of 64 bits that tells gathers of equal size apart: ranks that give different tags have called
                different collectives, which raises CommError.
            stream: Where the gather is queued. None: it is part of what torch computes.

        Returns:
            The Work to wait for if `stream` is given. Without one None, as torch.distributed's functions return: what
            torch computes next comes after the collective, and there is nothing to wait for.

        Raises:
            TypeError: An operand is no array, is sparse or quantised, or has a dtype that the transport does not move;
                or `counts` is no list.
            ValueError: An operand is not contiguous, on another device or of another size, or overlaps the other; or
                `counts` is not one whole number for each rank, or `tag` is no number of 64 bits.
            CommError: A rank died, called something else, did not come in time, or closed the communicator. `counts`
                that differ between ranks are noticed where ranks share memory (`shm`, `local`).
        """

    @overload
    def reduce_scatter(
        self,
        recv: ArrayLike,
        send: ArrayLike,
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
        send: ArrayLike,
        op: ReduceOp = ...,
        *,
        counts: Sequence[int] | None = ...,
        scale: float = ...,
        accumulate: bool = ...,
        nonfinite: torch.Tensor | None = ...,
        tag: int = ...,
        stream: AnyStream,
    ) -> Work: ...
    @abstractmethod
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
    ) -> Work | None:
        """Reduces `send` over all ranks, and writes this rank's part of the result to `recv`.

        With n = recv.numel(), rank r gets elements r * n to (r + 1) * n of the result. float16 and bfloat16 are summed
        in float32, multiplied by `scale`, and rounded once, to the dtype of `recv`. The reduce is in place when `recv`
        is this rank's part of `send`, of send's dtype. That is the only way in which the two may overlap, as in NCCL,
        since the other ranks read the rest of `send`.

        Args:
            recv: This rank's part of the result, n elements.
            send: What is reduced, `size` * n elements. Neither operand may be in memory of `allocate(use="gather")`,
                where all ranks have one value. If ranks are threads that share tensors, the caller must see to it that
                no rank's `recv` is what another rank sends.
            op: "sum", "avg", "max" or "min".
            counts: The length of each rank's part, as in `all_gather`.
            scale: A factor of the result, which float32 can hold; only for floating-point dtypes.
            accumulate: Whether the result is added to what `recv` holds.
            nonfinite: A tensor of one int32 element on `device`. It is set to 1 if an element of the result in `recv`
                is NaN or Inf, also by overflow of a sum or of recv's dtype, and else left as it is. A kernel of
                shardcomm's looks while it writes the result. A result that another library writes (c10d; nccl with
                neither conversion nor scale nor accumulation) is read once more.
            tag: As in `all_gather`.
            stream: As in `all_gather`.

        Returns:
            As `all_gather`.

        Raises:
            TypeError: As `all_gather`.
            ValueError: As `all_gather`; or `scale` is no number that float32 can hold, or `op` or `nonfinite` is not as
                described.
            CommError: As `all_gather`.
        """

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
        stream: AnyStream,
    ) -> Work: ...
    @abstractmethod
    def all_reduce(
        self,
        buffer: ArrayLike,
        op: ReduceOp = "sum",
        *,
        tag: int = 0,
        stream: AnyStream | None = None,
    ) -> Work | None:
        """Reduces `buffer` over all ranks, in place. The result is the same on each rank, bit for bit.

        Args:
            buffer: What is reduced, of equal size and dtype on all ranks. It may not be in memory of
                `allocate(use="gather")`, where all ranks have one value.
            op: "sum", "avg", "max" or "min".
            tag: As in `all_gather`.
            stream: As in `all_gather`.

        Returns:
            As `all_gather`.

        Raises:
            TypeError: As `all_gather`.
            ValueError: As `all_gather`; or `op` is none of the accepted.
            CommError: As `all_gather`.
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
        stream: AnyStream,
    ) -> Work: ...
    @abstractmethod
    def broadcast(
        self, buffer: ArrayLike, root: int = 0, *, stream: AnyStream | None = None
    ) -> Work | None:
        """Copies `buffer` of rank `root` to `buffer` of all ranks.

        Args:
            buffer: What is sent or received, of equal size and dtype on all ranks. It may have any dtype. In memory of
                `allocate(use="gather")` it must be one place for all ranks of a host.
            root: The rank that sends.
            stream: As in `all_gather`.

        Returns:
            As `all_gather`.

        Raises:
            TypeError: As `all_gather`.
            ValueError: As `all_gather`; or `root` is no rank.
            CommError: As `all_gather`.
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
        stream: AnyStream,
    ) -> Work: ...
    @abstractmethod
    def barrier(self, *, tag: int = 0, stream: AnyStream | None = None) -> Work | None:
        """Waits until every rank has called it.

        Args:
            tag: As in `all_gather`.
            stream: Work that is put on this stream later starts when every rank's barrier has been reached. None: the
                host waits.

        Returns:
            As `all_gather`.

        Raises:
            CommError: As `all_gather`.
        """

    # The same collectives, bound to their operands, for tensors that are the same in every step.

    @abstractmethod
    def bind_all_gather(
        self,
        recv: ArrayLike,
        send: ArrayLike,
        *,
        counts: Sequence[int] | None = None,
        tag: int = 0,
    ) -> BoundCollective:
        """Binds an `all_gather` to its operands, which are checked here and never again.

        Nothing is communicated: a rank binds when it likes. `send` may not be a lazily negated view, of which only the
        values of now could be sent.

        Args:
            recv: As in `all_gather`.
            send: As in `all_gather`.
            counts: As in `all_gather`.
            tag: As in `all_gather`.

        Returns:
            What runs it; see [`BoundCollective`][shardcomm.BoundCollective].

        Raises:
            TypeError: As `all_gather`.
            ValueError: As `all_gather`; or `send` is a lazily negated view.
        """

    @abstractmethod
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
        """Binds a `reduce_scatter` to its arguments, as `bind_all_gather` does an `all_gather`.

        Args:
            recv: As in `reduce_scatter`.
            send: As in `reduce_scatter`.
            op: As in `reduce_scatter`.
            counts: As in `reduce_scatter`.
            scale: As in `reduce_scatter`.
            accumulate: As in `reduce_scatter`.
            nonfinite: As in `reduce_scatter`.
            tag: As in `reduce_scatter`.

        Returns:
            What runs it; see [`BoundCollective`][shardcomm.BoundCollective].

        Raises:
            TypeError: As `reduce_scatter`.
            ValueError: As `reduce_scatter`; or `send` is a lazily negated view.
        """

    @abstractmethod
    def bind_all_reduce(
        self, buffer: ArrayLike, op: ReduceOp = "sum", *, tag: int = 0
    ) -> BoundCollective:
        """Binds an `all_reduce` to its arguments, as `bind_all_gather` does an `all_gather`.

        Args:
            buffer: As in `all_reduce`.
            op: As in `all_reduce`.
            tag: As in `all_reduce`.

        Returns:
            What runs it; see [`BoundCollective`][shardcomm.BoundCollective].

        Raises:
            TypeError: As `all_reduce`.
            ValueError: As `all_reduce`.
        """

    @abstractmethod
    def bind_broadcast(self, buffer: ArrayLike, root: int = 0) -> BoundCollective:
        """Binds a `broadcast` to its arguments, as `bind_all_gather` does an `all_gather`.

        Args:
            buffer: As in `broadcast`.
            root: As in `broadcast`.

        Returns:
            What runs it; see [`BoundCollective`][shardcomm.BoundCollective].

        Raises:
            TypeError: As `broadcast`.
            ValueError: As `broadcast`.
        """

    @abstractmethod
    def bind_barrier(self, *, tag: int = 0) -> BoundCollective:
        """Binds a `barrier` to its tag, as `bind_all_gather` does an `all_gather`.

        Args:
            tag: As in `barrier`.

        Returns:
            What runs it; see [`BoundCollective`][shardcomm.BoundCollective].

        Raises:
            ValueError: As `barrier`.
        """

    @abstractmethod
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
        """Binds a `reduce_scatter` to what it sends alone, for results that go elsewhere each time.

        `Bucket` uses it: the memory of gradients comes and goes. The caller must keep `send` and `stats` alive.

        Args:
            recv: As in `reduce_scatter`; a tensor like those that calls will give, which is not kept.
            send: As in `reduce_scatter`.
            op: As in `reduce_scatter`.
            counts: As in `reduce_scatter`.
            tag: As in `reduce_scatter`.
            format: In what partial sums cross between hosts, where the transport has such (`codes_reduces`). The ranks
                of a host sum in float32 first, and so do those that receive. None: as float32.
            stats: Three numbers that grow with what `format` costs this rank's partial sums.

        Returns:
            A function of (stream, after, recv, scale, accumulate, nonfinite). It queues the reduce-scatter on `stream`,
            after all work that the stream `after`, or None, has been given so far, and returns the event of its end.
            The others are as in `reduce_scatter`, where `recv` has the size and dtype of the one that was bound; the
            caller must keep them alive until that end.

        Raises:
            TypeError: As `reduce_scatter`; or `format` is none.
            ValueError: As `reduce_scatter`; or the transport has no partial sums that cross.
        """

    def sharing(self, memory: torch.Tensor, *, tag: int = 0) -> Sharing:
        """Tells which ranks share `memory`, so that they can divide the work of writing it.

        On a CPU over shm, hosts and local, memory from `allocate(use="gather")` is one for all ranks of a host.

        Args:
            memory: A tensor.
            tag: Tells meetings of one tensor from those of another, as in `all_gather`.

        Returns:
            The ranks, and how they meet.
        """
        return Sharing(0, 1, None)

    def check_codes(self, what: str, format: ReduceFormat | None) -> None:
        """Checks that the sums of a host can be sent to other hosts in a format.

        Args:
            what: What the error calls the format: the argument that it comes from.
            format: The format; None is accepted everywhere.

        Raises:
            ValueError: This transport has no such sums.
        """
        if format is not None and not self.codes_reduces:
            raise ValueError(
                f"{what} is {format}, in which ranks of one host send their sum to other hosts, and transport "
                f"{self.transport!r} has no such sums; leave it out, or use transport 'hosts'"
            )

    @abstractmethod
    def check(self) -> None:
        """Does nothing, unless this rank can call no collective here any more.

        Raises:
            CommError: The group has failed, or this rank has closed the communicator, or this process was forked from
                the rank.
        """

    @abstractmethod
    def abort(self, reason: str) -> None:
        """Makes every rank's present and later collectives raise `CommError` with this reason.

        Over `c10d` only this rank hears the reason; the others fail when the group's connections or timeout do.

        Args:
            reason: A sentence, which the error quotes.
        """

    @abstractmethod
    def close(self) -> None:
        """Leaves the group. Allocated memory stays valid as long as a tensor refers to it."""

    @abstractmethod
    def receipts(self) -> list[Receipt]:
        """The path that the latest collective of each kind took, and why it was not a faster one.

        Returns:
            One receipt for each kind of collective that this rank has called, the latest call's.
        """

    @abstractmethod
    def pending(self) -> list[Pending]:
        """The collectives that ranks have called and that have not ended.

        `shm` and `local` know of every rank of the group, from the memory that the ranks share; no rank is stopped by
        it or takes part in it. `nccl` and `c10d` know of this rank alone. Any thread may ask, and a signal handler,
        also while this rank is in a collective. After a failure it tells which collectives the ranks were in.

        Returns:
            One entry for each rank, in order, and two for a rank that is in a gather and a reduce.
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

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError(
            "a Communicator cannot be copied or pickled, nor can a Mesh, a Bucket or an Engine that has one: it is "
            "this process's place in a group; another process makes its own, by Communicator.from_env() for instance"
        )

    def __repr__(self) -> str:
        return f"Communicator({self.transport}, rank {self.rank} of {self.size})"
