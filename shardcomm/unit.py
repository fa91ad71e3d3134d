"""Units: which module's parameters are gathered together, and which parameters those are.

Every parameter belongs to the innermost unit around it; the model itself is the outermost unit and takes the rest. A
parameter that several units use (tied weights) belongs to the innermost unit around all of them, which is gathered
as long as any of them runs::

    model                 unit 0: embed.weight, norm.weight, head.weight (tied to embed: one parameter, two places)
      embed
      blocks.0            unit 1: blocks.0.attn.weight, ...
      blocks.1            unit 2: ...
      norm
      head
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from torch import nn

from shardcomm.schedule import Phase, Trigger

Units = Sequence[nn.Module | type[nn.Module]] | type[nn.Module] | None


@dataclass
class OwnedParam:
    """A parameter of a unit: its name in the model, and every place (module, attribute) that shows it.

    `param`: the full parameter, and once it is sharded this rank's rows.
    """

    name: str
    param: nn.Parameter
    places: list[tuple[nn.Module, str]] = field(default_factory=list)

    def check(self, shard: nn.Parameter, full: nn.Parameter) -> None:
        """RuntimeError unless all its places show one of them."""
        for module, attribute in self.places:
            shown = module._parameters.get(attribute)
            if shown is not shard and shown is not full:
                raise RuntimeError(
                    f"{type(module).__name__}.{attribute}, parameter {self.name!r}, was replaced after fully_shard, "
                    "which trains the one it was given; replace, tie and parametrize before fully_shard, load values "
                    "by load_state_dict, and call the model itself instead of functional_call"
                )

    def show(self, param: nn.Parameter) -> None:
        """Makes the model's modules see `param` in this parameter's places."""
        for module, attribute in self.places:
            # Not setattr: nn.Module's checks cost more than the rest of a step's bookkeeping.
            module._parameters[attribute] = param


@dataclass
class UnitParams:
    """A unit's module and the parameters it owns, in the model's order."""

    name: str
    module: nn.Module
    params: list[OwnedParam]


def find_units(model: nn.Module, units: Units) -> list[UnitParams]:
    """The units of `model`, the model itself first, in the order the model registers them.

    `units`: modules, or module classes whose instances are units; None takes the entries of every `nn.ModuleList`,
    containers apart.

    Raises:
        ValueError: a unit is not a module of the model, or has parameters and no forward before which to gather them.
    """
    modules = _unit_modules(model, units)
    names = {module: name for name, module in model.named_modules() if module in modules}
    parents: dict[nn.Module, nn.Module] = {}
    owners: dict[nn.Parameter, set[nn.Module]] = {}
    places: dict[nn.Parameter, dict[tuple[nn.Module, str], None]] = {}
    for module, unit, parent in _walk(model, model, model, modules):
        if module is unit and module is not model:
            parents.setdefault(unit, parent)
        for attribute, param in module._parameters.items():
            if param is not None:
                owners.setdefault(param, set()).add(unit)
                places.setdefault(param, {})[module, attribute] = None

    found = {module: UnitParams(name, module, []) for module, name in names.items()}
    for name, param in model.named_parameters():
        owner = _innermost_common(owners[param], parents)
        found[owner].params.append(OwnedParam(name, param, list(places[param])))
    if found[model].params and not _has_forward(model):
        raise ValueError(
            f"fully_shard: model is a {type(model).__name__} with parameters and without a forward before which they "
            "could be gathered; shard the modules in it that have one"
        )
    return list(found.values())


def registration_order(units: Sequence[UnitParams]) -> tuple[Trigger, ...]:
    """The forward's triggers if every module runs once, in the order of registration: the guess for the first step."""
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


def _unit_modules(model: nn.Module, units: Units) -> set[nn.Module]:
    everything = list(model.modules())
    if units is None:
        chosen: Iterable[nn.Module] = (
            entry
            for module in everything
            if isinstance(module, nn.ModuleList)
            for entry in module
            if _has_forward(entry)
        )
    else:
        if not isinstance(units, type | Iterable):
            raise TypeError(
                f"fully_shard: units is {units!r}; it must be modules, module classes, or None for the entries of "
                "ModuleLists"
            )
        given = [units] if isinstance(units, type) else list(units)
        classes = tuple(unit for unit in given if isinstance(unit, type))
        chosen = [module for module in everything if isinstance(module, classes)]
        for kind in classes:
            if not any(isinstance(module, kind) for module in everything):
                raise ValueError(
                    f"fully_shard: units contains the class {kind.__name__}, of which the model has no module"
                )
        chosen += [unit for unit in given if not isinstance(unit, type)]
        known = set(everything)
        for module in chosen:
            if module not in known:
                raise ValueError(
                    f"fully_shard: units contains {type(module).__name__}, which is not a module of the model; "
                    "give modules of the model, module classes, or None for the entries of its ModuleLists"
                )
            if not _has_forward(module):
                raise ValueError(
                    f"fully_shard: units contains a {type(module).__name__}, which has no forward before which its "
                    "parameters could be gathered; give the modules in it that have one"
                )
    return {model, *chosen}


def _has_forward(module: nn.Module) -> bool:
    """Containers (ModuleList, ModuleDict, ...) have none: their hooks never fire."""
    return getattr(module.forward, "__func__", None) is not nn.Module.forward


def _walk(
    module: nn.Module, unit: nn.Module, parent: nn.Module, units: set[nn.Module]
) -> Iterator[tuple[nn.Module, nn.Module, nn.Module]]:
    """Every (module, unit it belongs to, unit around that one), once for each path that leads to it."""
    if module in units and module is not unit:
        unit, parent = module, unit
    yield module, unit, parent
    for child in module._modules.values():
        if child is not None:
            yield from _walk(child, unit, parent, units)


def _innermost_common(owners: set[nn.Module], parents: dict[nn.Module, nn.Module]) -> nn.Module:
    chains = [_ancestors(owner, parents) for owner in owners]
    return next(unit for unit in chains[0] if all(unit in chain for chain in chains))


def _ancestors(unit: nn.Module, parents: dict[nn.Module, nn.Module]) -> list[nn.Module]:
    chain = [unit]
    while chain[-1] in parents:
        chain.append(parents[chain[-1]])
    return chain
