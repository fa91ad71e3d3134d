"""AwaitedBackward: the backward of one forward of a unit, until which the unit's gradients are not complete."""

from __future__ import annotations

from collections.abc import Callable


class AwaitedBackward:
    """The backward of one forward of a unit. The mark at the unit's inputs holds it, and calls it when it has ended.

    A graph that is freed before, as when a loss is dropped, drops the mark too. Nothing is awaited then.

    Args:
        awaited: The unit's awaited backwards, by their `id`.
        on_end: The function to call when this one has ended.
    """

    __slots__ = ("_awaited", "_on_end")

    def __init__(self, awaited: set[int], on_end: Callable[[], None]) -> None:
        self._awaited = awaited
        self._on_end = on_end

    def begin(self) -> None:
        """Makes the unit's gradients wait for this backward."""
        self._awaited.add(id(self))

    def __call__(self) -> None:
        """Notes that this backward has ended."""
        self._awaited.discard(id(self))
        self._on_end()

    def __del__(self) -> None:
        self._awaited.discard(id(self))
