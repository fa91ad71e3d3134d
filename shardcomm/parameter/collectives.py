"""Torch's collectives of which torch 2.11 asks no `__torch_function__`: broadcast, reduce, gather, scatter, send, recv.

Given a sharded parameter they would take this rank's rows for the whole, and overwrite other ranks' other rows. Newer
versions of torch ask, and so do these once `install` has been called. `isend` and `irecv` stay as they are: torch
compares them with what a `P2POp` is given.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache, wraps
from typing import Any

import torch.distributed as dist
from torch.overrides import handle_torch_function, has_torch_function
from torch.utils import _pytree as pytree

_NAMES = ("broadcast", "reduce", "gather", "scatter", "send", "recv")


@cache
def install() -> None:
    """Has torch's collectives ask what they are given, once in the process."""
    for name in _NAMES if dist.is_available() else ():
        function = getattr(dist, name)
        if not asks(function):
            asked = asking(function)
            setattr(dist, name, asked)
            setattr(dist.distributed_c10d, name, asked)


def asks(function: Callable[..., Any]) -> bool:
    """Whether a function of torch asks what it is given for its `__torch_function__`."""
    code = getattr(inspect.unwrap(function), "__code__", None)  # of a patch there may be none
    return code is None or "has_torch_function" in code.co_names


def asking(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, which asks the tensors that it is given, also in lists, for their `__torch_function__` first."""

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        given = tuple(pytree.tree_leaves((args, kwargs)))
        if has_torch_function(given):
            return handle_torch_function(call, given, *args, **kwargs)
        return function(*args, **kwargs)

    return call
