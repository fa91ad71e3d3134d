"""Sums over ranks, in the order that the documentation promises (docs/how-it-works.md)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch


def combined(
    values: Sequence[torch.Tensor],
    combine: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = torch.add,
) -> torch.Tensor:
    """Combines a value of each rank as a tree, neighbours first: ((0 + 1) + (2 + 3)) + 4."""
    if len(values) == 1:
        return values[0]
    lower = 1 << (len(values) - 1).bit_length() - 1
    return combine(combined(values[:lower], combine), combined(values[lower:], combine))
