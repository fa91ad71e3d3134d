"""Offload: shards, gradients and optimizer state are in host memory, and pass through the device one after the other.

    gather stream    shard (host) ──copy──► staging ──all-gather──► full parameters
    reduce stream    full gradients ──reduce-scatter──► staging ──copy──► gradient (host)

With replicas, what their all-reduce leaves goes the second way, on the replicate stream. A gradient that is added to
comes to its staging first: nothing is computed on the host but the optimizer's step. The host's memory is pinned, so
that a GPU copies while it computes, in both directions at once; the host itself waits only before it reads a gradient
or writes a shard.

Ranks that compute on a CPU have their staging in host memory, too. That gains nothing, but goes the same way, so that a
run can be tested and debugged without a GPU.

Its peer is PyTorch FSDP2's `CPUOffloadPolicy(pin_memory=True)`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from shardcomm.stream.streams import Event, Stream, copy


class Offload:
    """The staging of all buckets whose shards are offloaded. One stream uses each buffer, so each bucket in its turn.

    Args:
        device: where the ranks compute.
        shard_bytes: of the largest shard.

    Attributes:
        landed: fires when the latest gradient is in host memory; None: there was none.
    """

    def __init__(self, device: torch.device, shard_bytes: int) -> None:
        self._device = device
        self._shard = torch.empty(shard_bytes, dtype=torch.uint8, device=device)
        self._gradient = torch.empty(shard_bytes, dtype=torch.uint8, device=device)
        self._fetched: Event | None = None
        self.landed: Event | None = None

    @property
    def nbytes(self) -> int:
        """What it takes of the device."""
        return self._shard.nbytes + self._gradient.nbytes

    def zeros(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A shard-to-be in host memory, pinned unless the device is a CPU."""
        return torch.zeros(numel, dtype=dtype, pin_memory=self._device.type != "cpu")

    def staged(self, shard: torch.Tensor) -> torch.Tensor:
        """Where `shard` is on the device, after `fetch` and until the next one."""
        return _as(shard, self._shard)

    def fetch(self, shard: torch.Tensor, stream: Stream) -> None:
        """Queues the copy of `shard` to the device."""
        self._fetched = copy(self.staged(shard), shard, stream)

    @contextmanager
    def gradient(self, grad: torch.Tensor, stream: Stream, *, add: bool) -> Iterator[torch.Tensor]:
        """Gives a tensor of the device; what is queued in here leaves there what then goes to `grad` in host memory.

        With `add` it holds what `grad` does, else nothing yet.
        """
        here = _as(grad, self._gradient)
        if add:
            copy(here, grad, stream)
        yield here
        self.landed = copy(grad, here, stream)

    def wait(self) -> None:
        """Blocks the host until no copy is under way: it may then read gradients, and write shards."""
        for event in (self._fetched, self.landed):
            if event is not None:
                event.wait()


def _as(tensor: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
    """The beginning of `memory`, as long as `tensor` and of its dtype."""
    return memory[: tensor.nbytes].view(tensor.dtype)
