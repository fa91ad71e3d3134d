"""Reduction: the way of a bucket's gradients, from full ones on every rank to the mean of this rank's rows.

    full gradients ──pack, cast──► reduce buffer ──reduce-scatter──► epilogue ──► gradient of the shard

In the reduce-scatter, sums may cross between hosts in a format of fewer bytes (`reduce_format`). The epilogue scales,
casts, adds to a gradient that is there, and looks for NaN. On a rank alone, gradients are packed straight into the
shard's gradient. If other ranks hold the same shard, `replica_reduction.py` averages over these between the
reduce-scatter and the epilogue, and may put that off until several reduces are summed.

The three parts are called one after the other, each as early as possible: `pack`, after which the full gradients may be
dropped; `reduce`, before which the shard's gradient takes no memory; and with replicas `all_reduce`, on a stream of its
own. Then `ShardGradients.show` sets the `.grad` of the shard's parameters.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shardcomm.arguments.dtype import FLOATS
from shardcomm.bucket.full_gradients import FullGradients, Sources
from shardcomm.bucket.reduce_scatter import AS_IT_IS, ReduceScatter
from shardcomm.bucket.replica_reduction import ReplicaReduction
from shardcomm.bucket.shard_gradients import ShardGradients
from shardcomm.bucket.side_streams import SideStreams
from shardcomm.bucket.staging import Staging
from shardcomm.comm.communicator import Communicator
from shardcomm.copy.blocks import ReduceFormat
from shardcomm.copy.wire_stats import WireError
from shardcomm.layout.layout import Layout
from shardcomm.stream.streams import AnyStream
from shardcomm.stream.work import DONE, Work


class Reduction:
    """Averages full gradients of `layout` over the ranks of `comm` and `replicas`, into `gradients`.

    Attributes:
        epilogue: What is done with the mean, from the next reduce on.
        buffer: The buffer into which gradients are packed; None until the first reduce, unless it was given.
        among_replicas: What averages over the ranks that hold the same shard; None if there are no others.
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
        side: SideStreams,
        tag: int,
        replica_tag: int,
    ) -> None:
        _check_format(format, comm, replicas, reduce_dtype)
        self.epilogue = AS_IT_IS
        self.buffer = buffer
        self._layout = layout
        self._comm = comm
        self._gradients = gradients
        self._dtype = reduce_dtype
        self._side = side
        self._full = FullGradients(layout, param_dtype, reduce_dtype)
        self._scatter = ReduceScatter(layout, comm, format, side=side, tag=tag)
        self.among_replicas: ReplicaReduction | None = None
        if replicas is not None:
            self.among_replicas = ReplicaReduction(
                replicas,
                self._scatter,
                gradients,
                layout.shard_numels[comm.rank],
                reduce_dtype,
                staging=staging,
                side=side,
                tag=replica_tag,
            )
        self._packed: torch.Tensor | None = None  # what the next reduce sends; None: nothing

    def take_error(self) -> WireError | None:
        """What the format has cost this rank's partial sums since this was called last; None without a format.

        It waits for a reduce under way.
        """
        return self._scatter.take_error()

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
        adds = self._gradients.begin_reduce()
        if not aside:
            self._pack_mean(sources, self._gradients.flat, adds=adds)
            return False
        stream = self._side.streams.reduce
        with self._gradients.written(stream, add=adds) as grad:
            # Wait until the last content of the offload's staging has left it.
            self._side.streams.compute().wait(stream.record())
            self._pack_mean(sources, grad, adds=adds)
            self._side.streams.after_compute(stream)
        return False

    def _pack_mean(self, sources: Sources, grad: torch.Tensor, *, adds: bool) -> None:
        scale, nonfinite = self.epilogue
        self._full.pack(sources, grad, self._computing(), scale, add=adds, nonfinite=nonfinite)

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
        if self.among_replicas is not None:
            return self.among_replicas.reduce(packed, aside=aside, put_off=put_off)
        # Before the reduce is queued: on a GPU the compute stream writes the zeros that it adds to.
        adds = self._gradients.begin_reduce()
        if not aside and self._scatter.format is None:
            self._scatter(self._gradients.flat, packed, self.epilogue, adds=adds)
            return DONE
        with self._gradients.written(self._side.streams.reduce, add=adds) as grad:
            work = self._scatter.reduce_aside(grad, packed, self.epilogue, adds=adds)
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
        assert self.among_replicas is not None
        return self.among_replicas.all_reduce(self.epilogue, aside=self._side.takes(async_op))

    def forget(self) -> None:
        """Drops the sum for which an all-reduce was put off."""
        if self.among_replicas is not None:
            self.among_replicas.forget()

    def _needs_no_other(self) -> bool:
        """Whether this rank's gradients are the mean, and are packed straight into the shard's."""
        if self._side.has_peers:
            return False
        if self._gradients.dtype in FLOATS:  # in which a pack computes
            return True
        scale, nonfinite = self.epilogue
        return scale == 1.0 and nonfinite is None and not self._gradients.adds

    def _free_buffer(self, *, aside: bool) -> torch.Tensor:
        """The buffer for packed gradients. Computation from now on comes after the reduce that read it last."""
        if self._comm.size == 1 and self.among_replicas is not None:
            # What is packed is the only shard: the replicas reduce it where it is.
            return self.among_replicas.vacant_staging()
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
