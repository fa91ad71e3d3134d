"""Around the steps of optimizers: what one may see of sharded parameters, and whether it has the right ones.

Those of torch's optimizers that go element by element see plain parameters, which the fused and foreach kernels take at
no cost. Others see guarded rows: elementwise arithmetic and norms of the whole are right there too, such as LAMB's; one
that looks at matrices, such as Muon, is refused at its first product.

Torch calls the hooks for every `torch.optim.Optimizer` of the process.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from torch import nn, optim
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from shardcomm.sharded_parameter import ShardedParameter

_ELEMENTWISE = (
    optim.ASGD,
    optim.Adadelta,
    optim.Adagrad,
    optim.Adam,  # and AdamW
    optim.Adamax,
    optim.NAdam,
    optim.RAdam,
    optim.RMSprop,
    optim.Rprop,
    optim.SGD,
)


@cache
def install() -> None:
    """From now on; once a process."""
    register_optimizer_step_pre_hook(_before)
    register_optimizer_step_post_hook(_after)


def replaced(param: nn.Parameter, name: str) -> None:
    """`param` was the whole parameter `name`, and is no parameter of the model any more."""
    param._shardcomm_name = name  # type: ignore[attr-defined]


_stepping: weakref.WeakKeyDictionary[optim.Optimizer, list[ShardedParameter]] = (
    weakref.WeakKeyDictionary()
)
_checked: weakref.WeakKeyDictionary[optim.Optimizer, int] = weakref.WeakKeyDictionary()


def _before(
    optimizer: optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    params = [p for group in optimizer.param_groups for p in group["params"]]
    if _checked.get(optimizer) != len(params):
        _check(optimizer, params)
        _checked[optimizer] = len(params)
    sharded = [p for p in params if type(p) is ShardedParameter]
    if not isinstance(optimizer, _ELEMENTWISE):
        # Who has all or nothing of a parameter does with it as it would without sharding, and alone.
        sharded = [p for p in sharded if p.whole.is_here or p.whole.is_elsewhere]
    if not sharded:
        return None
    _stepping[optimizer] = sharded
    _make(sharded, nn.Parameter)
    if len(args) > 1 and callable(args[1]):
        return (args[0], _guarding(args[1], sharded), *args[2:]), kwargs
    if callable(kwargs.get("closure")):
        return args, {**kwargs, "closure": _guarding(kwargs["closure"], sharded)}
    return None


def _check(optimizer: optim.Optimizer, params: Sequence[nn.Parameter]) -> None:
    for param in params:
        if name := getattr(param, "_shardcomm_name", None):
            raise RuntimeError(
                f"{type(optimizer).__name__}.step: the optimizer has parameter {name!r} as it was before fully_shard, "
                "which the model does not use any more; make the optimizer of model.parameters() after fully_shard"
            )


def _after(optimizer: optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    sharded = _stepping.pop(optimizer, [])
    moved = [param for param in sharded if param.data_ptr() != param.whole.address]
    _make(sharded, ShardedParameter)
    for param in moved:  # by `param.data = ...`
        param.whole.adopt(param)


def _guarding(closure: Callable[[], Any], sharded: Sequence[nn.Parameter]) -> Callable[[], Any]:
    """`closure` is the user's code: a forward and a backward, and perhaps clipping."""

    def guarded() -> Any:
        _make(sharded, ShardedParameter)
        try:
            return closure()
        finally:
            _make(sharded, nn.Parameter)

    return guarded


def _make(params: Sequence[nn.Parameter], kind: type[nn.Parameter]) -> None:
    for param in params:
        param.__class__ = kind
