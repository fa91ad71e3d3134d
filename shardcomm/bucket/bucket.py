"""A Bucket is a unit's layout together with its memory: this rank's shard, and the communication buffers.

One step of a unit, on one rank::

    shard ──cast──► all-gather ──► full buffer ──► params: views into it, nothing is copied out
    grads ──pack, cast──► reduce buffer ──reduce-scatter──► grad (summed in f32, cast, accumulated), shown as
                                                                the `.grad` of `shards`

`gathering.py` does what the first line shows, and `reduction.py` what the second does.

Buckets may share the full buffer and the reduce buffer if they do not use them at the same time; the engine does that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

import torch
from torch import nn

from shardcomm.arguments.checks import check_type
from shardcomm.arguments.dtype import FLOATS
from shardcomm.arguments.scalars import check_tag, is_whole
from shardcomm.bucket.block_gather import BlockWire
from shardcomm.bucket.gathering import Gathering
from shardcomm.bucket.offload import Offload
from shardcomm.bucket.reduction import Reduction
from shardcomm.bucket.shard_gradients import ShardGradients
from shardcomm.bucket.side_streams import SideStreams
from shardcomm.bucket.staging import Staging
from shardcomm.comm.agreement import difference, layout_items
from shardcomm.comm.communicator import Communicator
from shardcomm.copy.blocks import BlockFormat, ReduceFormat, check_reduce_format, check_repeats
from shardcomm.copy.nonfinite import flag_address
from shardcomm.layout.layout import Layout
from shardcomm.layout.param_spec import ParamSpec
from shardcomm.layout.placement import Placement
from shardcomm.layout.views import check_count, check_full, check_shape, full_view, rows, shard_view
from shardcomm.meeting.comm_error import comm_error
from shardcomm.parameter.plain import plain
from shardcomm.stream.streams import Streams
from shardcomm.stream.work import Work
from shardcomm.trace import traffic


class Bucket:
    """The parameters of one unit, all of one dtype, sharded over the ranks of a communicator.

    It gathers this rank's shard into full parameters, which are views and not copies, and reduces full gradients into
    the `.grad` of this rank's rows. `fully_shard` makes buckets itself; a hand-written loop may use them alone. Every
    rank makes the same buckets, in the same order. That is checked where a bucket allocates its full buffer.

    Args:
        layout: Where every element lives; `layout.world_size` must be `comm.size`.
        comm: The ranks.
        dtype: The dtype of the shard and of its gradient.
        param_dtype: The dtype of the full parameters, and of what a gather sends. None: `dtype`.
        reduce_dtype: The dtype in which a reduce sends gradients. None: `param_dtype`.
        gather_format: The block format in which a gather sends the shard, from `dtype`; `params` then are what it
            stands for, in `param_dtype`. Both must be float32, bfloat16 or float16. None: `param_dtype`.
        coded: How many parameters `gather_format` is for, the first ones of `layout`; the same gather sends the others
            in `param_dtype`. None: all.
        reduce_format: In what the ranks of a host send the sums of their gradients to other hosts: torch.bfloat16 or a
            block format. Within a host gradients have `reduce_dtype`, which must be float32, bfloat16 or float16, and
            sums are taken in float32. It needs transport "hosts", and no `replicas`. None: those sums are sent as
            float32.
        full_buffer: Memory for the full parameters: `layout.flat_numel` elements of `param_dtype`, from
            `comm.allocate(use="gather")`. None: its own.
        reduce_buffer: Memory for packed gradients: `layout.flat_numel` elements of `reduce_dtype`, from
            `comm.allocate(use="reduce")`. None: its own.
        replicas: Ranks that hold the same shard; gradients are averaged over them, too. None: there are none.
        wire: Memory for gathers in `gather_format`. None: its own.
        staging: Memory for the all-reduce among replicas: at least as many elements as the shard, of `reduce_dtype`.
            None: its own.
        offload: Keeps shard and gradient in host memory, and brings them to the device when they are needed. Buckets
            share it. None: they are on the device.
        streams: The streams on which collectives with `async_op=True` run. None: those of `comm`.
        tag: A number that tells this bucket's collectives from others of the same size, should ranks disagree on their
            order.
        replica_tag: The same for the all-reduce over `replicas`.

    Attributes:
        coded: How many parameters a gather codes, the first ones, if there is a `gather_format`.
        layout: As given.
        comm: As given.
        shard: This rank's elements, flat: `layout.shard_numels[comm.rank]` of `dtype`.
        shards: The same memory as one `nn.Parameter` for each parameter: this rank's rows, possibly none. An optimizer
            updates these. After a reduce their `.grad` hold the gradients; the next reduce adds to those that are not
            None.
        gradients: The memory of the gradients, which knows what of it is shown as `.grad`.
        full: The full buffer, flat: `layout.flat_numel` of `param_dtype`.
        params: The full parameters, as views into `full`. Their values are there from a gather to the next use of the
            full buffer by another bucket. Read them, but do not write them: ranks may share this memory.
        gathering: Gathers the parameters; it has the wire for `gather_format`.
        reduction: Packs and reduces the gradients; it has the buffers for that.

    Raises:
        TypeError: `layout` is no Layout, or `comm` no Communicator.
        ValueError: An argument does not fit the others.
        CommError: The ranks' layouts or dtypes differ, and no `full_buffer` is given; the message says in what.

    Example:
        ```python
        weights = {"w": torch.randn(6, 4), "b": torch.randn(6)}
        bucket = shardcomm.Bucket.from_tensors(weights, comm)
        optimizer = torch.optim.SGD(bucket.shards, lr=0.1)

        bucket.all_gather()
        w, b = bucket.params  # full parameters
        bucket.reduce_scatter([torch.ones_like(w), torch.ones_like(b)])
        optimizer.step()  # this rank's rows
        ```
    """

    def __init__(
        self,
        layout: Layout,
        comm: Communicator,
        *,
        dtype: torch.dtype = torch.float32,
        param_dtype: torch.dtype | None = None,
        reduce_dtype: torch.dtype | None = None,
        gather_format: BlockFormat | None = None,
        coded: int | None = None,
        reduce_format: ReduceFormat | None = None,
        full_buffer: torch.Tensor | None = None,
        reduce_buffer: torch.Tensor | None = None,
        replicas: Communicator | None = None,
        wire: BlockWire | None = None,
        staging: Staging | None = None,
        offload: Offload | None = None,
        streams: Streams | None = None,
        tag: int = 0,
        replica_tag: int = 0,
    ) -> None:
        if not isinstance(comm, Communicator) or not isinstance(layout, Layout):
            raise TypeError(
                f"Bucket: layout is a {type(layout).__name__} and comm a {type(comm).__name__}; they must be a Layout "
                "and a Communicator"
            )
        _check_dtypes(dtype, param_dtype, reduce_dtype)
        _check_format(gather_format, dtype)
        check_reduce_format("Bucket: reduce_format", reduce_format)
        if wire is not None:
            check_type("Bucket", "wire", wire, BlockWire, "a BlockWire, or None")
        check_tag("Bucket", tag)
        check_tag("Bucket", replica_tag)
        if layout.world_size != comm.size:
            raise ValueError(
                f"Bucket: layout is for {layout.world_size} ranks, comm has {comm.size}; plan the layout for "
                "the communicator's size"
            )
        self.layout = layout
        self.comm = comm
        self.param_dtype = param_dtype or dtype
        self.reduce_dtype = reduce_dtype or self.param_dtype
        self.gather_format = gather_format
        self.coded = _checked_coded(coded, len(layout.placements))
        self.reduce_format = reduce_format
        self.offload = offload
        numel = layout.shard_numels[comm.rank]
        if offload is None:
            self.shard = torch.zeros(numel, dtype=dtype, device=comm.device)
        else:
            self.shard = offload.zeros(numel, dtype)
        self.full = self._full_buffer(full_buffer)

        pieces = [layout.piece(comm.rank, i) for i in range(len(layout.placements))]
        self._placed = placed = list(zip(layout.placements, pieces, strict=True))
        # Each has a version counter of its own, by `.data`; see parameter/versions.py. If the shard is the whole unit,
        # each full parameter has that of its rows.
        flats = [self.shard.data for _ in placed]
        self.shards = tuple(
            nn.Parameter(shard_view(flat, p, piece), requires_grad=dtype.is_floating_point)
            for flat, (p, piece) in zip(flats, placed, strict=True)
        )
        if self.full is not self.shard:
            flats = [self.full.data for _ in placed]
        self._addresses = [shard.data_ptr() for shard in self.shards]
        self._gathered_versions: list[int] = []
        self.params = tuple(
            full_view(flat, p) for flat, p in zip(flats, layout.placements, strict=True)
        )
        self.gradients = ShardGradients(self.shard, self.shards, placed, offload)
        if replicas is not None and replicas.size == 1:
            replicas = None
        side = SideStreams(comm, replicas, offloads=offload is not None, streams=streams)
        self.gathering = Gathering(
            layout,
            comm,
            self.shard,
            self.full,
            gather_format,
            coded=self.coded,
            wire=wire,
            offload=offload,
            side=side,
            tag=tag,
        )
        self.reduction = Reduction(
            layout,
            comm,
            self.gradients,
            self.param_dtype,
            self.reduce_dtype,
            reduce_format,
            buffer=reduce_buffer,
            replicas=replicas,
            staging=staging,
            side=side,
            tag=tag,
            replica_tag=replica_tag,
        )

    @classmethod
    def from_tensors(
        cls,
        tensors: Mapping[str, torch.Tensor],
        comm: Communicator,
        *,
        param_dtype: torch.dtype | None = None,
        reduce_dtype: torch.dtype | None = None,
        gather_format: BlockFormat | None = None,
        reduce_format: ReduceFormat | None = None,
    ) -> Bucket:
        """Plans the layout of full parameters, makes their bucket, and loads this rank's rows.

        Args:
            tensors: The full parameters by name, all of one dtype; the same names, shapes and dtype on every rank.
            comm: The ranks.
            param_dtype: The dtype of the full parameters, and of what a gather sends. None: that of `tensors`.
            reduce_dtype: The dtype in which a reduce sends gradients. None: `param_dtype`.
            gather_format: As in `Bucket`.
            reduce_format: As in `Bucket`.

        Returns:
            The bucket, whose shard holds this rank's rows of `tensors`.

        Raises:
            TypeError: `tensors` is no mapping of names to dense tensors, `comm` no Communicator, or a format is none.
            ValueError: `tensors` have several dtypes, a dtype cannot be converted to another, or `comm` cannot send in
                a format.
            CommError: The ranks' tensors differ; the message says in what.
        """
        check_type(
            "Bucket.from_tensors", "tensors", tensors, Mapping,
            "a mapping of names to tensors, such as dict(module.named_parameters())",
        )  # fmt: skip
        check_type("Bucket.from_tensors", "comm", comm, Communicator, "a Communicator")
        for name, tensor in tensors.items():
            check_full(f"Bucket.from_tensors: tensors[{name!r}]", tensor)
        dtypes = {tensor.dtype for tensor in tensors.values()}
        if len(dtypes) != 1:
            raise ValueError(
                f"Bucket.from_tensors: tensors have dtypes {sorted(map(str, dtypes))}; a bucket holds exactly one: "
                "make one bucket per dtype"
            )
        dtype = dtypes.pop()
        # Before the tag is taken: a rank that goes on after a refusal must not have taken one more than the others.
        _check_dtypes(dtype, param_dtype, reduce_dtype)
        _check_format(gather_format, dtype)
        check_reduce_format("Bucket: reduce_format", reduce_format)
        wire = [dtype, param_dtype or dtype, reduce_dtype or dtype]
        layout = Layout.plan(
            [ParamSpec(name, tuple(tensor.shape)) for name, tensor in tensors.items()],
            comm.size,
            itemsize=min(d.itemsize for d in wire),
        )
        bucket = cls(
            layout,
            comm,
            dtype=dtype,
            param_dtype=param_dtype,
            reduce_dtype=reduce_dtype,
            gather_format=gather_format,
            reduce_format=reduce_format,
            tag=comm.tag(f"the bucket of {next(iter(tensors))!r}"),
        )
        bucket.load(list(tensors.values()))
        return bucket

    @torch.no_grad()
    def load(self, tensors: Sequence[torch.Tensor]) -> None:
        """Copies this rank's rows of full parameters into the shard. No communication.

        Args:
            tensors: The full parameters, in the layout's order, of any dtype and device.

        Raises:
            TypeError: An entry is no dense tensor with values.
            ValueError: There is not one entry for each parameter, or one has another shape.
        """
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
        """Gathers the full parameters into `params`; collective.

        Args:
            async_op: Whether to return at once; call `wait()` of the result before you read `params`. The gather then
                runs on the gather stream, as it always does with an offload.

        Returns:
            The Work to wait for.

        Raises:
            ValueError: One of `shards` has moved to other memory, of which the gather does not know.
            CommError: A rank died, called something else or did not come in time.
        """
        addresses = [shard.data_ptr() for shard in self.shards]
        if addresses != self._addresses:
            moved = next(i for i, at in enumerate(addresses) if at != self._addresses[i])
            raise ValueError(
                f"all_gather: shards[{moved}], rows of {self.layout.placements[moved].spec.name!r}, has moved to other "
                "memory (by .data = or set_), which is not what is gathered; write into it, as by "
                f"shards[{moved}].copy_(...) under torch.no_grad()"
            )
        self._tell_autograd()
        return self.gathering.all_gather(async_op=async_op)

    def _tell_autograd(self) -> None:
        """A backward that needs former values of `params` raises, where this rank's shards have changed since.

        Not at every gather: a loop may gather the same values again for its backward.
        """
        if (
            self.full is self.shard or self.full.is_inference()
        ):  # the same memory; or what is in no graph
            return
        versions = [0 if shard.is_inference() else shard._version for shard in self.shards]
        if versions != self._gathered_versions:
            self._gathered_versions = versions
            torch.autograd.graph.increment_version(self.params)

    def gathered_shards(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Gathers the shards in their own dtype into memory of the caller's; collective.

        Args:
            flat: Where they go: `layout.flat_numel` elements of `dtype`.

        Returns:
            The full parameters, as views into `flat`.

        Raises:
            TypeError: `flat` is no tensor.
            CommError: As `all_gather`.
        """
        check_type("gathered_shards", "flat", flat, torch.Tensor, "a torch.Tensor")
        self.gathering.shards_into(flat)
        return [full_view(flat, p) for p in self.layout.placements]

    def gathered_rows(self, index: int, held: torch.Tensor) -> torch.Tensor:
        """Gathers this rank's rows of a tensor, such as an optimizer's moment, into the whole tensor; collective.

        The tensor has the shape of a parameter, and ranks have the rows of it that they have of that parameter. Its
        gather comes after those that are queued, such as prefetches of a forward that goes on.

        Args:
            index: The parameter's number in the layout.
            held: This rank's rows, of the shape of `shards[index]` and of any dtype.

        Returns:
            The whole tensor, of the parameter's shape, on the device of `held`.

        Raises:
            CommError: As `all_gather`.
        """
        return self.gathering.rows(index, held)

    def reduce_scatter(
        self, grads: Sequence[torch.Tensor | None], *, async_op: bool = False
    ) -> Work:
        """Averages full gradients over all ranks into the `.grad` of `shards`; collective.

        The mean is cast to the shards' dtype, and added to a `.grad` that is not None.

        Args:
            grads: A gradient for each parameter, of its full shape and of `param_dtype`, in the layout's order; None
                counts as zeros. If any has `reduce_dtype` instead, as a sum of gradients may, all are packed from that.
            async_op: Whether to return at once; the gradients are right after `wait()` of the result.

        Returns:
            The Work to wait for.

        Raises:
            TypeError: An entry is no tensor with values.
            ValueError: There is not one entry for each parameter, or one has another shape or device.
            CommError: As `all_gather`.
        """
        check_count("reduce_scatter", "grads", grads, self.layout)
        reduction = self.reduction
        reduction.pack(
            [
                None if grad is None else self._checked(grad, placement)
                for grad, placement in zip(grads, self.layout.placements, strict=True)
            ],
            async_op=async_op,
        )
        work = reduction.reduce(async_op=async_op)
        if reduction.among_replicas is not None:
            work = reduction.all_reduce(async_op=async_op)
        if self.offload is not None:
            work = Work(self.offload.landed)  # the host waits, since it reads the gradients
            if not async_op:
                work.wait()
        self.gradients.show()
        return work

    def _checked(self, grad: torch.Tensor, placement: Placement) -> torch.Tensor:
        """A gradient that a caller gave, checked. Gradients of autograd, which the engine packs, need fewer checks."""
        name = f"reduce_scatter: grads for {placement.spec.name}"
        check_full(name, grad, sparse=True)
        check_shape("reduce_scatter", "grads", grad, placement)
        if grad.device != self.comm.device:
            raise ValueError(f"{name} is on {grad.device}; it must be on {self.comm.device}")
        return grad.resolve_neg() if grad.layout is torch.strided else grad

    @property
    def grad(self) -> torch.Tensor:
        """The gradients of `shard`: flat, of the same length and dtype.

        Once read, it stays: all reduces write into it, also where somebody has kept a view of a parameter's `.grad`.
        """
        self.gradients.stays = True
        return self.gradients.flat

    @property
    def grad_scale(self) -> float:
        """The factor by which the mean over all ranks is multiplied; 1.0 unless set."""
        return self.reduction.epilogue.scale

    @grad_scale.setter
    def grad_scale(self, scale: float) -> None:
        self.reduction.epilogue = self.reduction.epilogue._replace(scale=scale)

    @property
    def nonfinite(self) -> torch.Tensor | None:
        """A flag that a reduce sets to 1 if it leaves NaN or Inf in `grad`: a tensor of one int32 element, or None.

        None: nobody asks. Setting it raises TypeError unless it is a tensor, and ValueError unless it has one int32
        element on the communicator's device.
        """
        return self.reduction.epilogue.nonfinite

    @nonfinite.setter
    def nonfinite(self, flag: torch.Tensor | None) -> None:
        flag_address("Bucket", flag, self.comm.device)
        self.reduction.epilogue = self.reduction.epilogue._replace(nonfinite=flag)

    @property
    def gather_bytes(self) -> int:
        """The bytes that this rank receives from the others in one gather."""
        return self.gathering.nbytes

    @cached_property
    def reduce_bytes(self) -> int:
        """The bytes that this rank sends to the others in one reduce-scatter."""
        return (self.layout.flat_numel - self.shard.numel()) * self.reduce_dtype.itemsize

    @cached_property
    def all_reduce_bytes(self) -> int:
        """The bytes that this rank sends to the replicas in one all-reduce."""
        among = self.reduction.among_replicas
        return 0 if among is None else traffic.all_reduce_bytes(among.nbytes, among.replicas.size)

    def __repr__(self) -> str:
        gathered = self.param_dtype if self.gather_format is None else self.gather_format
        wire = f"{gathered} gathered, {self.reduce_dtype} reduced"
        return f"Bucket({self.shard.dtype}, {wire}, {self.comm})\n{self.layout!r}"

    def _full_buffer(self, given: torch.Tensor | None) -> torch.Tensor:
        if given is not None:
            if given.dtype != self.param_dtype or given.numel() != self.layout.flat_numel:
                raise ValueError(
                    f"Bucket: full_buffer has {given.numel()} elements of {given.dtype}; it must have "
                    f"{self.layout.flat_numel} of {self.param_dtype}"
                )
            return given
        self._check_agreement()
        if self.comm.size == 1 and self.param_dtype == self.shard.dtype and self.offload is None:
            return self.shard  # the shard is the whole unit: nothing to gather
        return self.comm.allocate(self.layout.flat_numel, dtype=self.param_dtype, use="gather")

    def _check_agreement(self) -> None:
        """CommError unless the other ranks make the same bucket: gathers take their bytes for parts of this layout."""
        facts = {
            "dtype": str(self.shard.dtype),
            "param_dtype": str(self.param_dtype),
            "reduce_dtype": str(self.reduce_dtype),
            "gather_format": str(self.gather_format),
            "coded": str(self.coded),
            "reduce_format": str(self.reduce_format),
        }
        if differs := difference([self.comm], layout_items(self.layout, facts)):
            raise comm_error("mismatch", f"Bucket: ranks differ: {differs}")


