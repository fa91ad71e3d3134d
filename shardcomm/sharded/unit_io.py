"""A unit's inputs and outputs: casts, and the marks by which autograd announces the unit's backward.

forward    inputs ──enter──► unit ──► leave ──► outputs
backward   on_end ◄────────  unit  ◄──────────  on_begin

A mark at an output is a hook on the node of autograd's graph that made it. A mark at an input is a node of its own,
whose result is an alias of the input. A unit that is given a container which it may write into, return or keep has the
caller's own, and in it, or to put into it, the caller's own tensors: then these get hooks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch._C._autograd import _get_sequence_nr

from shardcomm.sharded import containers
from shardcomm.sharded.awaited_backward import AwaitedBackward
from shardcomm.sharded.containers import NO_COPIES, Copies
from shardcomm.sharded.hooks import run_eagerly

_OWN = None, None, None


class Entered:
    """What a unit computes with, in the place of its caller's inputs.

    Attributes:
        aliases: For each input in whose place the unit has an alias: it, the alias, and the alias's version at that
            time. Their mark tells of each backward of the unit, and of nothing else.
        given: Each input that requires a gradient, its node in autograd's graph (None of a leaf), and what the caller
            gets if the unit returns it as it came; by its `id`.
        hooked: Whether an input in whose place there is none got a hook.
        writable: The inputs, if there is a container among them which the unit may write into.
        copies: The copies of the caller's containers in which tensors are cast.
    """

    __slots__ = ("aliases", "copies", "given", "hooked", "writable")

    def __init__(self, copies: Copies = NO_COPIES) -> None:
        self.aliases: list[tuple[torch.Tensor, torch.Tensor, int]] = []
        self.given: dict[int, tuple[torch.Tensor, Any, torch.Tensor]] = {}
        self.hooked = False
        self.writable: tuple[Any, ...] = ()
        self.copies = copies

    @property
    def marked(self) -> bool:
        """Whether an input is marked, to tell of the end of the unit's backward."""
        return self.hooked or bool(self.aliases)

    def mark(
        self, tensors: Sequence[torch.Tensor], backward: AwaitedBackward
    ) -> tuple[torch.Tensor, ...]:
        """Marks tensors that the unit is given themselves; returns their aliases, which the unit is to have instead."""
        aliases = _mark(backward.on_alias, *tensors)
        for tensor, alias in zip(tensors, aliases, strict=True):
            self.aliases.append((tensor, alias, alias._version))
            self.given[id(alias)] = alias, alias.grad_fn, tensor
        return aliases

    def hold(self, tensor: torch.Tensor, device: torch.device, backward: AwaitedBackward) -> None:
        """Marks a tensor that stays the caller's own, if the completion of its gradient tells that the unit's are.

        Autograd runs a leaf's node as soon as it can. Others it orders by when a thread has recorded them.
        """
        node = tensor.grad_fn
        self.given[id(tensor)] = tensor, node, tensor
        if (
            tensor.device == device
            and node is not None
            and node._sequence_nr() < _get_sequence_nr()
        ):
            # It comes before the hooks on the node: those of `leave`, if a unit has returned this tensor.
            tensor.register_hook(backward.on_tensor)  # type: ignore[no-untyped-call]
            self.hooked = True

    def callers(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The caller's tensor if `tensor` stands in its place, or is it, as it came; None: it is the unit's own."""
        _, node, callers = self.given.get(id(tensor), _OWN)
        return callers if node is tensor.grad_fn else None

    def carry_back(self) -> None:
        """Gives the caller's tensors and containers what the unit has done to the aliases and copies.

        Tensors get the autograd history of in-place operations; containers get what was put into them.
        """
        for given, alias, version in self.aliases:
            if alias._version != version:
                # The values are there already, and may have been saved for backward: this must not be a new version.
                with torch.autograd.grad_mode._unsafe_preserve_version_counter(given):
                    given.copy_(alias)
        self.copies.carry_back()


NOTHING_ENTERED = Entered()


def enter(
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    dtype: torch.dtype | None,
    device: torch.device,
    backward: AwaitedBackward,
) -> tuple[tuple[Any, ...], dict[str, Any], Entered]:
    """Casts floating-point inputs to `dtype`, and has `backward` told when it has come through the unit to an input.

    By then all gradients inside the unit are complete: of one device's nodes, autograd runs first what was recorded
    last. So inputs on another than the unit's `device` get no mark.

    Returns:
        The inputs with which the unit computes, and what of them is not the caller's own. Containers in which nothing
        is cast are the caller's own.
    """
    if len(args) == 1 and not kwargs and isinstance(args[0], torch.Tensor):
        # The usual call has a way of its own, since the general one costs more than the rest of a trigger.
        tensor = args[0] if dtype is None else _cast(args[0], dtype)
        if not (tensor.requires_grad and torch.is_grad_enabled()):
            return (tensor,), kwargs, NOTHING_ENTERED
        entered = Entered()
        return entered.mark((tensor,), backward), kwargs, entered
    copies = NO_COPIES
    if dtype is not None:
        args, kwargs, copies = _cast_inputs(args, kwargs, dtype)
    entered = Entered(copies)
    if torch.is_grad_enabled():
        args, kwargs = _mark_inputs(args, kwargs, entered, device, backward)
    return args, kwargs, entered


def _cast_inputs(
    args: tuple[Any, ...], kwargs: dict[str, Any], dtype: torch.dtype
) -> tuple[tuple[Any, ...], dict[str, Any], Copies]:
    given = [each for each in containers.contents((args, kwargs)) if isinstance(each, torch.Tensor)]
    # By identity, so that a tensor which is given twice stays one.
    inside = {id(each): _cast(each, dtype) for each in given}
    copies = Copies({id(inside[id(each)]): each for each in given})
    # By place, since a registered type may make its tensors anew each time it is opened.
    places = iter(given)
    args, kwargs = containers.mapped(lambda _: inside[id(next(places))], (args, kwargs), copies)
    return args, kwargs, copies


def _mark_inputs(
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    entered: Entered,
    device: torch.device,
    backward: AwaitedBackward,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    inputs = (*args, *kwargs.values())
    in_containers = list(
        containers.contents([x for x in inputs if not isinstance(x, torch.Tensor)])
    )
    # By identity, so that a tensor which is given twice stays one.
    held = {id(each): each for each in _needing_gradients(in_containers)}
    themselves = {id(each): each for each in _needing_gradients(inputs) if id(each) not in held}
    if any(containers.is_writable(each) for each in in_containers):
        entered.writable = inputs
        held |= themselves
    elif themselves:
        aliases = dict(zip(themselves, entered.mark([*themselves.values()], backward), strict=True))
        args = tuple([aliases.get(id(each), each) for each in args])
        kwargs = {name: aliases.get(id(each), each) for name, each in kwargs.items()}
    for tensor in held.values():
        entered.hold(tensor, device, backward)
    return args, kwargs


def _needing_gradients(values: Iterable[Any]) -> list[torch.Tensor]:
    return [each for each in values if isinstance(each, torch.Tensor) and each.requires_grad]


def leave(
    output: Any,
    entered: Entered,
    dtype: torch.dtype | None,
    own_storages: Collection[int],
    on_begin: Callable[[torch.Tensor], None],
) -> tuple[Any, bool]:
    """Casts floating-point outputs to `dtype`, and has `on_begin` called when the gradient of an output is there.

    That is before backward enters the unit. An output in one of the unit's `own_storages` is a view of a parameter. It
    is copied, since another unit's parameters may come into that memory next. An input that is returned as it came is
    the caller's own, of which backward tells nothing.

    Returns:
        The output that the caller gets, and whether any tensor in it can call `on_begin`.
    """
    if (
        isinstance(output, torch.Tensor) and not entered.writable
    ):  # the usual case, which so costs half
        return _leave(output, entered, dtype, own_storages, on_begin)
    marked = False

    def outside(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal marked
        tensor, can_call = _leave(tensor, entered, dtype, own_storages, on_begin)
        marked |= can_call
        return tensor

    output = containers.mapped(outside, output)
    # What the unit has put into a container, or changed in place, leaves it as well.
    for each in _needing_gradients(containers.contents(entered.writable)):
        marked |= _announce(each, entered, on_begin)
    return output, marked


def _leave(
    tensor: torch.Tensor,
    entered: Entered,
    dtype: torch.dtype | None,
    own_storages: Collection[int],
    on_begin: Callable[[torch.Tensor], None],
) -> tuple[torch.Tensor, bool]:
    callers = entered.callers(tensor)
    if callers is not None:
        return callers if dtype is None else _cast(callers, dtype), False
    if (
        own_storages
        and tensor.layout is torch.strided
        and tensor.untyped_storage()._cdata in own_storages
    ):
        tensor = tensor.clone()
    if dtype is not None and tensor.is_floating_point() and tensor.dtype != dtype:
        tensor = tensor.to(dtype)
    if tensor.requires_grad and tensor.grad_fn is None and torch.is_grad_enabled():
        tensor = tensor.clone()  # a leaf, such as a parameter, would get one more hook a forward
    return tensor, _announce(tensor, entered, on_begin)


def _announce(
    tensor: torch.Tensor, entered: Entered, on_begin: Callable[[torch.Tensor], None]
) -> bool:
    """Has `on_begin` called when the tensor's gradient is there, if the unit has made it; returns whether it has."""
    node = tensor.grad_fn
    if node is None or not torch.is_grad_enabled() or entered.callers(tensor) is not None:
        return False
    node.register_prehook(on_begin)
    # Once a view is changed in place, as by `output += residual`, it has another node, and backward comes to its base.
    base = tensor._base if tensor._is_view() else None
    if base is not None and base.grad_fn is not None and entered.callers(base) is not base:
        base.grad_fn.register_prehook(on_begin)
    return True


def cast(tree: Any, dtype: torch.dtype | None) -> Any:
    """`tree` with its floating-point tensors cast to `dtype`; `tree` itself if `dtype` is None. It makes no marks."""
    return tree if dtype is None else containers.mapped(partial(_cast, dtype=dtype), tree)


def _cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


class _Mark(torch.autograd.Function):
    """The identity on a unit's inputs. It returns aliases, not views, which autograd forbids to change in place."""

    @staticmethod
    def forward(
        ctx: Any, on_end: Callable[[], None], *inputs: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.on_end = on_end
        ctx.set_materialize_grads(False)  # an input that the loss does not use has no gradient
        return tuple([tensor.detach() for tensor in inputs])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        ctx.on_end()
        return (None, *grads)

    @staticmethod
    def jvp(ctx: Any, on_end: None, *tangents: torch.Tensor | None) -> Any:
        return tuple(None if tangent is None else tangent.view_as(tangent) for tangent in tangents)


run_eagerly(_Mark.backward)

_mark: Callable[..., tuple[torch.Tensor, ...]] = super(torch.autograd.Function, _Mark).apply
"""`_Mark.apply` without its support for torch.func, in half of its time."""
