"""A Bucket is a unit's layout together with its memory: this rank's shard, and the communication buffers.

One step of a unit, on one rank::

    shard ──cast──► full buffer ──all-gather──► params: views into it, nothing is copied out
    grads ──pack, cast──► reduce buffer ──reduce-scatter──► shard.grad (summed in f32, cast, accumulated)

Of one rank alone, the gradients are packed straight into `shard.grad`.

The full and the reduce buffer may be shared by buckets that do not use them at the same time; the engine does that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

import torch

from shardcomm.communicator import Communicator
from shardcomm.copy_plan import BoundCopy, CopyPlan
from shardcomm.dtype import movable
from shardcomm.layout import Layout, ParamSpec, Piece, Placement
from shardcomm.mixed_precision import FLOATS
from shardcomm.streams import Event, Stream, Streams, compute_stream, keep_until


class Work:
    """A collective, queued or done. What it reads is kept until it is waited for, or has ended."""

    def __init__(
        self, event: Event | None, device: torch.device, reads: Sequence[torch.Tensor | None] = ()
    ) -> None:
        self._event = event  # None: nothing to wait for
        self._device = device
        self._reads: Sequence[torch.Tensor | None] = reads

    @property
    def queued(self) -> bool:
        """Whether there is something to wait for."""
        return self._event is not None

    def wait(self) -> None:
        """What torch computes from now on comes after the collective. On a CPU: returns when it is complete here.

        Raises:
            CommError: it failed; see `shardcomm.communicator`.
        """
        if self._event is not None:
            compute_stream(self._device).wait(self._event)
        self._reads = ()

    def __del__(self) -> None:
        if self._reads and self._event is not None:
            keep_until(self._event, self._reads)


class Bucket:
    """The parameters of one unit, all of one dtype, sharded over the ranks of `comm`.

    Attributes:
        layout: where every element lives; `layout.world_size == comm.size`.
        shard: this rank's elements, flat, `layout.shard_numel` of `dtype`; what an optimizer updates. After a reduce
            `shard.grad` holds the gradient; set it to None and the next reduce overwrites instead of accumulating.
        shards: the same memory, one view a parameter: this rank's rows (possibly none).
        grad, shard_grads: likewise, the memory of the gradient; allocated by the first reduce, or when asked for.
        full: the full buffer, flat, `layout.flat_numel` of `param_dtype`.
        params: the full parameters, views into `full`; their values are there between a gather and the next use of
            the full buffer by another bucket. Read them, do not write: ranks may share this memory.

    Args:
        dtype: of the shard and of its gradient.
        param_dtype: of the full parameters, and on the wire of a gather (default: `dtype`).
        reduce_dtype: of the gradients on the wire of a reduce (default: `param_dtype`).
        full_buffer: `layout.flat_numel` of `param_dtype`, from `comm.allocate(use="gather")` (default: its own).
        reduce_buffer: `layout.flat_numel` of `reduce_dtype`, from `allocate(use="reduce")` (default: its own).
        replicas: ranks that hold the same shard; gradients are averaged over them too.
        tag: tells this bucket's collectives from others of the same size, should ranks disagree on their order.
        streams: where `async_op=True` runs (default: two of its own, made when first needed).
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
        streams: Streams | None = None,
        tag: int = 0,
    ) -> None:
        if layout.world_size != comm.size:
            raise ValueError(
                f"Bucket: layout is for {layout.world_size} ranks, comm has {comm.size}; plan the layout for "
                "the communicator's size"
            )
        self.layout = layout
        self.comm = comm
        self.param_dtype = param_dtype or dtype
        self.reduce_dtype = reduce_dtype or self.param_dtype
        self.shard = torch.zeros(layout.shard_numel, dtype=dtype, device=comm.device)
        self.full = self._full_buffer(full_buffer)
        self._gather_recv, self._gather_send = self.full, self.shard
        if self.param_dtype == dtype:  # else they are converted on the way
            self._gather_recv, self._gather_send = movable(self.full), movable(self.shard)
        self._reduce_buffer = reduce_buffer
        self._replicas = replicas
        self._streams = streams
        self._tag = tag

        pieces = [layout.piece(comm.rank, i) for i in range(len(layout.placements))]
        placed = list(zip(layout.placements, pieces, strict=True))
        # `.data` has a version counter of its own: refilling the buffer with the same values, as a second gather in a
        # step does, must not look to autograd like a change of the weights it saved.
        self.params = tuple(_full_view(self.full.data, p) for p in layout.placements)
        self.shards = tuple(_shard_view(self.shard, p, piece) for p, piece in placed)
        self._packs: dict[tuple[torch.dtype, bool], BoundCopy] = {}

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
        dtypes = {tensor.dtype for tensor in tensors.values()}
        if len(dtypes) != 1:
            raise ValueError(
                f"Bucket.from_tensors: tensors have dtypes {sorted(map(str, dtypes))}; a bucket holds exactly one: "
                "make one bucket per dtype"
            )
        dtype = dtypes.pop()
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
        self._check_count("load", "tensors", tensors)
        for tensor, placement in zip(tensors, self.layout.placements, strict=True):
            _check_shape("load", "tensors", tensor, placement)
        for tensor, shard, (placement, piece) in zip(
            tensors, self.shards, self._placed(), strict=True
        ):
            shard.copy_(_rows(tensor, placement, piece))

    def all_gather(self, *, async_op: bool = False) -> Work:
        """Fills `params` on every rank. With `async_op` returns at once; `wait()` before reading them."""
        if self.full is self.shard:
            return Work(None, self.comm.device)
        stream = self._side_streams().gather if async_op and self._has_peers else None
        self._after_compute(stream)
        end = self.comm.all_gather(
            self._gather_recv, self._gather_send, tag=self._tag, stream=stream
        )
        return Work(end, self.comm.device)

    def gathered_shards(self) -> list[torch.Tensor]:
        """The full parameters in the shard's dtype, as tensors of their own; collective."""
        flat = self.shard
        if self.comm.size > 1:
            flat = self.shard.new_empty(self.layout.flat_numel)
            self.comm.all_gather(movable(flat), movable(self.shard))
        return [
            _full_view(flat, p).clone(memory_format=torch.contiguous_format)
            for p in self.layout.placements
        ]

    def reduce_scatter(
        self, grads: Sequence[torch.Tensor | None], *, async_op: bool = False
    ) -> Work:
        """Averages `grads` over all ranks into `shard.grad`, cast to its dtype; adds if it is not None.

        `grads`: one for each parameter, of its full shape and `param_dtype`, in the layout's order; None counts as
        zeros. Where any has `reduce_dtype` instead (a sum of gradients), all are packed from that. With `async_op`
        returns at once; `shard.grad` is right after `wait()`.
        """
        stream = self._side_streams().reduce if async_op and self._has_peers else None
        accumulate = self.shard.grad is not None
        dtype = self.param_dtype
        if dtype != self.reduce_dtype and any(
            grad is not None and grad.dtype == self.reduce_dtype for grad in grads
        ):
            dtype = self.reduce_dtype
        sources = self._stored("reduce_scatter", "grads", grads, dtype)
        if not accumulate and "grad" not in vars(self):
            vars(self)["grad"] = torch.empty_like(self.shard)  # all of it is written
        shard_grad = self.grad  # may be zeroed now, which belongs to what was computed so far
        if not self._has_peers and (shard_grad.dtype in FLOATS or not accumulate):
            self._pack(sources, dtype, shard_grad, None, accumulate=accumulate)
            self.shard.grad = shard_grad
            return Work(None, self.comm.device)
        self._after_compute(stream)
        buffer = self._reduce_buffer
        if buffer is None:
            numel = self.layout.flat_numel
            buffer = self.comm.allocate(numel, dtype=self.reduce_dtype, use="reduce")
            self._reduce_buffer = buffer
        self._pack(sources, dtype, buffer, stream)
        if self._replicas is not None:
            self._replicas.all_reduce(buffer, "avg", stream=stream)
        end = self.comm.reduce_scatter(
            shard_grad, buffer, "avg", accumulate=accumulate, tag=self._tag, stream=stream
        )
        self.shard.grad = shard_grad
        return Work(end, self.comm.device, sources)

    @cached_property
    def grad(self) -> torch.Tensor:  # noqa: D102  (in the class's docstring, as the next)
        return torch.zeros_like(self.shard)

    @cached_property
    def shard_grads(self) -> tuple[torch.Tensor, ...]:  # noqa: D102
        return tuple(_shard_view(self.grad, p, piece) for p, piece in self._placed())

    def drop_gradient(self) -> None:
        """Gives the gradient's memory back until the next reduce."""
        self.shard.grad = None
        for name in ("grad", "shard_grads"):
            vars(self).pop(name, None)

    @property
    def gradient_bytes(self) -> int:
        """What the gradient takes: nothing before the first reduce."""
        return self.grad.nbytes if "grad" in vars(self) else 0

    @property
    def gather_bytes(self) -> int:
        """What this rank receives from the others in one gather."""
        return (self.comm.size - 1) * self.shard.numel() * self.param_dtype.itemsize

    @property
    def reduce_bytes(self) -> int:
        """What this rank sends to the others in one reduce (an all-reduce sends 2 (n - 1) / n of the buffer)."""
        flat_bytes = self.layout.flat_numel * self.reduce_dtype.itemsize
        ranks = self.comm.size
        scattered = flat_bytes * (ranks - 1) // ranks
        if self._replicas is None:
            return scattered
        replicas = self._replicas.size
        return scattered + 2 * flat_bytes * (replicas - 1) // replicas

    def __repr__(self) -> str:
        wire = f"{self.param_dtype} gathered, {self.reduce_dtype} reduced"
        return f"Bucket({self.shard.dtype}, {wire}, {self.comm})\n{self.layout!r}"

    def _full_buffer(self, given: torch.Tensor | None) -> torch.Tensor:
        if given is not None:
            return given
        if self.comm.size == 1 and self.param_dtype == self.shard.dtype:
            return self.shard  # the shard is the whole unit: nothing to gather
        return self.comm.allocate(self.layout.flat_numel, dtype=self.param_dtype, use="gather")

    def _pack(
        self,
        sources: Sequence[torch.Tensor | None],
        dtype: torch.dtype,
        flat: torch.Tensor,
        stream: Stream | None,
        *,
        accumulate: bool = False,
    ) -> None:
        """Packs `sources`, all of `dtype`, into `flat`: the reduce buffer, or the gradient."""
        if (dtype, accumulate) not in self._packs:
            plan = CopyPlan.pack(
                [p.numel for p in self.layout.placements],
                [p.offset for p in self.layout.placements],
                dtype,
                flat.dtype,
                () if accumulate else self.layout.gaps(),
            )
            bound = plan.bind([None] * len(sources), [flat], accumulate=accumulate)
            self._packs[dtype, accumulate] = bound
        # Past the checks of `set_sources`: reduce_scatter has made them, at a fraction of their cost.
        pack = self._packs[dtype, accumulate]
        addresses = [0 if source is None else source.data_ptr() for source in sources]
        pack.core.set_operands(addresses, [flat.data_ptr()])
        pack.run(stream)

    @property
    def _has_peers(self) -> bool:
        """Without any there is nobody to wait for: work is done sooner than handed over."""
        return self.comm.size > 1 or self._replicas is not None

    def _side_streams(self) -> Streams:
        if self._streams is None:
            self._streams = Streams(self.comm.device)
        return self._streams

    def _after_compute(self, stream: Stream | None) -> None:
        if stream is not None:
            self._side_streams().after_compute(stream)

    def _placed(self) -> list[tuple[Placement, Piece]]:
        rank = self.comm.rank
        return [(p, self.layout.piece(rank, i)) for i, p in enumerate(self.layout.placements)]

    def _stored(
        self,
        operation: str,
        name: str,
        tensors: Sequence[torch.Tensor | None],
        dtype: torch.dtype,
    ) -> list[torch.Tensor | None]:
        """As the pack plan reads them; ValueError for another shape than the layout's."""
        self._check_count(operation, name, tensors)
        stored: list[torch.Tensor | None] = []
        for tensor, placement in zip(tensors, self.layout.placements, strict=True):
            if tensor is None:
                stored.append(None)
                continue
            _check_shape(operation, name, tensor, placement)
            stored.append(_as_stored(tensor, placement, dtype))
        return stored

    def _check_count(
        self, operation: str, name: str, tensors: Sequence[torch.Tensor | None]
    ) -> None:
        if len(tensors) != len(self.layout.placements):
            raise ValueError(
                f"{operation}: {name} has {len(tensors)} entries; the layout has "
                f"{len(self.layout.placements)} parameters"
            )


