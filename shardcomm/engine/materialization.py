"""Materialization: models that were built on the meta device get memory and values, a unit at a time."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from shardcomm.parameter.optimizer_steps import replaced
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
    """
    kept = [
        (tensor, tensor.detach().clone())
        for tensor in (*module._parameters.values(), *module._buffers.values())
        if tensor is not None and not tensor.is_meta
    ]
    for name in on_meta(module._parameters):
        param = module._parameters[name]
        assert param is not None
        empty = torch.empty_like(param, device=device)
        module._parameters[name] = made = nn.Parameter(empty, requires_grad=param.requires_grad)
        vars(made).update(vars(param))
    for name in on_meta(module._buffers):
        buffer = module._buffers[name]
        assert buffer is not None
        module._buffers[name] = torch.empty_like(buffer, device=device)
    module.reset_parameters()  # type: ignore[operator]
    with torch.no_grad():
        for tensor, value in kept:
            tensor.copy_(value)
