"""What the steps and the `zero_grad` of optimizers see of sharded parameters, and whether a step has the right ones.

Those of torch's optimizers that go element by element see plain parameters, which the fused and foreach kernels take at
no cost. Other optimizers, and the hooks of all, see guarded rows. With these, elementwise arithmetic and norms of the
whole are right, too, such as LAMB's; an optimizer that looks at matrices, such as Muon, is refused. A parameter that
one rank owns as a whole is plain to it, except in a user's own step around an optimizer that goes element by element.

Torch calls the hooks for every `torch.optim.Optimizer` of the process, in each step. A guarded parameter costs several
times as much to look at as a plain one. So the hooks look at each parameter as few times as they can, and torch's
`zero_grad`, for which there are no hooks, is wrapped: it sees plain parameters, too.
"""

from __future__ import annotations

import sys
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import cache, wraps
from typing import Any, NamedTuple

import torch
from torch import nn, optim
from torch.optim.optimizer import register_optimizer_step_pre_hook

from shardcomm.parameter import optimizer_dicts
from shardcomm.parameter.plain import plain, set_grad
from shardcomm.parameter.replaced import replace
from shardcomm.parameter.sharded_parameter import ShardedParameter, ShardedRows
from shardcomm.parameter.versions import written
from shardcomm.parameter.whole import Held, Owned, awaiting, elsewhere
from shardcomm.parameter.whole_parameter import WholeParameter

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


