"""A bucket group: parameters of a unit that share a bucket, and how many bytes they come to. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch

from shardcomm.copy.blocks import BlockFormat, ReduceFormat
from shardcomm.copy.wire_part import part_bytes
from shardcomm.layout.layout import Layout
from shardcomm.unit.unit import OwnedParam


@dataclass(frozen=True)
class BucketGroup:
    """Parameters of a unit that share a bucket.

    Attributes:
        params: The parameters.
        layout: The bucket's layout.
        dtype: As in `Bucket`.
        param_dtype: As in `Bucket`.
        reduce_dtype: As in `Bucket`.
        gather_format: As in `Bucket`.
        coded: How many parameters `gather_format` is for, the first ones; 0 without one.
        reduce_format: As in `Bucket`.
        cpu_offload: Whether the bucket's shard is in host memory.
    """

    params: list[OwnedParam]
    layout: Layout
    dtype: torch.dtype
    param_dtype: torch.dtype
    reduce_dtype: torch.dtype
    gather_format: BlockFormat | None
    coded: int
    reduce_format: ReduceFormat | None
    cpu_offload: bool

    @property
    def trainable(self) -> bool:
        """Whether the parameters have gradients, which are reduced."""
        return self.params[0].param.requires_grad

    @property
    def shard_bytes(self) -> tuple[int, ...]:
        """The bytes of each rank's shard, padding included."""
        return self._of_each_rank(lambda numel: numel * self.dtype.itemsize)

    @property
    def full_bytes(self) -> int:
        """The bytes of the full buffer, in the unit's slot."""
        return self.layout.flat_numel * self.param_dtype.itemsize

    @property
    def reduced_bytes(self) -> int:
        """The bytes of the full gradients, in the dtype in which they are reduced."""
        return self.layout.flat_numel * self.reduce_dtype.itemsize

    @property
    def reduced_shard_bytes(self) -> tuple[int, ...]:
        """The bytes of each rank's part of the gradients, in the dtype in which they are reduced."""
        return self._of_each_rank(lambda numel: numel * self.reduce_dtype.itemsize)

    @property
    def partial_shard_bytes(self) -> tuple[int, ...]:
        """The bytes of each rank's part of the gradients as the sums of several hosts are."""
        itemsize = max(self.reduce_dtype.itemsize, torch.float32.itemsize)
        return self._of_each_rank(lambda numel: numel * itemsize)

    @property
    def crossing_shard_bytes(self) -> tuple[int, ...]:
        """The bytes of each rank's part of the gradients as a host's sums cross to other hosts."""
        if self.reduce_format is None:
            return self.partial_shard_bytes
        if isinstance(self.reduce_format, BlockFormat):
            return self._of_each_rank(self.reduce_format.nbytes)
        itemsize = self.reduce_format.itemsize
        return self._of_each_rank(lambda numel: numel * itemsize)

    def sum_coding_bytes(self, rank: int) -> int:
        """What `rank` reads and writes, for each host, to code the sums that cross and to decode those that came.

        Those that came as bfloat16 are added as they are.
        """
        if self.reduce_format is None:
            return 0
        passes = 2 if isinstance(self.reduce_format, BlockFormat) else 1
        return passes * (self.partial_shard_bytes[rank] + self.crossing_shard_bytes[rank])

    @cached_property
    def sent_bytes(self) -> tuple[int, ...]:
        """The bytes of each rank's part as a gather sends it."""
        if self.gather_format is not None and self.layout.world_size > 1:
            itemsize = self.param_dtype.itemsize
            return part_bytes(self.layout, self.gather_format, self.coded, itemsize)
        return self._of_each_rank(lambda numel: numel * self.param_dtype.itemsize)

    @property
    def codes_gathers(self) -> bool:
        """Whether a gather encodes what it sends, and decodes what it receives."""
        return self.gather_format is not None and self.layout.world_size > 1

    def encoding_bytes(self, rank: int) -> int:
        """What `rank` reads and writes in a gather to encode its part."""
        return self.shard_bytes[rank] + self.sent_bytes[rank] if self.codes_gathers else 0

    @property
    def decoding_bytes(self) -> int:
        """What is read and written in a gather to decode the parts of all, once."""
        return sum(self.sent_bytes) + self.full_bytes if self.codes_gathers else 0

    def secondary_bytes(self, ranks: int) -> list[int]:
        """The bytes of the secondary shard of each of `ranks` ranks."""
        return [numel * self.param_dtype.itemsize for numel in self.layout.parts(ranks)]

    @property
    def needs_slot(self) -> bool:
        """Whether full parameters need memory, which they do unless they are the shard itself."""
        return self.layout.world_size > 1 or self.param_dtype != self.dtype or self.cpu_offload

    def _of_each_rank(self, nbytes: Callable[[int], int]) -> tuple[int, ...]:
        """What `nbytes` says of the number of elements of each rank's shard. Of a million ranks most are alike."""
        numels = self.layout.shard_numels
        if self.layout.counts is None:
            return (nbytes(numels[0]),) * len(numels)
        return tuple(map(nbytes, numels))
