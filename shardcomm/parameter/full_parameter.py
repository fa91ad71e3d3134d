"""Full parameters in a unit's slot: what is done to them past autograd is answered, noticed or refused.

    gathered    for the unit's forward and backward: a plain parameter to torch's functions. A change through `.data`
                is noticed when the forward ends; `.grad` is that of this rank's rows
    released    when other values come into the slot: whoever has kept it in a variable is told so

A parameter becomes the one or the other by setting its class.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, NoReturn

import torch
from torch import nn
from torch._guards import TracingContext

from shardcomm.parameter.plain import plain

_DATA: Any = torch._C.TensorBase.data
_INTERFACE = "__cuda_array_interface__"  # the only attribute that is a property, which has no name
_VALUES = ("H", "T", "data", "imag", "mH", "mT", "real", _INTERFACE)
_OF_NO_VALUES = (
    "dim",
    "element_size",
    "get_device",
    "is_complex",
    "is_floating_point",
    "ndimension",
    "nelement",
    "numel",
    "register_post_accumulate_grad_hook",
    "requires_grad_",
    "size",
    "stride",
)


@dataclass(eq=False)
class Origin:
    """What a full parameter is the whole of.

    Attributes:
        name: The parameter's name in the model.
        unit: The name of its unit.
        rows: This rank's rows of it, which have the gradient.
        given: The list of what `.data` gives; None where the parameter is no copy, and changes are kept.
    """

    name: str
    unit: str
    rows: nn.Parameter
    given: list[tuple[str, torch.Tensor]] | None = None


def refuse_change(name: str, unit: str) -> NoReturn:
    """Raises the RuntimeError against a change of the parameter `name` in the forward of its `unit`."""
    raise RuntimeError(
        f"parameter {name!r} was changed in the forward of unit {unit!r}, where it is a copy, so that the change would "
        "be lost; change parameters inside of engine.gathered(write=True), or this rank's rows of them elementwise, as "
        "by clamp_, before a forward or after the optimizer's step"
    )


class GatheredParameter(nn.Parameter):
    """A full parameter while its values are in its memory."""

    _shardcomm_origin: Origin

    @property
    def grad(self) -> torch.Tensor | None:
        """The gradient of this rank's rows, as between steps; RuntimeError while autograd runs."""
        if TracingContext.try_get() is not None:
            return None  # torch.compile asks each parameter; a graph has no use for it
        return self._trained().grad

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        self._trained().grad = value

    @grad.deleter
    def grad(self) -> None:
        self._trained().grad = None

    def _trained(self) -> nn.Parameter:
        origin = self._shardcomm_origin
        if torch._C._current_graph_task_id() != -1:
            raise RuntimeError(
                f".grad of {origin.name!r} in a backward of unit {origin.unit!r}, when it is not reduced over the "
                "ranks yet; read it after backward, or in a hook of register_post_accumulate_grad_hook"
            )
        return origin.rows

    @property
    def data(self) -> torch.Tensor:  # noqa: D102
        value: torch.Tensor = _DATA.__get__(self)
        origin = self._shardcomm_origin
        if origin.given is not None and not value.is_inference():
            origin.given.append((origin.name, value))
        return value

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        is_same = (value.shape, value.dtype) == (self.shape, self.dtype)
        if is_same and value.data_ptr() == self.data_ptr():
            return  # a conversion that changes nothing, as by `.float()`
        refuse_change(self._shardcomm_origin.name, self._shardcomm_origin.unit)

    def set_(self, *args: Any, **kwargs: Any) -> NoReturn:  # noqa: D102
        refuse_change(self._shardcomm_origin.name, self._shardcomm_origin.unit)

    def __deepcopy__(self, memo: Any) -> nn.Parameter:
        copied = memo[id(self)] = nn.Parameter(self.detach().clone(), self.requires_grad)
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        plainly: Any = nn.Parameter(self.detach(), self.requires_grad)
        return plainly.__reduce_ex__(protocol)


class ReleasedParameter(GatheredParameter):
    """A full parameter while other values are, or may be, in its memory: only what is of no values is answered."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        is_attribute = name in ("__get__", "__set__")
        if is_attribute:
            name = getattr(func.__self__, "__name__", _INTERFACE)
        if name not in _VALUES if is_attribute else name in _OF_NO_VALUES:
            with plain():
                return func(*args, **(kwargs or {}))
        kept = next(
            each
            for each in torch.utils._pytree.tree_leaves((args, kwargs))
            if isinstance(each, cls)
        )
        return kept._refuse(name)

    @property
    def data(self) -> NoReturn:
        """Raises RuntimeError."""
        self._refuse("data")

    @data.setter
    def data(self, value: torch.Tensor) -> NoReturn:
        self._refuse("data")

    def set_(self, *args: Any, **kwargs: Any) -> NoReturn:  # noqa: D102
        self._refuse("set_")

    def _refuse(self, what: str) -> NoReturn:
        origin = self._shardcomm_origin
        raise RuntimeError(
            f"{what} of {origin.name!r}, which was kept in a variable past the forward of unit {origin.unit!r}: other "
            "values may be in its memory by now. Compute with it in that forward, keep a clone() of it, or read the "
            "model's parameter between unshard() and reshard() of the unit, or by full_tensor()"
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"ReleasedParameter({self._shardcomm_origin.name!r})"

    def __deepcopy__(self, memo: Any) -> NoReturn:
        self._refuse("deepcopy")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        self._refuse("a pickle")


@cache
def gathered_class(kind: type[nn.Parameter]) -> type[nn.Parameter]:
    """The class of gathered parameters that are of the user's class `kind`, which forward may need."""
    if kind is nn.Parameter:
        return GatheredParameter
    return type(kind.__name__, (GatheredParameter, kind), {"__module__": kind.__module__})
