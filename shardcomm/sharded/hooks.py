"""Hooks: the engine's methods that a sharded model's modules hold. A copy of the model holds the same ones."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NoReturn, Self

from torch._C._dynamo import eval_frame

from shardcomm.parameter.shard_tensor import SAVE_BY


def run_eagerly(*functions: Any) -> None:
    """Keeps torch.compile from compiling the functions, and what they call, where compiled code comes to them.

    A compiled model comes to its hooks, and a compiled function with a backward in it to those of autograd.
    `torch.compiler.disable` does this, too, but costs each call as much as a hook.
    """
    skip = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.SKIP)
    for function in functions:
        eval_frame.set_code_exec_strategy(function.__code__, skip)


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

    run_eagerly(call)
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
