"""A secondary shard: the part of a unit's full parameters that a rank keeps, so that its host's ranks can gather them
for backward.

Four ranks, of which 0 and 1 are on one host, and 2 and 3 on another; a unit of 8 rows::

    rank                       0         1         2         3
    shard                   [ 0 1 ]   [ 2 3 ]   [ 4 5 ]   [ 6 7 ]
    forward: all-gather    [ 0 1 2 3 4 5 6 7 ]   on each              between hosts
    secondary shard        [0 1 2 3] [4 5 6 7] [0 1 2 3] [4 5 6 7]    copied out of it
    backward: all-gather   [ 0 1 2 3 4 5 6 7 ]   on each              inside hosts

Backward computes with the same bits as forward did. Only units that share their slots have secondary shards. Each is
in memory of its own, for the whole run, and takes the bytes of the unit's full parameters, in the dtype to compute in,
divided by the number of the host's ranks.

References: `reshard_after_forward` of PyTorch's FSDP2, and hpZ: Wang et al., "ZeRO++: Extremely Efficient Collective
Communication for Giant Model Training", arXiv 2306.10209, section 3.2.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shardcomm.bucket.bucket import Bucket
from shardcomm.comm.bound_collective import BoundCollective
from shardcomm.comm.communicator import Communicator
from shardcomm.stream.streams import Streams, copy, on_host
from shardcomm.stream.work import Work


class SecondaryShard:
    """The secondary shard of one unit.

    Args:
        buckets: The unit's buckets, whose full buffers must be this rank's own.
        comm: The ranks that gather for backward.
        streams: The streams on which `buckets` are gathered.
        tag: A number that tells the unit's gathers from others.

    Attributes:
        memory: Its memory.
        is_current: Whether it holds the values that this step's forward gathered.
        gather_bytes: The bytes that this rank receives from the others in one gather.
    """

    def __init__(
        self, buckets: Sequence[Bucket], comm: Communicator, streams: Streams, tag: int
    ) -> None:
        sizes = [[n * b.full.itemsize for n in b.layout.parts(comm.size)] for b in buckets]
        self.memory = comm.allocate(sum(map(max, sizes)), dtype=torch.uint8, use="reduce")
        self.is_current = False
        self._comm = comm
        self._streams = streams
        self._compute = None if on_host(comm.device) else streams.compute
        # For each bucket the part that is kept, and its place in the full buffer.
        self._parts: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._gathers: list[BoundCollective] = []
        free = self.memory
        for bucket, counts in zip(buckets, sizes, strict=True):
            full = bucket.full.view(torch.uint8)
            held, free = free[: counts[comm.rank]], free[max(counts) :]
            self._parts.append((held, torch.split(full, counts)[comm.rank]))
            self._gathers.append(comm.bind_all_gather(full, held, counts=counts, tag=tag))
        self.gather_bytes = sum(map(sum, sizes)) - sum(held.nbytes for held, _ in self._parts)

    def keep(self) -> None:
        """Queues the copy of this rank's part of the full buffers, after the gathers that fill them."""
        for held, part in self._parts:
            copy(held, part, self._streams.gather)
        self.is_current = True

    def gather(self) -> list[Work]:
        """Queues the gathers that fill the full buffers from the ranks' secondary shards."""
        works = []
        for gather in self._gathers:
            gathered = gather.queue(self._streams.gather, self._streams.computed())
            self._comm.order.queued("all_gather", gathered)
            works.append(Work(gathered, self._compute, self))
        return works
