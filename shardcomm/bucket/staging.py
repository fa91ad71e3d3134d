"""Staging: where what a reduce-scatter left of a gradient is all-reduced among the ranks that hold the same shard."""

from __future__ import annotations

import torch

from shardcomm.stream.streams import Event


class Staging:
    """Where shards' gradients are all-reduced among replicas. Buckets share some, so that they use them in turn.

    Attributes:
        memory: from `replicas.allocate(use="reduce")`, bytes.
        filled: fires when a reduce-scatter has filled it; None: has filled it.
        free: fires when what was there last has left; None: has left.
    """

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        self.filled: Event | None = None
        self.free: Event | None = None
