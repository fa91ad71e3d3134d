"""A parameter of which this rank has the whole, but in memory of the engine's."""

from __future__ import annotations

import sys
from typing import Any, NoReturn

import torch
from torch import nn

from shardcomm.parameter.draws import DRAWS, check_new_empty, on_one_rank, refuse_draws_into
from shardcomm.parameter.whole import Whole

_DATA: Any = torch._C.TensorBase.data


class WholeParameter(nn.Parameter):
    """A parameter of which this rank has the whole, in memory of the engine's, which must not move.

    In everything else, but for random values in place, it is a plain parameter, whose class it has in optimizers'
    steps. It has `to_local` and `full_tensor`, too, so that a program for several ranks runs on one. A copy of it, or
    one that was pickled, is wholly plain: it has no `whole`.
    """

    whole: Whole | None = None

    @property
    def data(self) -> torch.Tensor:  # noqa: D102
        return _given(_DATA.__get__(self), self.whole)

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if self.whole is None:
            _DATA.__set__(self, value)
        else:
            self.whole.take(value)

    def detach(self) -> torch.Tensor:  # noqa: D102
        if self.whole is not None and sys._getframe(1).f_code is nn.Parameter.__new__.__code__:
            self.whole.refuse_leaf()  # nn.Parameter would say that this class is wrong
        return _given(super().detach(), self.whole)

    def to_local(self) -> torch.Tensor:
        """The parameter as a plain tensor, in the same memory and without autograd history; as of rows."""
        return self.detach()

    def full_tensor(self) -> torch.Tensor:
        """A copy of the parameter, without autograd history; as of rows, of which it would be gathered."""
        return self.detach().clone()

    def register_hook(self, hook: Any) -> Any:  # noqa: D102
        if self.whole is None:
            return super().register_hook(hook)  # type: ignore[no-untyped-call]
        return self.whole.refuse_hook()

    def expand_as(self, other: torch.Tensor) -> torch.Tensor:  # noqa: D102
        return super().expand_as(self._no_node("expand_as", other))

    def view_as(self, other: torch.Tensor) -> torch.Tensor:  # noqa: D102
        return super().view_as(self._no_node("view_as", other))

    def _no_node(self, what: str, other: torch.Tensor) -> torch.Tensor:
        """`other`; RuntimeError if it is the parameter itself, since that is how others come to a node of autograd."""
        if self.whole is not None and other is self and torch.is_grad_enabled():
            self.whole.refuse_node(what)
        return other

    def _use_count(self) -> Any:
        if self.whole is None:
            return super()._use_count()  # type: ignore[misc]
        return self.whole.refuse_swap()

    def new_empty(self, *args: Any, **kwargs: Any) -> torch.Tensor:  # noqa: D102
        if self.whole is not None and self.whole.holders.mesh.size > 1:
            check_new_empty(self.whole, sys._getframe(1))
        return super().new_empty(*args, **kwargs)

    def set_(self, *args: Any, **kwargs: Any) -> Any:  # noqa: D102
        return super().set_(*args, **kwargs) if self.whole is None else self._refuse("set_")

    def share_memory_(self) -> Any:  # noqa: D102
        return super().share_memory_() if self.whole is None else self._refuse("share_memory_")  # type: ignore[no-untyped-call]

    def _refuse(self, what: str) -> NoReturn:
        assert self.whole is not None
        self.whole.refuse_other_memory(what)

    def __reduce_ex__(self, protocol: Any) -> Any:
        plainly: Any = nn.Parameter(self.detach(), self.requires_grad)
        return plainly.__reduce_ex__(protocol)


for _name in DRAWS:
    setattr(WholeParameter, _name, on_one_rank(_name))


def _given(values: torch.Tensor, whole: Whole | None) -> torch.Tensor:
    """`values` of a WholeParameter, which somebody is given."""
    if whole is None:
        return values
    if whole.holders.mesh.size > 1:
        refuse_draws_into(values, whole)
    return whole.given(values)
