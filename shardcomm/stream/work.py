"""Work: what every asynchronous collective returns, to be waited for."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import NoReturn

from shardcomm.stream.streams import FIRED, AnyEvent, AnyStream, keep_until

_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 20e-6, 1e-3  # between looks at an event


class Work:
    """A collective that was called, and that may be under way or done.

    It keeps the collective's operands alive until `wait` has been called, after which computation may use their memory.
    If it is dropped before that, the operands are kept until the collective has ended.

    Args:
        event: The event of the collective's end. None: the collective was done when its call returned.
        compute: A function that returns the stream that waits. None: the host waits.
        *operands: The objects to keep alive.

    Attributes:
        event: The event of the collective's end; it has fired if the collective was done when its call returned. To
            make another stream come after the collective, call `stream.wait(work.event)`.

    Example:
        ```python
        stream = shardcomm.Stream()  # a worker thread of this rank
        full = comm.allocate(comm.size * 4, use="gather")
        work = comm.all_gather(full, torch.ones(4), stream=stream)
        work.wait()
        print(full.sum())
        ```
    """

    __slots__ = ("_compute", "_operands", "event")

    def __init__(
        self,
        event: AnyEvent | None = None,
        compute: Callable[[], AnyStream] | None = None,
        *operands: object,
    ) -> None:
        self.event = FIRED if event is None else event
        self._compute = compute
        self._operands = operands

    def is_completed(self) -> bool:
        """Whether the collective has ended on this rank, or has failed. It never blocks and never raises."""
        return self.event.query()

    def wait(self, timeout: float | timedelta | None = None) -> None:
        """Makes what torch computes from now on come after the collective.

        On a CPU it returns when the collective is complete on this rank. On a GPU torch's current stream waits, and the
        host goes on.

        Args:
            timeout: How long the host waits for the collective's end: a timedelta, or a number of seconds. None: on a
                GPU the host does not wait at all, and on a CPU it waits as long as the communicator's deadline allows.

        Raises:
            TypeError, ValueError: `timeout` is no such value, or is negative or NaN.
            TimeoutError: The collective has not ended within `timeout`. It goes on, and may be waited for again.
            CommError: The collective failed: a rank died, called something else or did not come in time.
        """
        within_s = None if timeout is None else _seconds(timeout)
        if self.event is not FIRED:
            if within_s is not None:
                _wait_for(self.event, within_s)
            if self._compute is None:
                self.event.wait()
            else:
                self._compute().wait(self.event)
        self._operands = ()

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError("a Work cannot be copied or pickled: it is a collective of this process")

    def __del__(self) -> None:
        if self._operands and self.event is not FIRED:
            keep_until(self.event, self._operands)


DONE = Work()
"""The Work of a collective that had ended when its call returned."""


def _seconds(timeout: float | timedelta) -> float:
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    if isinstance(seconds, bool) or not isinstance(seconds, int | float):
        raise TypeError(
            f"wait: timeout is a {type(timeout).__name__}; it must be a number of seconds, a timedelta, or None"
        )
    if not seconds >= 0:
        raise ValueError(
            f"wait: timeout is {seconds}; it must be a number of seconds of at least 0"
        )
    return seconds


def _wait_for(event: AnyEvent, within_s: float) -> None:
    end = time.monotonic() + within_s
    pause_s = _SHORTEST_PAUSE_S
    while not event.query():
        if time.monotonic() >= end:
            raise TimeoutError(
                f"wait: the collective has not ended within {within_s:g} s; it goes on, and may be waited for again"
            )
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
