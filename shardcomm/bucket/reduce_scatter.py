"""ReduceScatter: the collective of a bucket's reduction, over the ranks among which the bucket is sharded."""

from __future__ import annotations

from typing import NamedTuple

import torch

from shardcomm.bucket.side_streams import SideStreams
from shardcomm.comm.bound_collective import BoundReduction
from shardcomm.comm.communicator import Communicator
from shardcomm.copy.blocks import ReduceFormat
from shardcomm.copy.wire_stats import WireError, WireStats
from shardcomm.layout.layout import Layout
from shardcomm.stream.streams import AnyEvent, AnyStream
from shardcomm.stream.work import Work


class Epilogue(NamedTuple):
    """What is done with the mean on its way into the gradient.

    Attributes:
        scale: The factor by which the mean is multiplied.
        nonfinite: A flag of one int32 element, set to 1 if the gradient then has NaN or Inf; None: nobody asks.
    """

    scale: float
    nonfinite: torch.Tensor | None


AS_IT_IS = Epilogue(1.0, None)


class ReduceScatter:
    """Averages packed gradients of `layout` over the ranks of `comm`, of which each gets the mean of its rows.

    Attributes:
        comm: The ranks.
        format: The format in which sums cross between hosts; None: as they are. With one there is `reduce_aside` alone.
    """

    def __init__(
        self,
        layout: Layout,
        comm: Communicator,
        format: ReduceFormat | None,
        *,
        side: SideStreams,
        tag: int,
    ) -> None:
        self.format = format if comm.size > 1 else None
        self._counts = layout.counts
        self.comm = comm
        self._side = side
        self._tag = tag
        self._stats = None if self.format is None else WireStats()
        # A collective that is bound to the buffer it sends, and that buffer.
        self._bound: tuple[torch.Tensor, BoundReduction] | None = None

    def take_error(self) -> WireError | None:
        """What the format has cost this rank's partial sums since this was called last; None without a format.

        It waits for a reduce under way.
        """
        if self._stats is None:
            return None
        if self._side.streams.reduced is not None:
            self._side.streams.reduced.wait()
        return self._stats.take()

    def __call__(
        self,
        into: torch.Tensor,
        packed: torch.Tensor,
        epilogue: Epilogue,
        *,
        adds: bool,
        stream: AnyStream | None = None,
    ) -> AnyEvent | None:
        """Reduces `packed` into this rank's rows, `into`, without a format.

        Args:
            into: The gradient of this rank's rows.
            packed: The gradients of all rows.
            epilogue: What is done with the mean.
            adds: Whether the mean is added to what `into` holds.
            stream: As in `Communicator.reduce_scatter`.

        Returns:
            The event that fires at the end of what is queued on `stream`; None without a stream.
        """
        assert self.format is None
        work = self.comm.reduce_scatter(
            into,
            packed,
            "avg",
            counts=self._counts,
            scale=epilogue.scale,
            accumulate=adds,
            nonfinite=epilogue.nonfinite,
            tag=self._tag,
            stream=stream,
        )
        return None if work is None else work.event

    def reduce_aside(
        self, into: torch.Tensor, packed: torch.Tensor, epilogue: Epilogue, *, adds: bool
    ) -> Work:
        """Reduces as a call does, in `format` if there is one, on the reduce stream after what was computed so far.

        Returns:
            The Work to wait for, whose event is `streams.reduced` from now on.
        """
        if self._bound is None or self._bound[0] is not packed:
            bound = self.comm.bind_reduction(
                into,
                packed,
                "avg",
                counts=self._counts,
                tag=self._tag,
                format=self.format,
                stats=self._stats,
            )
            self._bound = packed, bound
        streams, reduce = self._side.streams, self._bound[1]
        scale, nonfinite = epilogue
        streams.reduced = reduce(streams.reduce, streams.computed(), into, scale, adds, nonfinite)
        self.comm.order.queued("reduce_scatter", streams.reduced)
        return Work(streams.reduced, self._side.compute, self, packed, into, nonfinite)
