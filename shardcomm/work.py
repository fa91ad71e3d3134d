"""Work: what an asynchronous collective of a Bucket returns, to be waited for."""

from __future__ import annotations

import torch

from shardcomm.streams import Event, compute_stream


class Work:
    """A collective, queued or done."""

    def __init__(self, event: Event | None, device: torch.device) -> None:
        self._event = event  # None: nothing to wait for
        self._device = device

    @property
    def queued(self) -> bool:
        """Whether there is something to wait for."""
        return self._event is not None

    def wait(self) -> None:
        """What torch computes from now on comes after the collective. On a CPU: returns when it is complete here.

        Raises:
            CommError: it failed; see `shardcomm.communicator`.
        """
        if self._event is not None:
            if self._device.type == "cpu":  # the host itself waits, for a GPU's event as well
                self._event.wait()
            else:
                compute_stream(self._device).wait(self._event)
