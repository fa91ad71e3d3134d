"""AwaitedBackward: the backward of one forward of a unit, until which the unit's gradients are not complete."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from shardcomm.sharded.hooks import run_eagerly, weakly


class Awaited(set[int]):
    """A unit's backwards that have yet to come, by the `id` of each `AwaitedBackward`.

    Attributes:
        going_on: The one that has begun last; None: it has ended, or its graph is gone.
    """

    going_on: int | None = None


class AwaitedBackward:
    """The backward of one forward of a unit. The marks in autograd's graph hold it, and tell it of begin and end.

    A graph that is freed before, as when a loss is dropped, drops the marks too. Nothing is awaited then.

    Args:
        awaited: The unit's awaited backwards.
        on_begin: The function to call whenever the gradient of an output is there.
        on_end: The function to call when this backward has ended. It is told whether backward has come through the unit
            for certain.
    """

    __slots__ = ("__weakref__", "_awaited", "_hooks", "_on_begin", "_on_end")

    def __init__(
        self,
        awaited: Awaited,
        on_begin: Callable[[torch.Tensor], None],
        on_end: Callable[[bool], None],
    ) -> None:
        self._awaited = awaited
        self._on_begin = on_begin
        self._on_end = on_end
        self._hooks: tuple[Any, ...] = ()

    def begin(self) -> None:
        """Makes the unit's gradients wait for this backward."""
        self._awaited.add(id(self))

    def watch(self, tensor: torch.Tensor) -> None:
        """Marks a tensor which the unit was given, and which others may compute with, too: it tells of the end.

        The tensor does not hold this backward. Once the unit's graph is freed, the mark is gone.
        """
        # It comes before hooks on the tensor's node: those of `on_output`, if the tensor is a unit's output.
        self._hooks += (tensor.register_hook(weakly(self._on_tensor)),)  # type: ignore[no-untyped-call]

    def on_output(self, grad: torch.Tensor) -> None:
        """The mark at the node that made an output: its gradient is there."""
        self._awaited.going_on = id(self)
        self._on_begin(grad)

    def on_alias(self) -> None:
        """The mark at inputs that the unit alone has: backward has come through the unit."""
        self._end(certain=True)

    def _on_tensor(self, _grad: object) -> None:
        if self._awaited.going_on == id(self):
            self._end(certain=False)

    def _end(self, *, certain: bool) -> None:
        self._awaited.going_on = None
        self._awaited.discard(id(self))
        self._on_end(certain)

    def __del__(self) -> None:
        self._awaited.discard(id(self))
        if self._awaited.going_on == id(self):
            self._awaited.going_on = None
        for hook in self._hooks:
            hook.remove()


run_eagerly(AwaitedBackward.on_output, AwaitedBackward.on_alias, AwaitedBackward._on_tensor)
