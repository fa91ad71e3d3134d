"""CallOrder: blocking collectives come after what their thread has queued, as on every other rank."""

from __future__ import annotations

from collections.abc import Callable
from threading import get_ident

from shardcomm.comm.pending import Channel, channel_of
from shardcomm.stream.streams import FIRED, AnyEvent


class CallOrder:
    """The order in which a program calls a communicator's collectives, where its tensors are on a CPU.

    A queued collective runs on its stream's thread there, and a blocking one on the caller's: on another rank the two
    might run in the other order. So a blocking one first waits for the last one that its thread has queued on the same
    channel. A thread that has queued nothing waits for nothing, since the stream's own thread would wait for itself. On
    a GPU the transports put what is called later behind its channel's earlier collectives, whatever their streams.

    Args:
        on_host: Whether tensors are on a CPU.

    Attributes:
        last: The collective of each channel that was queued last and has not been waited for here: the thread that
            called it, and the event of its end.
    """

    def __init__(self, on_host: bool) -> None:
        self.last: dict[Channel, tuple[int, AnyEvent]] = {}
        self._on_host = on_host

    def queued(self, operation: str, event: AnyEvent) -> None:
        """Notes that this thread has queued `operation`, which ends at `event`."""
        if self._on_host and event is not FIRED:
            self.last[channel_of(operation)] = get_ident(), event

    def come_after_queued(self, channel: Channel, check: Callable[[], None]) -> None:
        """Waits for what this thread has queued on `channel`, on which it is about to run a blocking collective.

        Args:
            channel: The blocking collective's.
            check: The communicator's `check`, which raises if it has ended, or if the process was forked.

        Raises:
            CommError: The communicator has ended.
            Exception: What ended the queued collective, or kept it from running.
        """
        last = self.last.get(channel)
        if last is None or last[0] != get_ident():
            return
        check()
        self.last.pop(channel, None)
        last[1].wait()
