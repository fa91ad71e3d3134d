"""Groups: which parameters of a unit share a bucket, in which dtypes, and the memory they all need. Pure arithmetic.

The engine allocates by it, and the planner adds it up before anything is allocated.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import torch
from torch import nn

from shardcomm.arguments.dtype import FLOATS
from shardcomm.layout.layout import Granularity, Layout, ParamSpec, ShardDim
from shardcomm.parameter.tensor_parallel import local
from shardcomm.schedule.schedule import REDUCES_IN_FLIGHT
from shardcomm.unit.mixed_precision import MixedPrecision
from shardcomm.unit.owners import OwnerCost, checked_cost, choose_owners, in_bytes
from shardcomm.unit.policy import Policy
from shardcomm.unit.unit import OwnedParam, UnitParams

_T = TypeVar("_T")

GranularityOf = Granularity | Callable[[str, nn.Parameter], Granularity]
ShardDimOf = ShardDim | Callable[[str, nn.Parameter], ShardDim]


@dataclass(frozen=True)
class BucketGroup:
    """Parameters that share a bucket, its layout, and its dtypes (as in `Bucket`).

    `cpu_offload`: whether its shard is in host memory.
    """

    params: list[OwnedParam]
    layout: Layout
    dtype: torch.dtype
    param_dtype: torch.dtype
    reduce_dtype: torch.dtype
    cpu_offload: bool

    @property
    def trainable(self) -> bool:
        """Whether its gradients are reduced."""
        return self.params[0].param.requires_grad

    @property
    def shard_bytes(self) -> tuple[int, ...]:
        """Of each rank's shard, padding included."""
        return tuple(numel * self.dtype.itemsize for numel in self.layout.shard_numels)

    @property
    def full_bytes(self) -> int:
        """Of the full buffer, in the unit's slot."""
        return self.layout.flat_numel * self.param_dtype.itemsize

    @property
    def reduced_bytes(self) -> int:
        """Of the full gradients as they are reduced."""
        return self.layout.flat_numel * self.reduce_dtype.itemsize

    @property
    def reduced_shard_bytes(self) -> tuple[int, ...]:
        """Of each rank's part of them."""
        return tuple(numel * self.reduce_dtype.itemsize for numel in self.layout.shard_numels)

    def secondary_bytes(self, ranks: int) -> list[int]:
        """Of the secondary shard of each of `ranks` ranks."""
        return [numel * self.param_dtype.itemsize for numel in self.layout.parts(ranks)]

    @property
    def needs_slot(self) -> bool:
        """Whether full parameters are anything else than the shard."""
        return self.layout.world_size > 1 or self.param_dtype != self.dtype or self.cpu_offload


def group_units(
    units: Sequence[UnitParams],
    policies: Sequence[Policy],
    pools: Sequence[Pool],
    granularity: GranularityOf,
    shard_dim: ShardDimOf,
    owner_cost: OwnerCost | None = None,
) -> list[list[BucketGroup]]:
    """The buckets-to-be of each unit: one a dtype; frozen parameters apart, since they are never reduced.

    Parameters that are not cut are apart, too: their shards are as long as what each rank owns, which is chosen over
    all units of a pool (`shardcomm.unit.owners`). `policies`, `pools`: one a unit; the policies leave nothing open.

    Raises:
        ValueError: a parameter cannot be sharded, or an argument gives what is none of its values.
    """
    specs = [[_spec(owned, granularity, shard_dim) for owned in unit.params] for unit in units]
    owners: dict[str, int] = {}
    for pool in dict.fromkeys(pools):
        its = [i for i, each in enumerate(pools) if each == pool]
        owners |= _owners(
            [units[i] for i in its], [specs[i] for i in its], pool.shards, owner_cost or in_bytes
        )
    groups = []
    for unit, policy, pool, unit_specs in zip(units, policies, pools, specs, strict=True):
        by_kind: dict[tuple[torch.dtype, bool, bool], list[tuple[OwnedParam, ParamSpec]]] = {}
        for owned, spec in zip(unit.params, unit_specs, strict=True):
            param = owned.param
            kind = param.dtype, param.requires_grad, spec.name in owners
            by_kind.setdefault(kind, []).append((owned, spec))
        groups.append(
            [_group(together, pool.shards, policy, owners) for together in by_kind.values()]
        )
    return groups


def _owners(
    units: Sequence[UnitParams],
    specs: Sequence[Sequence[ParamSpec]],
    world_size: int,
    cost: OwnerCost,
) -> dict[str, int]:
    """The rank of each parameter that has one, by name; without peers none has."""
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
    owners: Mapping[str, int],
) -> BucketGroup:
    params, specs = [owned for owned, _ in together], [spec for _, spec in together]
    dtype = params[0].param.dtype
    precision = policy.mixed_precision or MixedPrecision()
    param_dtype, reduce_dtype = _dtypes(params[0], precision)
    layout = Layout.plan(
        specs,
        world_size,
        itemsize=min(dtype.itemsize, param_dtype.itemsize, reduce_dtype.itemsize),
        owners=[owners[spec.name] for spec in specs] if specs[0].name in owners else None,
    )
    return BucketGroup(params, layout, dtype, param_dtype, reduce_dtype, bool(policy.cpu_offload))


