"""Which modules are sharded. A parameter or module that is put into one later is refused, and so is DDP of one."""

from __future__ import annotations

import weakref
from functools import cache
from typing import NoReturn

from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

# Modules stay in it when their engine is closed.
_sharded: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def is_sharded(module: nn.Module) -> bool:
    """Whether `fully_shard` has been called with `module`, or with a module around it."""
    return module in _sharded


def remember(model: nn.Module) -> None:
    """Counts `model` and all modules in it as sharded from now on."""
    _install()
    _sharded.update(model.modules())


@cache
def _install() -> None:
    """Registers the hooks, once. Torch then calls them for every parameter and module that any module is given."""
    register_module_parameter_registration_hook(_on_parameter)
    register_module_module_registration_hook(_on_module)


def _on_parameter(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
    if param is not None and param is not module._parameters.get(name) and module in _sharded:
        _refuse(module, name, "a parameter")


def _on_module(module: nn.Module, name: str, child: nn.Module | None) -> None:
    if isinstance(module, nn.parallel.DistributedDataParallel | nn.DataParallel) and child:
        if any(map(is_sharded, child.modules())):
            raise RuntimeError(
                f"{type(module).__name__} of a model that fully_shard has sharded would put one rank's rows over those "
                "of the others, or copy them; its engine averages gradients already: call the model itself"
            )
        return
    if child is None or child is module._modules.get(name) or module not in _sharded:
        return
    if any(
        not is_sharded(m) and any(True for _ in m.parameters(recurse=False))
        for m in child.modules()
    ):
        _refuse(module, name, f"a {type(child).__name__}")


def containers(model: nn.Module) -> list[tuple[nn.Module, int]]:
    """The containers in `model` whose `insert` torch tells no hook of, each with its number of entries."""
    kinds = (nn.ModuleList, nn.Sequential)
    return [(each, len(each._modules)) for each in model.modules() if isinstance(each, kinds)]


def check_containers(known: list[tuple[nn.Module, int]]) -> None:
    """RuntimeError if something was inserted into one of the containers that are `known`."""
    for container, entries in known:
        if len(container._modules) > entries:
            for name, child in container._modules.items():
                if child is not None and not is_sharded(child):
                    _refuse(container, name, f"a {type(child).__name__}")


def _refuse(module: nn.Module, name: str, what: str) -> NoReturn:
    raise RuntimeError(
        f"{type(module).__name__}.{name}: {what} is put into a model after fully_shard, and its gradients would not be "
        "averaged over the ranks; build, replace, tie and parametrize before fully_shard, and load values by "
        "load_state_dict"
    )
