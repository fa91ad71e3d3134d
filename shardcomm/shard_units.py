"""Set-up: from a model's units to sharded units, with their communication memory and rank 0's values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle

import torch
from torch import nn

from shardcomm.bucket import Bucket
from shardcomm.groups import (
    Group,
    offload_bytes,
    reduce_buffer_bytes,
    slot_bytes,
    staging_bytes,
)
from shardcomm.mesh import Mesh
from shardcomm.offload import Offload
from shardcomm.sharded_unit import ShardedUnit
from shardcomm.staging import Staging
from shardcomm.streams import Streams
from shardcomm.unit import OwnedParam, UnitParams


def shard_units(
    units: Sequence[UnitParams],
    groups: Sequence[Sequence[Group]],
    mesh: Mesh,
    slot_of: Sequence[int],
    streams: Streams,
) -> list[ShardedUnit]:
    """Shards `units` over `mesh`; collective. Unit i has a bucket for each of `groups[i]`, and slot `slot_of[i]`.

    At any moment at most one unit exists in full besides what the model held before.

    Raises:
        ValueError: something in the model cannot be sharded, or initialised; nothing is changed then.
    """
    model = units[0].module
    device = mesh.device
    _check_modules(model, device)
    slots = [
        mesh.shard.allocate(nbytes, dtype=torch.uint8, use="gather")
        for nbytes in slot_bytes(groups, slot_of)
    ]
    # One reduce buffer serves all: gradients are packed into it only when the reduce before has ended.
    reduce_buffer = None
    if nbytes := reduce_buffer_bytes(groups, mesh.shard.size):
        reduce_buffer = mesh.shard.allocate(nbytes, dtype=torch.uint8, use="reduce")
    staging = [
        Staging(mesh.replicate.allocate(nbytes, dtype=torch.uint8, use="reduce"))
        for nbytes in staging_bytes(groups, mesh.replicate.size)
    ]
    next_staging = cycle(staging or [None])
    shard_bytes = offload_bytes(groups)
    offload = Offload(device, shard_bytes) if shard_bytes else None

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
                staging=next(next_staging),
                offload=offload,
                streams=streams,
                tag=index + 1,
            )
            _load(bucket, group.params, mesh)
            buckets.append((bucket, group.params))
        sharded.append(ShardedUnit(index, unit.name, unit.module, slot_of[index], buckets, mesh))
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
    values = [
        owned.param.detach().to(mesh.device).resolve_neg().resolve_conj().contiguous()
        for owned in params
    ]
    for value in values:
        mesh.broadcast(value)
    bucket.load(values)
