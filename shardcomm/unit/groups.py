"""Groups: which parameters of a unit share a bucket, in which dtypes, and how much memory they need. Pure arithmetic.

The engine allocates these sizes, and the planner adds them up before anything is allocated.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import torch
from torch import nn

from shardcomm.arguments.dtype import FLOATS
from shardcomm.copy.blocks import BlockFormat, ReduceFormat
from shardcomm.layout.layout import Layout
from shardcomm.layout.param_spec import Granularity, ParamSpec, ShardDim
from shardcomm.parameter.tensor_parallel import local
from shardcomm.schedule.planning import REDUCES_IN_FLIGHT
from shardcomm.unit.mixed_precision import MixedPrecision
from shardcomm.unit.owners import OwnerCost, checked_cost, choose_owners, in_bytes
from shardcomm.unit.policy import Policy
from shardcomm.unit.unit import OwnedParam, UnitParams

_T = TypeVar("_T")

GranularityOf = Granularity | Callable[[str, nn.Parameter], Granularity]
"""A granularity for all parameters, or a function of a parameter's name and the parameter."""

ShardDimOf = ShardDim | Callable[[str, nn.Parameter], ShardDim]
"""A shard dim for all parameters, or a function of a parameter's name and the parameter."""


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
        reduce_format: As in `Bucket`.
        cpu_offload: Whether the bucket's shard is in host memory.
    """

    params: list[OwnedParam]
    layout: Layout
    dtype: torch.dtype
    param_dtype: torch.dtype
    reduce_dtype: torch.dtype
    gather_format: BlockFormat | None
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

    @property
    def sent_bytes(self) -> tuple[int, ...]:
        """The bytes of each rank's part as a gather sends it."""
        if self.gather_format is not None and self.layout.world_size > 1:
            return self._of_each_rank(self.gather_format.nbytes)
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


def group_units(
    units: Sequence[UnitParams],
    policies: Sequence[Policy],
    pools: Sequence[Pool],
    granularity: GranularityOf,
    shard_dim: ShardDimOf,
    owner_cost: OwnerCost | None = None,
) -> list[list[BucketGroup]]:
    """Groups the parameters of each unit; each group will have a bucket.

    A unit has a group for each dtype, and for each block format in which it is gathered. Frozen parameters have groups
    of their own, since they are never reduced. So do parameters that are not cut, since their shards are as long as
    what each rank owns; owners are chosen over all units of a pool (`shardcomm.unit.owners`).

    Args:
        units: The model's units.
        policies: The policy of each unit, with nothing left open.
        pools: The ranks over which each unit is sharded.
        granularity: As in `fully_shard`.
        shard_dim: As in `fully_shard`.
        owner_cost: As in `fully_shard`.

    Raises:
        TypeError: `owner_cost` is no function.
        ValueError: A parameter cannot be sharded, a function that was given as an argument returned a value that is
            not accepted, or `owner_cost` is given and no parameter has an owner.
    """
    if isinstance(granularity, type):  # RowBlock without its number
        raise ValueError(
            f"granularity is {granularity!r}; accepted: 'element', 'row', 'tensor', RowBlock(n), or a function that "
            "returns one of these"
        )
    specs = [[_spec(owned, granularity, shard_dim) for owned in unit.params] for unit in units]
    if owner_cost is not None and not callable(owner_cost):
        raise TypeError(
            f"owner_cost is {owner_cost!r}; it must be a function of a parameter's name and the parameter, or None "
            "for its bytes"
        )
    if owner_cost is not None and not any(
        spec.granularity == "tensor" for unit_specs in specs for spec in unit_specs
    ):
        raise ValueError(
            'owner_cost is given, and no parameter has an owner; give granularity="tensor" too, or leave it out'
        )
    owners: dict[str, int] = {}
    for pool in dict.fromkeys(pools):
        its = [i for i, each in enumerate(pools) if each == pool]
        owners |= _owners(
            [units[i] for i in its], [specs[i] for i in its], pool.shards, owner_cost or in_bytes
        )
    groups = []
    for unit, policy, pool, unit_specs in zip(units, policies, pools, specs, strict=True):
        precision = policy.mixed_precision or MixedPrecision()
        by_kind: dict[
            tuple[torch.dtype, bool, bool, BlockFormat | None], list[tuple[OwnedParam, ParamSpec]]
        ] = {}
        for owned, spec in zip(unit.params, unit_specs, strict=True):
            param = owned.param
            format = precision.gather_format_of(spec.name, param)
            kind = param.dtype, param.requires_grad, spec.name in owners, format
            by_kind.setdefault(kind, []).append((owned, spec))
        groups.append(
            [
                _group(together, pool.shards, policy, format, owners)
                for (_, _, _, format), together in by_kind.items()
            ]
        )
    return groups


