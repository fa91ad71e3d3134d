"""What a format on the wire costs: the bound of the error of its elements, and the largest error there was."""

from __future__ import annotations

from typing import NamedTuple

import torch


class WireError(NamedTuple):
    """What a format on the wire has cost.

    Attributes:
        bound: The most by which an element of the blocks that were not flagged can differ from its value on the wire.
        seen: The most by which one of these elements has differed from its value on the wire.
        flagged: How many blocks had a NaN or Inf. All of such a block is NaN on the wire. In bfloat16, which has no
            blocks, how many elements were NaN or Inf, which they are on the wire.
    """

    bound: float
    seen: float
    flagged: int


class WireStats:
    """What encoding has cost since the last `reset`. Read it when the encodings that have been given it have ended.

    Args:
        device: Where the wire is.

    Attributes:
        numbers: The three numbers, as int32 elements on the device; the first two are the bits of float32 numbers.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.numbers = torch.zeros(3, dtype=torch.int32, device=device)

    def reset(self) -> None:
        """Sets all three to 0, where torch computes now."""
        self.numbers.zero_()

    @property
    def bound(self) -> float:
        """The most by which an element of the blocks that were not flagged can differ from its value on the wire."""
        return float(self.numbers.view(torch.float32)[0])

    @property
    def seen(self) -> float:
        """The largest difference between an element and its value on the wire, in all blocks that were not flagged."""
        return float(self.numbers.view(torch.float32)[1])

    @property
    def flagged(self) -> int:
        """How many blocks had a NaN or Inf. All of such a block decodes to NaN."""
        return int(self.numbers[2])

    def take(self) -> WireError:
        """All three, which are 0 from now on."""
        error = WireError(self.bound, self.seen, self.flagged)
        self.reset()
        return error

    def __repr__(self) -> str:
        return f"WireStats(bound={self.bound:g}, seen={self.seen:g}, flagged={self.flagged})"
