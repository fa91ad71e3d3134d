"""Random values in place, which each rank would draw by its own generator: refused of parameters.

Of rows, ranks whose generators are seeded alike would draw the same for other rows. Of a parameter that every rank has
as a whole, ranks whose generators are not would draw different values, and train apart.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

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

    Not seen are values that are drawn into `param.data`, or into other tensors first, as `nn.init.orthogonal_` does.
    """
    draw = getattr(torch.Tensor, name)

    @wraps(draw)
    def drawn(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.whole is not None and self.whole.holders.mesh.size > 1:
            self.whole.refuse_draw(name)
        return draw(self, *args, **kwargs)

    return drawn
