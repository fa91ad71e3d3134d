"""The calls of a unit's module: what is called before and after each, and when one fails, by hooks and in its place."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from types import MethodType
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn

from shardcomm.engine import forward_methods
from shardcomm.engine.forward_methods import ForwardMethod
from shardcomm.sharded import unit_io
from shardcomm.sharded.hooks import Hooks, run_eagerly
from shardcomm.sharded.sharded_unit import ShardedUnit

if TYPE_CHECKING:
    from shardcomm.engine.step import Step


class ModuleCalls(Hooks):
    """Tells the step of the calls of a unit's module: of begin and end by hooks, and of failures from around the call.

    Torch tells no hook of a failure that is no Exception, such as KeyboardInterrupt.
    """

    def __init__(self, unit: ShardedUnit, step: Step) -> None:
        self._unit = unit
        self._step = step
        self._call: Any  # what stands in the place of the module's own call

    def install(self) -> Iterator[Any]:
        """Installs all of it; yields the handles, which remove it."""
        module = self._unit.module
        begin: Any = self._begin
        end: Any = self._end
        if module._compiled_call_impl is not None:
            # `module.compile()` compiles its hooks as well. Only the module itself should be compiled.
            begin, end = map(torch.compiler.disable, (begin, end))
        yield module.register_forward_pre_hook(begin, prepend=True, with_kwargs=True)
        yield module.register_forward_hook(end)
        yield from self._around()

    def _around(self) -> Iterator[ForwardMethod]:
        """Stands in the place of what `module(...)` calls, hooks included; in copies `_CallOfCopy` does."""
        unit, step, module = self._unit, self._step, self._unit.module
        compiled = module._compiled_call_impl is not None
        name = "_compiled_call_impl" if compiled else "_call_impl"
        inner: Any = getattr(module, name)

        def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if self is not module:  # a copy that the module's own __deepcopy__ or __getstate__ made
                raise RuntimeError(forward_methods.copied(unit))
            outermost = step.claim(unit)
            unit.forward.depth += 1
            try:
                return inner(*args, **kwargs)
            except BaseException:
                failed()
                raise
            finally:
                unit.forward.depth -= 1
                if outermost:
                    unit.forward.thread = None

        failed = self._failed
        self._call = call
        self.keep_out_of_graphs(True)
        installed = ForwardMethod(module, name, vars(module).get(name))
        setattr(module, name, MethodType(call, module))
        yield installed
        yield ForwardMethod(module, "__getstate__", None)
        vars(module)["__getstate__"] = functools.partial(_state_of_copy, unit, name)

    def keep_out_of_graphs(self, keep: bool) -> None:
        """Says whether graphs of `torch.compile(model)` end here. Inside of `gathered` nothing is in their way."""
        self._call._torchdynamo_disable = keep

    def _begin(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: Any = None
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if module is not self._unit.module:  # a deep copy of it, which no engine trains
            if torch.is_grad_enabled():
                raise RuntimeError(forward_methods.copied(self._unit))
            return args, kwargs
        if self._unit.forward.depth > 1:  # inside of its own forward, which has gathered
            return unit_io.cast((args, kwargs), self._unit.input_dtype)  # type: ignore[no-any-return]
        return self._step.pre_forward(self._unit, args, kwargs)

    def _end(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        unit = self._unit
        if module is not unit.module:
            return output
        if unit.forward.depth > 1:
            return unit_io.cast(output, unit.output_dtype)
        return self._step.post_forward(unit, output)

    def _failed(self) -> None:
        # Registered methods, and calls around this one, handle their own exceptions.
        if not self._unit.forward.in_method and self._unit.forward.depth == 1:
            self._step.forward_failed(self._unit)


class _CallOfCopy:
    """What `copy.copy(module)(...)` calls: it would be the forward of the original, and is refused.

    A deep copy, which can be made of whole parameters alone, has parameters of its own, and gets torch's own call.
    """

    def __init__(self, unit: ShardedUnit, name: str) -> None:
        self._unit = unit
        self._name = name

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise RuntimeError(forward_methods.copied(self._unit))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = memo[id(self._unit.module)]  # deepcopy notes it before it copies the state
        return MethodType(type(copied)._call_impl, copied) if self._name == "_call_impl" else None


def _state_of_copy(unit: ShardedUnit, name: str) -> Any:
    """What `copy.copy(module)` and `copy.deepcopy(module)` copy. What the module calls belongs to its engine."""
    state: Any = type(unit.module).__getstate__(unit.module)  # type: ignore[no-untyped-call]
    if isinstance(state, dict):
        state = {**state, name: _CallOfCopy(unit, name)}
        state.pop("__getstate__", None)
    return state


run_eagerly(ModuleCalls._begin, ModuleCalls._end, ModuleCalls._failed)
