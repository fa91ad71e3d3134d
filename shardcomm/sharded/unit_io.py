"""A unit's inputs and outputs: casts, and the marks by which autograd announces the unit's backward.

forward    inputs ──enter──► unit ──► leave ──► outputs
backward   on_end ◄────────  unit  ◄──────────  on_begin

A mark at an output is a hook on the node of autograd's graph that made it. A mark at an input is a node of its own,
whose result is an alias of the input. A unit that is given a container which it may write into, return or keep has the
caller's own, and in it, or to put into it, the caller's own tensors: then these get hooks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch._C._autograd import CreationMeta, _get_creation_meta, _get_sequence_nr

from shardcomm.sharded import containers
from shardcomm.sharded.awaited_backward import AwaitedBackward
from shardcomm.sharded.containers import Copies
from shardcomm.sharded.hooks import run_eagerly


class Entered:
    """What a unit computes with, in the place of its caller's inputs.

    Attributes:
        backward: The backward of this forward.
        aliases: For each input in whose place the unit has an alias: it, the alias, and the alias's node in autograd's
            graph.
        came: The caller's own tensors that the unit has and that require a gradient, and those of which they are views;
            each with its node, or None where it is a leaf; by its `id`.
        inputs: The inputs in which the unit may leave something.
        copies: The copies of the caller's containers in which tensors are cast; None: nothing is cast.
        marked: Whether an input is marked, to tell of the end of the unit's backward.
    """

    aliases: Sequence[tuple[torch.Tensor, torch.Tensor, Any]] = ()
    came: Mapping[int, tuple[torch.Tensor, Any]] = MappingProxyType({})
    inputs: tuple[Any, ...] = ()
    copies: Copies | None = None
    marked = False

    def __init__(self, backward: AwaitedBackward) -> None:
        self.backward = backward

    def made(self, tensor: torch.Tensor) -> bool:
        """Whether the unit has made this tensor, or has changed it in place: backward comes from it into the unit."""
        for given, alias, node in self.aliases:
            if tensor is given:
                return alias.grad_fn is not node
            if tensor is given._base:  # the caller's
                return False
        node = _node_of(tensor)
        return node is not None and self.came.get(id(tensor), _NOTHING)[1] is not node


_NOTHING = None, None


def enter(
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    dtype: torch.dtype | None,
    device: torch.device,
    backward: AwaitedBackward,
) -> tuple[tuple[Any, ...], dict[str, Any], Entered]:
    """Casts floating-point inputs to `dtype`, and has `backward` told when it has come through the unit to an input.

    By then all gradients inside the unit are complete, since of one device's nodes autograd runs first what was
    recorded last. So of tensors that stay the caller's own, only those on the unit's `device` are marked.

    Returns:
        The inputs with which the unit computes, and what of them is not the caller's own. Containers in which nothing
        is cast are the caller's own.
    """
    entered = Entered(backward)
    if len(args) == 1 and not kwargs and isinstance(args[0], torch.Tensor):
        # The usual call has a way of its own, since the general one costs more than the rest of a trigger.
        tensor = args[0] if dtype is None else _cast(args[0], dtype)
        if tensor.requires_grad and torch.is_grad_enabled():
            return _aliases(entered, tensor), kwargs, entered
        return (tensor,), kwargs, entered
    if dtype is not None:
        entered.copies = Copies()
        args, kwargs = containers.mapped(
            partial(_cast, dtype=dtype), (args, kwargs), entered.copies
        )
    entered.inputs = (*args, *kwargs.values())
    if torch.is_grad_enabled():
        args, kwargs = _mark_inputs(entered, args, kwargs, device)
    return args, kwargs, entered


def _mark_inputs(
    entered: Entered, args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    inside = containers.contents(*[x for x in entered.inputs if not isinstance(x, torch.Tensor)])
    # By identity, so that a tensor which is given twice stays one.
    held = {id(x): x for x in inside if _needs_gradient(x)}
    themselves = {id(x): x for x in entered.inputs if _needs_gradient(x) and id(x) not in held}
    if any(map(containers.is_writable, inside)):
        held |= themselves
    elif themselves:
        entered.inputs = tuple([x for x in entered.inputs if not _needs_gradient(x)])
        aliases = dict(zip(themselves, _aliases(entered, *themselves.values()), strict=True))
        args = tuple([aliases.get(id(x), x) for x in args])
        kwargs = {name: aliases.get(id(x), x) for name, x in kwargs.items()}
    came = [each for x in held.values() for each in (x, x._base) if each is not None]
    entered.came = {id(x): (x, _node_of(x)) for x in came}
    for tensor in held.values():
        if _tells_of_end(tensor, device):
            entered.backward.watch(tensor)
            entered.marked = True
    return args, kwargs


def _aliases(entered: Entered, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Aliases of tensors, with a mark, which the unit is to have in their place."""
    aliases = _mark(entered.backward.on_alias, *tensors)
    entered.aliases = [
        (each, alias, alias.grad_fn) for each, alias in zip(tensors, aliases, strict=True)
    ]
    entered.marked = True
    return aliases


def _tells_of_end(tensor: torch.Tensor, device: torch.device) -> bool:
    """Whether the unit's gradients are complete when the tensor's is.

    Autograd runs a leaf's node as soon as it can. Others it orders by when a thread has recorded them.
    """
    node = _node_of(tensor)
    return node is not None and tensor.device == device and node._sequence_nr() < _get_sequence_nr()


