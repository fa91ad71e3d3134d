"""Set-up: from a model's units to sharded units, with their communication memory and rank 0's values."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, repeat

import torch
from torch import nn

from shardcomm.bucket import Bucket, Staging
from shardcomm.layout import Granularity, Layout, ParamSpec, ShardDim
from shardcomm.mesh import Mesh
from shardcomm.mixed_precision import FLOATS, MixedPrecision
from shardcomm.schedule import REDUCES_IN_FLIGHT
from shardcomm.sharded_unit import ShardedUnit
from shardcomm.streams import Streams
from shardcomm.unit import OwnedParam, UnitParams

GranularityOf = Granularity | Callable[[str, nn.Parameter], Granularity]
ShardDimOf = ShardDim | Callable[[str, nn.Parameter], ShardDim]


@dataclass(frozen=True)
class _Group:
    """Parameters that share a bucket, its layout, and its dtypes."""

    params: list[OwnedParam]
    layout: Layout
    dtype: torch.dtype
    param_dtype: torch.dtype
    reduce_dtype: torch.dtype

    @property
    def full_bytes(self) -> int:
        return self.layout.flat_numel * self.param_dtype.itemsize

    @property
    def reduced_shard_bytes(self) -> int:
        return self.layout.shard_numel * self.reduce_dtype.itemsize

    @property
    def needs_slot(self) -> bool:
        return self.layout.world_size > 1 or self.param_dtype != self.dtype


def shard_units(
    units: Sequence[UnitParams],
    mesh: Mesh,
    mixed_precision: MixedPrecision,
    slot_of: Sequence[int],
    granularity: GranularityOf,
    shard_dim: ShardDimOf,
    streams: Streams,
) -> list[ShardedUnit]:
    """Shards `units` over `mesh`; collective. Unit i computes in slot `slot_of[i]`.

    At any moment at most one unit exists in full besides what the model held before.

    Raises:
        ValueError: something in the model cannot be sharded, or initialised; nothing is changed then.
    """
    model = units[0].module
    device = mesh.device
    _check_modules(model, device)
    groups = [
        _group(unit, mesh.shard.size, mixed_precision, granularity, shard_dim) for unit in units
    ]

    slot_bytes = [0] * (max(slot_of, default=-1) + 1)
    for slot, unit_groups in zip(slot_of, groups, strict=True):
        wanted = sum(group.full_bytes for group in unit_groups if group.needs_slot)
        slot_bytes[slot] = max(slot_bytes[slot], wanted)
    slots = [mesh.shard.allocate(n, dtype=torch.uint8, use="gather") for n in slot_bytes]
    # One reduce buffer serves all: the reduce stream packs into it only when the reduce before has ended.
    shard_bytes = max((group.reduced_shard_bytes for each in groups for group in each), default=0)
    reduce_buffer = None  # of one rank alone, gradients need none
    if mesh.shard.size > 1:
        reduce_bytes = mesh.shard.size * shard_bytes
        reduce_buffer = mesh.shard.allocate(reduce_bytes, dtype=torch.uint8, use="reduce")
    staging: Iterator[Staging | None] = repeat(None)
    if mesh.replicate.size > 1:
        # While one unit's shard is all-reduced, the next unit's comes.
        staging = cycle(
            [
                Staging(mesh.replicate.allocate(shard_bytes, dtype=torch.uint8, use="reduce"))
                for _ in range(REDUCES_IN_FLIGHT)
            ]
        )

    for module in model.modules():
        if _meta(module._buffers) and not _meta(module._parameters):
            _materialize(module, device)
        for name, tensor in module._buffers.items():
            if tensor is not None and not tensor.is_meta:
                module._buffers[name] = tensor.to(device)
    sharded = []
    for index, (unit, unit_groups) in enumerate(zip(units, groups, strict=True)):
        _materialize_unit(unit, device)
        free = slots[slot_of[index]]
        buckets = []
        for group in unit_groups:
            full = None
            if group.needs_slot:
                full, free = free[: group.full_bytes], free[group.full_bytes :]
            in_reduce_buffer = None
            if reduce_buffer is not None:
                nbytes = mesh.shard.size * group.reduced_shard_bytes
                in_reduce_buffer = reduce_buffer[:nbytes].view(group.reduce_dtype)
            bucket = Bucket(
                group.layout,
                mesh.shard,
                dtype=group.dtype,
                param_dtype=group.param_dtype,
                reduce_dtype=group.reduce_dtype,
                full_buffer=None if full is None else full.view(group.param_dtype),
                reduce_buffer=in_reduce_buffer,
                replicas=mesh.replicate,
                staging=next(staging),
                streams=streams,
                tag=index + 1,
            )
            _load(bucket, group.params, mesh)
            buckets.append((bucket, group.params))
        sharded.append(ShardedUnit(index, unit.name, unit.module, slot_of[index], buckets))
    return sharded


def _check_modules(model: nn.Module, device: torch.device) -> None:
    for name, module in model.named_modules():
        here = f"{type(module).__name__} {name!r}"
        on_meta = [*_meta(module._parameters), *_meta(module._buffers)]
        if on_meta and not hasattr(module, "reset_parameters"):
            raise ValueError(
                f"fully_shard: {here} has {', '.join(on_meta)} on the meta device and no reset_parameters() to "
                f"initialise them; add one, or build the model on {device}"
            )
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
            raise ValueError(
                f"fully_shard: {here} has max_norm={module.max_norm}, by which its forward changes the gathered "
                "weight, not the shard that is kept; leave it out, and renormalise after the optimizer's step"
            )


def _meta(tensors: Mapping[str, torch.Tensor | None]) -> list[str]:
    return [name for name, tensor in tensors.items() if tensor is not None and tensor.is_meta]


def _materialize_unit(unit: UnitParams, device: torch.device) -> None:
    """Every module with a parameter of the unit on the meta device; where it is tied, its first place counts."""
    for owned in unit.params:
        for module, _ in owned.places:
            if _meta(module._parameters):
                _materialize(module, device)
        module, attribute = owned.places[0]
        param = module._parameters[attribute]
        assert param is not None
        owned.param = param


def _materialize(module: nn.Module, device: torch.device) -> None:
    """Memory on `device` and values by `reset_parameters`, for the module's own tensors on the meta device only."""
    kept = [
        (tensor, tensor.detach().clone())
        for tensor in (*module._parameters.values(), *module._buffers.values())
        if tensor is not None and not tensor.is_meta
    ]
    for name in _meta(module._parameters):
        param = module._parameters[name]
        assert param is not None
        empty = torch.empty_like(param, device=device)
        module._parameters[name] = nn.Parameter(empty, requires_grad=param.requires_grad)
    for name in _meta(module._buffers):
        buffer = module._buffers[name]
        assert buffer is not None
        module._buffers[name] = torch.empty_like(buffer, device=device)
    module.reset_parameters()  # type: ignore[operator]
    with torch.no_grad():
        for tensor, value in kept:
            tensor.copy_(value)


