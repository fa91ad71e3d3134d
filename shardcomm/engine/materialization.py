"""Materialization: models that were built on the meta device get memory and values, a unit at a time."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import nn

from shardcomm.parameter.optimizer_steps import replaced
from shardcomm.parameter.tensor_parallel import local
from shardcomm.parameter.versions import version_of
from shardcomm.unit.unit import UnitParams


def on_meta(tensors: Mapping[str, torch.Tensor | None]) -> list[str]:
    """The names of the tensors that are on the meta device, which have a shape and no values."""
    return [name for name, tensor in tensors.items() if tensor is not None and tensor.is_meta]


def move_buffers(model: nn.Module, device: torch.device) -> None:
    """Moves the model's buffers to `device`, and materialises modules on the meta device that have no parameters there.

    Modules that have some are materialised unit by unit.
    """
    for module in model.modules():
        if on_meta(module._buffers) and not on_meta(module._parameters):
            _materialize(module, device)
        for name, tensor in module._buffers.items():
            if tensor is not None and not tensor.is_meta:
                module._buffers[name] = tensor.to(device)


def materialize_unit(unit: UnitParams, device: torch.device) -> None:
    """Materialises every module with a parameter of the unit on the meta device.

    Of a tied parameter the values in its first place count.
    """
    for owned in unit.params:
        for module, _ in owned.places:
            if on_meta(module._parameters):
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

    Raises:
        ValueError: `reset_parameters` has left a tensor without values.
    """
    kept = [
        (tensor, tensor.detach().clone())
        for tensor in (*module._parameters.values(), *module._buffers.values())
        if tensor is not None and not tensor.is_meta
    ]
    made: dict[str, torch.Tensor] = {}
    for name in on_meta(module._parameters):
        param = module._parameters[name]
        assert param is not None
        memory = _without_values(param, device)
        made[name] = new = nn.Parameter(memory, requires_grad=param.requires_grad)
        module._parameters[name] = new
        vars(new).update(vars(param))
    for name in on_meta(module._buffers):
        buffer = module._buffers[name]
        assert buffer is not None
        made[name] = module._buffers[name] = _without_values(buffer, device)
    versions = {name: version_of(tensor) for name, tensor in made.items()}
    module.reset_parameters()  # type: ignore[operator]
    with torch.no_grad():
        for tensor, value in kept:
            tensor.copy_(value)
    now = {**module._parameters, **module._buffers}
    left = [
        name
        for name, tensor in made.items()
        if now.get(name) is tensor and version_of(tensor) == versions[name] and _is_unset(tensor)
    ]
    if left:
        raise ValueError(
            f"reset_parameters() of {type(module).__name__} has left {', '.join(left)} without values, which came from "
            f"the meta device; set them there, or build the model on {device}"
        )


def _without_values(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Memory in the shape of `tensor`, whose elements are a mark."""
    made = torch.empty_like(tensor, device=device, requires_grad=False)
    if (mark := _mark(tensor.dtype)) is not None:
        made.fill_(mark)
    return made


def _is_unset(tensor: torch.Tensor) -> bool:
    """Whether all elements are still the mark, which tells what was written through `.data`, as no version does."""
    if (mark := _mark(tensor.dtype)) is None:
        return False
    mine = local(tensor)
    unset = mine.isnan() if math.isnan(mark) else mine == mark
    return mine.numel() > 0 and bool(unset.all())


def _mark(dtype: torch.dtype) -> float | None:
    """NaN, or the largest integer; None for booleans, of which any may be meant."""
    if dtype.is_floating_point or dtype.is_complex:
        return math.nan
    return None if dtype == torch.bool else torch.iinfo(dtype).max
