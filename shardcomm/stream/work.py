"""Work: what an asynchronous collective of a Bucket returns, to be waited for."""

from __future__ import annotations

from collections.abc import Callable

from shardcomm.stream.streams import Event, Stream, keep_until


class Work:
    """A collective, queued or done.

    It holds on to `operands` until it has been waited for: what computation then does comes after the collective, and
    so does what is put into their memory. Dropped before that, it has them kept until the collective has ended.

    Args:
        event: of the collective's end; None: there is nothing to wait for.
        compute: gives the stream that waits; None: the host does.
    """

    __slots__ = ("_compute", "_event", "_operands")

    def __init__(
        self,
        event: Event | None = None,
        compute: Callable[[], Stream] | None = None,
        *operands: object,
    ) -> None:
        self._event = event
        self._compute = compute
        self._operands = operands

    @property
    def queued(self) -> bool:
        """Whether there is something to wait for."""
        return self._event is not None

    def wait(self) -> None:
        """What torch computes from now on comes after the collective. On a CPU: returns when it is complete here.

        Raises:
            CommError: it failed; see `shardcomm.comm.communicator`.
        """
        if self._event is not None:
            if self._compute is None:
                self._event.wait()
            else:
                self._compute().wait(self._event)
        self._operands = ()

    def __del__(self) -> None:
        if self._operands and self._event is not None:
            keep_until(self._event, self._operands)
