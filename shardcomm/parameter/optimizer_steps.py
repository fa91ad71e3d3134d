"""Hooks around the steps of optimizers: what a step sees of sharded parameters, and whether it has the right ones.

Those of torch's optimizers that go element by element see plain parameters, which the fused and foreach kernels take at
no cost. Other optimizers, and the hooks of all, see guarded rows. With these, elementwise arithmetic and norms of the
whole are right, too, such as LAMB's; an optimizer that looks at matrices, such as Muon, is refused. A parameter that
one rank owns as a whole is plain to it, except in a user's own step around an optimizer that goes element by element.

Torch calls the hooks for every `torch.optim.Optimizer` of the process.
"""

from __future__ import annotations

import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import nn, optim
from torch.optim.optimizer import register_optimizer_step_pre_hook

from shardcomm.parameter import optimizer_dicts
from shardcomm.parameter.plain import plain, set_grad
from shardcomm.parameter.replaced import replace
from shardcomm.parameter.sharded_parameter import ShardedParameter, ShardedRows, WholeParameter
from shardcomm.parameter.versions import written
from shardcomm.parameter.whole import Held, Owned

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

_OURS = (ShardedParameter, WholeParameter)

_KNOWN_STEPS = ("torch.optim.", "shardcomm.")

# Refused on rows before their steps begin. An operation in them would be refused, too, but not on a rank without rows.
_OF_WHOLE_PARAMETERS = (optim.Adafactor, optim.Muon)


@cache
def install() -> None:
    """Registers the hook for all optimizers of the process, once."""
    register_optimizer_step_pre_hook(_before)
    optimizer_dicts.install()


def replaced(param: nn.Parameter, name: str) -> None:
    """Makes optimizers, and reads of `.grad`, refuse `param`: it was parameter `name`, and the model has it no more."""
    _checked.clear()  # an optimizer that has it may have stepped already
    _refuse(
        param,
        f"parameter {name!r} as it was before the model was sharded, which the model does not use any more; make the "
        "optimizer, and take lists, of model.parameters() after fully_shard; in a framework that calls it, set up both "
        "together, as by fabric.setup(model, optimizer)",
    )
    replace(param)


def shown_for_a_while(param: nn.Parameter, name: str) -> None:
    """Makes optimizers refuse `param`: it is a copy of `name`, which engine.gathered() or unit.unshard() shows."""
    _refuse(
        param,
        f"the full parameter {name!r} that engine.gathered() or unit.unshard() showed, which is not what is trained; "
        "make the optimizer of model.parameters() outside of gathered(), and before unshard() or after reshard()",
    )


def left_to_each_rank(param: nn.Parameter) -> None:
    """Lets optimizers have `param` beside sharded ones: it is one of `ignored_params`."""
    param._shardcomm_ignored = True  # type: ignore[attr-defined]


def _refuse(param: nn.Parameter, why: str) -> None:
    param._shardcomm_refused = why  # type: ignore[attr-defined]


_stepping: weakref.WeakKeyDictionary[optim.Optimizer, _Stepping] = weakref.WeakKeyDictionary()
_checked: weakref.WeakKeyDictionary[optim.Optimizer, int] = weakref.WeakKeyDictionary()
_warned: weakref.WeakSet[type[optim.Optimizer]] = weakref.WeakSet()
_hooks: weakref.WeakKeyDictionary[optim.Optimizer, tuple[int, int]] = weakref.WeakKeyDictionary()