class Pool(NamedTuple):
    """Ranks over which some units are sharded, and that share the memory of these: a mesh, as a plan knows it.

    Attributes:
        number: tells pools of the same ranks apart.
        replicas, shards: how many ranks hold each shard, and how many shards there are.
        rank: this one's shard.
        secondary: how many ranks gather for backward among themselves; 0: all.
    """

    number: int
    replicas: int
    shards: int
    rank: int
    secondary: int = 0

    def of(self, pools: Sequence[Pool], groups: Sequence[_T]) -> list[_T]:
        """Those of `groups`, one a unit, that are this pool's."""
        return [each for pool, each in zip(pools, groups, strict=True) if pool == self]


def slot_bytes(groups: Sequence[Sequence[BucketGroup]], slot_of: Sequence[int]) -> list[int]:
    """The size of each slot: of the largest unit that uses it. `groups[i]` are those of unit i."""
    sizes = [0] * (max(slot_of, default=-1) + 1)
    for slot, unit_groups in zip(slot_of, groups, strict=True):
        wanted = sum(group.full_bytes for group in unit_groups if group.needs_slot)
        sizes[slot] = max(sizes[slot], wanted)
    return sizes


def secondary_bytes(
    groups: Sequence[Sequence[BucketGroup]], slot_of: Sequence[int], pools: Sequence[Pool]
) -> list[int]:
    """The size of each unit's secondary shard; a unit that has a slot for itself is not released, and needs none."""
    users = Counter(slot_of)
    return [
        sum(max(group.secondary_bytes(pool.secondary)) for group in unit_groups)
        if pool.secondary and users[slot] > 1
        else 0
        for unit_groups, slot, pool in zip(groups, slot_of, pools, strict=True)
    ]


def reduce_buffer_bytes(groups: Sequence[Sequence[BucketGroup]], shard_ranks: int) -> int:
    """The size of the one reduce buffer; of one shard alone, gradients need none."""
    if shard_ranks == 1:
        return 0
    return max((group.reduced_bytes for unit in groups for group in unit), default=0)


def staging_bytes(groups: Sequence[Sequence[BucketGroup]], replicas: int) -> list[int]:
    """The size of each staging buffer, which buckets use in turn; without replicas there are none."""
    if replicas == 1:
        return []
    largest = max((max(g.reduced_shard_bytes) for unit in groups for g in unit), default=0)
    # While one unit's shard is all-reduced, the next unit's comes.
    return [largest] * min(REDUCES_IN_FLIGHT, sum(map(len, groups)))


def offload_bytes(groups: Sequence[Sequence[BucketGroup]]) -> int:
    """The size of the device's memory through which offloaded shards pass; their gradients have as much.

    Gradients of frozen parameters count, too: they may be thawed later.
    """
    return max((max(g.shard_bytes) for unit in groups for g in unit if g.cpu_offload), default=0)


def _spec(owned: OwnedParam, granularity: GranularityOf, shard_dim: ShardDimOf) -> ParamSpec:
    name, param = owned.name, owned.param
    if nn.parameter.is_lazy(param):
        raise ValueError(
            f"fully_shard: parameter {name!r} has no shape yet, as a lazy module's before its first forward; call the "
            "model once, on every rank, before fully_shard"
        )
    if owned.distribution is None and not issubclass(type(param), nn.Parameter):
        raise ValueError(
            f"fully_shard: parameter {name!r} is a {type(param).__name__}, of which rows would be plain tensors; "
            "accepted: nn.Parameter of plain tensors or of DTensors. Leave it to each rank by ignored_params=, or "
            "convert it before"
        )
    if param._backward_hooks or param._post_accumulate_grad_hooks or param.grad is not None:
        what = "a gradient" if param.grad is not None else "hooks"
        raise ValueError(
            f"fully_shard: parameter {name!r} has {what} already, which would be lost: drop gradients by zero_grad() "
            "before, and call register_post_accumulate_grad_hook after fully_shard"
        )
    if param.layout is not torch.strided or param.is_quantized:
        kind = param.dtype if param.is_quantized else param.layout
        raise ValueError(
            f"fully_shard: parameter {name!r} is a tensor of {kind}, whose rows cannot be shared out; "
            "accepted: dense tensors that are not quantised"
        )
    return ParamSpec(
        name,
        tuple(local(param).shape),
        granularity(name, param) if callable(granularity) else granularity,
        shard_dim(name, param) if callable(shard_dim) else shard_dim,
    )


def _dtypes(owned: OwnedParam, precision: MixedPrecision) -> tuple[torch.dtype, torch.dtype]:
    """What a parameter is computed with, and what its gradient is reduced in."""
    dtype, trainable = owned.param.dtype, owned.param.requires_grad
    if dtype in FLOATS:
        param_dtype = precision.param_dtype or dtype
        return param_dtype, precision.reduce_dtype or param_dtype
    if trainable and dtype != torch.float64:
        raise ValueError(
            f"fully_shard: parameter {owned.name!r} is {dtype}, in which gradients cannot be reduced; accepted: "
            "float32, bfloat16, float16, float64, or any dtype with requires_grad=False"
        )
    if dtype == torch.float64 and (precision.param_dtype or (trainable and precision.reduce_dtype)):
        raise ValueError(
            f"fully_shard: parameter {owned.name!r} is {dtype}, which mixed_precision does not convert; accepted: "
            "float32, bfloat16, float16"
        )
    return dtype, dtype  # quantised, or an index: moved as it is