def _owners(
    units: Sequence[UnitParams],
    specs: Sequence[Sequence[ParamSpec]],
    world_size: int,
    cost: OwnerCost,
) -> dict[str, int]:
    """The owner of each parameter that has one, by name. On a rank alone none has."""
    if world_size == 1:
        return {}
    whole = {
        spec.name: checked_cost(cost, spec.name, owned.param)
        for unit, unit_specs in zip(units, specs, strict=True)
        for owned, spec in zip(unit.params, unit_specs, strict=True)
        if spec.granularity == "tensor"
    }
    return dict(zip(whole, choose_owners(list(whole.values()), world_size), strict=True))


def _group(
    together: Sequence[tuple[OwnedParam, ParamSpec]],
    world_size: int,
    policy: Policy,
    format: BlockFormat | None,
    owners: Mapping[str, int],
) -> BucketGroup:
    params, specs = [owned for owned, _ in together], [spec for _, spec in together]
    dtype = params[0].param.dtype
    precision = policy.mixed_precision or MixedPrecision()
    param_dtype, reduce_dtype = _dtypes(params[0], precision)
    itemsize = min(dtype.itemsize, param_dtype.itemsize, reduce_dtype.itemsize)
    layout = Layout.plan(
        specs,
        world_size,
        # With a block format, no block has elements of two parameters.
        align_bytes=128 if format is None else max(128, format.block * itemsize),
        itemsize=itemsize,
        owners=[owners[spec.name] for spec in specs] if specs[0].name in owners else None,
    )
    reduces = params[0].param.requires_grad and dtype in FLOATS
    reduce_format = precision.reduce_format if reduces else None
    return BucketGroup(
        params,
        layout,
        dtype,
        param_dtype,
        reduce_dtype,
        format,
        reduce_format,
        bool(policy.cpu_offload),
    )


class Pool(NamedTuple):
    """The ranks over which some units are sharded, which share their memory: a mesh, as a plan knows it.

    Attributes:
        number: A number that tells pools of the same sizes apart.
        replicas: How many ranks hold each shard.
        shards: How many shards there are.
        rank: The shard of the rank for which the plan is.
        secondary: How many ranks gather for backward among themselves; 0: all.
    """

    number: int
    replicas: int
    shards: int
    rank: int
    secondary: int = 0

    def of(self, pools: Sequence[Pool], groups: Sequence[_T]) -> list[_T]:
        """The entries of `groups`, which has one for each unit, for the units of this pool."""
        return [each for pool, each in zip(pools, groups, strict=True) if pool == self]


def slot_bytes(groups: Sequence[Sequence[BucketGroup]], slot_of: Sequence[int]) -> list[int]:
    """The size of each slot in bytes: that of the largest unit that uses it. `groups[i]` are the groups of unit i."""
    sizes = [0] * (max(slot_of, default=-1) + 1)
    for slot, unit_groups in zip(slot_of, groups, strict=True):
        wanted = sum(group.full_bytes for group in unit_groups if group.needs_slot)
        sizes[slot] = max(sizes[slot], wanted)
    return sizes


def secondary_bytes(
    groups: Sequence[Sequence[BucketGroup]], slot_of: Sequence[int], pools: Sequence[Pool]
) -> list[int]:
    """The size of each unit's secondary shard in bytes.

    It is 0 for a unit that has a slot for itself, which is not released before backward.
    """
    users = Counter(slot_of)
    return [
        sum(max(group.secondary_bytes(pool.secondary)) for group in unit_groups)
        if pool.secondary and users[slot] > 1
        else 0
        for unit_groups, slot, pool in zip(groups, slot_of, pools, strict=True)
    ]


def reduce_buffer_bytes(groups: Sequence[Sequence[BucketGroup]], shard_ranks: int) -> int:
    """The size of the reduce buffer in bytes; 0 if there is one shard, whose gradients need no reduce."""
    if shard_ranks == 1:
        return 0
    return max((group.reduced_bytes for unit in groups for group in unit), default=0)


