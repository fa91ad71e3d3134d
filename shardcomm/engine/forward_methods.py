"""Methods that use a unit's parameters as its forward does: `Engine.register_forward_method`."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from types import MethodType
from typing import TYPE_CHECKING, Any

from torch import nn

from shardcomm.sharded.sharded_unit import ShardedUnit

if TYPE_CHECKING:
    from shardcomm.engine.step import Step


@dataclass(frozen=True)
class ForwardMethod:
    """A method that stands in the place of a module's own, until `remove()`.

    Attributes:
        module: The module.
        name: The method's name.
        before: What the module's dict held under this name before; None: nothing, since the class has the method.
    """

    module: nn.Module
    name: str
    before: Any

    def remove(self) -> None:
        """Gives the module its own method back."""
        vars(self.module).pop(self.name, None)
        if self.before is not None:
            vars(self.module)[self.name] = self.before


def install(unit: ShardedUnit, name: object, step: Step) -> ForwardMethod:
    """Tells `step` of calls of the method `name` of the unit's module, as of its forward's.

    A call of the method, or of the module itself, that comes from inside of such a call is part of the outermost one.

    Raises:
        ValueError: The module has no such method, or the method is its forward.
    """
    module = unit.module
    method = getattr(module, name, None) if isinstance(name, str) else None
    if not isinstance(name, str) or not callable(method):
        raise ValueError(
            f"register_forward_method: {type(module).__name__} has no method {name!r}; give the name of a "
            "method that computes with its parameters"
        )
    if name in ("forward", "__call__"):
        raise ValueError(
            f"register_forward_method: {name!r} is what the engine gathers for already; call the module"
        )

    @functools.wraps(method)
    def gathering(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if self is not module:
            raise RuntimeError(copied(unit))
        outermost = step.claim(unit)
        try:
            if unit.forward.depth or unit.forward.in_method or unit.apart is not None:
                return method(*args, **kwargs)
            return gathered(*args, **kwargs)
        finally:
            if outermost:
                unit.forward.thread = None

    def gathered(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = step.pre_forward(unit, args, kwargs)
        unit.forward.in_method = True
        try:
            try:
                output = method(*args, **kwargs)
            finally:
                unit.forward.in_method = False
            return step.post_forward(unit, output, method=True)
        except BaseException:
            step.forward_failed(unit)
            raise

    # Bound to the module, as its own method is. A copy of the module has it, too, and sees that `self` is another.
    installed = ForwardMethod(module, name, vars(module).get(name))
    setattr(module, name, MethodType(gathering, module))
    return installed


def copied(unit: ShardedUnit) -> str:
    """The sentence about a call of a copy of the unit's module, which has the original's hooks."""
    return (
        f"forward of a copy of unit {unit.name!r}, which no engine trains; call a deep copy under torch.no_grad(); to "
        "train one, copy a model before fully_shard, or load its full_state_dict() into another one; for an average of "
        "its parameters use shardcomm.ExponentialMovingAverage"
    )
