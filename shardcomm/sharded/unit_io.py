"""Where a unit's inputs come in and its outputs go out: casts, and the marks by which autograd tells of its backward.

forward    inputs ──enter──► unit ──► leave ──► outputs
backward   on_end ◄────────  unit  ◄──────────  on_begin

Tensors are found in what pytree opens (tuples, lists, dicts and what is registered with it) and in dataclasses.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Collection, Iterable
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.utils import _pytree as pytree

Marked = list[tuple[torch.Tensor, torch.Tensor, int]]
"""Of each marked input: the caller's tensor, its alias that the unit computes with, and its version at that time."""


def enter(
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    dtype: torch.dtype | None,
    on_end: Callable[[], None],
) -> tuple[tuple[Any, ...], dict[str, Any], Marked]:
    """Casts floating-point inputs to `dtype`, and has `on_end` called when their gradients are complete.

    By then all gradients inside the unit are, since autograd runs what was recorded last first. Returns the inputs to
    go on with, and those that are marked: without any, `on_end` is never called.
    """
    if len(args) == 1 and not kwargs and isinstance(args[0], torch.Tensor):
        # The usual call; the general way costs more than the rest of a trigger.
        tensor = args[0] if dtype is None or not args[0].is_floating_point() else args[0].to(dtype)
        if not (tensor.requires_grad and torch.is_grad_enabled()):
            return (tensor,), kwargs, []
        (alias,) = _mark(on_end, tensor)
        return (alias,), kwargs, [(tensor, alias, alias._version)]
    leaves, rebuild = _flatten((args, kwargs))
    tensors = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    if dtype is not None:
        for i in tensors:
            if leaves[i].is_floating_point():
                leaves[i] = leaves[i].to(dtype)
    marked: Marked = []
    to_mark = [i for i in tensors if leaves[i].requires_grad] if torch.is_grad_enabled() else []
    if to_mark:
        aliases = _mark(on_end, *[leaves[i] for i in to_mark])
        for i, alias in zip(to_mark, aliases, strict=True):
            marked.append((leaves[i], alias, alias._version))
            leaves[i] = alias
    args, kwargs = rebuild(leaves)
    return args, kwargs, marked


def leave(
    output: Any,
    dtype: torch.dtype | None,
    own_storages: Collection[int],
    on_begin: Callable[[torch.Tensor], None],
) -> tuple[Any, bool]:
    """Casts floating-point outputs to `dtype`, and has `on_begin` called when the gradient of an output is there.

    That is before backward enters the unit. An output in one of the unit's `own_storages` (a view of a parameter) is
    copied: another unit's parameters may come there next. Returns the output to go on with, and whether any tensor of
    it can call `on_begin`.
    """
    if isinstance(output, torch.Tensor):  # the usual one, at half of the cost
        return _leave(output, dtype, own_storages, on_begin)
    leaves, rebuild = _flatten(output)
    changed = marked = False
    for i, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor):
            outside, can_call = _leave(leaf, dtype, own_storages, on_begin)
            changed |= outside is not leaf
            marked |= can_call
            leaves[i] = outside
    return rebuild(leaves) if changed else output, marked


def _leave(
    tensor: torch.Tensor,
    dtype: torch.dtype | None,
    own_storages: Collection[int],
    on_begin: Callable[[torch.Tensor], None],
) -> tuple[torch.Tensor, bool]:
    if (
        own_storages
        and tensor.layout is torch.strided
        and tensor.untyped_storage()._cdata in own_storages
    ):
        tensor = tensor.clone()
    if dtype is not None and tensor.is_floating_point() and tensor.dtype != dtype:
        tensor = tensor.to(dtype)
    if not (tensor.requires_grad and torch.is_grad_enabled()):
        return tensor, False
    if (
        tensor.grad_fn is None
    ):  # a leaf, such as a parameter, would have one more hook with each forward
        tensor = tensor.clone()
    tensor.grad_fn.register_prehook(on_begin)  # type: ignore[union-attr]
    return tensor, True


def cast(tree: Any, dtype: torch.dtype | None) -> Any:
    """`tree` with its floating-point tensors cast to `dtype`, if that is one; no marks."""
    if dtype is None:
        return tree
    leaves, rebuild = _flatten(tree)
    return rebuild(
        leaf.to(dtype) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf
        for leaf in leaves
    )


def carry_back(marked: Marked) -> None:
    """Gives the caller's tensors the autograd history of what the unit did to their aliases in place."""
    for given, alias, version in marked:
        if alias._version != version:
            # Its values are there already, and may have been saved for backward: this is no new version of them.
            with torch.autograd.grad_mode._unsafe_preserve_version_counter(given):
                given.copy_(alias)


def in_backward() -> bool:
    """Whether autograd runs in this thread: a forward then is a recomputation (activation checkpointing)."""
    return torch._C._current_graph_task_id() != -1


def in_make_fx() -> bool:
    """Whether a graph is recorded, by make_fx or what builds on it."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None


in_transform: Callable[[], bool] = torch._C._are_functorch_transforms_active
"""Whether a function of torch.func runs: its tensors have no memory, and take no hooks."""

outside_transforms = temporarily_clear_interpreter_stack
"""In it operations are on plain tensors, as outside of torch.func."""


class _Mark(torch.autograd.Function):
    """Identity on a unit's inputs. Aliases of them, since autograd forbids in-place changes of a function's views."""

    @staticmethod
    def forward(
        ctx: Any, on_end: Callable[[], None], *inputs: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.on_end = on_end
        return tuple([tensor.detach() for tensor in inputs])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        ctx.on_end()
        return (None, *grads)

    @staticmethod
    def jvp(ctx: Any, on_end: None, *tangents: torch.Tensor | None) -> Any:
        return tuple(None if tangent is None else tangent.view_as(tangent) for tangent in tangents)


_mark: Callable[..., tuple[torch.Tensor, ...]] = super(torch.autograd.Function, _Mark).apply
"""`_Mark.apply` without what is for torch.func, in half of its time."""

_Rebuild = Callable[[Iterable[Any]], Any]


def _flatten(tree: Any) -> tuple[list[Any], _Rebuild]:
    """The leaves of `tree`, and what makes such a tree of others."""
    leaves, spec = pytree.tree_flatten(tree)
    opened = {
        i: _flatten(_fields(leaf))
        for i, leaf in enumerate(leaves)
        if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type)
    }
    if not opened:
        return leaves, partial(pytree.tree_unflatten, treespec=spec)

    def rebuild(values: Iterable[Any]) -> Any:
        rest = iter(values)
        made = [
            _with_fields(leaf, opened[i][1](islice(rest, len(opened[i][0]))))
            if i in opened
            else next(rest)
            for i, leaf in enumerate(leaves)
        ]
        return pytree.tree_unflatten(made, spec)

    flat = [
        each for i, leaf in enumerate(leaves) for each in (opened[i][0] if i in opened else [leaf])
    ]
    return flat, rebuild


def _fields(instance: Any) -> dict[str, Any]:
    names = [field.name for field in dataclasses.fields(instance)]
    return {name: getattr(instance, name) for name in names if hasattr(instance, name)}


def _with_fields(instance: Any, values: dict[str, Any]) -> Any:
    """`instance` itself where nothing differs: the unit may mean to change it."""
    differing = {name: new for name, new in values.items() if new is not getattr(instance, name)}
    if not differing:
        return instance
    changed = copy.copy(instance)
    for name, value in differing.items():
        object.__setattr__(changed, name, value)  # a frozen one too
    return changed
