"""Sharded parameters that say what they are: what is asked of a rank's rows is right for the whole, or a sentence.

`model.parameters()` of a sharded model are this rank's rows, which torch's tools take for whole parameters. So the rows
are guarded. An elementwise operation on them is done, and gives guarded rows again; a norm is the norm of the whole
(`norms.py`); and what would be silently wrong of rows alone, such as a product of matrices, an index or a sum, raises a
RuntimeError that says where the whole parameter is to be had. Inside most optimizers' steps they are plain parameters
(`optimizer_steps.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from shardcomm.parameter.holders import Holders
from shardcomm.parameter.norms import completed, is_norm, partial_norms
from shardcomm.parameter.plain import grad_of, plain, set_grad
from shardcomm.parameter.shard_tensor import Part
from shardcomm.parameter.versions import written


@dataclass(eq=False)
class Whole:
    """What the rows of a parameter are a part of.

    Attributes:
        name: the parameter's, in the model.
        unit: the name of the unit in whose forward the whole parameter is there.
        holders: the ranks that hold the other rows.
        rows: this rank's, a plain tensor.
        part: which part of the whole they are.
        is_part: whether other ranks hold what belongs to the whole, or to the whole model.
        is_here, is_elsewhere: one rank owns the whole parameter; it is this one, or another.
        gather: the whole of a tensor of the rows' shape; collective.
        is_owned: one rank owns the whole parameter by its granularity, as opposed to having all of its few rows.
        is_part_owned: one rank owns a part of a DTensor that others have other parts of: nobody has the whole, and not
            all who have some of it would call for its norm.
        counts: whether norms count these rows here: several tensor-parallel ranks may have the same.
        address: of the rows.
        grad_elsewhere: what `.grad` shows where there is none, and the parameter's owner has one.
        check_names: raises where other ranks have other parameters by the same name; see `checkpoint/elsewhere.py`.
    """

    name: str
    unit: str
    holders: Holders
    rows: torch.Tensor
    part: Part
    is_part: bool
    is_here: bool
    is_elsewhere: bool
    gather: Callable[[torch.Tensor], torch.Tensor]
    is_owned: bool = False
    is_part_owned: bool = False
    counts: bool = True
    grad_elsewhere: ShardedRows | None = None
    check_names: Callable[[str], None] | None = None

    def __post_init__(self) -> None:
        self.address = self.rows.data_ptr()

    def adopt(self, param: nn.Parameter) -> None:
        """Takes the values of memory that was put in place of the rows'."""
        with plain():
            values, param.data = param.data, self.rows
        self.take(values)

    def take(self, values: torch.Tensor) -> None:
        """Copies `values` to the rows."""
        self.check(values)
        with plain():
            self.rows.copy_(values)

    def check(self, values: torch.Tensor) -> None:
        """RuntimeError unless `values` can be in the rows' place: of the same shape, dtype and device."""
        rows = self.rows
        with plain():
            if values.shape == rows.shape and (values.dtype, values.device) == (
                rows.dtype,
                rows.device,
            ):
                return
        raise RuntimeError(
            f"parameter {self.name!r} was given {values.dtype} of shape {tuple(values.shape)} on {values.device} after "
            f"fully_shard; this rank's rows are {rows.dtype} of shape {tuple(rows.shape)} on {rows.device}. Convert "
            "and move a model before fully_shard, compute in another dtype by mixed_precision=, and load values by "
            "load_state_dict"
        )

    def refuse(self, what: str) -> NoReturn:
        """RuntimeError: `what` would be of rows alone."""
        raise RuntimeError(
            f"{what} of {self.name!r}: outside of the forward of unit {self.unit!r} this rank has only its rows of it. "
            "Compute in that forward, in a method given to engine.register_forward_method, or between unshard() and "
            "reshard() of the unit; write inside of engine.gathered(write=True); take full_tensor() for the whole, "
            'to_local() for the rows. An optimizer of whole matrices needs granularity="tensor" and no DTensors'
        )

    def refuse_swap(self) -> NoReturn:
        """RuntimeError: an optimizer would step on memory of which the engine knows nothing."""
        raise RuntimeError(
            f"torch.utils.swap_tensors of {self.name!r}, a parameter of fully_shard, as by torch.__future__."
            "set_swap_module_params_on_conversion: its memory belongs to the engine; swap before fully_shard, and give "
            "it values by copy_ or load_state_dict"
        )

    def refuse_collective(self, operation: str) -> NoReturn:
        """RuntimeError: `operation` would mix rows with other ranks' other rows."""
        raise RuntimeError(
            f"{operation} of {self.name!r}, of which each rank has other rows: fully_shard makes parameters the same "
            "on all ranks, and averages gradients over them in backward; leave the call out, take full_tensor() for "
            "the whole, or to_local() for the rows as a plain tensor"
        )


