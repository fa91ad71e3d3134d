"""A call on a thread of its own, for what blocks inside torch: the caller can wait in pieces, and Ctrl-C is heard."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Generic, TypeVar

T = TypeVar("T")


class Background(Generic[T]):
    """fn(), begun. Who gives up leaves the thread behind, which ends when fn does, or with the process."""

    def __init__(self, fn: Callable[[], T]) -> None:
        self._outcome: Future[T] = Future()
        threading.Thread(target=self._run, args=(fn,), daemon=True).start()

    def _run(self, fn: Callable[[], T]) -> None:
        try:
            self._outcome.set_result(fn())
        except BaseException as error:
            self._outcome.set_exception(error)

    def ended(self, within_s: float) -> bool:
        """Whether fn has returned or raised; waits for it so long."""
        return bool(wait([self._outcome], within_s).done)

    def result(self) -> T:
        """What fn returned; raises what it raised."""
        return self._outcome.result()
