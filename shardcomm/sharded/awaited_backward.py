"""AwaitedBackward: the backward of one forward of a unit, until which the unit's gradients are not complete."""

from __future__ import annotations

from collections.abc import Callable

import torch

from shardcomm.sharded.hooks import run_eagerly

_NONE = -1


class AwaitedBackward:
    """The backward of one forward of a unit. The marks at the unit's inputs hold it, and tell it of the end.

    A graph that is freed before, as when a loss is dropped, drops the marks too. Nothing is awaited then.

    Args:
        awaited: The unit's awaited backwards, by their `id`.
        on_end: The function to call when this one has ended, once in each backward. It is told whether backward has
            come through the unit for certain.
    """

    __slots__ = ("_awaited", "_ended_in", "_on_end")

    def __init__(self, awaited: set[int], on_end: Callable[[bool], None]) -> None:
        self._awaited = awaited
        self._on_end = on_end
        self._ended_in = _NONE  # the backward, by autograd's number of it

    def begin(self) -> None:
        """Makes the unit's gradients wait for this backward."""
        self._awaited.add(id(self))

    def on_alias(self) -> None:
        """The mark at what the unit alone has: backward has come through the unit."""
        self._end(certain=True)

    def on_tensor(self, _grad: object) -> None:
        """The mark at a tensor that others have, too: backward has come through the unit, or through them alone."""
        self._end(certain=False)

    def _end(self, *, certain: bool) -> None:
        backward = torch._C._current_graph_task_id()
        if self._ended_in == backward:
            return
        self._ended_in = backward
        self._awaited.discard(id(self))
        self._on_end(certain)

    def __del__(self) -> None:
        self._awaited.discard(id(self))


run_eagerly(AwaitedBackward.on_alias, AwaitedBackward.on_tensor)
