"""Traffic: how many bytes a run communicates, and how long computation waits for that."""

from __future__ import annotations

from collections import deque

from shardcomm.stream.streams import AnyEvent


def all_reduce_bytes(nbytes: int, ranks: int) -> int:
    """The bytes that a rank sends to the others in an all-reduce: 2 (n - 1) / n of its buffer."""
    return 2 * nbytes * (ranks - 1) // ranks


class Traffic:
    """Counts this rank's communication since the start. `engine.traffic` is one.

    Attributes:
        gathered_bytes: The bytes received from other ranks by gathers.
        reduced_bytes: The bytes sent to other ranks by reduces.
        waits_timed: Whether waits are timed; see `time_waits`.
    """

    def __init__(self) -> None:
        self.gathered_bytes = 0
        self.reduced_bytes = 0
        self.waits_timed = False
        self._exposed_s = 0.0
        self._waits: deque[tuple[AnyEvent, AnyEvent]] = deque()  # those that may still go on

    def time_waits(self) -> None:
        """Sums up `exposed_s` from now on. That takes two timed events for each wait, which cost a step some time.

        It is not for steps that are captured in a CUDA graph, whose events tell no time.
        """
        self.waits_timed = True

    @property
    def exposed_s(self) -> float:
        """For how many seconds computation has stood still since `time_waits`, and waited for communication.

        To read it waits for the device.

        Raises:
            RuntimeError: Waits are not timed.
        """
        if not self.waits_timed:
            raise RuntimeError(
                "traffic.exposed_s: waits are not timed; call engine.traffic.time_waits() before the steps in question"
            )
        for _, end in self._waits:
            end.wait()
        self._count_ended()
        return self._exposed_s

    def waited(self, begin: AnyEvent, end: AnyEvent) -> None:
        """Records that computation waits between these two events of its stream."""
        self._waits.append((begin, end))
        self._count_ended()

    def _count_ended(self) -> None:
        while self._waits and self._waits[0][1].query():
            begin, end = self._waits.popleft()
            self._exposed_s += end.seconds_since(begin)
