"""Reduction: the way of a bucket's gradients, from full ones on every rank to the mean of this rank's rows.

    full gradients ──pack, cast──► reduce buffer ──reduce-scatter──► epilogue ──► gradient of the shard

In the reduce-scatter, sums may cross between hosts in a format of fewer bytes (`reduce_format`). The epilogue scales,
casts, adds to a gradient that is there, and looks for NaN. On a rank alone, gradients are packed straight into the
shard's gradient. If other ranks hold the same shard (replicas), the result of the reduce-scatter goes to a staging
buffer, is all-reduced among the replicas there, and only then goes through the epilogue. The all-reduce may be put off:
the results of several reduce-scatters are summed until then, in the gradients' dtype.

The three parts are called one after the other, each as early as possible: `pack`, after which the full gradients may be
dropped; `reduce`, before which the shard's gradient takes no memory; and with replicas `all_reduce`, on a stream of its
own. Then `ShardGradients.show` sets the `.grad` of the shard's parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import NamedTuple

import torch

from shardcomm.arguments.dtype import FLOATS
from shardcomm.bucket.full_gradients import FullGradients, Sources
from shardcomm.bucket.offload import Offload
from shardcomm.bucket.shard_gradients import ShardGradients
from shardcomm.bucket.side_streams import SideStreams
from shardcomm.bucket.staging import Staging
from shardcomm.comm.bound_collective import BoundReduction
from shardcomm.comm.communicator import Communicator
from shardcomm.copy.blocks import ReduceFormat
from shardcomm.copy.wire_stats import WireError, WireStats
from shardcomm.layout.layout import Layout
from shardcomm.stream.streams import AnyStream, compute_stream, keep_until
from shardcomm.stream.work import DONE, Work


class Epilogue(NamedTuple):
    """What is done with the mean on its way into the gradient.

    Attributes:
        scale: The factor by which the mean is multiplied.
        nonfinite: A flag of one int32 element, set to 1 if the gradient then has NaN or Inf; None: nobody asks.
    """

    scale: float
    nonfinite: torch.Tensor | None


_AS_IT_IS = Epilogue(1.0, None)


class Reduction:
    """Averages full gradients of `layout` over the ranks of `comm` and `replicas`, into `gradients`.

    Attributes:
        epilogue: What is done with the mean, from the next reduce on.
        buffer: The buffer into which gradients are packed; None until the first reduce, unless it was given.
        replicas: The ranks that hold the same shard; None if there are no others.
        staging: The buffer in which replicas all-reduce; None without replicas.
    """

    def __init__(
        self,
        layout: Layout,
        comm: Communicator,
        gradients: ShardGradients,
        param_dtype: torch.dtype,
        reduce_dtype: torch.dtype,
        format: ReduceFormat | None,
        *,
        buffer: torch.Tensor | None,
        replicas: Communicator | None,
        staging: Staging | None,
        offload: Offload | None,
        side: SideStreams,
        tag: int,
        replica_tag: int,
    ) -> None:
        self.epilogue = _AS_IT_IS
        self.buffer = buffer
        self.replicas = replicas
        self.staging: Staging | None = None
        self._layout = layout
        self._comm = comm
        self._gradients = gradients
        self._dtype = reduce_dtype
        self._format = format if comm.size > 1 else None
        self._stats = None if self._format is None else WireStats()
        _check_format(format, comm, self.replicas, reduce_dtype)
        self._offload = offload
        self._side = side
        self._tag, self._replica_tag = tag, replica_tag
        self._full = FullGradients(layout, param_dtype, reduce_dtype)
        if self.replicas is not None:
            self.staging = staging or Staging(
                self.replicas.allocate(self.nbytes, dtype=torch.uint8, use="reduce")
            )
            self._alone = (
                comm if comm.size == 1 else Communicator.local_group(1, device=comm.device)[0]
            )
        # The state of the reduce that is under way.
        self._packed: torch.Tensor | None = None  # None: there is none, or it needs no other rank
        self._adds = False  # whether it adds to what the gradient holds
        # A reduce-scatter that is bound to the buffer it sends, and that buffer.
        self._bound: tuple[torch.Tensor, BoundReduction] | None = None
        self._put_off: torch.Tensor | None = None  # sum of reduce-scatters without an all-reduce

    @property
    def nbytes(self) -> int:
        """The bytes of the gradients of this rank's shard, in the dtype in which they are reduced."""
        return self._layout.shard_numels[self._comm.rank] * self._dtype.itemsize

    def take_error(self) -> WireError | None:
        """What the format has cost this rank's partial sums since this was called last; None without a format.

        It waits for a reduce under way.
        """
        if self._stats is None:
            return None
        if self._side.streams.reduced is not None:
            self._side.streams.reduced.wait()
        return self._stats.take()

    def pack(self, grads: Sequence[torch.Tensor | None], *, async_op: bool = False) -> bool:
        """Copies full gradients into the buffer that `reduce` sends, once its last content has been reduced.

        The caller may drop `grads` afterwards. The compute stream makes the copy. If the stream of the reduces made it,
        nobody would know when `grads` have been read.

        Args:
            grads: As in `Bucket.reduce_scatter`.
            async_op: The same for all three parts.

        Returns:
            Whether there is something to reduce. On a rank alone the gradients are the mean already.
        """
        aside = self._side.takes(async_op)
        sources = self._full.checked(grads)
        if not self._needs_no_other():
            self._packed = self._free_buffer(aside=aside)
            self._full.pack(sources, self._packed, self._computing())
            return True
        self._comm.check()  # raises where a reduce with other ranks would
        self._adds = self._gradients.begin_reduce()
        if not aside:
            self._pack_mean(sources, self._gradients.flat)
            return False
        stream = self._side.streams.reduce
        with self._gradient(stream) as grad:
            # Wait until the last content of the offload's staging has left it.
            self._side.streams.compute().wait(stream.record())
            self._pack_mean(sources, grad)
            self._side.streams.after_compute(stream)
        return False

    def _pack_mean(self, sources: Sources, grad: torch.Tensor) -> None:
        scale, nonfinite = self.epilogue
        self._full.pack(
            sources, grad, self._computing(), scale, add=self._adds, nonfinite=nonfinite
        )

    def reduce(self, *, async_op: bool = False, put_off: bool = False) -> Work:
        """Averages the packed gradients over the ranks of `comm`; with replicas, `all_reduce` must follow; collective.

        Args:
            async_op: As in `pack`.
            put_off: Whether `all_reduce` comes only after a later reduce, and covers this one, too.

        Returns:
            The Work to wait for.
        """
        aside = self._side.takes(async_op)
        packed, self._packed = self._packed, None
        if packed is None:
            return DONE
        if self.replicas is not None and (put_off or self._put_off is not None):
            return self._add_to_put_off(packed, aside=aside)
        # Before the reduce is queued: on a GPU the compute stream writes the zeros that it adds to.
        self._adds = self._gradients.begin_reduce()
        if self.staging is not None:
            return self._reduce_to_staging(packed, self.staging, aside=aside)
        epilogue = self.epilogue
        if not aside and self._format is None:
            self._comm.reduce_scatter(
                self._gradients.flat,
                packed,
                "avg",
                counts=self._layout.counts,
                scale=epilogue.scale,
                accumulate=self._adds,
                nonfinite=epilogue.nonfinite,
                tag=self._tag,
            )
            return DONE
        with self._gradient(self._side.streams.reduce) as grad:
            work = self._reduce_aside(packed, grad, epilogue, self._adds)
        if not aside:
            work.wait()
        return work

    def all_reduce(self, *, async_op: bool = False) -> Work:
        """Averages what `reduce` left over the replicas; collective.

        Args:
            async_op: As in `pack`.

        Returns:
            The Work to wait for.
        """
        aside = self._side.takes(async_op)
        assert self.replicas is not None
        assert self.staging is not None
        if self._put_off is not None:
            self._stage_put_off(self._put_off, self.staging, aside=aside)
        epilogue = self.epilogue
        stream = self._side.streams.replicate if aside else None
        if self.staging.filled is not None:
            (stream or compute_stream(self._comm.device)).wait(self.staging.filled)
        self.replicas.all_reduce(self._staged, "avg", tag=self._replica_tag, stream=stream)
        with self._gradient(stream) as grad:
            # Over one rank: a cast with a scale and a sum.
            work = self._alone.reduce_scatter(
                grad,
                self._staged,
                scale=epilogue.scale,
                accumulate=self._adds,
                nonfinite=epilogue.nonfinite,
                stream=stream,
            )
        self.staging.free = None if work is None else work.event
        return Work(self.staging.free, self._side.compute, self)

    def forget(self) -> None:
        """Drops the sum for which an all-reduce was put off."""
        self._put_off = None

    def _add_to_put_off(self, packed: torch.Tensor, *, aside: bool) -> Work:
        adds = self._put_off is not None
        if self._put_off is None:
            numel = self.nbytes // self._dtype.itemsize
            self._put_off = torch.empty(
                numel, dtype=self._gradients.dtype, device=self._comm.device
            )
        stream = self._stream_of_put_off(aside=aside)
        if aside:
            self._side.streams.after_compute(stream)
        event = self._comm.reduce_scatter(
            self._put_off,
            packed,
            "avg",
            counts=self._layout.counts,
            accumulate=adds,
            stream=stream,
            tag=self._tag,
        ).event
        if self.staging is not None and packed is self._staged:  # see `_free_buffer`
            self.staging.free = event
        if aside:
            self._side.streams.reduced = event
        return Work(event, self._side.compute, self, packed, self._put_off)

    def _stage_put_off(self, summed: torch.Tensor, staging: Staging, *, aside: bool) -> None:
        """Moves the sum of the put-off reduces to the staging buffer, in the dtype in which it is all-reduced."""
        self._put_off = None
        self._adds = self._gradients.begin_reduce()
        stream = self._stream_of_put_off(aside=aside)
        if staging.free is not None:
            stream.wait(staging.free)
        cast = self._alone.reduce_scatter(self._staged, summed, stream=stream)
        staging.filled = cast.event
        if staging.filled is not None:
            keep_until(staging.filled, summed)

    def _stream_of_put_off(self, *, aside: bool) -> AnyStream:
        """The stream of put-off reduces.

        On a rank alone, `comm` runs the epilogue, too, and only one stream at a time may use a communicator.
        """
        if not aside:
            return compute_stream(self._comm.device)
        return self._side.streams.replicate if self._comm.size == 1 else self._side.streams.reduce

    def _reduce_to_staging(self, packed: torch.Tensor, staging: Staging, *, aside: bool) -> Work:
        """Reduces `packed` into the staging buffer, in which `all_reduce` goes on."""
        if packed is self._staged:  # see `_free_buffer`
            staging.filled = compute_stream(self._comm.device).record()
            return DONE
        stream = self._side.streams.reduce if aside else compute_stream(self._comm.device)
        if staging.free is not None:
            stream.wait(staging.free)
        if not aside:
            staging.filled = None
            self._comm.reduce_scatter(
                self._staged, packed, "avg", counts=self._layout.counts, tag=self._tag
            )
            return DONE
        work = self._reduce_aside(packed, self._staged, _AS_IT_IS, adds=False)
        staging.filled = self._side.streams.reduced
        return work

    def _reduce_aside(
        self, packed: torch.Tensor, into: torch.Tensor, epilogue: Epilogue, adds: bool
    ) -> Work:
        if self._bound is None or self._bound[0] is not packed:
            bound = self._comm.bind_reduction(
                into,
                packed,
                "avg",
                counts=self._layout.counts,
                tag=self._tag,
                format=self._format,
                stats=self._stats,
            )
            self._bound = packed, bound
        streams, reduce = self._side.streams, self._bound[1]
        scale, nonfinite = epilogue
        streams.reduced = reduce(streams.reduce, streams.computed(), into, scale, adds, nonfinite)
        return Work(streams.reduced, self._side.compute, self, packed, into, nonfinite)

    def _needs_no_other(self) -> bool:
        """Whether this rank's gradients are the mean, and are packed straight into the shard's."""
        if self._side.has_peers:
            return False
        if self._gradients.dtype in FLOATS:  # in which a pack computes
            return True
        scale, nonfinite = self.epilogue
        return scale == 1.0 and nonfinite is None and not self._gradients.adds

    def _gradient(self, stream: AnyStream | None) -> AbstractContextManager[torch.Tensor]:
        """A context that gives the tensor into which gradients are reduced."""
        if self._offload is None or stream is None:
            return nullcontext(self._gradients.flat)
        return self._offload.gradient(self._gradients.flat, stream, add=self._adds)

    @cached_property
    def _staged(self) -> torch.Tensor:
        assert self.staging is not None
        return self.staging.memory[: self.nbytes].view(self._dtype)

    def _free_buffer(self, *, aside: bool) -> torch.Tensor:
        """The buffer for packed gradients. Computation from now on comes after the reduce that read it last."""
        if self._comm.size == 1 and self.staging is not None:
            # What is packed is the only shard: the replicas reduce it where it is.
            if self.staging.free is not None:
                compute_stream(self._comm.device).wait(self.staging.free)
            return self._staged
        numel = self._layout.flat_numel
        if self._comm.size == 1:  # a dtype in which no pack computes, such as float64
            return torch.empty(numel, dtype=self._dtype, device=self._comm.device)
        if aside and self._side.streams.reduced is not None:
            self._side.streams.compute().wait(self._side.streams.reduced)
        if self.buffer is None:
            self.buffer = self._comm.allocate(numel, dtype=self._dtype, use="reduce")
        return self.buffer

    def _computing(self) -> AnyStream | None:
        """The stream on which torch computes; None: the host computes."""
        return None if self._side.compute is None else self._side.compute()


def _check_format(
    format: ReduceFormat | None,
    comm: Communicator,
    replicas: Communicator | None,
    reduce_dtype: torch.dtype,
) -> None:
    """ValueError unless gradients of `reduce_dtype` can be reduced in `format`."""
    if format is None or (comm.size == 1 and replicas is None):
        return
    if replicas is not None:
        raise ValueError(
            f"Bucket: reduce_format is {format}, and there are {replicas.size} replicas, whose all-reduce has no such "
            "format; leave it out, or shard over all ranks"
        )
    comm.check_codes("Bucket: reduce_format", format)
    if reduce_dtype not in FLOATS:
        raise ValueError(
            f"Bucket: reduce_format is {format} and reduce_dtype is {reduce_dtype}; accepted with it: float32, "
            "bfloat16, float16"
        )