def leave(
    output: Any,
    entered: Entered,
    dtype: torch.dtype | None,
    own_storages: Collection[int],
    shared_by: str | None,
) -> tuple[Any, bool]:
    """Casts floating-point outputs to `dtype`, and has the backward told when the gradient of an output is there.

    That is before backward enters the unit. Outputs are also what the unit has left in its inputs: in containers, and
    by changing tensors in place. An output in one of the unit's `own_storages` is a view of a parameter. It is copied,
    since other values may come into that memory next.

    Args:
        output: What the unit returns.
        entered: What it has computed with.
        dtype: The dtype of floating-point outputs; None: that in which they are computed.
        own_storages: The memory of the unit's full parameters.
        shared_by: The unit's name if other units' parameters come into that memory, too; else None.

    Returns:
        The output that the caller gets, and whether any output can tell of the backward.

    Raises:
        RuntimeError: The unit has left a view of a parameter, whose memory is shared, in a container.
    """
    changed = []
    for given, alias, node in entered.aliases:
        if alias.grad_fn is not node:
            # The values are there already, and may have been saved for backward: this must not be a new version.
            with torch.autograd.grad_mode._unsafe_preserve_version_counter(given):
                given.copy_(alias)
            changed.append(given)
    if entered.copies is not None:
        entered.copies.carry_back()
    if isinstance(output, torch.Tensor) and not (entered.inputs or changed):
        # The usual case, which so costs half.
        output = _outside(output, entered, dtype, own_storages)
        return output, _announce(output, entered)
    marked = False

    def outside(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal marked
        tensor = _outside(tensor, entered, dtype, own_storages)
        marked |= _announce(tensor, entered)
        return tensor

    if entered.aliases:  # containers that the unit has made, and may keep
        containers.put_in(partial(_callers, entered=entered), output)
    output = containers.mapped(outside, output)
    if torch.is_grad_enabled() or shared_by is not None:
        for each in containers.contents(*entered.inputs, *changed):
            if isinstance(each, torch.Tensor):
                _check_no_view(each, own_storages, shared_by)
                marked |= _announce(each, entered)
    return output, marked


def _check_no_view(
    tensor: torch.Tensor, own_storages: Collection[int], shared_by: str | None
) -> None:
    # A parameter itself raises where it is used.
    if shared_by is not None and type(tensor) is torch.Tensor and _is_in(tensor, own_storages):
        raise RuntimeError(
            f"forward of unit {shared_by!r} has left a view of a parameter in a container, in whose memory other "
            "parameters will be; put a clone() of it there"
        )


def _outside(
    tensor: torch.Tensor,
    entered: Entered,
    dtype: torch.dtype | None,
    own_storages: Collection[int],
) -> torch.Tensor:
    """What the caller gets for a tensor that the unit returns."""
    if entered.aliases:
        tensor = _callers(tensor, entered)
    if own_storages and _is_in(tensor, own_storages):
        tensor = tensor.clone()
    return tensor if dtype is None else _cast(tensor, dtype)


def _callers(tensor: torch.Tensor, entered: Entered) -> torch.Tensor:
    """The caller's own tensor for an alias of it, and its view for a view of an alias; else `tensor`."""
    for given, alias, _ in entered.aliases:
        if alias._backward_hooks is not None:  # the unit's own, on what backward brings to it
            continue
        if tensor is alias and alias.shape == given.shape:
            return given
        if tensor._base is alias and type(given) is torch.Tensor and _is_plain_view(tensor, alias):
            view: torch.Tensor = tensor._view_func(given)  # type: ignore[attr-defined]
            return view
    return tensor


def _is_plain_view(tensor: torch.Tensor, base: torch.Tensor) -> bool:
    """Whether another view like this one can stand in its place: backward only undoes the view, and nobody looks on."""
    node = tensor.grad_fn
    return (
        type(tensor) is torch.Tensor
        and _get_creation_meta(tensor) == CreationMeta.DEFAULT
        and node is not None
        and node.next_functions[0][0] is base.grad_fn  # not of a view between, which may have hooks
        and tensor._backward_hooks is None
        and not tensor.retains_grad
    )


def _announce(tensor: torch.Tensor, entered: Entered) -> bool:
    """Has the unit's backward told when the gradient of an output is there; returns whether it will be."""
    if not (tensor.requires_grad and torch.is_grad_enabled() and entered.made(tensor)):
        return False
    on_output = entered.backward.on_output
    tensor.grad_fn.register_prehook(on_output)  # type: ignore[union-attr]
    # Once a view is changed in place, as by `output += residual`, it has another node, and backward comes to its base.
    base = tensor._base
    if base is not None and base.requires_grad and entered.made(base):
        base.grad_fn.register_prehook(on_output)  # type: ignore[union-attr]
    return True


def _needs_gradient(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def _is_in(tensor: torch.Tensor, storages: Collection[int]) -> bool:
    return tensor.layout is torch.strided and tensor.untyped_storage()._cdata in storages


def _node_of(tensor: torch.Tensor) -> Any:
    """The tensor's node in autograd's graph; None: it has none, or is a view that autograd refuses by now."""
    try:
        return tensor.grad_fn
    except RuntimeError:
        return None


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
