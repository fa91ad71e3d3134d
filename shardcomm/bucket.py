"""A Bucket is a unit's layout together with its memory: this rank's shard, and the communication buffers.

One step of a unit, on one rank::

    shard ──cast──► full buffer ──all-gather──► params: views into it, nothing is copied out
    grads ──pack, cast──► reduce buffer ──reduce-scatter──► grad (summed in f32, cast, accumulated), shown as
                                                                the `.grad` of `shards`

Of one rank alone, the gradients are packed straight into `grad`. Where other ranks hold the same shard (replicas), what
the reduce-scatter leaves goes to a staging buffer, is all-reduced among them there, and then cast and accumulated.

The full and the reduce buffer may be shared by buckets that do not use them at the same time; the engine does that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property

import torch
from torch import nn

from shardcomm import traffic
from shardcomm._C import CommError
from shardcomm.agreement import difference, layout_items
from shardcomm.arguments import check_type
from shardcomm.communicator import BoundGather, BoundReduce, Communicator
from shardcomm.dtype import movable
from shardcomm.full_gradients import FullGradients
from shardcomm.layout import Layout, ParamSpec, Placement
from shardcomm.mixed_precision import FLOATS
from shardcomm.nonfinite import flag_address
from shardcomm.offload import Offload
from shardcomm.plain import plain
from shardcomm.scalars import check_tag
from shardcomm.shard_gradients import ShardGradients
from shardcomm.staging import Staging
from shardcomm.streams import Event, Stream, Streams, compute_stream, computing, on_host
from shardcomm.views import check_count, check_full, check_shape, full_view, rows, shard_view
from shardcomm.work import Work


class Bucket:
    """The parameters of one unit, all of one dtype, sharded over the ranks of `comm`.

    Attributes:
        layout: where every element lives; `layout.world_size == comm.size`.
        shard: this rank's elements, flat, `layout.shard_numel` of `dtype`.
        shards: the same memory, one a parameter: this rank's rows (possibly none); what an optimizer updates. After a
            reduce their `.grad` hold the gradients; the next reduce adds to those that are not None.
        gradients: the memory of the gradients, and what of it is shown as `.grad`.
        grad_scale: what the mean over all ranks is multiplied by.
        nonfinite: one int32 element, which a reduce sets to 1 if it leaves NaN or Inf in `grad`; None: nobody asks.
        full: the full buffer, flat, `layout.flat_numel` of `param_dtype`.
        params: the full parameters, views into `full`; their values are there between a gather and the next use of
            the full buffer by another bucket. Read them, do not write: ranks may share this memory.
        reduce_buffer: where gradients are packed; None until the first reduce, unless given.
        staging: where they are all-reduced; None without replicas.

    Args:
        dtype: of the shard and of its gradient.
        param_dtype: of the full parameters, and on the wire of a gather (default: `dtype`).
        reduce_dtype: of the gradients on the wire of a reduce (default: `param_dtype`).
        full_buffer: `layout.flat_numel` of `param_dtype`, from `comm.allocate(use="gather")` (default: its own).
        reduce_buffer: `layout.flat_numel` of `reduce_dtype`, from `allocate(use="reduce")` (default: its own).
        replicas: ranks that hold the same shard; gradients are averaged over them too.
        staging: at least `layout.shard_numel` of `reduce_dtype` (default: its own).
        offload: keeps shard and gradient in host memory, and brings them to the device when they are needed; buckets
            share it (default: they are on the device).
        tag: tells this bucket's collectives from others of the same size, should ranks disagree on their order.
        streams: where `async_op=True` runs (default: those of `comm`).

    Every rank makes the same buckets, in the same order. Where a bucket allocates its full buffer that is checked.

    Raises:
        ValueError: an argument does not fit the others.
        CommError: the ranks' layouts or dtypes differ, and no `full_buffer` is given; the message says in what.
    """

    def __init__(
        self,
        layout: Layout,
        comm: Communicator,
        *,
        dtype: torch.dtype = torch.float32,
        param_dtype: torch.dtype | None = None,
        reduce_dtype: torch.dtype | None = None,
        full_buffer: torch.Tensor | None = None,
        reduce_buffer: torch.Tensor | None = None,
        replicas: Communicator | None = None,
        staging: Staging | None = None,
        offload: Offload | None = None,
        streams: Streams | None = None,
        tag: int = 0,
    ) -> None:
        if not isinstance(comm, Communicator) or not isinstance(layout, Layout):
            raise TypeError(
                f"Bucket: layout is a {type(layout).__name__} and comm a {type(comm).__name__}; they must be a Layout "
                "and a Communicator"
            )
        _check_dtypes(dtype, param_dtype, reduce_dtype)
        check_tag("Bucket", tag)
        if layout.world_size != comm.size:
            raise ValueError(
                f"Bucket: layout is for {layout.world_size} ranks, comm has {comm.size}; plan the layout for "
                "the communicator's size"
            )
        self.layout = layout
        self.comm = comm
        self.param_dtype = param_dtype or dtype
        self.reduce_dtype = reduce_dtype or self.param_dtype
        self.offload = offload
        if offload is None:
            self.shard = torch.zeros(layout.shard_numel, dtype=dtype, device=comm.device)
        else:
            self.shard = offload.zeros(layout.shard_numel, dtype)
        self.full = self._full_buffer(full_buffer)
        self._sent = self.shard if offload is None else offload.staged(self.shard)
        self._gather_recv, self._gather_send = self.full, self._sent
        if self.param_dtype == dtype:  # else they are converted on the way
            self._gather_recv, self._gather_send = movable(self.full), movable(self._sent)
        self.reduce_buffer = reduce_buffer
        self.replicas = replicas if replicas is not None and replicas.size > 1 else None
        self.staging: Staging | None = None
        if self.replicas is not None:
            self.staging = staging or self._new_staging(self.replicas)
            self._alone = (
                comm if comm.size == 1 else Communicator.local_group(1, device=comm.device)[0]
            )
        self._given_streams = streams
        self._compute = None if on_host(comm.device) else computing(comm.device)
        self._tag = tag

        pieces = [layout.piece(comm.rank, i) for i in range(len(layout.placements))]
        self._placed = placed = list(zip(layout.placements, pieces, strict=True))
        # `.data` has a version counter of its own: refilling the buffer with the same values, as a second gather in a
        # step does, must not look to autograd like a change of the weights it saved.
        self.params = tuple(full_view(self.full.data, p) for p in layout.placements)
        self.shards = tuple(
            nn.Parameter(shard_view(self.shard, p, piece), requires_grad=dtype.is_floating_point)
            for p, piece in placed
        )
        self.gradients = ShardGradients(self.shard, self.shards, placed)
        self.grad_scale = 1.0
        self._nonfinite: torch.Tensor | None = None
        self._packed: torch.Tensor | None = None  # where `pack` left the gradients; None: in `grad`
        self._bound_reduce: tuple[torch.Tensor, BoundReduce] | None = None  # what it sends; it
        self._add = False  # the reduce under way adds to the gradients
        self._filled: Event | None = None  # when the staging buffer is
        self._full_gradients = FullGradients(layout, self.param_dtype, self.reduce_dtype)

    @classmethod
    def from_tensors(
        cls,
        tensors: Mapping[str, torch.Tensor],
        comm: Communicator,
        *,
        param_dtype: torch.dtype | None = None,
        reduce_dtype: torch.dtype | None = None,
    ) -> Bucket:
        """Plans the layout of `tensors` (full parameters of one dtype, by name), and loads this rank's rows."""
        if not isinstance(comm, Communicator) or not isinstance(tensors, Mapping):
            raise TypeError(
                f"Bucket.from_tensors: tensors is a {type(tensors).__name__} and comm a {type(comm).__name__}; they "
                "must be a mapping of names to tensors and a Communicator"
            )
        for name, tensor in tensors.items():
            check_full(f"Bucket.from_tensors: tensors[{name!r}]", tensor)
        dtypes = {tensor.dtype for tensor in tensors.values()}
        if len(dtypes) != 1:
            raise ValueError(
                f"Bucket.from_tensors: tensors have dtypes {sorted(map(str, dtypes))}; a bucket holds exactly one: "
                "make one bucket per dtype"
            )
        dtype = dtypes.pop()
        _check_dtypes(dtype, param_dtype, reduce_dtype)
        wire = [dtype, param_dtype or dtype, reduce_dtype or dtype]
        layout = Layout.plan(
            [ParamSpec(name, tuple(tensor.shape)) for name, tensor in tensors.items()],
            comm.size,
            itemsize=min(d.itemsize for d in wire),
        )
        bucket = cls(layout, comm, dtype=dtype, param_dtype=param_dtype, reduce_dtype=reduce_dtype)
        bucket.load(list(tensors.values()))
        return bucket

    @torch.no_grad()
    def load(self, tensors: Sequence[torch.Tensor]) -> None:
        """Keeps this rank's rows of the full parameters `tensors`, in the layout's order. No communication."""
        check_count("load", "tensors", tensors, self.layout)
        for tensor, placement in zip(tensors, self.layout.placements, strict=True):
            check_full(f"load: tensors for {placement.spec.name}", tensor)
            check_shape("load", "tensors", tensor, placement)
        for tensor, shard, (placement, piece) in zip(
            tensors, self.shards, self._placed, strict=True
        ):
            with plain():
                shard.copy_(rows(tensor, placement, piece))

    def all_gather(self, *, async_op: bool = False) -> Work:
        """Fills `params` on every rank. With `async_op` returns at once; `wait()` before reading them."""
        if self.full is self.shard:
            return Work()
        if self._aside(async_op):
            work = self._gather_aside(self._bound_gather)
            if not async_op:
                work.wait()
            return work
        self.comm.all_gather(self._gather_recv, self._gather_send, tag=self._tag)
        return Work()

    def gathered_shards(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Gathers the shards in their own dtype into `flat`, of `layout.flat_numel`; the full parameters in it."""
        check_type("gathered_shards", "flat", flat, torch.Tensor, "a torch.Tensor")
        recv, send = movable(flat), movable(self._sent)
        if self._aside(async_op=False):
            self._gather_aside(self.comm.bind_all_gather(recv, send, tag=self._tag)).wait()
        else:
            self.comm.all_gather(recv, send, tag=self._tag)
        return [full_view(flat, p) for p in self.layout.placements]

    def gathered_rows(self, index: int, held: torch.Tensor) -> torch.Tensor:
        """The whole of `held`, which is of the shape of `shards[index]` on each rank; collective."""
        placement, piece = self._placed[index]
        flat = self.shard.new_zeros(self.layout.shard_numel, dtype=held.dtype)
        shard_view(flat, placement, piece).copy_(held)
        flat = flat.to(self.comm.device)
        full = flat.new_empty(self.layout.flat_numel)
        self.comm.all_gather(movable(full), movable(flat), tag=self._tag)
        return full_view(full, placement).contiguous().to(held.device)

    def _gather_aside(self, gather: BoundGather) -> Work:
        streams = self._streams
        if self.offload is not None:  # while what is in the full buffer is still computed with
            self.offload.fetch(self.shard, streams.gather)
        return Work(gather(streams.gather, streams.computed()), self._compute, self)

    @cached_property
    def _bound_gather(self) -> BoundGather:
        return self.comm.bind_all_gather(self._gather_recv, self._gather_send, tag=self._tag)

    def reduce_scatter(
        self, grads: Sequence[torch.Tensor | None], *, async_op: bool = False
    ) -> Work:
        """Averages `grads` over all ranks into the `.grad` of `shards`, cast to their dtype; adds to what is not None.

        `grads`: one for each parameter, of its full shape and `param_dtype`, in the layout's order; None counts as
        zeros. Where any has `reduce_dtype` instead (a sum of gradients), all are packed from that. With `async_op`
        returns at once; the gradients are right after `wait()`.
        """
        check_count("reduce_scatter", "grads", grads, self.layout)
        self.pack(
            [
                None if grad is None else self._checked(grad, placement)
                for grad, placement in zip(grads, self.layout.placements, strict=True)
            ],
            async_op=async_op,
        )
        work = self.reduce(async_op=async_op)
        if self.replicas is not None:
            work = self.all_reduce(async_op=async_op)
        if self.offload is not None:
            work = Work(self.offload.landed)  # the host waits: it is the one that reads them
            if not async_op:
                work.wait()
        self.gradients.show()
        return work

    def _checked(self, grad: torch.Tensor, placement: Placement) -> torch.Tensor:
        """A caller's gradient; autograd's, which the engine packs, need fewer looks."""
        name = f"reduce_scatter: grads for {placement.spec.name}"
        check_full(name, grad, sparse=True)
        if grad.device != self.comm.device:
            raise ValueError(f"{name} is on {grad.device}; it must be on {self.comm.device}")
        return grad.resolve_neg() if grad.layout is torch.strided else grad

    # The parts of it, which the engine runs at different times.

    def pack(self, grads: Sequence[torch.Tensor | None], *, async_op: bool = False) -> None:
        """Copies `grads` to where `reduce` finds them, once what was there has been reduced; the caller may drop them.

        Computation does it, not the stream that reduces: nobody would know when that has come to it.
        """
        sources = self._full_gradients.checked(grads)
        aside = self._aside(async_op)
        if self._packs_into_grad():
            self._packed = None
            self._add = self.gradients.begin_reduce()
            stream = self._streams.reduce if aside else None
            with self._gradient(stream) as grad:
                if stream is not None:  # what an offload's staging held has left it
                    self._streams.compute().wait(stream.record())
                self._full_gradients.pack(
                    sources,
                    grad,
                    self._computing(),
                    self.grad_scale,
                    add=self._add,
                    nonfinite=self.nonfinite,
                )
                if stream is not None:
                    self._streams.after_compute(stream)
        else:
            self._packed = self._free_buffer(aside)
            self._full_gradients.pack(sources, self._packed, self._computing())

    def reduce(self, *, async_op: bool = False) -> Work:
        """Averages over the ranks of `comm` what was packed, into `grad`; with replicas, for `all_reduce` to go on."""
        packed, self._packed = self._packed, None
        if packed is None:
            return Work()
        self._add = self.gradients.begin_reduce()  # its zeros belong to what was computed so far
        aside = self._aside(async_op)
        if self.staging is not None:
            return self._reduce_to_staging(packed, self.staging, aside)
        if not aside:
            self.comm.reduce_scatter(
                self.grad,
                packed,
                "avg",
                scale=self.grad_scale,
                accumulate=self._add,
                nonfinite=self.nonfinite,
                tag=self._tag,
            )
            return Work()
        epilogue = self.grad_scale, self._add, self.nonfinite
        if self.offload is None:
            return self._reduce_aside(packed, self.gradients.flat, *epilogue)
        with self._gradient(self._streams.reduce) as grad:
            return self._reduce_aside(packed, grad, *epilogue)

    def _reduce_to_staging(self, packed: torch.Tensor, staging: Staging, aside: bool) -> Work:
        """Where it is then all-reduced."""
        if packed is self._staged:  # the only shard
            self._filled = compute_stream(self.comm.device).record()
            return Work()
        stream = self._streams.reduce if aside else compute_stream(self.comm.device)
        if staging.free is not None:
            stream.wait(staging.free)
        if not aside:
            self._filled = None
            self.comm.reduce_scatter(self._staged, packed, "avg", tag=self._tag)
            return Work()
        work = self._reduce_aside(packed, self._staged)
        self._filled = self._streams.reduced
        return work

    def _reduce_aside(
        self,
        packed: torch.Tensor,
        into: torch.Tensor,
        scale: float = 1.0,
        add: bool = False,
        nonfinite: torch.Tensor | None = None,
    ) -> Work:
        if self._bound_reduce is None or self._bound_reduce[0] is not packed:
            bound = self.comm.bind_reduce_scatter(into, packed, "avg", tag=self._tag)
            self._bound_reduce = packed, bound
        streams, reduce = self._streams, self._bound_reduce[1]
        streams.reduced = reduce(streams.reduce, streams.computed(), into, scale, add, nonfinite)
        return Work(streams.reduced, self._compute, self, packed, into, nonfinite)

    def _packs_into_grad(self) -> bool:
        """Whether nobody else has a part in the gradients."""
        if self.comm.size > 1 or self.replicas is not None:
            return False
        plain = self.grad_scale == 1.0 and not self.gradients.adds and self.nonfinite is None
        return plain or self.shard.dtype in FLOATS

    def _gradient(self, stream: Stream | None) -> AbstractContextManager[torch.Tensor]:
        """What is reduced into."""
        if self.offload is None or stream is None:
            return nullcontext(self.grad)
        return self.offload.gradient(self.grad, stream, add=self._add)

    def all_reduce(self, *, async_op: bool = False) -> Work:
        """Averages what `reduce` left over the replicas, into `grad`."""
        assert self.replicas is not None
        assert self.staging is not None
        stream = self._streams.replicate if self._aside(async_op) else None
        if self._filled is not None:
            (stream or compute_stream(self.comm.device)).wait(self._filled)
        self.replicas.all_reduce(self._staged, "avg", stream=stream)
        with self._gradient(stream) as grad:
            # Over one rank: a cast with a scale and a sum.
            self.staging.free = self._alone.reduce_scatter(
                grad,
                self._staged,
                scale=self.grad_scale,
                accumulate=self._add,
                nonfinite=self.nonfinite,
                stream=stream,
            )
        return Work(self.staging.free, self._compute, self)

    @property
    def grad(self) -> torch.Tensor:
        """The gradients of `shard`, flat."""
        return self.gradients.flat

    @property
    def nonfinite(self) -> torch.Tensor | None:
        """See above; to set it raises ValueError unless it is one int32 element on the communicator's device."""
        return self._nonfinite

    @nonfinite.setter
    def nonfinite(self, flag: torch.Tensor | None) -> None:
        flag_address("Bucket", flag, self.comm.device)
        self._nonfinite = flag

    @cached_property
    def gather_bytes(self) -> int:
        """What this rank receives from the others in one gather."""
        return traffic.gather_bytes(
            self.layout.shard_numel * self.param_dtype.itemsize, self.comm.size
        )

    @cached_property
    def reduce_bytes(self) -> int:
        """What this rank sends to the others in one reduce-scatter."""
        return traffic.gather_bytes(self._reduced_shard_bytes, self.comm.size)

    @cached_property
    def all_reduce_bytes(self) -> int:
        """What this rank sends to the replicas in one all-reduce."""
        replicas = 1 if self.replicas is None else self.replicas.size
        return traffic.all_reduce_bytes(self._reduced_shard_bytes, replicas)

    def __repr__(self) -> str:
        wire = f"{self.param_dtype} gathered, {self.reduce_dtype} reduced"
        return f"Bucket({self.shard.dtype}, {wire}, {self.comm})\n{self.layout!r}"

    def _full_buffer(self, given: torch.Tensor | None) -> torch.Tensor:
        if given is not None:
            if given.dtype != self.param_dtype or given.numel() != self.layout.flat_numel:
                raise ValueError(
                    f"Bucket: full_buffer has {given.numel()} elements of {given.dtype}; it must have "
                    f"{self.layout.flat_numel} of {self.param_dtype}"
                )
            return given
        if self.comm.size == 1 and self.param_dtype == self.shard.dtype and self.offload is None:
            return self.shard  # the shard is the whole unit: nothing to gather
        self._check_agreement()
        return self.comm.allocate(self.layout.flat_numel, dtype=self.param_dtype, use="gather")

    def _check_agreement(self) -> None:
        """CommError unless the other ranks make the same bucket: their bytes are taken for this layout's."""
        facts = {
            "dtype": str(self.shard.dtype),
            "param_dtype": str(self.param_dtype),
            "reduce_dtype": str(self.reduce_dtype),
        }
        if differs := difference([self.comm], layout_items(self.layout, facts)):
            raise CommError(f"Bucket: ranks differ: {differs}")

    def _new_staging(self, replicas: Communicator) -> Staging:
        nbytes = self._reduced_shard_bytes
        return Staging(replicas.allocate(nbytes, dtype=torch.uint8, use="reduce"))

    @property
    def _reduced_shard_bytes(self) -> int:
        return self.layout.shard_numel * self.reduce_dtype.itemsize

    @cached_property
    def _staged(self) -> torch.Tensor:
        assert self.staging is not None
        return self.staging.memory[: self._reduced_shard_bytes].view(self.reduce_dtype)

    def _free_buffer(self, aside: bool) -> torch.Tensor:
        """Where gradients are packed; what is computed from now on comes after the reduce that read it last."""
        if self.comm.size == 1 and self.staging is not None:
            if self.staging.free is not None:
                compute_stream(self.comm.device).wait(self.staging.free)
            return self._staged
        numel = self.layout.flat_numel
        if self.comm.size == 1:  # float64 that is more than copied: a pack computes in float32 only
            return torch.empty(numel, dtype=self.reduce_dtype, device=self.comm.device)
        if aside and self._streams.reduced is not None:
            self._streams.compute().wait(self._streams.reduced)
        if self.reduce_buffer is None:
            self.reduce_buffer = self.comm.allocate(numel, dtype=self.reduce_dtype, use="reduce")
        return self.reduce_buffer

    def _aside(self, async_op: bool) -> bool:
        """Whether work goes to a stream of its own: an offload's always, by which its staging is used in turn.

        Without peers there is nobody to wait for: work is done sooner than handed over.
        """
        return self.offload is not None or (
            async_op and (self.comm.size > 1 or self.replicas is not None)
        )

    def _computing(self) -> Stream | None:
        """Where torch computes; None: it is the host that does."""
        return None if self._compute is None else self._compute()

    @cached_property
    def _streams(self) -> Streams:
        return self._given_streams or self.comm.streams


def _check_dtypes(
    dtype: torch.dtype, param_dtype: torch.dtype | None, reduce_dtype: torch.dtype | None
) -> None:
    """ValueError unless what a bucket holds can be converted to what travels."""
    for name, each in (
        ("dtype", dtype),
        ("param_dtype", param_dtype),
        ("reduce_dtype", reduce_dtype),
    ):
        given = dtype if each is None else each
        converts = given == dtype or (given in FLOATS and dtype in FLOATS)
        if not isinstance(given, torch.dtype) or not converts:
            raise ValueError(
                f"Bucket: {name} is {given!r} and dtype {dtype!r}; float32, bfloat16 and float16 convert, another "
                "dtype stays itself"
            )
