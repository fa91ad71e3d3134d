"""Groups: which parameters of a unit share a bucket, in which dtypes, and the memory they all need. Pure arithmetic.

The engine allocates by it, and the planner adds it up before anything is allocated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from shardcomm.layout import Granularity, Layout, ParamSpec, ShardDim
from shardcomm.mixed_precision import FLOATS, MixedPrecision
from shardcomm.schedule import REDUCES_IN_FLIGHT
from shardcomm.unit import OwnedParam, UnitParams

GranularityOf = Granularity | Callable[[str, nn.Parameter], Granularity]
ShardDimOf = ShardDim | Callable[[str, nn.Parameter], ShardDim]


@dataclass(frozen=True)
class Group:
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
    def shard_bytes(self) -> int:
        """Of each rank's shard, padding included."""
        return self.layout.shard_numel * self.dtype.itemsize

    @property
    def full_bytes(self) -> int:
        """Of the full buffer, in the unit's slot."""
        return self.layout.flat_numel * self.param_dtype.itemsize

    @property
    def reduced_shard_bytes(self) -> int:
        """Of this rank's part of the gradients as they are reduced."""
        return self.layout.shard_numel * self.reduce_dtype.itemsize

    @property
    def needs_slot(self) -> bool:
        """Whether full parameters are anything else than the shard."""
        return self.layout.world_size > 1 or self.param_dtype != self.dtype or self.cpu_offload


def group_params(
    unit: UnitParams,
    world_size: int,
    precision: MixedPrecision,
    granularity: GranularityOf,
    shard_dim: ShardDimOf,
    *,
    cpu_offload: bool,
) -> list[Group]:
    """A bucket for each dtype; frozen parameters apart, since they are never reduced."""
    by_kind: dict[tuple[torch.dtype, bool], list[OwnedParam]] = {}
    for owned in unit.params:
        if owned.param.layout is not torch.strided or owned.param.is_quantized:
            kind = owned.param.dtype if owned.param.is_quantized else owned.param.layout
            raise ValueError(
                f"fully_shard: parameter {owned.name!r} is a tensor of {kind}, whose rows cannot be shared out; "
                "accepted: dense tensors that are not quantised"
            )
        by_kind.setdefault((owned.param.dtype, owned.param.requires_grad), []).append(owned)
    groups = []
    for (dtype, _), params in by_kind.items():
        param_dtype, reduce_dtype = _dtypes(params[0], precision)
        layout = Layout.plan(
            [_spec(owned, granularity, shard_dim) for owned in params],
            world_size,
            itemsize=min(dtype.itemsize, param_dtype.itemsize, reduce_dtype.itemsize),
        )
        groups.append(Group(params, layout, dtype, param_dtype, reduce_dtype, cpu_offload))
    return groups


def slot_bytes(groups: Sequence[Sequence[Group]], slot_of: Sequence[int]) -> list[int]:
    """The size of each slot: of the largest unit that uses it. `groups[i]` are those of unit i."""
    sizes = [0] * (max(slot_of, default=-1) + 1)
    for slot, unit_groups in zip(slot_of, groups, strict=True):
        wanted = sum(group.full_bytes for group in unit_groups if group.needs_slot)
        sizes[slot] = max(sizes[slot], wanted)
    return sizes


def reduce_buffer_bytes(groups: Sequence[Sequence[Group]], shard_ranks: int) -> int:
    """The size of the one reduce buffer; of one shard alone, gradients need none."""
    return 0 if shard_ranks == 1 else shard_ranks * _reduced_shard_bytes(groups)


def staging_bytes(groups: Sequence[Sequence[Group]], replicas: int) -> list[int]:
    """The size of each staging buffer, which buckets use in turn; without replicas there are none."""
    if replicas == 1:
        return []
    # While one unit's shard is all-reduced, the next unit's comes.
    return [_reduced_shard_bytes(groups)] * min(REDUCES_IN_FLIGHT, sum(map(len, groups)))


def offload_bytes(groups: Sequence[Sequence[Group]]) -> int:
    """The size of the device's memory through which offloaded shards pass; their gradients have as much.

    Gradients of frozen parameters count, too: they may be thawed later.
    """
    return max((g.shard_bytes for unit in groups for g in unit if g.cpu_offload), default=0)


def _reduced_shard_bytes(groups: Sequence[Sequence[Group]]) -> int:
    return max((group.reduced_shard_bytes for unit in groups for group in unit), default=0)


def _spec(owned: OwnedParam, granularity: GranularityOf, shard_dim: ShardDimOf) -> ParamSpec:
    name, param = owned.name, owned.param
    return ParamSpec(
        name,
        tuple(param.shape),
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
