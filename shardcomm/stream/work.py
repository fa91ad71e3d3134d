"""Work: what every asynchronous collective returns, to be waited for."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta

from shardcomm.stream.streams import Event, Stream, keep_until

_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 20e-6, 1e-3  # between looks at an event


class Work:
    """A collective that was called: on its way, or done.

    It holds on to `operands` until it has been waited for: what computation then does comes after the collective, and
    so does what is put into their memory. Dropped before that, it has them kept until the collective has ended.

    Args:
        event: of the collective's end; None: it was done when the call returned.
        compute: gives the stream that waits; None: the host does.

    Attributes:
        event: as given; another stream comes after the collective by `stream.wait(work.event)`.
    """

    __slots__ = ("_compute", "_operands", "event")

    def __init__(
        self,
        event: Event | None = None,
        compute: Callable[[], Stream] | None = None,
        *operands: object,
    ) -> None:
        self.event = event
        self._compute = compute
        self._operands = operands

    def is_completed(self) -> bool:
        """Whether the collective has ended on this rank, or has failed; never blocks, never raises."""
        return self.event is None or self.event.query()

    def wait(self, timeout: float | timedelta | None = None) -> None:
        """What torch computes from now on comes after the collective. On a CPU: returns when it is complete here.

        Args:
            timeout: how long the host waits for the end, in seconds if it is a number. None: on a GPU the host does
                not wait at all, and on a CPU it waits as long as the communicator's own deadline allows.

        Raises:
            TimeoutError: it has not ended within `timeout`. It goes on, and may be waited for again.
            CommError: it failed; see `shardcomm.comm.communicator`.
        """
        if self.event is not None:
            if timeout is not None:
                _wait_for(self.event, timeout)
            if self._compute is None:
                self.event.wait()
            else:
                self._compute().wait(self.event)
        self._operands = ()

    def __del__(self) -> None:
        if self._operands and self.event is not None:
            keep_until(self.event, self._operands)


DONE = Work()
"""That of a collective which had ended when its call returned."""


def _wait_for(event: Event, timeout: float | timedelta) -> None:
    within_s = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    end = time.monotonic() + within_s
    pause_s = _SHORTEST_PAUSE_S
    while not event.query():
        if time.monotonic() >= end:
            raise TimeoutError(
                f"wait: the collective has not ended within {within_s:g} s; it goes on, and may be waited for again"
            )
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
