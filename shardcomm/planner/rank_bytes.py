"""What each rank holds of parameters, gradients and optimizer state, of which ranks may have different shares."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from shardcomm.unit.bucket_group import BucketGroup
from shardcomm.unit.grouped_unit import GroupedUnit

OPTIMIZERS: Mapping[str, int] = {"adamw": 2, "momentum": 1, "sgd": 0}
"""For each optimizer of torch, how many tensors of a parameter's shape and dtype it keeps for that parameter."""


def held_bytes(groups: Sequence[BucketGroup], ranks: int) -> npt.NDArray[np.int64]:
    """The bytes of each rank's shards of `groups`, padding included."""
    held = np.zeros(ranks, dtype=np.int64)
    for group in groups:
        held += group.shard_bytes[0] if group.layout.counts is None else np.array(group.shard_bytes)
    return held


def _trained_bytes(groups: Sequence[BucketGroup], ranks: int) -> npt.NDArray[np.int64]:
    """The bytes of trainable parameters on each rank, without padding."""
    trained = [group for group in groups if group.trainable]
    held = held_bytes(trained, ranks)
    for group in trained:
        starts = group.layout.starts
        for start, stop in group.layout.gaps():
            first = bisect_right(starts, start) - 1
            inside: Sequence[int] | npt.NDArray[np.int64] = starts[
                first : bisect_left(starts, stop) + 1
            ]
            if isinstance(inside, range):  # which np.array would go through number by number
                inside = np.arange(inside.start, inside.stop, inside.step)
            bounds = np.clip(inside, start, stop)
            held[first : first + len(bounds) - 1] -= np.diff(bounds) * group.dtype.itemsize
    return held


def state_bytes(groups: Sequence[BucketGroup], ranks: int, optimizer: str) -> npt.NDArray[np.int64]:
    """The bytes of optimizer state on each of `ranks` ranks."""
    return OPTIMIZERS[optimizer] * _trained_bytes(groups, ranks)


def load(groups: Sequence[BucketGroup], ranks: int, optimizer: str) -> npt.NDArray[np.int64]:
    """The bytes of parameters, gradients and optimizer state on each of `ranks` ranks."""
    trained = held_bytes([group for group in groups if group.trainable], ranks)
    return held_bytes(groups, ranks) + trained + state_bytes(groups, ranks, optimizer)


def most_loaded(units: Sequence[GroupedUnit], optimizer: str) -> int:
    """The rank of a pool that holds the most of the pool's `units`."""
    groups = [group for unit in units for group in unit.groups]
    return int(np.argmax(load(groups, units[0].pool.shards, optimizer)))
