"""Staging: the buffer in which a shard's gradient is all-reduced among the ranks that hold the same shard."""

from __future__ import annotations

import torch

from shardcomm.stream.streams import AnyEvent


class Staging:
    """A buffer in which shards' gradients are all-reduced among replicas. Buckets share a few, and use them in turn.

    Attributes:
        memory: The bytes, from `replicas.allocate(use="reduce")`.
        filled: The event that fires when a reduce-scatter has filled it; None: it is filled.
        free: The event that fires when its last content has left it; None: it is free.
    """

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        self.filled: AnyEvent | None = None
        self.free: AnyEvent | None = None
