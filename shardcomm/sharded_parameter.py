"""Sharded parameters that say what they are: what is asked of a rank's rows is right for the whole, or a sentence.

`model.parameters()` of a sharded model are this rank's rows, which torch's tools take for whole parameters. So the rows
are guarded. An elementwise operation on them is done, and gives guarded rows again; a norm is the norm of the whole
(`norms.py`); and what would be silently wrong of rows alone, such as a product of matrices, an index or a sum, raises a
RuntimeError that says where the whole parameter is to be had. Inside an optimizer's step they are plain parameters
(`optimizer_steps.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from shardcomm.norms import is_norm, partial_norms
from shardcomm.plain import plain

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardcomm.mesh import Mesh


@dataclass(eq=False)
class Whole:
    """What the rows of a parameter are a part of.

    Attributes:
        name: the parameter's, in the model.
        unit: the name of the unit in whose forward the whole parameter is there.
        mesh: the ranks that hold the other rows.
        gather: the whole of a tensor of the rows' shape; collective.
        guarded_grad: `.grad` as it was shown last.
        grad_elsewhere: what `.grad` shows where there is none, and other ranks, which own the parameter, have one.
    """

    name: str
    unit: str
    mesh: Mesh
    gather: Callable[[torch.Tensor], torch.Tensor]
    guarded_grad: ShardedRows | None = None
    grad_elsewhere: ShardedRows | None = None

    def refuse(self, what: str) -> NoReturn:
        """RuntimeError: `what` would be of rows alone."""
        raise RuntimeError(
            f"{what} of {self.name!r}: outside of the forward of unit {self.unit!r} this rank has only its rows of it, "
            "with which elementwise operations and norms are right. Compute in that forward, or take full_tensor() "
            "for the whole, to_local() for the rows"
        )


class ShardedRows(torch.Tensor):
    """A rank's rows of something of a parameter's shape: of its gradient, of its `data`, of twice its values."""

    whole: Whole
    rows: torch.Tensor

    @staticmethod
    def __new__(cls, rows: torch.Tensor, whole: Whole) -> ShardedRows:  # noqa: D102
        with plain():
            self = rows.as_subclass(cls)
        self.whole, self.rows = whole, rows
        return self

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _guarded(func, args, kwargs or {})

    def to_local(self) -> torch.Tensor:
        """The rows themselves: a plain tensor of the same memory, without history."""
        with plain():
            return self.detach().as_subclass(torch.Tensor)

    def full_tensor(self) -> torch.Tensor:
        """The whole, from all ranks' rows, without history; collective."""
        return self.whole.gather(self.to_local())

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"{type(self).__name__}(rows of {self.whole.name!r}: {self.to_local()!r})"

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        self.whole.refuse("a pickle or a deep copy")

    def __deepcopy__(self, memo: Any) -> NoReturn:
        self.whole.refuse("a deep copy")


class ShardedParameter(nn.Parameter):
    """A rank's rows of a parameter, which an optimizer updates.

    A plain parameter becomes one, and back, by its class, as torch's `UninitializedParameter` does.
    """

    whole: Whole

    __torch_function__ = ShardedRows.__torch_function__
    to_local = ShardedRows.to_local
    full_tensor = ShardedRows.full_tensor
    __repr__ = ShardedRows.__repr__
    __reduce_ex__ = ShardedRows.__reduce_ex__
    __deepcopy__ = ShardedRows.__deepcopy__


def _guarded(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    name = getattr(func, "__name__", "")
    if name == "__get__":
        return _got(func, args[0])
    if name == "__set__":
        if func.__self__.__name__ == "grad":
            args[0].whole.grad_elsewhere = None
        with plain():
            return func(args[0], _unguarded(args[1]))
    if func is torch._amp_foreach_non_finite_check_and_unscale_:
        return _unscaled(*args, **kwargs)
    if is_norm(func):
        return partial_norms(func, args, kwargs)
    first = next(_guarded_in((args, kwargs)))
    if name in _EXPORTS:
        first.whole.refuse(name)
    _check_shapes(name, first, args, kwargs)
    with plain(), _Elementwise(first.whole, name):
        result = func(*args, **kwargs)
    return _as_guarded(result, first)


def _got(func: Any, of: Any) -> Any:
    with plain():
        value = func(of)
    attribute = func.__self__.__name__
    if value is None and attribute == "grad":
        return of.whole.grad_elsewhere
    if not isinstance(value, torch.Tensor) or isinstance(value, ShardedRows):
        return value
    if attribute == "grad":
        if (known := of.whole.guarded_grad) is None or known.rows is not value:
            known = of.whole.guarded_grad = ShardedRows(value, of.whole)
        return known
    if attribute in ("data", "real", "imag"):
        return ShardedRows(value, of.whole)
    if attribute.startswith("_"):
        return value
    return of.whole.refuse(attribute)


def _unscaled(grads: Any, found_inf: torch.Tensor, inv_scale: torch.Tensor) -> None:
    """As `torch.amp.GradScaler` calls it: what is found on one rank is found on all."""
    with plain():
        torch._amp_foreach_non_finite_check_and_unscale_(grads, found_inf, inv_scale)
    for mesh in {id(t.whole.mesh): t.whole.mesh for t in _guarded_in(grads)}.values():
        found = found_inf.to(mesh.device)
        mesh.all_reduce_shards(found, "max")
        found_inf.copy_(found)


def _unguarded(value: Any) -> Any:
    return value.rows if isinstance(value, ShardedRows) else value


def _guarded_in(tree: Any) -> Iterator[Any]:
    return (t for t in tree_leaves(tree) if isinstance(t, ShardedRows | ShardedParameter))


def _check_shapes(name: str, first: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuses what would pair the rows with a tensor of the whole's shape, or of another's."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor) and value is not first:
            with plain():
                shape, other = first.shape, value.shape
            try:
                fits = torch.broadcast_shapes(shape, other) == shape
            except RuntimeError:
                fits = False
            if not fits:
                first.whole.refuse(f"{name} with a tensor of shape {tuple(other)}")


def _as_guarded(result: Any, first: Any) -> Any:
    def guard(tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, ShardedRows | ShardedParameter) or tensor.shape != shape:
            return tensor
        return ShardedRows(tensor, first.whole)

    with plain():
        shape = first.shape
    return tree_map_only(torch.Tensor, guard, result)


_EXPORTS = {"numpy", "__array__", "tolist", "item", "__dlpack__", "__dlpack_device__"}

_ELEMENTWISE = {
    "aten::alias",
    "aten::clone",
    "aten::copy_",
    "aten::detach",
    "aten::empty_like",
    "aten::fill_",
    "aten::full_like",
    "aten::ones_like",
    "aten::zero_",
    "aten::zeros_like",
    "aten::_to_copy",
    "aten::lift_fresh",
}


class _Elementwise(TorchDispatchMode):
    """Refuses what is not elementwise."""

    def __init__(self, whole: Whole, name: str) -> None:
        super().__init__()
        self._whole = whole
        self._name = name

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = func._schema.name
        if not (
            torch.Tag.pointwise in func.tags
            or name in _ELEMENTWISE
            or name.startswith(("aten::_foreach_", "aten::_fused_"))
        ):
            self._whole.refuse(self._name)
        return func(*args, **(kwargs or {}))
