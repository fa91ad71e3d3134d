"""Which dtype a unit computes in and which one its gradients travel in; the shard keeps its own (master) dtype."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class MixedPrecision:
    """Dtypes of a step, as in PyTorch FSDP2's `MixedPrecisionPolicy`.

    Attributes:
        param_dtype: of the full parameters, so of compute and of the gather's wire; floating-point inputs of a unit
            are cast to it. None: the parameter's own.
        reduce_dtype: of the gradients on the wire. None: `param_dtype`. Sums are always taken in f32 or wider.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        for name in ("param_dtype", "reduce_dtype"):
            dtype = getattr(self, name)
            if dtype is not None and dtype not in FLOATS:
                raise ValueError(
                    f"MixedPrecision: {name} is {dtype}; accepted: float32, bfloat16, float16, None"
                )


FLOATS = (torch.float32, torch.bfloat16, torch.float16)
