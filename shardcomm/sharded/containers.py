"""Tensors in containers: in what pytree opens (tuples, lists, dicts and registered types) and in dataclasses."""

from __future__ import annotations

import copy
import dataclasses
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from operator import is_
from typing import Any

import torch
from torch.utils import _pytree as pytree

_LEAVES = int, float, str, type(None)  # common ones, told from containers at once


class Copies:
    """The copies of a caller's lists, dicts and dataclasses that a unit gets, since tensors in them are cast."""

    def __init__(self) -> None:
        # What the unit has in the place of the caller's, and the caller's, by the `id` of the first.
        self._callers: dict[int, tuple[Any, Any]] = {}
        # The caller's container, the unit's copy of it, and what was in the copy.
        self._containers: list[tuple[Any, Any, list[tuple[Any, Any]]]] = []

    def note(self, callers: Any, inside: Any) -> None:
        """Notes that the unit has `inside`, a tensor or a container, in the place of `callers`."""
        self._callers[id(inside)] = inside, callers
        if _is_known(callers):
            self._containers.append((callers, inside, _items(inside)))

    def carry_back(self) -> None:
        """Puts into the caller's containers what was put into the copies."""
        for container, copied, before in self._containers:
            now = _items(copied)
            if len(now) == len(before) and all(map(_is_same, now, before)):
                continue
            if isinstance(container, list | deque):
                values = [self._outside(each) for each in copied]
                container.clear()
                container.extend(values)
            elif isinstance(container, dict):
                entries = {key: self._outside(each) for key, each in copied.items()}
                container.clear()
                container.update(entries)
            else:
                for name, value in _fields(copied).items():
                    object.__setattr__(container, name, self._outside(value))

    def _outside(self, value: Any) -> Any:
        return self._callers.get(id(value), (value, value))[1]


def mapped(
    change: Callable[[torch.Tensor], torch.Tensor], tree: Any, copies: Copies | None = None
) -> Any:
    """`tree` with every tensor in it changed. What has no changed tensor in it is the same object as before.

    Args:
        change: Makes the new tensor, or returns the one that it is given.
        tree: Tensors in containers. What is there several times stays one; a container in itself stays as it is there.
        copies: Is told of each tensor and container in whose place another one comes.
    """
    return _mapped(change, tree, copies, {})


def _mapped(
    change: Callable[[torch.Tensor], torch.Tensor],
    value: Any,
    copies: Copies | None,
    done: dict[int, tuple[Any, Any]],
) -> Any:
    """See `mapped`. `done` has, by its `id`, each value that was come to, which so is kept, and what became of it."""
    if id(value) in done:
        return done[id(value)][1]
    if isinstance(value, torch.Tensor):
        new: Any = change(value)
    elif isinstance(value, _LEAVES) or (opened := _open(value)) is None:
        return value
    else:
        children, put_together = opened
        done[id(value)] = value, value
        inside = [_mapped(change, each, copies, done) for each in children]
        new = value if all(map(is_, inside, children)) else put_together(inside)
    done[id(value)] = value, new
    if new is not value and copies is not None:
        copies.note(value, new)
    return new


def put_in(change: Callable[[torch.Tensor], torch.Tensor], tree: Any) -> None:
    """Changes the tensors in the lists, dicts and dataclasses of `tree`, which stay the same objects."""
    for container in filter(_is_known, contents(tree)):
        is_dataclass = dataclasses.is_dataclass(container)
        for key, value in _items(container):
            if isinstance(value, torch.Tensor) and (new := change(value)) is not value:
                if is_dataclass:
                    object.__setattr__(container, key, new)  # also where it is frozen
                else:
                    container[key] = new


def contents(*trees: Any) -> list[Any]:
    """Each tensor and each container in `trees`, these themselves if they are such, once."""
    found: dict[int, Any] = {}
    for tree in trees:
        _find(tree, found)
    return [*found.values()]


def _find(value: Any, found: dict[int, Any]) -> None:
    if id(value) in found:
        return
    if isinstance(value, torch.Tensor):
        found[id(value)] = value
    elif not isinstance(value, _LEAVES) and (children := _children(value)) is not None:
        found[id(value)] = value
        for each in children:
            _find(each, found)


def is_writable(container: Any) -> bool:
    """Whether `container`, one of `contents`, is one that can be written into."""
    return not isinstance(container, torch.Tensor | tuple)


def _children(tree: Any) -> list[Any] | None:
    """What is in a container; None: it is no container."""
    if (opened := _open(tree)) is not None:
        return opened[0]
    # Types of somebody's own can be read, if not made anew.
    if isinstance(tree, dict):
        return list(tree.values())
    return list(tree) if isinstance(tree, list | tuple) else None


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


def _is_same(item: tuple[Any, Any], before: tuple[Any, Any]) -> bool:
    (key, value), (key_before, value_before) = item, before
    return (key is key_before or key == key_before) and value is value_before


def _is_known(value: Any) -> bool:
    """Whether it is a list, a dict or a dataclass, and of no type of somebody's own, which may have other rules."""
    return type(value) in (list, deque, dict, OrderedDict, defaultdict) or (
        dataclasses.is_dataclass(value) and not isinstance(value, dict)
    )


def _items(container: Any) -> list[tuple[Any, Any]]:
    """What is in a list, a dict or a dataclass, each with its place."""
    if isinstance(container, list | deque):
        return list(enumerate(container))
    return list((container if isinstance(container, dict) else _fields(container)).items())


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