def _has_closure(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a step with these arguments, the optimizer first, computes gradients itself."""
    return (args[1] if len(args) > 1 else kwargs.get("closure")) is not None


def _before(optimizer: optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Runs before an optimizer's own hooks, which see guarded rows.

    It makes `_begin` the last of the hooks before the step, and `_end` the first of those after it.
    """
    _end(optimizer, args, kwargs)  # after a step that an exception ended, torch has called no hook
    params = [p for group in optimizer.param_groups for p in group["params"]]
    if _checked.get(optimizer) != len(params):
        _check(optimizer, params)
        _checked[optimizer] = len(params)
    if not _has_closure(args, kwargs):  # whose backward may reduce them yet
        for param in params:
            if type(param) in _OURS and param.whole is not None and param.whole.awaits_reduce:
                param.whole.refuse_step(type(optimizer).__name__)
    if not any(type(p) is ShardedParameter for p in params):
        return
    if optimizer not in _hooks:
        handles = optimizer.register_step_pre_hook(_begin), optimizer.register_step_post_hook(_end)
        _hooks[optimizer] = handles[0].id, handles[1].id
    last, first = _hooks[optimizer]
    before: OrderedDict[int, Any] = optimizer._optimizer_step_pre_hooks  # type: ignore[assignment]
    after: OrderedDict[int, Any] = optimizer._optimizer_step_post_hooks  # type: ignore[assignment]
    before.move_to_end(last)
    after.move_to_end(first, last=False)


def _begin(
    optimizer: optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    params = [p for group in optimizer.param_groups for p in group["params"]]
    sharded = [p for p in params if type(p) is ShardedParameter]
    if isinstance(optimizer, optim.LBFGS) and sharded:
        raise RuntimeError(
            "LBFGS.step: it takes products over all parameters together, of which this rank has only some; use it with "
            'strategy="no_shard", or an optimizer that treats elements or parameters by themselves'
        )
    if not isinstance(optimizer, _ELEMENTWISE):
        of_whole = isinstance(optimizer, _OF_WHOLE_PARAMETERS)
        for param in sharded:
            whole = param.whole
            if whole.owned is Owned.PART or (of_whole and whole.held is Held.ROWS):
                whole.refuse(f"{type(optimizer).__name__}.step")
            if whole.held is Held.ELSEWHERE:
                # Torch's get_optimizer_state_dict makes a step with zeros as gradients, which has no meaning here.
                with plain():
                    set_grad(param, None)
        # Ranks without rows do not hear of operations on rows, so that all ranks are told here that values change.
        written([p for p in sharded if p.grad is not None])
        # The owner of a parameter does with it alone what it would do without sharding.
        plain_ones = [p for p in sharded if p.whole.owned is Owned.WHOLE or of_whole]
        if plain_ones:
            _warn(type(optimizer))
    elif not type(optimizer).step.__module__.startswith(_KNOWN_STEPS):
        # A step of a user's own around one of these may do anything: clip, for instance.
        written([param for param in sharded if param.grad is not None])
        plain_ones = []
    else:
        plain_ones, sharded = sharded, []
    if not (plain_ones or sharded):
        return None
    stepping = _stepping[optimizer] = _Stepping(plain_ones, sharded)
    stepping.begin()
    if len(args) > 1 and callable(args[1]):
        return (args[0], stepping.guarding(args[1]), *args[2:]), kwargs
    if callable(kwargs.get("closure")):
        return args, {**kwargs, "closure": stepping.guarding(kwargs["closure"])}
    return None


def _warn(kind: type[optim.Optimizer]) -> None:
    """Warns once for each class whose step is unknown here, since it may compute with several parameters together."""
    if kind in _warned or kind.step.__module__.startswith(_KNOWN_STEPS):
        return
    _warned.add(kind)
    warnings.warn(
        f'{kind.__name__}.step is given the parameters that this rank owns, by granularity="tensor". Each of them is '
        "whole. But a value that it computes from several together, such as a norm of all gradients, is that of this "
        "rank's parameters alone, and differs between ranks: call torch.nn.utils.clip_grad_norm_ or get_total_norm "
        "before the step",
        stacklevel=4,
    )


def _check(optimizer: optim.Optimizer, params: Sequence[nn.Parameter]) -> None:
    for param in params:
        if why := getattr(param, "_shardcomm_refused", None):
            raise RuntimeError(f"{type(optimizer).__name__}.step: the optimizer has {why}")
    if any(
        isinstance(p, _OURS) and p.whole and p.whole.holders.everyone.all_ranks > 1 for p in params
    ):
        # Of another class are DTensors, for instance, whose gradients DTensor's mesh averages.
        others = [p for p in params if type(p) is nn.Parameter and p.requires_grad]
        shapes = [tuple(p.shape) for p in others if not hasattr(p, "_shardcomm_ignored")]
        if shapes:
            warnings.warn(
                f"{type(optimizer).__name__}.step: beside sharded parameters the optimizer has {len(shapes)} that no "
                f"engine has, the first of shape {shapes[0]}: unless something else averages their gradients, each "
                "rank trains its own; call fully_shard with one module around all of them, and give those that are to "
                "differ between ranks as its ignored_params",
                stacklevel=4,
            )


def _end(optimizer: optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if (stepping := _stepping.pop(optimizer, None)) is not None:
        with plain():  # they are guarded again where a forward has followed a step that raised
            moved = [param for param in stepping.params if param.data_ptr() != param.whole.address]
        stepping.end()
        for param in moved:  # by `param.data = ...`
            param.whole.adopt(param)


class _Stepping:
    """A step under way, from `begin` to `end`.

    Args:
        params: What has the classes of plain tensors in it, with its gradients.
        sized: What says the sizes of its rows in it; other steps may be under way in which it does.
    """

    def __init__(
        self, params: Sequence[ShardedParameter], sized: Sequence[ShardedParameter]
    ) -> None:
        self.params = params
        self._sized = [param.whole for param in sized if not param.whole.in_step]
        self._grads: list[torch.Tensor] = []

    def begin(self) -> None:
        for whole in self._sized:
            whole.in_step = True
        _make(self.params, nn.Parameter)
        shown = [param.grad for param in self.params]
        # Torch's fused kernels do not mark what they write as changed. Neither does a step on another rank, the owner.
        stepped = zip(self.params, shown, strict=True)
        written([p for p, g in stepped if g is not None or p.whole.grad_elsewhere is not None])
        self._grads = [grad for grad in shown if type(grad) is ShardedRows]
        _make(self._grads, torch.Tensor)

    def end(self) -> None:
        for whole in self._sized:
            whole.in_step = False
        _make(self.params, ShardedParameter)
        _make(self._grads, ShardedRows)

    def guarding(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """`closure` with guarded parameters around it, since it is the user's code: forward, backward, and clipping."""

        def guarded() -> Any:
            self.end()
            result = closure()  # if it raises, the step is over, without `_end`
            self.begin()
            return result

        return guarded


def _make(tensors: Sequence[torch.Tensor], kind: type[torch.Tensor]) -> None:
    for tensor in tensors:
        tensor.__class__ = kind
