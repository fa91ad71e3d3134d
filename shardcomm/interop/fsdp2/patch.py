"""A change to torch for as long as somebody needs it."""

from __future__ import annotations

import threading
from collections.abc import Callable

Undo = Callable[[], None]


class Patch:
    """`apply` changes something and returns what changes it back. Models of several threads may share one."""

    def __init__(self, apply: Callable[[], Undo]) -> None:
        self._apply = apply
        self._undo: Undo | None = None
        self._users = 0
        self._lock = threading.Lock()

    def take(self) -> Undo:
        """Applies it, unless it is; returns what the caller calls, once, when it needs it no more."""
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
