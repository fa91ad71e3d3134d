"""A change to torch that lasts as long as somebody needs it."""

from __future__ import annotations

import threading
from collections.abc import Callable

Undo = Callable[[], None]


class Patch:
    """A change that several users share, also from several threads.

    Args:
        apply: Makes the change, and returns the function that undoes it.
    """

    def __init__(self, apply: Callable[[], Undo]) -> None:
        self._apply = apply
        self._undo: Undo | None = None
        self._users = 0
        self._lock = threading.Lock()

    def take(self) -> Undo:
        """Makes the change, unless it is made already.

        Returns:
            An undo function; call it once, when the change is no longer needed. The last user's call undoes the change.
        """
        with self._lock:
            if self._undo is None:
                self._undo = self._apply()
            self._users += 1
        return self._let_go

    def _let_go(self) -> None:
        with self._lock:
            self._users -= 1
            if self._users == 0 and self._undo is not None:
                self._undo()
                self._undo = None