class ShardedRows(torch.Tensor):
    """A rank's rows of something of a parameter's shape: of its gradient, of its `data`, of twice its values."""

    whole: Whole
    is_values = False  # of the parameter itself, by `.data`

    @staticmethod
    def __new__(cls, rows: torch.Tensor, whole: Whole) -> ShardedRows:  # noqa: D102
        with plain():
            self = rows.as_subclass(cls)
        self.whole = whole
        return self

    @staticmethod
    def guarding(rows: torch.Tensor, whole: Whole) -> ShardedRows:
        """`rows` itself, which nobody else has: at a tenth of the time of another tensor."""
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
        """The rows themselves: a plain tensor of the same memory, without history."""
        with plain():
            return self.detach().as_subclass(torch.Tensor)

    def full_tensor(self) -> torch.Tensor:
        """The whole, from all ranks' rows, without history; collective."""
        return self.whole.gather(self.to_local())

    def refuse_collective(self, operation: str) -> NoReturn:
        """RuntimeError; see `Whole`. A communicator asks tensors of other classes than torch's for it."""
        self.whole.refuse_collective(operation)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"{type(self).__name__}(rows of {self.whole.name!r}: {self.to_local()!r})"

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        self._refuse_copies("pickled")

    def __deepcopy__(self, memo: Any) -> NoReturn:
        self._refuse_copies("copied by deepcopy")

    def _refuse_copies(self, how: str) -> NoReturn:
        raise RuntimeError(
            f"{self.whole.name!r} is sharded and cannot be {how}: its memory belongs to the engine. Save a model by "
            "torch.distributed.checkpoint or engine.full_state_dict(), copy it before fully_shard, take clone() for "
            "the values of a tensor, and shardcomm.ExponentialMovingAverage instead of AveragedModel"
        )


class ShardedParameter(nn.Parameter):
    """A rank's rows of a parameter, which an optimizer updates.

    A plain parameter becomes one, and back, by its class, as torch's `UninitializedParameter` does.
    """

    whole: Whole

    __torch_function__ = ShardedRows.__torch_function__
    to_local = ShardedRows.to_local
    full_tensor = ShardedRows.full_tensor
    refuse_collective = ShardedRows.refuse_collective
    __repr__ = ShardedRows.__repr__  # type: ignore[assignment]
    __reduce_ex__ = ShardedRows.__reduce_ex__
    __deepcopy__ = ShardedRows.__deepcopy__
    _refuse_copies = ShardedRows._refuse_copies

    # Without a way through __torch_function__, four times as long: for each parameter in each `zero_grad`.
    @property
    def grad(self) -> ShardedRows | None:  # noqa: D102
        with plain():
            value = grad_of(self)
            if value is None:
                return self.whole.grad_elsewhere
            if not isinstance(value, ShardedRows):  # somebody has set it past this class
                value = ShardedRows(value, self.whole)
                set_grad(self, value)
            return value

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        self.whole.grad_elsewhere = None
        with plain():
            set_grad(self, value)

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    def register_hook(self, hook: Any) -> NoReturn:  # noqa: D102
        refuse_hook(self.whole)

    def _use_count(self) -> NoReturn:  # asked by swap_tensors alone
        self.whole.refuse_swap()


