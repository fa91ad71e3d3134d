"""A call on a thread of its own, for functions that block inside torch: the caller waits in pieces and hears Ctrl-C."""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Generic, TypeVar

T = TypeVar("T")

_LAST_S = 3.0  # torch takes that long beyond its own timeout

_threads: set[threading.Thread] = set()


class Background(Generic[T]):
    """A call of fn() that has begun. A caller may give up: the thread ends when fn does, or with the process."""

    def __init__(self, fn: Callable[[], T]) -> None:
        self._outcome: Future[T] = Future()
        thread = threading.Thread(target=self._run, args=([fn],), daemon=True)
        _threads.difference_update([each for each in list(_threads) if not each.is_alive()])
        _threads.add(thread)  # first, since Ctrl-C may come while it starts
        thread.start()

    def _run(self, fns: list[Callable[[], T]]) -> None:
        try:
            # The caller may go on before this thread has ended. By then it holds nothing of fn's, such as a connection.
            self._outcome.set_result(fns.pop()())
        except BaseException as error:
            self._outcome.set_exception(error)

    def ended(self, within_s: float) -> bool:
        """Whether fn has returned or raised; waits up to `within_s` seconds for that."""
        return bool(wait([self._outcome], within_s).done)

    def result(self) -> T:
        """Waits for fn; returns what it returned, and raises what it raised."""
        return self._outcome.result()


def _wait_for_last() -> None:
    """Waits a moment for calls that somebody has given up.

    They often end at the same deadline as the process does, and a thread that leaves torch's code while the interpreter
    ends would abort the process.
    """
    until = time.monotonic() + _LAST_S
    for thread in list(_threads):
        if thread.is_alive():
            thread.join(max(0.0, until - time.monotonic()))


atexit.register(_wait_for_last)