def without_compiler(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method of torch's optimizers that does not load the compiler, torch._dynamo, which takes each rank seconds.

    Torch loads it to keep the method out of compiled code. There is none while the compiler is not loaded.
    """
    code = getattr(method, "__code__", None)
    if code is None or code.co_filename != torch._compile.__file__:
        return method  # somebody's own, which may be no function, or of a torch that wraps it in another way
    plain: Callable[..., Any] = method.__wrapped__  # type: ignore[attr-defined]

    @wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        return (method if "torch._dynamo" in sys.modules else plain)(*args, **kwargs)

    return call


@cache
def install() -> None:
    """Registers the hook for all optimizers of the process, and wraps their `zero_grad`, once."""
    register_optimizer_step_pre_hook(_before)
    optim.Optimizer.zero_grad = _of_plain(without_compiler(optim.Optimizer.zero_grad))  # type: ignore[method-assign]
    nn.Module.zero_grad = _of_rows(nn.Module.zero_grad)  # type: ignore[method-assign]
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


def shown_for_a_while(param: nn.Parameter, name: str, rows: nn.Parameter) -> None:
    """Makes optimizers refuse `param`: it is a copy of `name`, which engine.gathered() or unit.unshard() shows.

    A module's `zero_grad` is done on its `rows`.
    """
    param._shardcomm_rows = rows  # type: ignore[attr-defined]
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
_checked: weakref.WeakKeyDictionary[optim.Optimizer, _Checked] = weakref.WeakKeyDictionary()
_warned: weakref.WeakSet[type[optim.Optimizer]] = weakref.WeakSet()
_hooks: weakref.WeakKeyDictionary[optim.Optimizer, tuple[int, int]] = weakref.WeakKeyDictionary()


class _Checked(NamedTuple):
    """The parameters with which an optimizer has passed `_check`, by their `id`, and whether some are sharded."""

    ids: list[int]
    has_ours: bool


def _params(optimizer: optim.Optimizer) -> list[nn.Parameter]:
    params: list[nn.Parameter] = []
    for group in optimizer.param_groups:
        params += group["params"]
    return params


def _ours(params: Sequence[Any]) -> tuple[Sequence[ShardedParameter], Sequence[WholeParameter]]:
    """Those of `params` of which this rank has rows, and those of which it has the whole.

    Mostly all are of one class; then it is `params` itself, since another list would cost each step.
    """
    kinds = set(map(type, params))
    if kinds == {ShardedParameter}:
        return params, ()
    if kinds == {WholeParameter}:
        return (), params
    rows = [param for param in params if type(param) is ShardedParameter]
    return rows, [param for param in params if type(param) is WholeParameter]


def _is_known(optimizer: optim.Optimizer) -> bool:
    """Whether the step is torch's or our own, which does nothing but update parameters in place."""
    return type(optimizer).step.__module__.startswith(_KNOWN_STEPS)


def _of_plain(zero_grad: Callable[[optim.Optimizer, bool], None]) -> Any:
    """Torch's `zero_grad`, to which parameters are plain."""

    @wraps(zero_grad)
    def of_plain(self: optim.Optimizer, set_to_none: bool = True) -> None:
        ours = [_ours(group["params"]) for group in self.param_groups]
        for rows, whole in ours:
            _make(rows, nn.Parameter)
            _make(whole, nn.Parameter)
        try:
            zero_grad(self, set_to_none)
            if set_to_none and elsewhere:
                for rows, _ in ours:
                    for param in rows:
                        param.whole.grad_elsewhere = None
        finally:
            for rows, whole in ours:
                _make(rows, ShardedParameter)
                _make(whole, WholeParameter)

    return of_plain


def _of_rows(zero_grad: Callable[[nn.Module, bool], None]) -> Any:
    """Torch's `zero_grad` of a module, which is done on the rows of full parameters that are shown for a while."""

    @wraps(zero_grad)
    def of_rows(self: nn.Module, set_to_none: bool = True) -> None:
        zero_grad(self, set_to_none)
        for param in self.parameters():
            rows = getattr(param, "_shardcomm_rows", None)
            if rows is None or rows.grad is None:
                continue
            rows.grad = None if set_to_none else rows.grad.zero_()

    return of_rows


def _has_closure(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a step with these arguments, the optimizer first, computes gradients itself."""
    return (args[1] if len(args) > 1 else kwargs.get("closure")) is not None


def _before(optimizer: optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Runs before an optimizer's own hooks, which see guarded rows.

    It makes `_begin` the last of the hooks before the step, and `_end` the first of those after it.
    """
    _end(optimizer, args, kwargs)  # after a step that an exception ended, torch has called no hook
    params = _params(optimizer)
    ids = list(map(id, params))
    checked = _checked.get(optimizer)
    if checked is None or checked.ids != ids:
        _check(optimizer, params)
        checked = _checked[optimizer] = _Checked(ids, any(_ours(params)))
    if not checked.has_ours:
        return
    if awaiting and not _has_closure(args, kwargs):  # whose backward may reduce them yet
        rows, whole = _ours(params)
        await_reduce = [p.whole for p in rows if p.whole.awaits_reduce]
        await_reduce += [p.whole for p in whole if p.whole is not None and p.whole.awaits_reduce]
        if await_reduce:
            await_reduce[0].refuse_step(type(optimizer).__name__)
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
    sharded, whole = _ours(_params(optimizer))
    plain_ones: Sequence[ShardedParameter] = ()
    if sharded and isinstance(optimizer, optim.LBFGS):
        raise RuntimeError(
            "LBFGS.step: it takes products over all parameters together, of which this rank has only some; use it with "
            'strategy="no_shard", or an optimizer that treats elements or parameters by themselves'
        )
    if not isinstance(optimizer, _ELEMENTWISE):
        of_whole = isinstance(optimizer, _OF_WHOLE_PARAMETERS)
        for param in sharded:
            of = param.whole
            if of.owned is Owned.PART or (of_whole and of.held is Held.ROWS):
                of.refuse_matrices(type(optimizer).__name__)
            if of.held is Held.ELSEWHERE:
                # The step must not see a gradient that a program has set here, as torch's get_optimizer_state_dict sets
                # zeros. `.grad` shows it all the same, as on the owner.
                of.grad_elsewhere = param.grad
                with plain():
                    set_grad(param, None)
        # Ranks without rows do not hear of operations on rows, so that all ranks are told here that values change.
        written([p for p in sharded if p.grad is not None])
        # The owner of a parameter does with it alone what it would do without sharding.
        plain_ones = [p for p in sharded if p.whole.owned is Owned.WHOLE or of_whole]
        if plain_ones:
            _warn(optimizer)
    elif not _is_known(optimizer):
        # A step of a user's own around one of these may do anything: clip, for instance.
        written([param for param in sharded if param.grad is not None])
    else:
        plain_ones, sharded = sharded, ()
    if not _is_known(optimizer):
        whole = ()  # these stay guarded, and so refuse other memory
    if not (plain_ones or sharded or whole):
        return None
    stepping = _stepping[optimizer] = _Stepping(plain_ones, whole, sharded)
    stepping.begin()
    if len(args) > 1 and callable(args[1]):
        return (args[0], stepping.guarding(args[1]), *args[2:]), kwargs
    if callable(kwargs.get("closure")):
        return args, {**kwargs, "closure": stepping.guarding(kwargs["closure"])}
    return None


def _warn(optimizer: optim.Optimizer) -> None:
    """Warns once for each class whose step is unknown here, since it may compute with several parameters together."""
    kind = type(optimizer)
    if kind in _warned or _is_known(optimizer):
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
        may_be_moved = () if _is_known(optimizer) else stepping.rows
        with plain():  # they are guarded again where a forward has followed a step that raised
            moved = [param for param in may_be_moved if param.data_ptr() != param.whole.address]
        stepping.end()
        for param in moved:  # by `param.data = ...`
            param.whole.adopt(param)


class _Stepping:
    """A step under way, from `begin` to `end`.

    Args:
        rows: What has the classes of plain tensors in it, with its gradients.
        whole: The same of which this rank has the whole.
        sized: What says the sizes of its rows in it; other steps may be under way in which it does.
    """

    def __init__(
        self,
        rows: Sequence[ShardedParameter],
        whole: Sequence[WholeParameter],
        sized: Sequence[ShardedParameter],
    ) -> None:
        self.rows = rows
        self._whole = whole
        self._sized = [param.whole for param in sized if not param.whole.in_step]
        self._grads: list[torch.Tensor] = []

    def begin(self) -> None:
        for whole in self._sized:
            whole.in_step = True
        _make(self._whole, nn.Parameter)
        _make(self.rows, nn.Parameter)
        grads = [param.grad for param in self.rows]
        self._grads = [grad for grad in grads if type(grad) is ShardedRows]
        _make(self._grads, torch.Tensor)
        stepped: Sequence[ShardedParameter] = self.rows
        if len(self._grads) < len(grads):
            stepped = [
                param
                for param, grad in zip(self.rows, grads, strict=True)
                if grad is not None or param.whole.grad_elsewhere is not None
            ]
        # Torch's fused kernels do not mark what they write as changed. Neither does a step on another rank, the owner.
        written(stepped)

    def end(self) -> None:
        for whole in self._sized:
            whole.in_step = False
        _make(self.rows, ShardedParameter)
        _make(self._grads, ShardedRows)
        _make(self._whole, WholeParameter)

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
