"""Where a unit's inputs come in and its outputs go out: casts, and the marks by which autograd tells of its backward.

forward    inputs ──enter──► unit ──► leave ──► outputs
backward   on_end ◄────────  unit  ◄──────────  on_begin
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree


def enter(
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    dtype: torch.dtype | None,
    on_end: Callable[[], None],
) -> tuple[tuple[Any, ...], dict[str, Any], bool]:
    """Casts floating-point inputs to `dtype`, and has `on_end` called when their gradients are complete.

    By then all gradients inside the unit are, since autograd runs what was recorded last first. Returns the inputs to
    go on with, and whether any has a gradient: otherwise `on_end` is never called.
    """
    spec = None
    if len(args) == 1 and not kwargs and isinstance(args[0], torch.Tensor):
        leaves = list(args)  # the usual call; the general way costs more than the rest of a trigger
    else:
        leaves, spec = pytree.tree_flatten((args, kwargs))
    tensors = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    if dtype is not None:
        for i in tensors:
            if leaves[i].is_floating_point():
                leaves[i] = leaves[i].to(dtype)
    marked = [i for i in tensors if leaves[i].requires_grad] if torch.is_grad_enabled() else []
    if marked:
        passed = _Mark.apply(on_end, *(leaves[i] for i in marked))  # type: ignore[no-untyped-call]
        for i, leaf in zip(marked, passed, strict=True):
            leaves[i] = leaf
    if spec is None:
        return tuple(leaves), kwargs, bool(marked)
    args, kwargs = pytree.tree_unflatten(leaves, spec)
    return args, kwargs, bool(marked)


def leave(output: Any, on_begin: Callable[[torch.Tensor], None]) -> None:
    """Has `on_begin` called when the gradient of an output is there, before backward enters the unit."""
    if not torch.is_grad_enabled():
        return
    for leaf in [output] if isinstance(output, torch.Tensor) else pytree.tree_leaves(output):
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
            leaf.register_hook(on_begin)  # type: ignore[no-untyped-call]


def in_backward() -> bool:
    """Whether autograd runs in this thread: a forward then is a recomputation (activation checkpointing)."""
    return torch._C._current_graph_task_id() != -1


class _Mark(torch.autograd.Function):
    """Identity on a unit's inputs."""

    @staticmethod
    def forward(
        ctx: Any, on_end: Callable[[], None], *inputs: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.on_end = on_end
        return inputs

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        ctx.on_end()
        return (None, *grads)