def _load(bucket: Bucket, params: Sequence[OwnedParam], mesh: Mesh) -> None:
    """Keeps this rank's rows of rank 0's values, and lets go of the full ones."""
    values = [owned.param.detach().to(mesh.device).contiguous() for owned in params]
    for value in values:
        mesh.broadcast(value)
    bucket.load(values)


def _group(
    unit: UnitParams,
    world_size: int,
    precision: MixedPrecision,
    granularity: GranularityOf,
    shard_dim: ShardDimOf,
) -> list[_Group]:
    """A bucket for each dtype; frozen parameters apart, since they are never reduced."""
    by_kind: dict[tuple[torch.dtype, bool], list[OwnedParam]] = {}
    for owned in unit.params:
        by_kind.setdefault((owned.param.dtype, owned.param.requires_grad), []).append(owned)
    groups = []
    for (dtype, _), params in by_kind.items():
        param_dtype, reduce_dtype = _dtypes(params[0], precision)
        layout = Layout.plan(
            [_spec(owned, granularity, shard_dim) for owned in params],
            world_size,
            itemsize=min(dtype.itemsize, param_dtype.itemsize, reduce_dtype.itemsize),
        )
        groups.append(_Group(params, layout, dtype, param_dtype, reduce_dtype))
    return groups


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
