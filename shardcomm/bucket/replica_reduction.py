"""ReplicaReduction: how a bucket's gradients are reduced where several ranks hold the same shard, as replicas.

    reduce-scatter ───────────────────► staging ──all-reduce──► epilogue ──► gradient of the shard
          └──► sum of several ──cast──────►┘    where the all-reduce is put off

The sum is taken in the gradients' dtype. A rank that shards with no other packs its gradients straight into the
staging.
"""

from __future__ import annotations

from functools import cached_property

import torch

from shardcomm.bucket.reduce_scatter import AS_IT_IS, Epilogue, ReduceScatter
from shardcomm.bucket.shard_gradients import ShardGradients
from shardcomm.bucket.side_streams import SideStreams
from shardcomm.bucket.staging import Staging
from shardcomm.comm.communicator import Communicator
from shardcomm.stream.streams import AnyStream, compute_stream
from shardcomm.stream.work import DONE, Work


class ReplicaReduction:
    """Averages by `scatter` over the ranks of the shards, and then over `replicas`, into `gradients`.

    Attributes:
        replicas: The ranks that hold the same shard.
        nbytes: The bytes of the shard's gradients, in the dtype in which they are reduced.
        staging: The buffer in which the replicas all-reduce.
    """

    def __init__(
        self,
        replicas: Communicator,
        scatter: ReduceScatter,
        gradients: ShardGradients,
        numel: int,
        dtype: torch.dtype,
        *,
        staging: Staging | None,
        side: SideStreams,
        tag: int,
    ) -> None:
        comm = scatter.comm
        self.replicas = replicas
        self.nbytes = numel * dtype.itemsize
        self.staging = staging or Staging(
            replicas.allocate(self.nbytes, dtype=torch.uint8, use="reduce")
        )
        self._alone = comm if comm.size == 1 else Communicator.local_group(1, device=comm.device)[0]
        self._comm = comm
        self._scatter = scatter
        self._gradients = gradients
        self._numel = numel
        self._dtype = dtype
        self._side = side
        self._tag = tag
        self._adds = False  # whether the reduce that is under way adds to what the gradient holds
        self._put_off: torch.Tensor | None = None  # sum of reduce-scatters without an all-reduce

    def vacant_staging(self) -> torch.Tensor:
        """The buffer for the gradients that a rank alone packs. Computation from now on comes after its last use."""
        if self.staging.free is not None:
            compute_stream(self._comm.device).wait(self.staging.free)
        return self._staged

    def reduce(self, packed: torch.Tensor, *, aside: bool, put_off: bool) -> Work:
        """Averages packed gradients over the ranks among which the bucket is sharded; collective.

        `all_reduce` must follow.

        Args:
            packed: The gradients of all rows.
            aside: Whether it runs on a side stream.
            put_off: Whether `all_reduce` comes only after a later reduce, and covers this one, too.

        Returns:
            The Work to wait for.
        """
        if put_off or self._put_off is not None:
            return self._add_to_put_off(packed, aside=aside)
        # Before the reduce is queued: on a GPU the compute stream writes the zeros that it adds to.
        self._adds = self._gradients.begin_reduce()
        staging = self.staging
        if packed is self._staged:  # by a rank alone
            staging.filled = compute_stream(self._comm.device).record()
            return DONE
        stream = self._side.streams.reduce if aside else compute_stream(self._comm.device)
        if staging.free is not None:
            stream.wait(staging.free)
        if not aside:
            staging.filled = None
            self._scatter(self._staged, packed, AS_IT_IS, adds=False)
            return DONE
        work = self._scatter.reduce_aside(self._staged, packed, AS_IT_IS, adds=False)
        staging.filled = self._side.streams.reduced
        return work

    def all_reduce(self, epilogue: Epilogue, *, aside: bool) -> Work:
        """Averages what the reduces left over the replicas; collective.

        Args:
            epilogue: What is done with the mean on its way into the gradient.
            aside: Whether it runs on a side stream.

        Returns:
            The Work to wait for.
        """
        if self._put_off is not None:
            self._stage_put_off(self._put_off, aside=aside)
        staging = self.staging
        stream = self._side.streams.replicate if aside else None
        if staging.filled is not None:
            (stream or compute_stream(self._comm.device)).wait(staging.filled)
        self.replicas.all_reduce(self._staged, "avg", tag=self._tag, stream=stream)
        with self._gradients.written(stream, add=self._adds) as grad:
            # Over one rank: a cast with a scale and a sum.
            work = self._alone.reduce_scatter(
                grad,
                self._staged,
                scale=epilogue.scale,
                accumulate=self._adds,
                nonfinite=epilogue.nonfinite,
                stream=stream,
            )
        staging.free = None if work is None else work.event
        return Work(staging.free, self._side.compute, self)

    def forget(self) -> None:
        """Drops the sum for which an all-reduce was put off."""
        self._put_off = None

    def _add_to_put_off(self, packed: torch.Tensor, *, aside: bool) -> Work:
        adds = self._put_off is not None
        if self._put_off is None:
            self._put_off = torch.empty(
                self._numel, dtype=self._gradients.dtype, device=self._comm.device
            )
        stream = self._stream_of_put_off(aside=aside)
        if aside:
            self._side.streams.after_compute(stream)
        event = self._scatter(self._put_off, packed, AS_IT_IS, adds=adds, stream=stream)
        if packed is self._staged:  # by a rank alone
            self.staging.free = event
        if aside:
            self._side.streams.reduced = event
        return Work(event, self._side.compute, self, packed, self._put_off)

    def _stage_put_off(self, summed: torch.Tensor, *, aside: bool) -> None:
        """Moves the sum of the put-off reduces to the staging buffer, in the dtype in which it is all-reduced."""
        self._put_off = None
        self._adds = self._gradients.begin_reduce()
        stream = self._stream_of_put_off(aside=aside)
        if aside:  # on a GPU the compute stream writes the zeros that the epilogue adds to
            self._side.streams.after_compute(stream)
        if self.staging.free is not None:
            stream.wait(self.staging.free)
        self.staging.filled = self._alone.reduce_scatter(self._staged, summed, stream=stream).event

    def _stream_of_put_off(self, *, aside: bool) -> AnyStream:
        """The stream of put-off reduces.

        On a rank alone, `comm` runs the epilogue, too, and only one stream at a time may use a communicator.
        """
        if not aside:
            return compute_stream(self._comm.device)
        return self._side.streams.replicate if self._comm.size == 1 else self._side.streams.reduce

    @cached_property
    def _staged(self) -> torch.Tensor:
        return self.staging.memory[: self.nbytes].view(self._dtype)