_DATA: Any = torch._C.TensorBase.data


class WholeParameter(nn.Parameter):
    """A parameter of which this rank has the whole, in memory of the engine's that must stay where it is.

    A plain one otherwise, at no cost, and altogether where it was copied or pickled: without `whole`.
    """

    whole: Whole | None = None

    @property
    def data(self) -> torch.Tensor:  # noqa: D102
        value: torch.Tensor = _DATA.__get__(self)
        return value

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if self.whole is None:
            _DATA.__set__(self, value)
        else:
            self.whole.take(value)

    def register_hook(self, hook: Any) -> Any:  # noqa: D102
        if self.whole is None:
            return super().register_hook(hook)  # type: ignore[no-untyped-call]
        return refuse_hook(self.whole)

    def _use_count(self) -> Any:
        if self.whole is None:
            return super()._use_count()  # type: ignore[misc]
        return self.whole.refuse_swap()

    def __reduce_ex__(self, protocol: Any) -> Any:
        plainly: Any = nn.Parameter(self.detach(), self.requires_grad)
        return plainly.__reduce_ex__(protocol)


def refuse_hook(whole: Whole) -> NoReturn:
    """RuntimeError: autograd never comes to what the optimizer sees."""
    raise RuntimeError(
        f"register_hook on {whole.name!r}, a parameter of fully_shard: autograd's gradient is this rank's, of the "
        "whole parameter, and is reduced over the ranks before it is a .grad; use register_post_accumulate_grad_hook"
    )