def _check_shape(operation: str, name: str, tensor: torch.Tensor, placement: Placement) -> None:
    if tensor.shape != placement.spec.shape:
        raise ValueError(
            f"{operation}: {name} for {placement.spec.name} has shape {tuple(tensor.shape)}; the layout "
            f"says {placement.spec.shape}"
        )


def _full_view(flat: torch.Tensor, placement: Placement) -> torch.Tensor:
    stored = flat[placement.offset : placement.offset + placement.numel]
    if not placement.spec.shape:
        return stored.view(())
    return stored.view(placement.stored_shape).movedim(0, placement.shard_dim)


def _shard_view(flat: torch.Tensor, placement: Placement, piece: Piece) -> torch.Tensor:
    stored = flat[piece.offset : piece.offset + piece.numel].view(piece.shape)
    if len(piece.shape) != len(placement.spec.shape):  # granularity "element": a flat run
        return stored
    return stored.movedim(0, placement.shard_dim) if piece.shape else stored


def _rows(tensor: torch.Tensor, placement: Placement, piece: Piece) -> torch.Tensor:
    """The part of a full parameter that `piece` describes, in the shape of the shard's view."""
    if len(piece.shape) != tensor.dim():
        stored = tensor if tensor.dim() == 0 else tensor.movedim(placement.shard_dim, 0)
        return stored.reshape(-1)[piece.start * _row(placement, piece) :][: piece.numel]
    return tensor.narrow(placement.shard_dim, piece.start, piece.stop - piece.start)


def _row(placement: Placement, piece: Piece) -> int:
    """Elements per index of [start, stop)."""
    return piece.numel // (piece.stop - piece.start) if piece.stop > piece.start else 1


def _as_stored(grad: torch.Tensor, placement: Placement, dtype: torch.dtype) -> torch.Tensor:
    """`grad` with the shard dim outermost, contiguous, as the pack plan reads it. Rarely copies."""
    if grad.layout is not torch.strided:
        grad = grad.to_dense()
    if grad.dtype == dtype and placement.shard_dim == 0 and grad.is_contiguous():
        return grad
    if grad.dim() > 0:
        grad = grad.movedim(placement.shard_dim, 0)
    return grad.to(dtype).contiguous()
