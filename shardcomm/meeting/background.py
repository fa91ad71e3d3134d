"""A call on a thread of its own, for functions that block inside torch: the caller waits in pieces and hears Ctrl-C."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Generic, TypeVar

T = TypeVar("T")


class Background(Generic[T]):
    """A call of fn() that has begun. A caller may give up: the thread ends when fn does, or with the process."""

    def __init__(self, fn: Callable[[], T]) -> None:
        self._outcome: Future[T] = Future()
        threading.Thread(target=self._run, args=(fn,), daemon=True).start()

    def _run(self, fn: Callable[[], T]) -> None:
        try:
            self._outcome.set_result(fn())
        except BaseException as error:
            self._outcome.set_exception(error)

    def ended(self, within_s: float) -> bool:
        """Whether fn has returned or raised; waits up to `within_s` seconds for that."""
        return bool(wait([self._outcome], within_s).done)

    def result(self) -> T:
        """Waits for fn; returns what it returned, and raises what it raised."""
        return self._outcome.result()
