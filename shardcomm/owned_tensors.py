"""Owned parameters in an optimizer's first step, where what is computed of several of them together is refused.

With granularity "tensor" a step of a user's own is given whole parameters: those that this rank owns. What it does with
each is as without sharding: a product of matrices, a trust ratio. A norm of all of them would be of this rank's alone,
and other on each rank. So in the first step parameters and gradients carry the name of what they are of, which goes on
to what is computed of them; where two names meet, it raises. Later steps, which do the same, see plain tensors::

    a.grad ──norm──► of a ──┐
                            +  RuntimeError           a.grad ──► a.grad @ a.grad.T, of a
    b.grad ──norm──► of b ──┘
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from shardcomm.plain import plain
from shardcomm.sharded_parameter import ShardedParameter, Whole


class OwnedStep:
    """A step of the `optimizer` of that name, from `begin` to `end`."""

    def __init__(self, optimizer: str, params: Sequence[ShardedParameter]) -> None:
        self._optimizer = optimizer
        self._wholes = [param.whole for param in params]
        self._computed: list[weakref.ref[torch.Tensor]] = []
        self._eagerly = _Eagerly()

    def begin(self) -> None:
        """From here on, what is computed of OwnedTensors is watched."""
        for whole in self._wholes:
            whole.step = self
        self._eagerly.__enter__()

    def end(self) -> None:
        """What was computed, such as the optimizer's state, is plain."""
        self._eagerly.__exit__()
        for whole in self._wholes:
            whole.step = None
        for ref in self._computed:
            if (tensor := ref()) is not None and type(tensor) is OwnedTensor:
                del tensor.whole
                tensor.__class__ = torch.Tensor  # type: ignore[assignment]
        self._computed.clear()

    def computed(self, value: Any, of: Collection[Whole]) -> Any:
        """`value`, which carries the name of what it was computed `of`, if that is one."""
        for whole in of if len(of) == 1 else ():
            for tensor in tree_leaves(value):
                if type(tensor) is torch.Tensor:
                    tensor.__class__ = OwnedTensor
                    self._computed.append(weakref.ref(tensor))
                if type(tensor) is OwnedTensor:
                    tensor.whole = whole
            if type(value) is float:
                return OwnedNumber(value, whole)
        return value

    def refuse(self, what: str, wholes: Collection[Whole]) -> None:
        """RuntimeError: `what` is of several."""
        self._eagerly.__exit__()
        first, second, *_ = sorted(whole.name for whole in wholes)
        raise RuntimeError(
            f'{self._optimizer}.step: {what} of {first!r} and {second!r} together: by granularity="tensor" a rank\'s '
            "step is given the parameters that it owns, and no others. Clip by torch.nn.utils.clip_grad_norm_, or take "
            'get_total_norm, before the step; or fully_shard with granularity="row", with which a norm in a step is of '
            "all parameters"
        )


class _Eagerly:
    """In here what `torch.compile` has made runs as it was written: a compiler cannot trace OwnedTensors."""

    _lock = threading.Lock()
    _count = 0  # of those inside, which may be in several threads
    _stance: Any = None

    def __init__(self) -> None:
        self._inside = False

    def __enter__(self) -> None:
        with self._lock:
            self._inside = True
            _Eagerly._count += 1
            if self._count == 1:
                _Eagerly._stance = torch.compiler.set_stance("force_eager")

    def __exit__(self, *error: object) -> None:
        with self._lock:
            if not self._inside:
                return
            self._inside = False
            _Eagerly._count -= 1
            if self._count == 0:
                self._stance.__exit__(None, None, None)


class OwnedTensor(torch.Tensor):
    """What was computed of one owned parameter."""

    whole: Whole

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _watched(func, args, kwargs or {})


class OwnedParameter(nn.Parameter):
    """An owned parameter."""

    whole: Whole

    __torch_function__ = OwnedTensor.__torch_function__


class OwnedNumber(float):
    """What `item()` gives of an OwnedTensor."""

    whole: Whole

    def __new__(cls, value: float, whole: Whole) -> OwnedNumber:  # noqa: D102
        self = super().__new__(cls, value)
        self.whole = whole
        return self

    def __reduce__(self) -> Any:
        return float, (float(self),)


def _of_float(name: str) -> Callable[..., Any]:
    method = getattr(float, name)

    def watched(self: OwnedNumber, *others: Any) -> Any:
        if any(isinstance(other, torch.Tensor) for other in others):
            return NotImplemented
        step, wholes = self.whole.step, {each.whole for each in _owned((self, others))}
        if step is None:
            return method(self, *others)
        if len(wholes) > 1:
            step.refuse(name, wholes)
        return step.computed(method(self, *others), wholes)

    return watched


for _name in ("add", "sub", "mul", "truediv", "pow"):
    setattr(OwnedNumber, f"__{_name}__", _of_float(f"__{_name}__"))
    setattr(OwnedNumber, f"__r{_name}__", _of_float(f"__r{_name}__"))
for _name in ("lt", "le", "gt", "ge", "abs", "neg"):
    setattr(OwnedNumber, f"__{_name}__", _of_float(f"__{_name}__"))

_OVERWRITING = {"copy_", "fill_", "zero_"}


def _owned(tree: Any) -> list[Any]:
    kinds = OwnedTensor | OwnedParameter | OwnedNumber
    return [each for each in tree_leaves(tree) if isinstance(each, kinds)]


def _watched(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    name = getattr(func, "__name__", "")
    step = next((each.whole.step for each in _owned((args, kwargs)) if each.whole.step), None)
    if step is None:  # it was kept past the step
        with plain():
            return func(*args, **kwargs)
    if name.startswith(("_foreach_", "_fused_")):
        return _watched_lists(step, name, func, args, kwargs)
    # What is written into may have been another's.
    sources = args[1:] if name in _OVERWRITING else args
    wholes = {each.whole for each in _owned((sources, {**kwargs, "out": None}))}
    batches = func is torch.stack and all(each.dim() > 1 for each in args[0])  # of matrices
    if len(wholes) > 1 and not batches:
        step.refuse(name, wholes)
    with plain():
        result = func(*args, **kwargs)
    if name == "__float__":  # must be one
        return result
    return step.computed(result, wholes)


def _watched_lists(
    step: OwnedStep, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Of operations that go through lists of tensors side by side."""
    given = [*args, *kwargs.values()]
    of_all = {each.whole for each in _owned([g for g in given if not isinstance(g, list | tuple)])}
    rows = zip(*(g for g in given if isinstance(g, list | tuple) and g), strict=False)
    of_each = [of_all | {each.whole for each in _owned(row)} for row in rows]
    for wholes in of_each:
        if len(wholes) > 1:
            step.refuse(name, wholes)
    with plain():
        result = func(*args, **kwargs)
    for each, wholes in zip(result or (), of_each, strict=False):
        step.computed(each, wholes)
    return result
