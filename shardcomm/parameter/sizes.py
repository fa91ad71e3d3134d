"""What a sharded tensor says of its size: that of the whole, as a DTensor does.

In an optimizer's step it says that of this rank's rows, but for `numel()`: many optimizers make their state there, by
`torch.zeros(p.shape)`, and go through it with the rows element by element.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._guards import TracingContext

from shardcomm.parameter.plain import plain
from shardcomm.parameter.whole import Whole

_GETTERS = frozenset({"shape", "ndim", "nbytes"})

METHODS: tuple[Any, ...] = (
    torch.Tensor.size,
    torch.Tensor.dim,
    torch.Tensor.ndimension,
    torch.Tensor.stride,
    torch.Tensor.__len__,
)
"""The methods that tell a tensor's size, for which there is `size`; `numel()` is apart."""


def is_getter_of_size(name: str) -> bool:
    """Whether a property of this name, of a tensor, tells its size."""
    return name in _GETTERS


def size(func: Any, of: Any, *args: Any, **kwargs: Any) -> Any:
    """What `func`, the getter of such a property or one of `METHODS`, says of a sharded tensor."""
    whole: Whole = of.whole
    if TracingContext.try_get() is not None:  # torch.compile is told the sizes of what it traces
        whole.refuse_compile()
    with plain():
        if whole.in_step:
            return func(of, *args, **kwargs)
        outline = whole.outline
        return func(outline if outline.dtype is of.dtype else outline.to(of.dtype), *args, **kwargs)


def numel(input: Any) -> int:
    """How many elements the whole has, in an optimizer's step too: some divide norms, which are the whole's, by it."""
    count: int = input.whole.outline.numel()
    return count
