"""Random inputs whose sums are exact, so that a result is right to the last bit or wrong."""

from __future__ import annotations

import torch

_LARGEST = 1000
# Random elements before they repeat, since making them takes longer than moving them. A prime: no two slots are alike.
_PERIOD = 1_000_003


def values(
    numel: int, dtype: torch.dtype, rank: int, seed: int, *, terms: int = 1, divisor: int = 1
) -> torch.Tensor:
    """`numel` random integers as `dtype`: rank `rank`'s, which every rank can make, on the CPU.

    A sum of `terms` of them is exact in `dtype`, in any order, and so is its quotient by `divisor`.
    """
    bound = max(1, min(_LARGEST, _exact_up_to(dtype) // (terms * divisor)))
    low = 0 if dtype == torch.uint8 else -bound
    random = torch.Generator().manual_seed(seed << 16 | rank)
    period = torch.randint(low, bound + 1, (min(numel, _PERIOD),), generator=random) * divisor
    return period.to(dtype).repeat(-(-numel // _PERIOD))[:numel]


def count_wrong(result: torch.Tensor, expected: torch.Tensor) -> int:
    """Elements of `result` that differ from `expected`, which is on the CPU."""
    return int((result.cpu() != expected).sum())


def _exact_up_to(dtype: torch.dtype) -> int:
    """All integers up to this have a value of their own."""
    if dtype.is_floating_point:
        return round(2 / torch.finfo(dtype).eps)
    return torch.iinfo(dtype).max
