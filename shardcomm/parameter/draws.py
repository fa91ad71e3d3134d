"""Random values in place, which each rank would draw by its own generator: refused of parameters.

Into rows, ranks whose generators are seeded alike would draw the same values for different rows. Into a parameter that
every rank has as a whole, ranks whose generators are seeded differently would draw different values, and train apart.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from functools import wraps
from types import FrameType
from typing import Any, NoReturn

import torch

DRAWS = (
    "bernoulli_",
    "cauchy_",
    "exponential_",
    "geometric_",
    "log_normal_",
    "normal_",
    "random_",
    "uniform_",
)
"""The methods of torch.Tensor that fill a tensor with random numbers; those of `nn.init` call them."""


def on_one_rank(name: str) -> Callable[..., Any]:
    """The method `name`, one of `DRAWS`, of a parameter that may have a `whole`: refused where there are other ranks.

    Not seen are values that are drawn into a view, such as `param[0]`, or into another tensor first.
    """
    draw = getattr(torch.Tensor, name)

    @wraps(draw)
    def drawn(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.whole is not None and self.whole.holders.mesh.size > 1:
            self.whole.refuse_draw(name)
        return draw(self, *args, **kwargs)

    return drawn


def refuse_draws_into(values: torch.Tensor, whole: Any) -> None:
    """Refuses draws into `values`, which `.data` or `detach()` of a parameter gave, and which stay a plain tensor.

    A class of their own would keep `nn.Parameter(param.data)` from being a plain parameter.
    """
    of = weakref.ref(values)

    def copied(memo: Any) -> Any:
        memo[id(of())] = result = of().clone()  # type: ignore[union-attr]
        return result

    def reduced(protocol: Any) -> Any:
        return of().view_as(of()).__reduce_ex__(protocol)  # type: ignore[union-attr, arg-type]

    vars(values).update(whole.draws, __deepcopy__=copied, __reduce_ex__=reduced)


def refusals(whole: Any) -> dict[str, Any]:
    """The attributes of a tensor by which draws into it are refused."""

    def refusal(name: str) -> Callable[..., NoReturn]:
        return lambda *args, **kwargs: whole.refuse_draw(name)

    def new_empty(*args: Any, **kwargs: Any) -> Any:
        check_new_empty(whole, sys._getframe(1))
        return whole.rows.new_empty(*args, **kwargs)

    return {**{name: refusal(name) for name in DRAWS}, "new_empty": new_empty}


def check_new_empty(whole: Any, caller: FrameType) -> None:
    """RuntimeError if `caller` is `nn.init.orthogonal_`, which draws into a new tensor and copies that."""
    if caller.f_code is torch.nn.init.orthogonal_.__code__:
        whole.refuse_draw("orthogonal_")
