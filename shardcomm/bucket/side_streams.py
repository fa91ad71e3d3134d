"""SideStreams: which of a bucket's collectives run beside computation, and on which streams."""

from __future__ import annotations

from functools import cached_property

from shardcomm.comm.communicator import Communicator
from shardcomm.stream.streams import Streams, computing, on_host


class SideStreams:
    """The streams beside computation on which a bucket gathers and reduces.

    Args:
        comm: The ranks.
        replicas: The ranks that hold the same shard; None: there are no others.
        offloads: Whether the bucket has an offload.
        streams: The streams. None: those of `comm`.

    Attributes:
        has_peers: Whether other ranks, in `comm` or among the replicas, take part in the bucket's collectives.
        compute: A function that returns the stream on which torch computes; None: the host computes.
    """

    def __init__(
        self,
        comm: Communicator,
        replicas: Communicator | None,
        *,
        offloads: bool,
        streams: Streams | None,
    ) -> None:
        self.has_peers = comm.size > 1 or replicas is not None
        self.compute = None if on_host(comm.device) else computing(comm.device)
        self._comm = comm
        self._offloads = offloads
        self._given = streams

    def takes(self, async_op: bool) -> bool:
        """Whether a gather or a reduce with this `async_op` runs on a side stream.

        With an offload it always does, so that the buckets use the offload's staging in turn. Without peers there is no
        rank to wait for, and the work takes less time than handing it over would.
        """
        return self._offloads or (async_op and self.has_peers)

    @cached_property
    def streams(self) -> Streams:
        """The streams, made when they are first needed."""
        return self._given or self._comm.streams
