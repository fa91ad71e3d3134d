"""Models that cannot be sharded: what `fully_shard` refuses, before anything is allocated."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from shardcomm.arguments.checks import check_has_memory
from shardcomm.engine.materialization import on_meta
from shardcomm.parameter.tensor_parallel import local
from shardcomm.unit.unit import UnitParams


def check_modules(model: nn.Module, device: torch.device) -> None:
    """Looks for modules that cannot be sharded.

    Raises:
        ValueError: A module of `model` cannot be initialised on `device`, is TorchScript's, or would change a gathered
            parameter.
    """
    for name, module in model.named_modules():
        here = f"{type(module).__name__} {name!r}"
        names = [*on_meta(module._parameters), *on_meta(module._buffers)]
        if names and not hasattr(module, "reset_parameters"):
            raise ValueError(
                f"{here} has {', '.join(names)} on the meta device and no reset_parameters() to "
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


def check_devices(units: Sequence[UnitParams], device: torch.device) -> None:
    """Looks for parameters on a GPU, where the ranks compute on CPUs: they would silently go there.

    Raises:
        ValueError: There are such parameters.
    """
    for owned in (owned for unit in units for owned in unit.params):
        found = local(owned.param).device
        if found.type not in (device.type, "cpu", "meta"):
            raise ValueError(
                f"parameter {owned.name!r} is on {found}, and the ranks compute on {device}; connect them with "
                f"device={found.type!r}, as by Communicator.from_env(device={found.type!r}), or move the model to "
                f"{device}"
            )


def check_separate_memory(units: Sequence[UnitParams]) -> None:
    """Looks for parameters that have no memory, or the same as another one or a buffer, from which they would drift.

    Views with gaps, such as a column of a matrix, are looked at for memory alone.

    Raises:
        ValueError: There are such parameters.
    """
    for owned in (owned for unit in units for owned in unit.params):
        if not (held := local(owned.param)).is_meta:
            check_has_memory(f"parameter {owned.name!r}", held)
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
