"""A unit's inputs and outputs: casts, and the marks by which autograd announces the unit's backward.

forward    inputs ──enter──► unit ──► leave ──► outputs
backward   on_end ◄────────  unit  ◄──────────  on_begin

Tensors are found in everything that pytree opens (tuples, lists, dicts and registered types) and in dataclasses.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Sequence
from functools import partial
from operator import is_
from typing import Any

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.utils import _pytree as pytree

from shardcomm.sharded.hooks import run_eagerly

_NONE: list[Any] = []
_NOTHING: dict[int, Any] = {}


class Entered:
    """What a unit computes with in the place of its caller's inputs. True if an input is marked, to announce backward.

    Attributes:
        tensors: For each marked input: what is marked, its alias with which the unit computes, and the alias's version
            at that time.
        containers: For each container with a changed input: the caller's, the unit's copy, and what was in the copy.
        callers: The caller's own tensors and containers, by the `id` of what the unit has in their place.
    """

    __slots__ = ("callers", "containers", "tensors")

    def __init__(
        self,
        tensors: Sequence[tuple[torch.Tensor, torch.Tensor, int]] = (),
        containers: list[tuple[Any, Any, list[Any]]] = _NONE,
        callers: dict[int, Any] = _NOTHING,
    ) -> None:
        self.tensors = tensors
        self.containers = containers
        self.callers = callers

    def __bool__(self) -> bool:
        return bool(self.tensors)


NOTHING_ENTERED = Entered()


def enter(
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    dtype: torch.dtype | None,
    on_end: Callable[[], None],
) -> tuple[tuple[Any, ...], dict[str, Any], Entered]:
    """Casts floating-point inputs to `dtype`, and has `on_end` called when their gradients are complete.

    By then all gradients inside the unit are complete, since autograd runs first what was recorded last.

    Returns:
        The inputs with which the unit computes, and what in them is not the caller's own. Without any mark, `on_end` is
        never called. Containers in which nothing is cast or marked are the caller's own.
    """
    if len(args) == 1 and not kwargs and isinstance(args[0], torch.Tensor):
        # The usual call has a way of its own, since the general one costs more than the rest of a trigger.
        tensor = args[0] if dtype is None else _cast(args[0], dtype)
        if not (tensor.requires_grad and torch.is_grad_enabled()):
            return (tensor,), kwargs, NOTHING_ENTERED
        (alias,) = _mark(on_end, tensor)
        return (alias,), kwargs, Entered(((tensor, alias, alias._version),))
    given = _tensors((args, kwargs))
    # By identity, so that a tensor which is given twice stays one.
    inside = {id(each): each if dtype is None else _cast(each, dtype) for each in given}
    marked = []
    if torch.is_grad_enabled():
        to_mark = {key: each for key, each in inside.items() if each.requires_grad}
        aliases = _mark(on_end, *to_mark.values()) if to_mark else ()
        for (key, each), alias in zip(to_mark.items(), aliases, strict=True):
            marked.append((each, alias, alias._version))
            inside[key] = alias
    entered = Entered(marked, [], {id(inside[id(each)]): each for each in given})
    # By place, since a registered type may make its tensors anew each time it is opened.
    places = iter(given)
    args, kwargs = _mapped(lambda _: inside[id(next(places))], (args, kwargs), entered)
    return args, kwargs, entered


def leave(
    output: Any,
    dtype: torch.dtype | None,
    own_storages: Collection[int],
    on_begin: Callable[[torch.Tensor], None],
) -> tuple[Any, bool]:
    """Casts floating-point outputs to `dtype`, and has `on_begin` called when the gradient of an output is there.

    That is before backward enters the unit. An output in one of the unit's `own_storages` is a view of a parameter. It
    is copied, since another unit's parameters may come into that memory next.

    Returns:
        The output that the caller gets, and whether any tensor in it can call `on_begin`.
    """
    if isinstance(output, torch.Tensor):  # the usual case, which so costs half
        return _leave(output, dtype, own_storages, on_begin)
    marked = False

    def outside(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal marked
        tensor, can_call = _leave(tensor, dtype, own_storages, on_begin)
        marked |= can_call
        return tensor

    return _mapped(outside, output), marked


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
    if tensor.grad_fn is None:  # a leaf, such as a parameter, would get one more hook a forward
        tensor = tensor.clone()
    tensor.grad_fn.register_prehook(on_begin)  # type: ignore[union-attr]
    return tensor, True


def cast(tree: Any, dtype: torch.dtype | None) -> Any:
    """`tree` with its floating-point tensors cast to `dtype`; `tree` itself if `dtype` is None. It makes no marks."""
    return tree if dtype is None else _mapped(partial(_cast, dtype=dtype), tree)


def _cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def carry_back(entered: Entered) -> None:
    """Gives the caller's inputs what the unit has done to the aliases and copies that it had in their place.

    Tensors get the autograd history of in-place operations; containers get what was put into them.
    """
    for given, alias, version in entered.tensors:
        if alias._version != version:
            # The values are there already, and may have been saved for backward: this must not be a new version.
            with torch.autograd.grad_mode._unsafe_preserve_version_counter(given):
                given.copy_(alias)
    for given, copied, before in entered.containers:
        now = _contents(copied)
        if len(now) == len(before) and all(map(is_, now, before)):
            continue
        if isinstance(given, deque):
            values = [entered.callers.get(id(each), each) for each in copied]
            given.clear()
            given.extend(values)
        elif isinstance(given, list):
            given[:] = [entered.callers.get(id(each), each) for each in copied]
        elif isinstance(given, dict):
            entries = {k: entered.callers.get(id(each), each) for k, each in copied.items()}
            given.clear()
            given.update(entries)
        else:
            for name, value in _fields(copied).items():
                object.__setattr__(given, name, entered.callers.get(id(value), value))


def in_autograd_grad(leaf: torch.Tensor) -> bool:
    """Whether the backward under way is one of torch.autograd.grad, which leaves no gradient in `leaf.grad`."""
    with torch.enable_grad():
        accumulates: Any = torch.Tensor.view_as(leaf, leaf).grad_fn  # a parameter's own refuses
    try:
        torch._C._will_engine_execute_node(accumulates.next_functions[0][0])
    except RuntimeError:  # so torch tells the two apart
        return True
    return False


def in_backward() -> bool:
    """Whether autograd runs in this thread: a forward then is a recomputation (activation checkpointing)."""
    return torch._C._current_graph_task_id() != -1


def in_make_fx() -> bool:
    """Whether a graph is recorded, by make_fx or what builds on it."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None


