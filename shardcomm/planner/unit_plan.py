"""What one unit costs a rank."""

from __future__ import annotations

from dataclasses import dataclass

from shardcomm.trace import traffic
from shardcomm.unit.grouped_unit import GroupedUnit


@dataclass(frozen=True)
class UnitPlan:
    """What one unit costs a rank, in bytes.

    Attributes:
        name: The unit's name.
        numel: How many elements the parameters of the whole unit have.
        trained_numel: How many of them have gradients.
        shards: How many ranks hold the unit between them.
        replicas: How many times they do.
        buckets: How many buckets its parameters have, each of which is gathered by itself: one for each dtype and block
            format, and others for parameters that are frozen or not cut.
        reduced_buckets: How many of them have gradients, each of which is reduced by itself.
        parameter_bytes: The rank's shard, padding included.
        gradient_bytes: The gradients of the rank's shard, padding included.
        padding_bytes: The padding of all ranks' shards together.
        full_bytes: The full parameters, in the slot; 0 where the shard is all of them.
        full_gradient_bytes: The gradients that backward leaves, until they are packed.
        gather_bytes: What the rank receives from the others in one gather.
        encoding_bytes: What it reads and writes in such a gather to encode its part in a block format; 0 without one.
        decoding_bytes: What is read and written to decode the parts of all, once for all ranks that share memory.
        secondary_bytes: The secondary shard; 0 without one.
        regather_bytes: What the rank receives in each gather of a step except the first. With a secondary shard these
            come from the ranks of its host.
        regather_ranks: How many ranks take part in those.
        gathers: How many gathers there are in a step.
        packed_gradient_bytes: The unit's gradients as they are packed to be reduced, padding included.
        reduce_bytes: What the rank sends to the others in the step's reduce-scatter.
        reduce_format: In what the sums of a host cross to other hosts; "": as float32. `reduce_bytes` are those before,
            which the ranks of a host give each other.
        partial_bytes: A rank's part of the gradients as the sums of several hosts are: in float32, or in the dtype in
            which it is reduced if that is wider.
        crossing_bytes: The same as it crosses from host to host, in `reduce_format`.
        sum_coding_bytes: What the rank reads and writes in a reduce, for each host, to code those sums, and to decode
            the ones that come; 0 without a format.
        all_reduce_bytes: What the rank sends to the replicas in the step's all-reduce.
    """

    name: str
    numel: int
    trained_numel: int
    shards: int
    replicas: int
    buckets: int
    reduced_buckets: int
    parameter_bytes: int
    gradient_bytes: int
    padding_bytes: int
    full_bytes: int
    full_gradient_bytes: int
    gather_bytes: int
    encoding_bytes: int
    decoding_bytes: int
    secondary_bytes: int
    regather_bytes: int
    regather_ranks: int
    gathers: int
    packed_gradient_bytes: int
    reduce_bytes: int
    reduce_format: str
    partial_bytes: int
    crossing_bytes: int
    sum_coding_bytes: int
    all_reduce_bytes: int

    @property
    def gathered_bytes(self) -> int:
        """What the rank receives from the others in all gathers of a step, in bytes."""
        again = max(self.gathers - 1, 0)
        return (self.gathers - again) * self.gather_bytes + again * self.regather_bytes

    @classmethod
    def of(cls, unit: GroupedUnit, secondary_bytes: int, gathers: int) -> UnitPlan:
        """The costs of `unit`, with a secondary shard of so many bytes, and so many gathers in a step."""
        groups, pool = unit.groups, unit.pool
        rank = pool.rank
        trained = [group for group in groups if group.trainable]
        gather_bytes = sum(sum(group.sent_bytes) - group.sent_bytes[rank] for group in groups)
        regather_bytes = gather_bytes
        if secondary_bytes:
            place = rank % pool.secondary
            regather_bytes = sum(
                group.full_bytes - group.secondary_bytes(pool.secondary)[place] for group in groups
            )
        return cls(
            name=unit.unit.name,
            numel=sum(group.layout.numel for group in groups),
            trained_numel=sum(group.layout.numel for group in trained),
            shards=pool.shards,
            replicas=pool.replicas,
            buckets=len(groups),
            reduced_buckets=len(trained),
            parameter_bytes=sum(group.shard_bytes[rank] for group in groups),
            gradient_bytes=sum(group.shard_bytes[rank] for group in trained),
            padding_bytes=sum(group.layout.padding * group.dtype.itemsize for group in groups),
            full_bytes=sum(group.full_bytes for group in groups if group.needs_slot),
            full_gradient_bytes=sum(
                group.layout.numel * group.param_dtype.itemsize for group in trained
            ),
            gather_bytes=gather_bytes,
            encoding_bytes=sum(group.encoding_bytes(rank) for group in groups),
            decoding_bytes=sum(group.decoding_bytes for group in groups),
            secondary_bytes=secondary_bytes,
            regather_bytes=regather_bytes,
            regather_ranks=pool.secondary if secondary_bytes else pool.shards,
            gathers=gathers,
            packed_gradient_bytes=sum(group.reduced_bytes for group in trained),
            reduce_bytes=sum(
                group.reduced_bytes - group.reduced_shard_bytes[rank] for group in trained
            ),
            reduce_format=", ".join(
                dict.fromkeys(str(group.reduce_format) for group in trained if group.reduce_format)
            ),
            partial_bytes=sum(group.partial_shard_bytes[rank] for group in trained),
            crossing_bytes=sum(group.crossing_shard_bytes[rank] for group in trained),
            sum_coding_bytes=sum(group.sum_coding_bytes(rank) for group in trained),
            all_reduce_bytes=sum(
                traffic.all_reduce_bytes(group.reduced_shard_bytes[rank], pool.replicas)
                for group in trained
            ),
        )
