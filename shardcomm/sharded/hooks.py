"""Hooks: the engine's methods that a sharded model's modules hold. A copy of the model holds the same ones."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NoReturn, Self

from shardcomm.parameter.shard_tensor import SAVE_BY


def weakly(method: Callable[..., Any], *objects: object) -> Callable[..., Any]:
    """Calls `method(*objects, ...)`, and keeps neither its object nor these alive; once one is gone, it does nothing.

    It is for hooks that autograd holds, through which garbage collection does not see.
    """
    method_of, objects_of = weakref.WeakMethod(method), [weakref.ref(each) for each in objects]

    def call(*args: object) -> Any:
        bound, held = method_of(), [each() for each in objects_of]
        if bound is not None and all(each is not None for each in held):
            return bound(*held, *args)
        return None

    return call


class Hooks:
    """The base of classes whose methods are given to a module as hooks."""

    def __deepcopy__(self, memo: Any) -> Self:
        return self  # the hooks see that a copied module is another, and say so when it is called

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise RuntimeError(
            "a sharded model cannot be pickled, as torch.save(model) does: its memory belongs to the engine. "
            f"{SAVE_BY}"
        )
