"""Units: which module's parameters are gathered together, and which parameters those are.

Every parameter belongs to the innermost unit around it. The model itself is the outermost unit, which has all other
parameters. A parameter that several units use (tied weights) belongs to the innermost unit around all of them, which
is gathered as long as any of them runs::

    model                 unit 0: embed.weight, norm.weight, head.weight (tied to embed: one parameter, two places)
      embed
      blocks.0            unit 1: blocks.0.attn.weight, ...
      blocks.1            unit 2: ...
      norm
      head
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NoReturn

import torch
from torch import nn

from shardcomm.parameter.tensor_parallel import Distribution
from shardcomm.schedule.triggers import Phase, Trigger
from shardcomm.unit.policy import Policy

Units = (
    Sequence[nn.Module | type[nn.Module]]
    | type[nn.Module]
    | Mapping[nn.Module | type[nn.Module], Policy | None]
    | None
)
"""What `fully_shard` takes as `units`."""


@dataclass
class OwnedParam:
    """A parameter of a unit.

    Attributes:
        name: Its name in the model.
        param: The full parameter, and this rank's rows once it is sharded.
        places: Every place (module, attribute) that shows it.
        distribution: How a DTensor is distributed, whose local tensor is then sharded; None for a plain parameter.
    """

    name: str
    param: nn.Parameter
    places: list[tuple[nn.Module, str]] = field(default_factory=list)
    distribution: Distribution | None = field(init=False)

    def __post_init__(self) -> None:
        self.distribution = Distribution.of(self.name, self.param)

    def check(self, shard: nn.Parameter, full: nn.Parameter) -> None:
        """RuntimeError unless all places of the parameter show `shard` or `full`."""
        for module, attribute in self.places:
            shown = module._parameters.get(attribute)
            if shown is not shard and shown is not full:
                raise RuntimeError(
                    f"{type(module).__name__}.{attribute}, parameter {self.name!r}, was replaced after fully_shard, "
                    "which trains the one it was given; replace, tie and parametrize before fully_shard, load values "
                    "by load_state_dict, and call functional_call inside of engine.gathered()"
                )

    def show(self, param: nn.Parameter) -> None:
        """Makes the model's modules see `param` in this parameter's places."""
        for module, attribute in self.places:
            module._parameters[attribute] = param


@dataclass
class UnitParams:
    """A unit and its parameters.

    Attributes:
        name: The module's name in the model; "(root)" for the model itself.
        module: The unit's module.
        params: The parameters that belong to the unit, in the model's order.
        policy: The unit's own policy.
    """

    name: str
    module: nn.Module
    params: list[OwnedParam]
    policy: Policy = field(default_factory=Policy)


def find_units(
    model: nn.Module, units: Units, ignored: Iterable[nn.Parameter] = ()
) -> list[UnitParams]:
    """The units of `model`, the model itself first, in the order in which the model registers them.

    Args:
        model: The model.
        units: Modules, or module classes whose instances are units; a mapping gives them policies. None takes the
            entries of every `nn.ModuleList` that have a forward and are not inside such an entry.
        ignored: Parameters that belong to no unit.

    Raises:
        TypeError: `units` or `ignored` is none of the accepted types.
        ValueError: A unit is not a module of the model, or has parameters and no forward before which to gather them;
            or `ignored` has something else than parameters of the model.
    """
    policies = _unit_modules(model, units)
    modules = policies.keys()
    left_out = _ignored(model, ignored)
    names = {module: name for name, module in model.named_modules() if module in modules}
    parents: dict[nn.Module, nn.Module] = {}
    owners: dict[nn.Parameter, set[nn.Module]] = {}
    places: dict[nn.Parameter, dict[tuple[nn.Module, str], None]] = {}
    for module, unit, parent in _walk(model, model, model, modules):
        if module is unit and module is not model:
            parents.setdefault(unit, parent)
        for attribute, param in module._parameters.items():
            if param is not None and param not in left_out:
                owners.setdefault(param, set()).add(unit)
                places.setdefault(param, {})[module, attribute] = None

    found = {
        module: UnitParams(name or "(root)", module, [], _with_ranks(module, policies, parents))
        for module, name in names.items()
    }
    for name, param in model.named_parameters():
        if param in left_out:
            continue
        owner = _innermost_common(owners[param], parents)
        found[owner].params.append(OwnedParam(name, param, list(places[param])))
    if found[model].params and not _has_forward(model):
        raise ValueError(
            f"model is a {type(model).__name__} with parameters and without a forward before which they "
            "could be gathered; shard the modules in it that have one"
        )
    return list(found.values())


def registration_order(units: Sequence[UnitParams]) -> tuple[Trigger, ...]:
    """The guess for the first step: the forward's triggers if every module runs once, in the order of registration."""
    index = {unit.module: i for i, unit in enumerate(units)}
    seen: set[nn.Module] = set()

    def walk(module: nn.Module) -> Iterator[Trigger]:
        if module in seen:
            return
        seen.add(module)
        unit = index.get(module)
        if unit is not None:
            yield Trigger(Phase.PRE_FORWARD, unit)
        for child in module.children():
            yield from walk(child)
        if unit is not None:
            yield Trigger(Phase.POST_FORWARD, unit)

    return tuple(walk(units[0].module))


