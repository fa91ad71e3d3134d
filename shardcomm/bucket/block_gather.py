"""BlockGather: an all-gather that sends elements in a block format, a quarter of float32's bytes.

    shard ──encode──► own part ──all-gather──► a part of each rank ──decode──► full buffer
      └──────cast───────►┘                                └──────────copy───────────►┘       of elements that stay wide

Every part is decoded, also a rank's own, so that all ranks compute with the same values. The ranks of a host have one
full buffer where they share memory: each then decodes some of the parts, and they meet when all are there. The parts
lie in memory of their own, since an element in the full buffer is larger than on the wire.

Reference: quantised weight communication (qwZ) of ZeRO++: Wang et al., "ZeRO++: Extremely Efficient Collective
Communication for Giant Model Training", arXiv 2306.10209, section 3.1.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch

from shardcomm.comm.communicator import Communicator
from shardcomm.comm.words import Use
from shardcomm.copy.blocks import WIRE_ALIGN, BlockFormat, BlockSegment, decode, encode
from shardcomm.copy.bound_copy import BoundCopy
from shardcomm.copy.plan import CopyPlan
from shardcomm.copy.segment import Segment
from shardcomm.copy.wire_part import Run, WirePart, part_bytes
from shardcomm.copy.wire_stats import WireError, WireStats
from shardcomm.layout.layout import Layout
from shardcomm.stream.streams import AnyEvent, AnyStream, uses_core


class BlockWire:
    """The memory through which gathers in a block format pass. Buckets share it if their gathers are on one stream.

    Args:
        comm: The ranks.
        sent_bytes: The bytes of the longest part that a rank sends; the same on all ranks.
        received_bytes: The bytes of all parts of the largest gather.

    Attributes:
        sent: This rank's part. Not its place among the received ones, which ranks of one host share: others may still
            decode the gather before.
        received: The parts of all ranks.
    """

    def __init__(self, comm: Communicator, sent_bytes: int, received_bytes: int) -> None:
        self.sent = _aligned(comm, sent_bytes, "reduce")
        self.received = _aligned(comm, received_bytes, "gather")

    @property
    def nbytes(self) -> int:
        """The bytes of both."""
        return self.sent.nbytes + self.received.nbytes

    def check(self, parts: Sequence[int]) -> None:
        """ValueError unless there is room for parts of so many bytes."""
        if self.sent.nbytes < max(parts) or self.received.nbytes < sum(parts):
            raise ValueError(
                f"Bucket: wire has {self.sent.nbytes} bytes to send from, and {self.received.nbytes} to receive into; "
                f"the bucket needs {max(parts)} and {sum(parts)}"
            )


def _aligned(comm: Communicator, nbytes: int, use: Use) -> torch.Tensor:
    memory = comm.allocate(nbytes, dtype=torch.uint8, use=use)
    if memory.data_ptr() % WIRE_ALIGN == 0:  # as all memory of the core is
        return memory
    room = comm.allocate(nbytes + WIRE_ALIGN, dtype=torch.uint8, use=use)  # torch's, over `c10d`
    start = -room.data_ptr() % WIRE_ALIGN
    return room[start : start + nbytes]


class BlockGather:
    """Gathers the shards of a bucket in a block format.

    Args:
        comm: The ranks, at least two.
        layout: The bucket's layout.
        format: How elements are coded. It rounds to nearest.
        coded: How many parameters are coded, the first ones of `layout`. The others are sent in the dtype of `full`.
        full: The full buffer, where decoded elements go.
        shard: This rank's elements.
        wire: Memory for the parts. None: its own.
        tag: As in `Communicator.all_gather`.

    Attributes:
        wire: As given, or its own.
        nbytes: The bytes that this rank receives from the others in one gather.

    Raises:
        ValueError: The core does not work on the communicator's device, or `wire` is too small.
    """

    def __init__(
        self,
        comm: Communicator,
        layout: Layout,
        format: BlockFormat,
        coded: int,
        full: torch.Tensor,
        shard: torch.Tensor,
        *,
        wire: BlockWire | None,
        tag: int,
    ) -> None:
        if not uses_core(comm.device):
            raise ValueError(
                f"Bucket: gather_format is {format}, and the communicator is on {comm.device}, where the core does not "
                "encode; leave it out"
            )
        parts = part_bytes(layout, format, coded, full.itemsize)
        self.nbytes = sum(parts) - parts[comm.rank]
        self.wire = BlockWire(comm, max(parts), sum(parts)) if wire is None else wire
        self.wire.check(parts)
        self._stats = WireStats(comm.device)
        self._format = format
        own = WirePart.of(layout, comm.rank, format, coded, full.itemsize)
        sent = self.wire.sent[: parts[comm.rank]]
        self._sent, wide = sent[: own.coded_bytes], sent[own.coded_bytes :].view(full.dtype)
        self._shard = _coded(shard, own.coded)
        self._cast = _copy(
            [_moved(run.numel, run.start, run.place) for run in own.wide], shard, wide
        )
        received = self.wire.received[: sum(parts)]
        self._sharing = comm.sharing(full, tag=tag)
        self._decoded: list[tuple[torch.Tensor, list[BlockSegment]]] = []
        copied: list[Segment] = []
        begins = list(accumulate(parts, initial=0))
        # This rank's share of the parts; over `hosts`, those that it has brought in.
        for rank in range(self._sharing.number, comm.size, self._sharing.ranks):
            part = WirePart.of(layout, rank, format, coded, full.itemsize)
            begin, start = begins[rank], layout.starts[rank]
            behind = begin + part.coded_bytes
            if part.coded:
                self._decoded.append((received[begin:behind], _coded(full[start:], part.coded)))
            first = behind // full.itemsize
            copied += [_moved(r.numel, first + r.place, start + r.start) for r in part.wide]
        self._copy = _copy(copied, received.view(full.dtype), full)
        self._gather = comm.bind_all_gather(received, sent, counts=parts, tag=tag)
        self._ended: AnyEvent | None = None  # that of the latest gather; None: there was none

    def take_error(self) -> WireError:
        """What the format has cost this rank's elements since this was called last; waits for gathers under way."""
        if self._ended is not None:
            self._ended.wait()
        return self._stats.take()

    def queue(self, stream: AnyStream, after: AnyStream | None) -> AnyEvent:
        """Queues it on `stream`, after all work that `after` has been given so far; returns the event of its end."""
        if after is not None:
            stream.wait(after.record())
        threads = torch.get_num_threads()
        if self._shard:
            encode(
                self._format,
                self._shard,
                self._sent,
                stats=self._stats,
                stream=stream,
                threads=threads,
            )
        if self._cast is not None:
            self._cast.run(stream=stream)
        self._gather.queue(stream, None)
        for part, elements in self._decoded:
            decode(self._format, part, elements, stream=stream, threads=threads)
        if self._copy is not None:
            self._copy.run(stream=stream)
        if self._sharing.meeting is not None:
            self._sharing.meeting.queue(stream, None)
        self._ended = stream.record()
        return self._ended


def _coded(shard: torch.Tensor, runs: Sequence[Run]) -> list[BlockSegment]:
    """The runs of a shard, which may have more behind it, as they are encoded and decoded."""
    return [BlockSegment(shard[run.start : run.start + run.numel], run.place) for run in runs]


def _moved(numel: int, source: int, destination: int) -> Segment:
    return Segment(0, 0, source, numel, destination, numel, 1, numel)


def _copy(
    segments: Sequence[Segment], source: torch.Tensor, destination: torch.Tensor
) -> BoundCopy | None:
    """The copy of `segments` from one flat tensor to another, with a cast where dtypes differ; None without any."""
    if not segments:
        return None
    plan = CopyPlan(tuple(segments), source.dtype, destination.dtype)
    return plan.bind([source], [destination], threads=torch.get_num_threads())