in_transform: Callable[[], bool] = torch._C._are_functorch_transforms_active
"""Whether a function of torch.func runs: its tensors have no memory, and take no hooks."""

outside_transforms = temporarily_clear_interpreter_stack
"""A context in which operations are on plain tensors, as outside of torch.func."""


class _Mark(torch.autograd.Function):
    """The identity on a unit's inputs. It returns aliases, not views, which autograd forbids to change in place."""

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


run_eagerly(_Mark.backward)

_mark: Callable[..., tuple[torch.Tensor, ...]] = super(torch.autograd.Function, _Mark).apply
"""`_Mark.apply` without its support for torch.func, in half of its time."""


def _mapped(
    change: Callable[[torch.Tensor], torch.Tensor], tree: Any, entered: Entered | None = None
) -> Any:
    """`tree` with every tensor in it changed. What has no changed tensor in it is the same object as before.

    Args:
        change: Makes the new tensor, or returns the one that it is given.
        tree: Tensors in containers.
        entered: Is told of each list, dict and dataclass in whose place a copy comes.
    """
    if isinstance(tree, torch.Tensor):
        return change(tree)
    kind: Any = pytree._get_node_type(tree)
    if kind in pytree.SUPPORTED_NODES:
        node = pytree.SUPPORTED_NODES[kind]
        children, context = node.flatten_fn(tree)
        new = [_mapped(change, each, entered) for each in children]
        if all(map(is_, new, children)):
            return tree
        changed = node.unflatten_fn(new, context)
    elif dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        fields = _fields(tree)
        changed = _with_fields(
            tree, {name: _mapped(change, each, entered) for name, each in fields.items()}
        )
    else:
        return tree
    if entered is not None and changed is not tree and _is_written_into(tree):
        entered.containers.append((tree, changed, _contents(changed)))
        entered.callers[id(changed)] = tree
    return changed


def _tensors(tree: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []

    def take(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor

    _mapped(take, tree)
    return found


def _is_written_into(container: Any) -> bool:
    """Whether it is a list, a dict or a dataclass, and no type of somebody's own with other rules."""
    is_dict = isinstance(container, dict)
    return type(container) in (list, deque, dict, OrderedDict, defaultdict) or (
        dataclasses.is_dataclass(container) and not is_dict
    )


def _contents(container: Any) -> list[Any]:
    """What is in a list, a dict or a dataclass, by which a change of it is seen."""
    if isinstance(container, list | deque):
        return list(container)
    if isinstance(container, dict):
        return [each for entry in container.items() for each in entry]
    return list(_fields(container).values())


def _fields(instance: Any) -> dict[str, Any]:
    names = [field.name for field in dataclasses.fields(instance)]
    return {name: getattr(instance, name) for name in names if hasattr(instance, name)}


def _with_fields(instance: Any, values: dict[str, Any]) -> Any:
    """A copy of `instance` with these values. If none differs, `instance` itself, which the unit may mean to change."""
    differing = {name: new for name, new in values.items() if new is not getattr(instance, name)}
    if not differing:
        return instance
    changed = copy.copy(instance)
    for name, value in differing.items():
        object.__setattr__(changed, name, value)  # also where the dataclass is frozen
    return changed
