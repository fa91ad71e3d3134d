"""Offload: shards, gradients and optimizer state are in host memory, and pass through the device one after the other.

    gather stream    shard (host) ──copy──► staging ──all-gather──► full parameters
    reduce stream    full gradients ──reduce-scatter──► staging ──copy──► gradient (host)

With replicas, the result of their all-reduce goes the second way, on the replicate stream. To add to a gradient, the
gradient is first copied to the staging: the host computes nothing but the optimizer's step. The host's memory is
pinned, so that a GPU copies while it computes, in both directions at once. The host waits only before it reads a
gradient or writes a shard.

Ranks that compute on a CPU have their staging in host memory, too. They gain nothing by it, but take the same way, so
that a run can be tested and debugged without a GPU.

Its peer is PyTorch FSDP2's `CPUOffloadPolicy(pin_memory=True)`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from shardcomm.stream.streams import AnyEvent, AnyStream, copy


class Offload:
    """The staging of all buckets whose shards are offloaded. One stream uses each buffer, so buckets use it in turn.

    Args:
        device: The device on which the ranks compute.
        shard_bytes: The bytes of the largest shard.

    Attributes:
        landed: The event that fires when the latest gradient is in host memory; None: there was none.
    """

    def __init__(self, device: torch.device, shard_bytes: int) -> None:
        self._device = device
        self._shard = torch.empty(shard_bytes, dtype=torch.uint8, device=device)
        self._gradient = torch.empty(shard_bytes, dtype=torch.uint8, device=device)
        self._fetched: AnyEvent | None = None
        self.landed: AnyEvent | None = None

    @property
    def nbytes(self) -> int:
        """The bytes that it takes of the device."""
        return self._shard.nbytes + self._gradient.nbytes

    def zeros(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Memory of the host for a shard, pinned unless the device is a CPU."""
        return torch.zeros(numel, dtype=dtype, pin_memory=self._device.type != "cpu")

    def staged(self, shard: torch.Tensor) -> torch.Tensor:
        """The memory of the device in which `shard` is after `fetch`, until the next `fetch`."""
        return _as(shard, self._shard)

    def fetch(self, shard: torch.Tensor, stream: AnyStream) -> None:
        """Queues the copy of `shard` to the device."""
        self._fetched = copy(self.staged(shard), shard, stream)

    @contextmanager
    def gradient(
        self, grad: torch.Tensor, stream: AnyStream, *, add: bool
    ) -> Iterator[torch.Tensor]:
        """A context for work that writes a gradient on the device, after which it is copied to `grad` in host memory.

        Args:
            grad: Where the gradient goes.
            stream: The stream of the work and of the copies.
            add: Whether the work adds to `grad`, which is then copied to the device first.

        Yields:
            The tensor of the device for the work to write.
        """
        here = _as(grad, self._gradient)
        if add:
            copy(here, grad, stream)
        yield here
        self.landed = copy(grad, here, stream)

    def wait(self) -> None:
        """Blocks the host until no copy is under way. Then it may read gradients and write shards."""
        for event in (self._fetched, self.landed):
            if event is not None:
                event.wait()


def _as(tensor: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
    """The beginning of `memory`, as long as `tensor` and of its dtype."""
    return memory[: tensor.nbytes].view(tensor.dtype)
