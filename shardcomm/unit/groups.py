"""Groups: which parameters of a unit share a bucket, and in which dtypes. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain

import torch
from torch import nn

from shardcomm.arguments.dtype import FLOATS
from shardcomm.copy.blocks import BlockFormat
from shardcomm.layout.layout import Layout
from shardcomm.layout.param_spec import Granularity, ParamSpec, ShardDim
from shardcomm.parameter.tensor_parallel import local
from shardcomm.unit.bucket_group import BucketGroup
from shardcomm.unit.grouped_unit import GroupedUnit
from shardcomm.unit.mixed_precision import MixedPrecision
from shardcomm.unit.owners import OwnerCost, checked_cost, choose_owners, in_bytes
from shardcomm.unit.policy import Policy
from shardcomm.unit.pool import Pool
from shardcomm.unit.unit import OwnedParam, UnitParams

GranularityOf = Granularity | Callable[[str, nn.Parameter], Granularity]
"""A granularity for all parameters, or a function of a parameter's name and the parameter."""

ShardDimOf = ShardDim | Callable[[str, nn.Parameter], ShardDim]
"""A shard dim for all parameters, or a function of a parameter's name and the parameter."""

_Together = list[tuple[OwnedParam, ParamSpec]]

_MOST_SENT, _MOST_SENT_BYTES = 1.25, 16 << 10
"""How much more than two gathers one gather of a group may send: a factor, and bytes for each rank beside it.

The longest part decides, since parts are equal. A gather less saves its latency: a small message takes a millisecond
and more on a slow link, in which that carries a hundred kilobytes.
"""


def group_units(
    units: Sequence[UnitParams],
    policies: Sequence[Policy],
    pools: Sequence[Pool],
    granularity: GranularityOf,
    shard_dim: ShardDimOf,
    owner_cost: OwnerCost | None = None,
) -> list[GroupedUnit]:
    """Groups the parameters of each unit; each group will have a bucket.

    A unit has a group for each dtype, and for each block format in which it is gathered. Frozen parameters have groups
    of their own, since they are never reduced. So do parameters that are not cut, since their shards are as long as
    what each rank owns; owners are chosen over all units of a pool (`shardcomm.unit.owners`). Parameters that stay
    wide beside coded ones, such as norms, share their group, which one collective then gathers, unless there are so
    many that equal parts would be long for all ranks.

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
    params = [
        [(owned, _spec(owned, granularity, shard_dim)) for owned in unit.params] for unit in units
    ]
    if owner_cost is not None and not callable(owner_cost):
        raise TypeError(
            f"owner_cost is {owner_cost!r}; it must be a function of a parameter's name and the parameter, or None "
            "for its bytes"
        )
    if owner_cost is not None and not any(
        spec.granularity == "tensor" for _, spec in chain.from_iterable(params)
    ):
        raise ValueError(
            'owner_cost is given, and no parameter has an owner; give granularity="tensor" too, or leave it out'
        )
    owners: dict[str, int] = {}
    for pool in dict.fromkeys(pools):
        its = [each for each, at in zip(params, pools, strict=True) if at == pool]
        owners |= _owners(chain.from_iterable(its), pool.shards, owner_cost or in_bytes)
    return [
        GroupedUnit(unit, policy, pool, _groups(unit_params, policy, pool.shards, owners))
        for unit, policy, pool, unit_params in zip(units, policies, pools, params, strict=True)
    ]


def _owners(
    params: Iterable[tuple[OwnedParam, ParamSpec]], world_size: int, cost: OwnerCost
) -> dict[str, int]:
    """The owner of each parameter that has one, by name. On a rank alone none has."""
    if world_size == 1:
        return {}
    whole = {
        spec.name: checked_cost(cost, spec.name, owned.param)
        for owned, spec in params
        if spec.granularity == "tensor"
    }
    return dict(zip(whole, choose_owners(list(whole.values()), world_size), strict=True))


def _groups(
    params: Iterable[tuple[OwnedParam, ParamSpec]],
    policy: Policy,
    world_size: int,
    owners: Mapping[str, int],
) -> list[BucketGroup]:
    """The groups of a unit's parameters."""
    precision = policy.mixed_precision or MixedPrecision()
    by_kind: dict[tuple[torch.dtype, bool, bool], dict[BlockFormat | None, _Together]] = {}
    for owned, spec in params:
        param = owned.param
        format = precision.gather_format_of(spec.name, param)
        kind = param.dtype, param.requires_grad, spec.name in owners
        by_kind.setdefault(kind, {}).setdefault(format, []).append((owned, spec))
    groups: list[BucketGroup] = []
    for by_format in by_kind.values():
        apart = [
            _group(together, world_size, policy, format, owners)
            for format, together in by_format.items()
        ]
        wide = by_format.pop(None, [])
        first = next(iter(by_format), None)
        if wide and first is not None:
            beside = [group for group in apart if group.gather_format in (None, first)]
            coded = by_format[first]
            joint = _group([*coded, *wide], world_size, policy, first, owners, coded=len(coded))
            if _pays(joint, beside):
                apart = [joint, *(g for g in apart if g.gather_format not in (None, first))]
        groups += apart
    return groups


def _pays(joint: BucketGroup, apart: Sequence[BucketGroup]) -> bool:
    """Whether one gather of all takes the place of several without sending much more."""
    ranks = joint.layout.world_size
    few = sum(sum(group.sent_bytes) for group in apart)
    return sum(joint.sent_bytes) <= _MOST_SENT * few + ranks * _MOST_SENT_BYTES


def _group(
    together: _Together,
    world_size: int,
    policy: Policy,
    format: BlockFormat | None,
    owners: Mapping[str, int],
    *,
    coded: int | None = None,
) -> BucketGroup:
    """A group; its first `coded` parameters are gathered in `format`, or all of them if that is None."""
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
        0 if format is None else len(params) if coded is None else coded,
        reduce_format,
        bool(policy.cpu_offload),
    )


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