def _checked_coded(coded: int | None, params: int) -> int:
    """The number of parameters that a gather codes."""
    if coded is None:
        return params
    if not is_whole(coded, 0, params):
        raise ValueError(
            f"Bucket: coded is {coded!r}; it must be a whole number from 0 to {params}, the number of parameters, or "
            "None for all"
        )
    return coded


def _check_format(format: BlockFormat | None, dtype: torch.dtype) -> None:
    """Checks that a gather can send elements of `dtype` in `format`."""
    if format is None:
        return
    check_type("Bucket", "gather_format", format, BlockFormat, "a BlockFormat, or None")
    check_repeats("Bucket: gather_format", format)
    if dtype not in FLOATS:
        raise ValueError(
            f"Bucket: gather_format is {format} and dtype is {dtype}; accepted with it: float32, bfloat16, float16"
        )


def _check_dtypes(
    dtype: torch.dtype, param_dtype: torch.dtype | None, reduce_dtype: torch.dtype | None
) -> None:
    """ValueError unless the bucket's dtype can be converted to the dtypes in which it sends."""
    for name, each in (
        ("dtype", dtype),
        ("param_dtype", param_dtype),
        ("reduce_dtype", reduce_dtype),
    ):
        given = dtype if each is None else each
        converts = given == dtype or (given in FLOATS and dtype in FLOATS)
        if not isinstance(given, torch.dtype) or not converts:
            raise ValueError(
                f"Bucket: {name} is {given!r} and dtype is {dtype!r}; float32, bfloat16 and float16 convert among each "
                "other, and other dtypes do not convert"
            )
