"""Sharded parameters that know what they are: an operation on a rank's rows is right for the whole, or it is refused.

`model.parameters()` of a sharded model are this rank's rows, which torch's tools take for whole parameters. So the rows
are guarded. An elementwise operation on them is done, and gives guarded rows again. A norm is the norm of the whole
(`norms.py`). So are a sum, a mean or a maximum (`reductions.py`), and a shape (`sizes.py`). An operation that would be
silently wrong of rows alone, such as a product of matrices, an index or a transpose, raises a RuntimeError that says
where to get the whole parameter (`refused.py`, `elementwise.py`). Inside most optimizers' steps the rows are plain
parameters (`optimizer_steps.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any, NoReturn

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only

from shardcomm.parameter.elementwise import Elementwise
from shardcomm.parameter.norms import completed, is_norm, partial_norms
from shardcomm.parameter.plain import grad_of, plain, set_grad
from shardcomm.parameter.reductions import is_reduction, reduced
from shardcomm.parameter.refused import check_of_any, check_of_rows
from shardcomm.parameter.shard_tensor import SAVE_BY
from shardcomm.parameter.sizes import METHODS, is_getter_of_size, numel, size
from shardcomm.parameter.versions import written
from shardcomm.parameter.whole import Held, Owned, Whole, is_in_place


class ShardedRows(torch.Tensor):
    """A rank's rows of a tensor of a parameter's shape, such as its gradient, its `data`, or twice its values."""

    whole: Whole
    is_values = False  # whether they are the parameter's own values, which `.data` gives
    is_detached = False  # whether they are those that `detach()` of the parameter gives

    @staticmethod
    def __new__(cls, rows: torch.Tensor, whole: Whole) -> ShardedRows:  # noqa: D102
        with plain():
            self = rows.as_subclass(cls)
        self.whole = whole
        return self

    @staticmethod
    def guarding(rows: torch.Tensor, whole: Whole) -> ShardedRows:
        """Turns `rows`, which nobody else may have, into guarded rows. A new tensor would take ten times as long."""
        rows.__class__ = ShardedRows
        assert isinstance(rows, ShardedRows)
        rows.whole = whole
        return rows

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _guarded(func, args, kwargs or {})

    def to_local(self) -> torch.Tensor:
        """This rank's rows as a plain tensor, in the same memory and without autograd history."""
        with plain():
            return self.detach().as_subclass(torch.Tensor)

    def full_tensor(self) -> torch.Tensor:
        """The whole tensor, gathered from all ranks' rows, without autograd history; collective.

        Returns:
            A new tensor of the parameter's full shape, on the rows' device.

        Raises:
            CommError: A rank died, called something else or did not come in time.
        """
        return self.whole.gather(self.to_local())

    def refuse_collective(self, operation: str) -> NoReturn:
        """Raises RuntimeError: in a collective these rows would meet other ranks' other rows.

        A Communicator calls it for operands that have it.

        Args:
            operation: The collective, for the message.
        """
        self.whole.refuse_collective(operation)

    def set_(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raises RuntimeError: these rows are in memory of the engine. Torch asks no `__torch_function__`."""
        self.whole.refuse_other_memory("set_")

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"{type(self).__name__}(rows of {self.whole.name!r}: {self.to_local()!r})"

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        self._refuse_copies("pickled")

    def __deepcopy__(self, memo: Any) -> NoReturn:
        self._refuse_copies("copied by deepcopy")

    def _refuse_copies(self, how: str) -> NoReturn:
        raise RuntimeError(
            f"{self.whole.name!r} is sharded and cannot be {how}: its memory belongs to the engine. {SAVE_BY}. Copy a "
            "model before it is sharded, or inside of engine.gathered(); take to_local() for a tensor of these rows, "
            "full_tensor() for the whole, and shardcomm.ExponentialMovingAverage instead of AveragedModel"
        )


class ShardedParameter(nn.Parameter):
    """A rank's rows of a parameter: what `model.parameters()` of a sharded model gives, and an optimizer updates.

    Torch's tools take such a parameter for a whole one, so it answers for the whole, or refuses. Elementwise operations
    give rows again. Norms, sums, means, maxima and the like are of the whole parameter, by an all-reduce. An operation
    that would be wrong of rows alone, such as a product of matrices, an index or a transpose, raises a RuntimeError
    that says where to get the whole parameter.

    Example:
        ```python
        model = torch.nn.Linear(64, 64)
        engine = shardcomm.fully_shard(model, comm)
        print(model.weight.shape)  # the whole's
        print(model.weight.to_local().shape)  # that of this rank's rows
        print(model.weight.full_tensor())  # the whole; collective
        ```
    """

    # A plain parameter becomes one, and back, by setting its class, as torch's `UninitializedParameter` does.

    whole: Whole

    __torch_function__ = ShardedRows.__torch_function__
    to_local = ShardedRows.to_local
    full_tensor = ShardedRows.full_tensor
    refuse_collective = ShardedRows.refuse_collective
    set_ = ShardedRows.set_
    __repr__ = ShardedRows.__repr__  # type: ignore[assignment]
    __reduce_ex__ = ShardedRows.__reduce_ex__
    __deepcopy__ = ShardedRows.__deepcopy__
    _refuse_copies = ShardedRows._refuse_copies

    # A property of its own, since the way through __torch_function__ takes four times as long, and a module's
    # `zero_grad` asks each parameter.
    @property
    def grad(self) -> ShardedRows | None:
        """This rank's rows of the gradient, averaged over the ranks; None before a backward."""
        with plain():
            value = grad_of(self)
            if value is None:
                elsewhere: ShardedRows | None = self.whole.grad_elsewhere
                return elsewhere
            if not isinstance(value, ShardedRows):  # somebody has set it past this property
                value = ShardedRows(value, self.whole)
                set_grad(self, value)
            return value

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        self.whole.grad_elsewhere = None
        with plain():
            if value is not None and value.shape != self.shape:
                self.whole.refuse_grad(tuple(value.shape))
            set_grad(self, value)

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    def register_hook(self, hook: Any) -> NoReturn:
        """Raises RuntimeError: autograd's gradients never come to rows. See `register_post_accumulate_grad_hook`."""
        self.whole.refuse_hook()

    def _use_count(self) -> NoReturn:  # only swap_tensors calls it
        self.whole.refuse_swap()


# New values of a size that is given, which may be that of this rank's rows. Not new_empty, into which nn.init draws.
_NEW = ("new_zeros", "new_ones", "new_full", "new_tensor")


def _guarded(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    name = getattr(func, "__name__", "")
    if name == "__get__":
        return _got(func, args[0])
    if name == "__set__":
        return _set(func, *args)
    if func in _INSTEAD:
        return _INSTEAD[func](*args, **kwargs)
    if is_norm(func) or is_reduction(func, args, kwargs):
        return (partial_norms if is_norm(func) else reduced)(func, args, kwargs)
    if func is torch._has_compatible_shallow_copy_type:  # Module.to, .half, .cuda, ... call it
        args[0].whole.check(args[1])
    args, kwargs = completed(args), completed(kwargs)
    guarded = list(_guarded_in((args, kwargs)))
    first = next((t for t in guarded if t.whole.held is not Held.WHOLE), guarded[0])
    check_of_any(func, name, args, first.whole)
    if is_in_place(name):
        # So that autograd refuses graphs of the old values, see `versions.py`. Torch itself does not mark such changes
        # of tensors in lists, or through `.data`, and marks none on ranks without rows.
        written([t.whole.rows for t in _guarded_in(args[:1]) if _is_values(t)])
    is_new = name in _NEW and not first.whole.in_step
    if is_new or _has_whole(first):
        with plain():
            result = func(*args, **kwargs)
            return result if is_new else _as_guarded(result, first)
    of_values = _is_of_values(first)
    check_of_rows(name, args, first.whole, of_values=of_values)
    _check_shapes(name, first, args, kwargs)
    with plain(), Elementwise(first.whole, name, of_values=of_values):
        result = func(*args, **kwargs)
    of_lists = name.startswith("_foreach_") and isinstance(result, list | tuple)
    return _each_guarded(result, args, kwargs) if of_lists else _as_guarded(result, first)


def _has_whole(of: Any) -> bool:
    """Whether functions may compute with `of`, which has this rank's rows, as with the whole.

    Not if ranks share its rows out, and this one just happens to have all: the others refuse what this rank would do.
    """
    whole: Whole = of.whole
    by_chance = whole.owned is Owned.NOT and whole.is_part and not whole.in_step
    return whole.held is Held.WHOLE and not by_chance


def _is_values(tensor: Any) -> bool:
    """Whether `tensor` is a parameter or its `.data`, and not its gradient."""
    is_values = isinstance(tensor, ShardedParameter) or tensor.is_values
    return is_values and not tensor.whole.rows.is_inference()


def _is_of_values(tensor: Any) -> bool:
    """Whether it has a parameter's values; not a gradient, and not what was computed from rows."""
    return isinstance(tensor, ShardedParameter) or tensor.is_values or tensor.is_detached


def _got(func: Any, of: Any) -> Any:
    attribute = func.__self__.__name__
    if is_getter_of_size(attribute):
        return size(func, of)
    with plain():
        value = func(of)
    if not isinstance(value, torch.Tensor) or isinstance(value, ShardedRows):
        return value
    if attribute in ("data", "real", "imag"):
        rows = ShardedRows(value, of.whole)
        rows.is_values = _is_values(of)
        return of.whole.given(rows) if rows.is_values else rows
    if attribute.startswith("_") or _has_whole(of):
        return value
    return of.whole.refuse(attribute, of_values=_is_of_values(of))


def _set(func: Any, of: Any, value: Any) -> None:
    if func.__self__.__name__ == "data":
        if isinstance(of, ShardedParameter):
            of.whole.take(value)
            return
        of.whole.check(value)
        with plain():
            # In place, since other tensors, such as the flat gradient, have the same memory.
            of.detach().copy_(value)
        return
    with plain():
        func(of, value)


def _unscaled(grads: Any, found_inf: torch.Tensor, inv_scale: torch.Tensor) -> None:
    """The operation that `torch.amp.GradScaler` calls; an Inf that one rank finds counts on all ranks."""
    with plain():
        torch._amp_foreach_non_finite_check_and_unscale_(grads, found_inf, inv_scale)
    # Over all ranks of the model: a rank may have no gradients of its experts where another rank has some.
    for everyone in dict.fromkeys(t.whole.holders.everyone for t in _guarded_in(grads)):
        found = found_inf.to(everyone.device)
        everyone.all_reduce(found, "max")
        found_inf.copy_(found)


def _detached(self: Any) -> ShardedRows:
    with plain():
        rows = ShardedRows(self.detach(), self.whole)
    if not isinstance(self, ShardedParameter):
        return rows
    rows.is_detached = True
    return self.whole.given(rows)


def _requiring_grad(self: Any, requires_grad: bool = True) -> Any:
    """`self.requires_grad_(...)`. Of what `detach()` has just given, it is what nn.Parameter calls."""
    if requires_grad and isinstance(self, ShardedRows) and self.is_detached:
        self.whole.refuse_leaf()
    with plain():
        return self.requires_grad_(requires_grad)


def _converted(self: Any, *args: Any, **kwargs: Any) -> Any:
    """`self.to(...)`, or what is like it. Another tensor gives it no more than a dtype and a device."""
    with plain():
        converted = self.to(*args, **kwargs)
    return _as_guarded(converted, self) if hasattr(self, "whole") else converted


def _allclose(*args: Any, **kwargs: Any) -> bool:
    """What `torch.allclose` says of the whole tensors; collective."""
    return bool(torch.isclose(*args, **kwargs).all())


def _equal(first: Any, second: Any) -> bool:
    """What `torch.equal` says of the whole tensors; collective, unless they are one, or of different shapes.

    In an optimizer's step, the rank that owns a parameter asks alone.
    """
    if first is second:
        return True
    wholes = [getattr(tensor, "whole", None) for tensor in (first, second)]
    if all(whole is not None and _asks_together(whole) for whole in wholes):
        if first.whole.part.shape != second.whole.part.shape:
            return False
        return torch.equal(first.full_tensor(), second.full_tensor())
    for tensor, whole in zip((first, second), wholes, strict=True):
        if whole is not None and not _has_whole(tensor):
            whole.refuse("equal", of_values=_is_of_values(tensor))
    with plain():
        return torch.equal(first, second)


def _formatted(self: Any, spec: str) -> str:
    """`f"{self:.2f}"`, of a tensor without dims. Torch's own function does that for no subclass."""
    if spec == "":
        return repr(self)
    if not _has_whole(self):
        self.whole.refuse("__format__", of_values=_is_of_values(self))
    return format(self.to_local(), spec)


def _asks_together(whole: Whole) -> bool:
    return whole.owned is Owned.NOT or (whole.owned is Owned.WHOLE and not whole.in_step)


_INSTEAD: dict[Any, Any] = {
    torch._amp_foreach_non_finite_check_and_unscale_: _unscaled,
    torch.Tensor.detach: _detached,
    torch.numel: numel,
    torch.Tensor.numel: numel,
    torch.Tensor.nelement: numel,
    **{method: partial(size, method) for method in METHODS},
    torch.equal: _equal,
    torch.Tensor.equal: _equal,
    torch.Tensor.__format__: _formatted,
    torch.allclose: _allclose,
    torch.Tensor.allclose: _allclose,
    # Rows have no graph. Torch refuses it of views, which gradients are; old loops call it.
    torch.Tensor.detach_: lambda self: self.requires_grad_(False),
    torch.Tensor.requires_grad_: _requiring_grad,
    torch.Tensor.to: _converted,
    torch.Tensor.type_as: _converted,
}
"""What is called instead of torch's functions: most of these answer for the whole, some after all ranks have met."""


def _guarded_in(tree: Any) -> Iterator[Any]:
    return (t for t in tree_leaves(tree) if isinstance(t, ShardedRows | ShardedParameter))


def _check_shapes(name: str, first: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuses to pair rows with a tensor of the whole's shape, or of another parameter's rows."""
    values = (*args, *kwargs.values())
    _check_pairs(name, first, values)
    if name.startswith("_foreach_"):
        for together in zip(*_lists(values), strict=False):
            for rows in islice(_guarded_in(together), 1):
                _check_pairs(name, rows, together)


def _lists(values: Iterable[Any]) -> Iterator[Any]:
    return (value for value in values if isinstance(value, list | tuple) and value)


def _check_pairs(name: str, rows: Any, with_values: Sequence[Any]) -> None:
    for number, value in enumerate(with_values):
        if isinstance(value, torch.Tensor) and value is not rows:
            is_written = number == 0 and is_in_place(name)
            with plain():
                fits, shape = _fits(rows, value, is_written), tuple(value.shape)
            if not fits:
                rows.whole.refuse(
                    name,
                    f"with a tensor of shape {shape}",
                    given_whole=shape == rows.whole.part.shape,
                    of_values=_is_of_values(rows),
                )


def _fits(rows: Any, value: Any, is_written: bool) -> bool:
    shape, other = rows.shape, value.shape
    if isinstance(value, ShardedRows | ShardedParameter):
        # Not broadcast: a single row of another parameter may be any of that parameter's.
        same: bool = shape == other and rows.whole.part.shape == value.whole.part.shape
        return same
    if is_written:
        return bool(shape == other)
    try:
        # On a rank without rows, one row of a whole tensor, or a number, is broadcast to none.
        return bool(shape == torch.broadcast_shapes(shape, other))  # type: ignore[no-untyped-call]
    except RuntimeError:
        return False


def _as_guarded(result: Any, first: Any) -> Any:
    def guard(tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, ShardedRows | ShardedParameter) or tensor.shape != shape:
            return tensor
        return ShardedRows(tensor, first.whole)

    with plain():
        shape = first.shape
    return tree_map_only(torch.Tensor, guard, result)


def _each_guarded(results: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if results and results[0] is args[0][0]:  # in place
        return results
    rows = zip(*_lists((*args, *kwargs.values())), strict=False)
    firsts = (next(_guarded_in(row), None) for row in rows)
    return [
        result if first is None else _as_guarded(result, first)
        for result, first in zip(results, firsts, strict=False)
    ]
