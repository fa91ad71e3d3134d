"""What a communicator tells of its calls and of its memory: the path that a call took, and who shares memory."""

from __future__ import annotations

from typing import NamedTuple

from shardcomm.comm.bound_collective import BoundCollective


class Receipt(NamedTuple):
    """Which path the latest collective of a kind took; `Communicator.receipts` returns them.

    Attributes:
        operation: The collective, "all_gather" for instance.
        sequence: Its number among the calls of its channel; over `c10d`, among the calls of both.
        requested: The path that was asked for.
        taken: The path that it took.
        reason: Why a faster path was not taken; "" where the fastest was.
    """

    operation: str
    sequence: int
    requested: str
    taken: str
    reason: str


class Sharing(NamedTuple):
    """The ranks that have one tensor in common, in memory from `allocate(use="gather")`.

    Attributes:
        number: This rank's number among them.
        ranks: How many they are. 1: no other rank sees what this one writes there.
        meeting: Returns when all of them have come, and so have written their shares. None for one rank.
    """

    number: int
    ranks: int
    meeting: BoundCollective | None