def _unit_modules(model: nn.Module, units: Units) -> dict[nn.Module, Policy]:
    everything = list(model.modules())
    if units is None:
        return {model: Policy()} | dict.fromkeys(_list_entries(model), Policy())
    if not isinstance(units, type | Iterable):
        what = f"a {type(units).__name__}" if isinstance(units, nn.Module) else repr(units)
        raise TypeError(
            f"units is {what}; it must be a list of modules, module classes, a mapping of these to "
            "policies, or None for the entries of ModuleLists"
        )
    given = [units] if isinstance(units, type) else list(units)
    for unit in given:
        if not isinstance(unit, type | nn.Module):
            _refuse_unit(unit)
    policies = {
        unit: _policy(unit, units[unit]) if isinstance(units, Mapping) else Policy()
        for unit in given
    }
    chosen = {model: Policy()}
    for kind, policy in policies.items():
        if not isinstance(kind, type):
            continue
        instances = [module for module in everything if isinstance(module, kind)]
        if not instances:
            accepted = ", ".join(sorted({type(module).__name__ for module in everything}))
            raise ValueError(
                f"units contains the class {kind.__name__}, of which the model has no module; accepted: {accepted}"
            )
        chosen |= dict.fromkeys(instances, policy)
    known = set(everything)
    # The policy of a module that is named itself comes before that of its class.
    chosen |= {unit: policy for unit, policy in policies.items() if not isinstance(unit, type)}
    for module in chosen:
        if module not in known:
            _refuse_unit(module)
        if module is not model and not _has_forward(module):
            raise ValueError(
                f"units contains a {type(module).__name__}, which has no forward before which its "
                "parameters could be gathered; give the modules in it that have one"
            )
    return chosen


def _refuse_unit(given: object) -> NoReturn:
    raise ValueError(
        f"units contains {type(given).__name__}, which is not a module of the model; "
        "give modules of the model, module classes, or None for the entries of its ModuleLists"
    )


def _policy(unit: object, given: object) -> Policy:
    if given is None:
        return Policy()
    if not isinstance(given, Policy):
        raise TypeError(
            f"units maps {getattr(unit, '__name__', type(unit).__name__)} to {given!r}; it must be a "
            "shardcomm.Policy, or None for one as the rest"
        )
    return given


def _with_ranks(
    unit: nn.Module, policies: Mapping[nn.Module, Policy], parents: Mapping[nn.Module, nn.Module]
) -> Policy:
    """The policy of `unit`, with the ranks of the unit around it: a layer of an expert is where the expert is."""
    comms = [policies[each].comm for each in _ancestors(unit, parents)]
    return replace(policies[unit], comm=next((comm for comm in comms if comm is not None), None))


def _list_entries(module: nn.Module) -> Iterator[nn.Module]:
    """The entries of ModuleLists that have a forward. Lists inside such an entry are not looked at."""
    for child in module.children():
        if isinstance(module, nn.ModuleList) and _has_forward(child):
            yield child
        else:
            yield from _list_entries(child)


def _ignored(model: nn.Module, ignored: Iterable[nn.Parameter]) -> set[nn.Parameter]:
    if isinstance(ignored, torch.Tensor) or not isinstance(ignored, Iterable):
        raise TypeError(
            f"ignored_params is a {type(ignored).__name__}; it must be parameters of the model"
        )
    left_out = set(ignored)
    known = set(model.parameters())
    for param in left_out:
        if param not in known:
            what = f"{tuple(param.shape)}" if isinstance(param, torch.Tensor) else repr(param)
            raise ValueError(
                f"ignored_params contains {what}, which is not a parameter of the model; give parameters, "
                "for instance [*model.head.parameters()]"
            )
    return left_out


def _has_forward(module: nn.Module) -> bool:
    """Whether `module` has a forward. Containers (ModuleList, ModuleDict, ...) have none, so their hooks never fire."""
    return getattr(module.forward, "__func__", None) is not nn.Module.forward


def _walk(
    module: nn.Module, unit: nn.Module, parent: nn.Module, units: Collection[nn.Module]
) -> Iterator[tuple[nn.Module, nn.Module, nn.Module]]:
    """Every (module, its unit, the unit around that), once for each path that leads to the module."""
    if module in units and module is not unit:
        unit, parent = module, unit
    yield module, unit, parent
    for child in module._modules.values():
        if child is not None:
            yield from _walk(child, unit, parent, units)


def _innermost_common(owners: set[nn.Module], parents: dict[nn.Module, nn.Module]) -> nn.Module:
    chains = [_ancestors(owner, parents) for owner in owners]
    return next(unit for unit in chains[0] if all(unit in chain for chain in chains))


def _ancestors(unit: nn.Module, parents: Mapping[nn.Module, nn.Module]) -> list[nn.Module]:
    chain = [unit]
    while chain[-1] in parents:
        chain.append(parents[chain[-1]])
    return chain
