"""Around the steps of torch's optimizers: sharded parameters are plain ones inside, and are looked at before.

Torch calls the hooks for every `torch.optim.Optimizer` of the process.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from shardcomm.sharded_parameter import ShardedParameter

_stepping: weakref.WeakKeyDictionary[torch.optim.Optimizer, list[nn.Parameter]] = (
    weakref.WeakKeyDictionary()
)


@cache
def install() -> None:
    """From now on; once a process."""
    register_optimizer_step_pre_hook(_before)
    register_optimizer_step_post_hook(_after)


def _before(
    optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    params = [p for group in optimizer.param_groups for p in group["params"]]
    sharded = [p for p in params if type(p) is ShardedParameter]
    if not sharded:
        return None
    _stepping[optimizer] = sharded
    _make(sharded, nn.Parameter)
    if len(args) > 1 and callable(args[1]):
        return (args[0], _guarding(args[1], sharded), *args[2:]), kwargs
    if callable(kwargs.get("closure")):
        return args, {**kwargs, "closure": _guarding(kwargs["closure"], sharded)}
    return None


def _after(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    _make(_stepping.pop(optimizer, []), ShardedParameter)


def _guarding(closure: Callable[[], Any], sharded: list[nn.Parameter]) -> Callable[[], Any]:
    """`closure` is the user's code: a forward and a backward, and perhaps clipping."""

    def guarded() -> Any:
        _make(sharded, ShardedParameter)
        try:
            return closure()
        finally:
            _make(sharded, nn.Parameter)

    return guarded


def _make(params: list[nn.Parameter], kind: type[nn.Parameter]) -> None:
    for param in params:
        param.__class__ = kind