def wire_bytes(groups: Sequence[Sequence[BucketGroup]], shard_ranks: int) -> tuple[int, int]:
    """The bytes of the memory that gathers in block formats send from, and receive into; 0 and 0 if there are none."""
    parts = [
        group.sent_bytes
        for unit in groups
        for group in unit
        if group.gather_format is not None and shard_ranks > 1
    ]
    return max(map(max, parts), default=0), max(map(sum, parts), default=0)


def staging_bytes(groups: Sequence[Sequence[BucketGroup]], replicas: int) -> list[int]:
    """The size of each staging buffer in bytes. Buckets use them in turn; without replicas there are none."""
    if replicas == 1:
        return []
    largest = max((max(g.reduced_shard_bytes) for unit in groups for g in unit), default=0)
    # More than one, since the next unit's gradients come while one unit's shard is all-reduced; and as many as a unit
    # has buckets, all of which are reduced before the first is all-reduced.
    at_once = max(REDUCES_IN_FLIGHT, *map(len, groups), 0)
    return [largest] * min(at_once, sum(map(len, groups)))


def offload_bytes(groups: Sequence[Sequence[BucketGroup]]) -> int:
    """The size in bytes of the device's memory through which offloaded shards pass; gradients have as much again.

    Frozen parameters count, too, since they may be thawed later.
    """
    return max((max(g.shard_bytes) for unit in groups for g in unit if g.cpu_offload), default=0)


def _spec(owned: OwnedParam, granularity: GranularityOf, shard_dim: ShardDimOf) -> ParamSpec:
    name, param = owned.name, owned.param
    if nn.parameter.is_lazy(param):
        raise ValueError(
            f"parameter {name!r} has no shape yet, as a lazy module's before its first forward; call the "
            "model once, on every rank, before fully_shard"
        )
    if owned.distribution is None and not issubclass(type(param), nn.Parameter):
        raise ValueError(
            f"parameter {name!r} is a {type(param).__name__}, of which rows would be plain tensors; "
            "accepted: nn.Parameter of plain tensors or of DTensors. Leave it to each rank by ignored_params=, or "
            "convert it before"
        )
    if param._backward_hooks or param._post_accumulate_grad_hooks or param.grad is not None:
        what = "a gradient" if param.grad is not None else "hooks"
        raise ValueError(
            f"parameter {name!r} has {what} already, which would be lost: drop gradients by zero_grad() "
            "before, and call register_post_accumulate_grad_hook after fully_shard"
        )
    if param.layout is not torch.strided or param.is_quantized:
        kind = param.dtype if param.is_quantized else param.layout
        raise ValueError(
            f"parameter {name!r} is a tensor of {kind}, whose rows cannot be shared out; "
            "accepted: dense tensors that are not quantised"
        )
    return ParamSpec(
        name,
        tuple(local(param).shape),
        granularity(name, param) if callable(granularity) else granularity,
        shard_dim(name, param) if callable(shard_dim) else shard_dim,
    )


def _dtypes(owned: OwnedParam, precision: MixedPrecision) -> tuple[torch.dtype, torch.dtype]:
    """The dtype in which a parameter is computed with, and the one in which its gradient is reduced."""
    dtype, trainable = owned.param.dtype, owned.param.requires_grad
    if dtype in FLOATS:
        param_dtype = precision.param_dtype or dtype
        return param_dtype, precision.reduce_dtype or param_dtype
    if trainable and dtype != torch.float64:
        how = (
            ", by torch.view_as_complex of two real numbers each in forward"
            if dtype.is_complex
            else ""
        )
        raise ValueError(
            f"parameter {owned.name!r} is {dtype}, in which gradients cannot be reduced; accepted: "
            f"float32, bfloat16, float16, float64{how}, or any dtype with requires_grad=False"
        )
    if dtype == torch.float64 and (precision.param_dtype or (trainable and precision.reduce_dtype)):
        raise ValueError(
            f"parameter {owned.name!r} is {dtype}, which mixed_precision does not convert; accepted: "
            "float32, bfloat16, float16"
        )
    return dtype, dtype  # float64, and dtypes that are only moved: quantised values, indices
