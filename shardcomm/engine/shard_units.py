"""Set-up: from a model's units to sharded units, with their communication memory and rank 0's values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import cycle

import torch
from torch import nn

from shardcomm.bucket.block_gather import BlockWire
from shardcomm.bucket.bucket import Bucket
from shardcomm.bucket.offload import Offload
from shardcomm.bucket.secondary_shard import SecondaryShard
from shardcomm.bucket.staging import Staging
from shardcomm.comm.mesh import Mesh
from shardcomm.parameter.holders import Holders
from shardcomm.parameter.optimizer_steps import replaced
from shardcomm.parameter.tensor_parallel import local, with_same
from shardcomm.sharded.sharded_unit import ShardedUnit
from shardcomm.unit.buffer_bytes import (
    offload_bytes,
    reduce_buffer_bytes,
    slot_bytes,
    staging_bytes,
    wire_bytes,
)
from shardcomm.unit.grouped_unit import GroupedUnit, by_pool
from shardcomm.unit.mixed_precision import MixedPrecision
from shardcomm.unit.pool import Pool
from shardcomm.unit.unit import OwnedParam, UnitParams


class _Memory:
    """The communication memory of the units of one mesh.

    One reduce buffer serves all units: gradients are packed into it only when the reduce before has ended.
    """

    def __init__(self, mesh: Mesh, units: Sequence[GroupedUnit]) -> None:
        self._mesh = mesh
        self._reduce_buffer: torch.Tensor | None = None
        if nbytes := reduce_buffer_bytes(units):
            self._reduce_buffer = mesh.shard.allocate(nbytes, dtype=torch.uint8, use="reduce")
        sent, received = wire_bytes(units)
        self._wire = BlockWire(mesh.shard, sent, received) if received else None
        staging = [
            Staging(mesh.replicate.allocate(nbytes, dtype=torch.uint8, use="reduce"))
            for nbytes in staging_bytes(units)
        ]
        self._next_staging = cycle(staging or [None])
        # One for each mesh, since each has streams of its own.
        shard_bytes = offload_bytes(units)
        self._offload = Offload(mesh.device, shard_bytes) if shard_bytes else None

    def buckets(self, unit: GroupedUnit, slot: torch.Tensor) -> list[Bucket]:
        """A bucket for each group of `unit`, whose full parameters lie in `slot` one behind the other."""
        mesh = self._mesh
        tag, replica_tag = (
            comm.tag(f"unit {unit.unit.name!r}") for comm in (mesh.shard, mesh.replicate)
        )
        buckets = []
        for group in unit.groups:
            full = reduced = None
            if group.needs_slot:
                full, slot = slot[: group.full_bytes], slot[group.full_bytes :]
            if self._reduce_buffer is not None:
                reduced = self._reduce_buffer[: group.reduced_bytes].view(group.reduce_dtype)
            buckets.append(
                Bucket(
                    group.layout,
                    mesh.shard,
                    dtype=group.dtype,
                    param_dtype=group.param_dtype,
                    reduce_dtype=group.reduce_dtype,
                    gather_format=group.gather_format,
                    reduce_format=group.reduce_format,
                    full_buffer=None if full is None else full.view(group.param_dtype),
                    reduce_buffer=reduced,
                    replicas=mesh.replicate,
                    wire=self._wire,
                    staging=next(self._next_staging),
                    offload=self._offload if group.cpu_offload else None,
                    streams=mesh.streams,
                    tag=tag,
                    replica_tag=replica_tag,
                )
            )
        return buckets


def shard_units(
    units: Sequence[GroupedUnit], holders: Mapping[Pool, Holders], slot_of: Sequence[int]
) -> list[ShardedUnit]:
    """Shards `units`; collective.

    At any moment at most one unit exists in full besides what the model held before.

    Args:
        units: The model's units, the model itself first.
        holders: The ranks that hold the parameters of each pool's units.
        slot_of: The slot of each unit.
    """
    pool_of = {slot: unit.pool for unit, slot in zip(units, slot_of, strict=True)}
    slots = [
        _slot(holders[pool_of[slot]].mesh, nbytes)
        for slot, nbytes in enumerate(slot_bytes(units, slot_of))
    ]
    memory = {pool: _Memory(holders[pool].mesh, its) for pool, its in by_pool(units).items()}
    users = Counter(slot_of)
    device = holders[units[0].pool].mesh.device
    _move_buffers(units[0].unit.module, device)
    sharded = []
    for index, (grouped, slot) in enumerate(zip(units, slot_of, strict=True)):
        unit, ranks = grouped.unit, holders[grouped.pool]
        _materialize_unit(unit, device)
        buckets = memory[grouped.pool].buckets(grouped, slots[slot])
        for bucket, group in zip(buckets, grouped.groups, strict=True):
            _load(bucket, group.params, ranks)
        secondary = None
        if ranks.mesh.secondary is not None and users[slot] > 1:
            secondary = SecondaryShard(
                buckets,
                ranks.mesh.secondary,
                ranks.mesh.streams,
                ranks.mesh.secondary.tag(f"unit {unit.name!r}"),
            )
        precision = grouped.policy.mixed_precision or MixedPrecision()
        sharded.append(
            ShardedUnit(
                index,
                unit.name,
                unit.module,
                slot,
                [(b, g.params) for b, g in zip(buckets, grouped.groups, strict=True)],
                ranks,
                secondary=secondary,
                input_dtype=precision.input_dtype,
                output_dtype=_output_dtype(unit, precision, is_root=index == 0),
            )
        )
    return sharded


def _move_buffers(model: nn.Module, device: torch.device) -> None:
    """Moves the model's buffers to `device`, and materialises modules on the meta device that have no parameters there.

    Modules that have some are materialised unit by unit.
    """
    for module in model.modules():
        if _meta(module._buffers) and not _meta(module._parameters):
            _materialize(module, device)
        for name, tensor in module._buffers.items():
            if tensor is not None and not tensor.is_meta:
                module._buffers[name] = tensor.to(device)


def _slot(mesh: Mesh, nbytes: int) -> torch.Tensor:
    """The memory of one slot, into which units are gathered."""
    if mesh.secondary is not None and mesh.shard.transport in ("shm", "local"):
        # Not a window, which both groups of ranks would share: one group may gather into it for backward while the
        # other still computes with what is in it.
        return torch.zeros(nbytes, dtype=torch.uint8, device=mesh.device)
    return mesh.shard.allocate(nbytes, dtype=torch.uint8, use="gather")


def _output_dtype(
    unit: UnitParams, precision: MixedPrecision, *, is_root: bool
) -> torch.dtype | None:
    """The dtype of a unit's outputs: `fully_shard`'s for the model itself, and a unit's own policy's for that unit."""
    own = unit.policy.mixed_precision is not None
    return precision.output_dtype if is_root or own else None


def check_modules(model: nn.Module, device: torch.device) -> None:
    """Looks for modules that cannot be sharded.

    Raises:
        ValueError: A module of `model` cannot be initialised on `device`, is TorchScript's, or would change a gathered
            parameter.
    """
    for name, module in model.named_modules():
        here = f"{type(module).__name__} {name!r}"
        on_meta = [*_meta(module._parameters), *_meta(module._buffers)]
        if on_meta and not hasattr(module, "reset_parameters"):
            raise ValueError(
                f"{here} has {', '.join(on_meta)} on the meta device and no reset_parameters() to "
                f"initialise them; add one, or build the model on {device}"
            )
        if isinstance(module, torch.jit.ScriptModule) and any(
            True for _ in module.parameters(recurse=False)
        ):
            raise ValueError(
                f"{here} is compiled by TorchScript, which takes no hooks and no other parameters; give the module "
                "as it was before torch.jit.script, and compile the sharded model by torch.compile"
            )
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
            raise ValueError(
                f"{here} has max_norm={module.max_norm}, by which its forward changes the gathered "
                "weight, not the shard that is kept; leave it out, and renormalise after the optimizer's step"
            )


def check_memory(units: Sequence[UnitParams]) -> None:
    """Looks for parameters that have memory in common with another one, or with a buffer: they would drift apart.

    Views with gaps, such as a column of a matrix, are not looked at.

    Raises:
        ValueError: There are such parameters.
    """
    spans = [
        (*span, "parameter", owned.name)
        for unit in units
        for owned in unit.params
        if (span := _span(local(owned.param)))
    ]
    spans += [
        (*span, "buffer", name)
        for name, buffer in units[0].module.named_buffers()
        if type(buffer) is torch.Tensor and (span := _span(buffer))
    ]
    reached = {"parameter": (0, ""), "buffer": (0, "")}  # where those before end, at most
    for begin, end, kind, name in sorted(spans):
        for other_kind, (other_end, other) in reached.items():
            if begin < other_end and "parameter" in (kind, other_kind):
                raise ValueError(
                    f"{other_kind} {other!r} and {kind} {name!r} have the same memory, and would be two once they are "
                    "sharded; tie parameters by one nn.Parameter, as by module.weight = other.weight, before "
                    "fully_shard, and make views of a parameter, such as its transpose, in forward"
                )
        reached[kind] = max(reached[kind], (end, name))


def _span(tensor: torch.Tensor) -> tuple[int, int] | None:
    """The addresses at which a tensor begins and ends, if it has all of the memory between them."""
    if tensor.is_meta or tensor.layout is not torch.strided or not tensor.numel():
        return None
    reach = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    if reach != tensor.numel():
        return None
    return tensor.data_ptr(), tensor.data_ptr() + reach * tensor.element_size()


def _meta(tensors: Mapping[str, torch.Tensor | None]) -> list[str]:
    return [name for name, tensor in tensors.items() if tensor is not None and tensor.is_meta]


def _materialize_unit(unit: UnitParams, device: torch.device) -> None:
    """Materialises every module with a parameter of the unit on the meta device.

    Of a tied parameter the values in its first place count.
    """
    for owned in unit.params:
        for module, _ in owned.places:
            if _meta(module._parameters):
                _materialize(module, device)
        module, attribute = owned.places[0]
        param = module._parameters[attribute]
        assert param is not None
        if param is not owned.param:
            replaced(owned.param, owned.name)
        owned.param = param


def _materialize(module: nn.Module, device: torch.device) -> None:
    """Gives the module's own tensors on the meta device memory on `device`, and values by `reset_parameters`.

    The module's other tensors keep their values.
    """
    kept = [
        (tensor, tensor.detach().clone())
        for tensor in (*module._parameters.values(), *module._buffers.values())
        if tensor is not None and not tensor.is_meta
    ]
    for name in _meta(module._parameters):
        param = module._parameters[name]
        assert param is not None
        empty = torch.empty_like(param, device=device)
        module._parameters[name] = made = nn.Parameter(empty, requires_grad=param.requires_grad)
        vars(made).update(vars(param))
    for name in _meta(module._buffers):
        buffer = module._buffers[name]
        assert buffer is not None
        module._buffers[name] = torch.empty_like(buffer, device=device)
    module.reset_parameters()  # type: ignore[operator]
    with torch.no_grad():
        for tensor, value in kept:
            tensor.copy_(value)


def _load(bucket: Bucket, params: Sequence[OwnedParam], holders: Holders) -> None:
    """Loads this rank's rows of rank 0's values into `bucket`; collective."""
    values = [
        local(owned.param).detach().to(bucket.comm.device).resolve_neg().resolve_conj().contiguous()
        for owned in params
    ]
    for owned, value in zip(params, values, strict=True):
        same = with_same(owned.distribution, holders.everyone.inner)
        holders.mesh.broadcast(value, same)
    bucket.load(values)