def _guarded(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    name = getattr(func, "__name__", "")
    if name == "__get__":
        return _got(func, args[0])
    if name == "__set__":
        return _set(func, *args)
    if func is torch._amp_foreach_non_finite_check_and_unscale_:
        return _unscaled(*args, **kwargs)
    if is_norm(func):
        return partial_norms(func, args, kwargs)
    if func is torch._has_compatible_shallow_copy_type:  # of Module.to, .half, .cuda, ...
        args[0].whole.check(args[1])
    args, kwargs = completed(args), completed(kwargs)
    guarded = list(_guarded_in((args, kwargs)))
    first = next((t for t in guarded if not t.whole.is_here), guarded[0])
    if func is torch.autograd.grad:
        raise RuntimeError(
            f"torch.autograd.grad with respect to {first.whole.name!r}, which is sharded: autograd's gradient is "
            "of the whole parameter, and is reduced over the ranks before this rank has its rows of it; call "
            "loss.backward() and read .grad"
        )
    if getattr(func, "__module__", "") == _COLLECTIVES:
        first.whole.refuse_collective(name)
    if name == "share_memory_":  # also of a whole one: it moves memory that collectives know
        first.whole.refuse(name)
    if _is_in_place(name):
        # For graphs made before, see `versions.py`: torch does not tell of lists here, nor of `.data`, nor on ranks
        # without rows.
        written([t.whole.rows for t in _guarded_in(args[:1]) if _is_values(t)])
    if first.whole.is_here:
        with plain():
            return _as_guarded(func(*args, **kwargs), first)
    if name in _REFUSED or (name in _INDEXING and not _takes_all(args[1])):
        first.whole.refuse(name)
    _check_shapes(name, first, args, kwargs)
    with plain(), _Elementwise(first.whole, name):
        result = func(*args, **kwargs)
    of_lists = name.startswith("_foreach_") and isinstance(result, list | tuple)
    return _each_guarded(result, args, kwargs) if of_lists else _as_guarded(result, first)


def _takes_all(index: Any) -> bool:
    """Whether it is one of `[:]`, `[...]`, `[:, ...]`: else torch counts from this rank's first row."""
    if isinstance(index, tuple):
        return all(map(_takes_all, index))
    return index is ... or (isinstance(index, slice) and index == slice(None))


def _is_in_place(name: str) -> bool:
    return name.endswith("_") and not name.startswith("__")


def _is_values(tensor: Any) -> bool:
    """Whether it is a parameter or its `.data`, and no gradient of it."""
    is_values = isinstance(tensor, ShardedParameter) or tensor.is_values
    return is_values and not tensor.whole.rows.is_inference()


def _got(func: Any, of: Any) -> Any:
    with plain():
        value = func(of)
    attribute = func.__self__.__name__
    if not isinstance(value, torch.Tensor) or isinstance(value, ShardedRows):
        return value
    if attribute in ("data", "real", "imag"):
        rows = ShardedRows(value, of.whole)
        rows.is_values = _is_values(of)
        return rows
    if attribute.startswith("_") or of.whole.is_here:
        return value
    return of.whole.refuse(attribute)


def _set(func: Any, of: Any, value: Any) -> None:
    if func.__self__.__name__ == "data":
        of.whole.check(value)
        with plain():  # in place: others, such as the flat shard, show the same memory
            of.detach().copy_(value)
        return
    with plain():
        func(of, value)


def _unscaled(grads: Any, found_inf: torch.Tensor, inv_scale: torch.Tensor) -> None:
    """As `torch.amp.GradScaler` calls it: what is found on one rank is found on all."""
    with plain():
        torch._amp_foreach_non_finite_check_and_unscale_(grads, found_inf, inv_scale)
    # Over all ranks: of the experts that it has, one may have no gradient where another has.
    for everyone in dict.fromkeys(t.whole.holders.everyone for t in _guarded_in(grads)):
        found = found_inf.to(everyone.device)
        everyone.all_reduce(found, "max")
        found_inf.copy_(found)


def _guarded_in(tree: Any) -> Iterator[Any]:
    return (t for t in tree_leaves(tree) if isinstance(t, ShardedRows | ShardedParameter))


def _check_shapes(name: str, first: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuses what would pair rows with a tensor of the whole's shape, or of another's."""
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
            with plain():
                shape, other = rows.shape, value.shape
            is_written = number == 0 and _is_in_place(name)
            try:
                # Where there are no rows, one row of the whole's, or a number, would be broadcast to none.
                fits = shape == (other if is_written else torch.broadcast_shapes(shape, other))  # type: ignore[no-untyped-call]
            except RuntimeError:
                fits = False
            if not fits:
                rows.whole.refuse(f"{name} with a tensor of shape {tuple(other)}")


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


_COLLECTIVES = dist.all_reduce.__module__

# No operation of torch's tells of these, which take the rows out of torch.
_REFUSED = {
    "__array__",
    "__dlpack__",
    "__dlpack_device__",
    "item",
    "numpy",
    "tolist",
}

_INDEXING = {"__getitem__", "__setitem__"}

_ELEMENTWISE = {
    "aten::_to_copy",
    "aten::alias",
    "aten::clone",
    "aten::copy_",
    "aten::detach",
    "aten::empty_like",
    "aten::fill_",
    "aten::full_like",
    "aten::lift_fresh",
    "aten::new_empty",
    "aten::new_full",
    "aten::new_ones",
    "aten::new_zeros",
    "aten::ones_like",
    "aten::zero_",
    "aten::zeros_like",
}


# Among torch's operations on lists, and those that it calls pointwise: one value of each tensor, and products.
_NOT_ELEMENTWISE = {
    "aten::equal",
    "aten::_foreach_max",
    "aten::_foreach_mm",
    "aten::_foreach_norm",
    "aten::_foreach_powsum",
}

_ELEMENTWISE_FAMILIES = ("aten::_foreach_", "aten::_fused_ada", "aten::_fused_sgd")


class _Elementwise(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses what is not elementwise."""

    def __init__(self, whole: Whole, name: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._whole = whole
        self._name = name

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = func._schema.name
        if name in _NOT_ELEMENTWISE or not (
            torch.Tag.pointwise in func.tags
            or name in _ELEMENTWISE
            or name.startswith(_ELEMENTWISE_FAMILIES)
        ):
            self._whole.refuse(self._name)
        return func(*args, **(kwargs or {}))
