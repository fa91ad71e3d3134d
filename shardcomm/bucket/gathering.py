"""Gathering: the way of a bucket's parameters, from the shard of each rank to the full ones on every rank.

    shard ──fetch, with an offload──► device ──cast──► all-gather ──► full buffer
                                         └──encode──► all-gather ──decode──►┘   in a block format; see block_gather.py

Gathers that run beside computation do so on the gather stream, in the order in which they are queued; SideStreams says
which do.
"""

from __future__ import annotations

import zlib
from functools import cached_property

import torch

from shardcomm._C import CommError
from shardcomm.arguments.dtype import movable
from shardcomm.bucket.block_gather import BlockGather, BlockWire
from shardcomm.bucket.offload import Offload
from shardcomm.bucket.side_streams import SideStreams
from shardcomm.comm.bound_collective import BoundCollective
from shardcomm.comm.communicator import Communicator
from shardcomm.copy.blocks import BlockFormat
from shardcomm.copy.wire_stats import WireError
from shardcomm.layout.layout import Layout
from shardcomm.layout.views import full_view, shard_view
from shardcomm.meeting.comm_error import like
from shardcomm.stream.work import DONE, Work


class Gathering:
    """Gathers the shards of `layout` over the ranks of `comm` into `full`; in `format` the first `coded` parameters.

    Attributes:
        wire: The memory for gathers in a block format; None without one, and on a rank alone.
    """

    def __init__(
        self,
        layout: Layout,
        comm: Communicator,
        shard: torch.Tensor,
        full: torch.Tensor,
        format: BlockFormat | None,
        *,
        coded: int,
        wire: BlockWire | None,
        offload: Offload | None,
        side: SideStreams,
        tag: int,
    ) -> None:
        self._layout = layout
        self._comm = comm
        self._shard = shard
        self._full = full
        self._offload = offload
        self._side = side
        self._tag = tag
        self._sent = shard if offload is None else offload.staged(shard)
        self._recv, self._send = movable(full), movable(self._sent)
        self._counts = self._moved_counts(self._sent, self._send)
        self._blocks: BlockGather | None = None
        self.wire: BlockWire | None = None
        if format is not None and comm.size > 1:
            self._blocks = BlockGather(
                comm, layout, format, coded, full, self._sent, wire=wire, tag=tag
            )
            self.wire = self._blocks.wire

    @cached_property
    def nbytes(self) -> int:
        """The bytes that this rank receives from the others in one gather."""
        if self._blocks is not None:
            return self._blocks.nbytes
        return (self._layout.flat_numel - self._shard.numel()) * self._full.itemsize

    def take_error(self) -> WireError | None:
        """What the format has cost this rank's shard since this was called last; None without a format.

        It waits for gathers under way.
        """
        return None if self._blocks is None else self._blocks.take_error()

    def all_gather(self, *, async_op: bool = False) -> Work:
        """Gathers the full parameters into the full buffer; collective."""
        if self._full is self._shard:
            self._comm.check()  # raises where a gather with other ranks would
            return DONE
        if self._blocks is not None or self._side.takes(async_op):
            work = self._queue(self._blocks or self._bound)
            if not async_op:
                work.wait()
            return work
        self._bound()
        return DONE

    def shards_into(self, flat: torch.Tensor) -> None:
        """Gathers the shards in their own dtype into `flat`, and waits for them; collective."""
        recv, send = movable(flat), movable(self._sent)
        counts = self._moved_counts(self._sent, send)
        if self._side.takes(False):
            bound = self._comm.bind_all_gather(recv, send, counts=counts, tag=self._tag)
            self._queue(bound).wait()
        else:
            self._comm.all_gather(recv, send, counts=counts, tag=self._tag)

    def rows(self, index: int, held: torch.Tensor) -> torch.Tensor:
        """Gathers the rows `held` of a tensor of parameter `index`; see `Bucket.gathered_rows`."""
        placement = self._layout.placements[index]
        piece = self._layout.piece(self._comm.rank, index)
        flat = self._shard.new_zeros(self._shard.numel(), dtype=held.dtype)
        shard_view(flat, placement, piece).copy_(held)
        flat = flat.to(self._comm.device)
        full = flat.new_empty(self._layout.flat_numel)
        self._others_into(full, flat, f"all of {placement.spec.name!r}")
        return full_view(full, placement).contiguous().to(held.device)

    def _others_into(self, full: torch.Tensor, held: torch.Tensor, what: str) -> None:
        """Gathers other elements than the shards, `held` of this rank, into `full`, and waits; collective.

        It comes after the gathers that are queued. The tag is a checksum of `what`, so that transports which compare
        calls notice where one rank alone asks for `full_tensor()`, and another gathers its shard.
        """
        recv, send = movable(full), movable(held)
        counts = self._moved_counts(held, send)
        tag = zlib.crc32(what.encode())  # smaller than those of units
        try:
            if self._side.takes(True):
                streams = self._side.streams
                bound = self._comm.bind_all_gather(recv, send, counts=counts, tag=tag)
                gathered = bound.queue(streams.gather, streams.computed())
                self._comm.order.queued("all_gather", gathered)
                Work(gathered, self._side.compute, recv, send).wait()
            else:
                self._comm.all_gather(recv, send, counts=counts, tag=tag)
        except CommError as error:
            raise like(
                error, f"{what} (tag {tag}), which every rank must gather: {error}"
            ) from error

    def _queue(self, gather: BoundCollective | BlockGather) -> Work:
        streams = self._side.streams
        if self._offload is not None:  # beside computation that still reads the full buffer
            self._offload.fetch(self._shard, streams.gather)
        gathered = gather.queue(streams.gather, streams.computed())
        self._comm.order.queued("all_gather", gathered)
        return Work(gathered, self._side.compute, self)

    @cached_property
    def _bound(self) -> BoundCollective:
        return self._comm.bind_all_gather(
            self._recv, self._send, counts=self._counts, tag=self._tag
        )

    def _moved_counts(self, shard: torch.Tensor, moved: torch.Tensor) -> tuple[int, ...] | None:
        """`layout.counts` in elements of `moved`, which is `shard` as `movable` shows it."""
        counts = self._layout.counts
        if counts is None or moved.dtype == shard.dtype:
            return counts
        return tuple(count * shard.itemsize // moved.itemsize for count in counts)
