"""Which modules are sharded. A parameter or module that is put into one later is refused.

So are DistributedDataParallel, FSDP1 and FSDP2 of a sharded model, and sharding a model that they spread already.
"""

from __future__ import annotations

import sys
import weakref
from collections import OrderedDict
from functools import cache, partial
from typing import NoReturn

from torch import nn
from torch.distributed._composable.contract import REGISTRY_KEY, RegistryItem
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

# Modules stay in it when their engine is closed.
_sharded: weakref.WeakSet[nn.Module] = weakref.WeakSet()

_OURS = RegistryItem()


def is_sharded(module: nn.Module) -> bool:
    """Whether `fully_shard` has been called with `module`, or with a module around it."""
    return module in _sharded


def check_not_spread(model: nn.Module) -> None:
    """Looks for modules whose gradients torch would average, too, or whose parameters it has flattened.

    Raises:
        ValueError: There is one.
    """
    for name, module in model.named_modules():
        here = f"{type(module).__name__} {name!r}"
        if isinstance(module, (nn.parallel.DistributedDataParallel, _fsdp1())):
            raise ValueError(
                f"{here} spreads a model over ranks itself; give fully_shard the model as it was before it"
            )
        for applied in ("fully_shard", "replicate"):
            if applied in vars(module).get(REGISTRY_KEY, ()):
                raise ValueError(
                    f"{here} is spread over ranks by {applied} of torch; give the model as it was before it, or keep "
                    "FSDP2 and let it communicate by shardcomm.fsdp2.attach(model)"
                )


def _fsdp1() -> type[nn.Module] | tuple[()]:
    """FSDP1's class if the program has loaded it, which takes long."""
    found: type[nn.Module] | tuple[()] = getattr(
        sys.modules.get("torch.distributed.fsdp"), "FullyShardedDataParallel", ()
    )
    return found


def remember(model: nn.Module) -> None:
    """Counts `model` and all modules in it as sharded from now on."""
    _install()
    _sharded.update(model.modules())
    for module in model.modules():
        # Where FSDP2 looks whether it was applied already, and `replicate` whether it should leave a module out.
        vars(module).setdefault(REGISTRY_KEY, OrderedDict())["fully_shard"] = _OURS
        vars(module)["__prepare_scriptable__"] = partial(_refuse_script, type(module).__name__)
        if isinstance(module, nn.RNNBase):
            vars(module)["flatten_parameters"] = _leave_in_place


def unmark(model: nn.Module) -> None:
    """Removes the mark by which torch refuses to shard `model`, whose engine is closed."""
    for module in model.modules():
        registry = vars(module).get(REGISTRY_KEY, {})
        if registry.get("fully_shard") is _OURS:  # not FSDP2's, of a module that was put in since
            del registry["fully_shard"]


def _refuse_script(kind: str) -> NoReturn:
    raise RuntimeError(
        f"torch.jit.script of a {kind} that fully_shard has sharded: TorchScript would not call the engine, and would "
        "compute with this rank's rows; script another model, which loads engine.full_state_dict()"
    )


def _leave_in_place() -> None:
    """Does nothing, where an `nn.LSTM` or the like would move its parameters out of the engine's memory for cuDNN.

    cuDNN copies them together in each forward instead.
    """


@cache
def _install() -> None:
    """Registers the hooks, once. Torch then calls them for every parameter and module that any module is given."""
    register_module_parameter_registration_hook(_on_parameter)
    register_module_module_registration_hook(_on_module)


def _on_parameter(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
    if param is not None and param is not module._parameters.get(name) and module in _sharded:
        _refuse(module, name, "a parameter")


def _on_module(module: nn.Module, name: str, child: nn.Module | None) -> None:
    if (
        isinstance(module, (nn.parallel.DistributedDataParallel, nn.DataParallel, _fsdp1()))
        and child
    ):
        ignored = getattr(module, "_ignored_modules", ())  # FSDP1's
        # `replicate` of torch.distributed gives it a list of the parameters.
        parameters = any(getattr(each, "whole", None) is not None for each in child.parameters())
        if (parameters and not ignored) or any(
            is_sharded(each) for each in child.modules() if each not in ignored
        ):
            raise RuntimeError(
                f"{type(module).__name__} of a model that fully_shard has sharded would put one rank's rows over those "
                "of the others, or copy them; its engine averages gradients already: call the model itself"
            )
        return
    if child is not None and child is not module._modules.get(name) and module in _sharded:
        _accept(module, name, child)


def _accept(module: nn.Module, name: str, child: nn.Module) -> None:
    """Counts `child`, which is put into a sharded `module`, as sharded; RuntimeError if it has parameters."""
    for each in child.modules():
        if not is_sharded(each) and any(True for _ in each.parameters(recurse=False)):
            _refuse(module, name, f"a {type(child).__name__}")
    _sharded.update(child.modules())  # what is put into it later is seen, too
    Containers.others += 1


class Containers:
    """The containers in `model` whose `insert` torch tells no hook of, each with its entries."""

    others = 0
    """How often any sharded module was given another module, which may be such a container."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._look()

    def _look(self) -> None:
        self._others = Containers.others
        kinds = (nn.ModuleList, nn.Sequential)
        found = (each for each in self._model.modules() if isinstance(each, kinds))
        self._known = [(each, [*each._modules.values()]) for each in found]

    def check(self) -> None:
        """RuntimeError if a module with parameters was inserted into one of them since the last check."""
        if self._others == Containers.others and all(
            [[*container._modules.values()] == known for container, known in self._known]
        ):
            return
        self._look()
        for container, entries in self._known:
            for name, child in zip(container._modules, entries, strict=True):
                if child is not None and not is_sharded(child):
                    self._others = -1  # so that the next check says so again
                    _accept(container, name, child)


def _refuse(module: nn.Module, name: str, what: str) -> NoReturn:
    raise RuntimeError(
        f"{type(module).__name__}.{name}: {what} is put into a model after fully_shard, and its gradients would not be "
        "averaged over the ranks; build, replace, tie and parametrize before fully_shard, and load values by "
        "load_state_dict"
    )
