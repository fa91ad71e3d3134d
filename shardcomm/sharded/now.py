"""What runs in this thread now: a backward, a recording of a graph, or a transform of torch.func."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

_NONE = -1


def in_backward() -> bool:
    """Whether autograd runs: a forward then is a recomputation (activation checkpointing)."""
    return backward() != _NONE


def backward() -> int:
    """The number of the backward that runs, the innermost one, as autograd counts them; -1: none runs."""
    return torch._C._current_graph_task_id()


def in_autograd_grad(leaf: torch.Tensor) -> bool:
    """Whether the backward under way is one of torch.autograd.grad, which leaves no gradient in `leaf.grad`."""
    with torch.enable_grad():
        accumulates: Any = torch.Tensor.view_as(leaf, leaf).grad_fn  # a parameter's own refuses
    try:
        torch._C._will_engine_execute_node(accumulates.next_functions[0][0])
    except RuntimeError:  # so torch tells the two apart
        return True
    return False


def in_make_fx() -> bool:
    """Whether a graph is recorded, by make_fx or what builds on it."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None


in_transform: Callable[[], bool] = torch._C._are_functorch_transforms_active
"""Whether a function of torch.func runs: its tensors have no memory, and take no hooks."""

outside_transforms = temporarily_clear_interpreter_stack
"""A context in which operations are on plain tensors, as outside of torch.func."""
