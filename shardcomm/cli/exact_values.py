"""Random inputs whose sums are exact, so that a result is right to the last bit or wrong."""

from __future__ import annotations

import torch

_LARGEST = 1000
# Random elements repeat after so many, since making them takes longer than moving them. It is a prime, so that no two
# slots are alike.
_PERIOD = 1_000_003


def values(
    numel: int, dtype: torch.dtype, rank: int, seed: int, *, terms: int = 1, divisor: int = 1
) -> torch.Tensor:
    """`numel` random integers as `dtype`, on the CPU: the values of rank `rank`, which every rank can make.

    A sum of `terms` ranks' values is exact in `dtype`, in any order, and so is its quotient by `divisor`.
    """
    bound = max(1, min(_LARGEST, _exact_up_to(dtype) // (terms * divisor)))
    low = 0 if dtype == torch.uint8 else -bound
    random = torch.Generator().manual_seed(seed << 16 | rank)
    period = torch.randint(low, bound + 1, (min(numel, _PERIOD),), generator=random) * divisor
    return period.to(dtype).repeat(-(-numel // _PERIOD))[:numel]


def count_wrong(result: torch.Tensor, expected: torch.Tensor) -> int:
    """How many elements of `result` differ from `expected`, which is on the CPU."""
    return int((result.cpu() != expected).sum())


def _exact_up_to(dtype: torch.dtype) -> int:
    """The largest number up to which `dtype` holds all integers exactly."""
    if dtype.is_floating_point:
        return round(2 / torch.finfo(dtype).eps)
    return torch.iinfo(dtype).max
