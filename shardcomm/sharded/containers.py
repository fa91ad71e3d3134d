"""Tensors in containers: in what pytree opens (tuples, lists, dicts and registered types) and in dataclasses."""

from __future__ import annotations

import copy
import dataclasses
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from operator import is_
from typing import Any

import torch
from torch.utils import _pytree as pytree


class Copies:
    """The copies of a caller's lists, dicts and dataclasses that a unit gets, since tensors in them are cast.

    Args:
        callers: The caller's own tensors, by the `id` of what the unit has in their place.
    """

    def __init__(self, callers: dict[int, Any]) -> None:
        self._callers = callers
        # The caller's container, the unit's copy of it, and what was in the copy.
        self._containers: list[tuple[Any, Any, list[Any]]] = []

    def note(self, container: Any, copied: Any) -> None:
        """Notes that `copied` stands in the place of `container`."""
        is_dict = isinstance(container, dict)
        # No type of somebody's own, which may have other rules.
        if type(container) in (list, deque, dict, OrderedDict, defaultdict) or (
            dataclasses.is_dataclass(container) and not is_dict
        ):
            self._containers.append((container, copied, _values(copied)))
            self._callers[id(copied)] = container

    def carry_back(self) -> None:
        """Puts into the caller's containers what was put into the copies."""
        for container, copied, before in self._containers:
            now = _values(copied)
            if len(now) == len(before) and all(map(is_, now, before)):
                continue
            if isinstance(container, list | deque):
                values = [self._callers.get(id(each), each) for each in copied]
                container.clear()
                container.extend(values)
            elif isinstance(container, dict):
                entries = {k: self._callers.get(id(each), each) for k, each in copied.items()}
                container.clear()
                container.update(entries)
            else:
                for name, value in _fields(copied).items():
                    object.__setattr__(container, name, self._callers.get(id(value), value))


NO_COPIES = Copies({})


def mapped(
    change: Callable[[torch.Tensor], torch.Tensor],
    tree: Any,
    copies: Copies | None = None,
    *,
    _within: tuple[int, ...] = (),
) -> Any:
    """`tree` with every tensor in it changed. What has no changed tensor in it is the same object as before.

    Args:
        change: Makes the new tensor, or returns the one that it is given.
        tree: Tensors in containers. A container in itself stays as it is there.
        copies: Is told of each container in whose place a copy comes.
    """
    if isinstance(tree, torch.Tensor):
        return change(tree)
    opened = _open(tree)
    if opened is None or id(tree) in _within:
        return tree
    children, put_together = opened
    within = (*_within, id(tree))
    new = [mapped(change, each, copies, _within=within) for each in children]
    if all(map(is_, new, children)):
        return tree
    changed = put_together(new)
    if copies is not None:
        copies.note(tree, changed)
    return changed


def contents(tree: Any, *, _within: tuple[int, ...] = ()) -> Iterator[Any]:
    """Each tensor and each container in `tree`, and `tree` itself if it is one, once for each place."""
    if isinstance(tree, torch.Tensor):
        yield tree
        return
    opened = _open(tree)
    if opened is not None and id(tree) not in _within:
        yield tree
        for each in opened[0]:
            yield from contents(each, _within=(*_within, id(tree)))


def is_writable(container: Any) -> bool:
    """Whether `container`, one of `contents`, is one that can be written into."""
    return not isinstance(container, torch.Tensor | tuple)


def _open(tree: Any) -> tuple[list[Any], Callable[[list[Any]], Any]] | None:
    """What is in a container, and the function that makes one like it of other contents; None: it is no container."""
    kind: Any = pytree._get_node_type(tree)
    if kind in pytree.SUPPORTED_NODES:
        node = pytree.SUPPORTED_NODES[kind]
        children, context = node.flatten_fn(tree)
        return children, lambda new: node.unflatten_fn(new, context)
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        fields = _fields(tree)
        return list(fields.values()), lambda new: _with_fields(
            tree, dict(zip(fields, new, strict=True))
        )
    return None


def _values(container: Any) -> list[Any]:
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
    """A copy of `instance` with these values."""
    changed = copy.copy(instance)
    for name, value in values.items():
        if value is not getattr(instance, name):
            object.__setattr__(changed, name, value)  # also where the dataclass is frozen
    return changed
