"""Work: what an asynchronous collective of a Bucket returns, to be waited for."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shardcomm.streams import Event, compute_stream, keep_until


class Work:
    """A collective, queued or done. What it reads is kept until it is waited for, or has ended."""

    def __init__(
        self, event: Event | None, device: torch.device, reads: Sequence[torch.Tensor | None] = ()
    ) -> None:
        self._event = event  # None: nothing to wait for
        self._device = device
        self._reads: Sequence[torch.Tensor | None] = reads

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
        self._reads = ()

    def __del__(self) -> None:
        if self._reads and self._event is not None:
            keep_until(self._event, self._reads)
