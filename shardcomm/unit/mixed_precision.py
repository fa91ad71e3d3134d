"""Which dtype a unit computes in and which one its gradients travel in; the shard keeps its own (master) dtype."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from shardcomm.arguments.dtype import FLOATS


@dataclass(frozen=True)
class MixedPrecision:
    """Dtypes of a step, as in PyTorch FSDP2's `MixedPrecisionPolicy`.

    Attributes:
        param_dtype: of the full parameters, so of compute and of the gather's wire. None: the parameter's own.
        reduce_dtype: of the gradients on the wire. None: `param_dtype`. Sums are always taken in f32 or wider.
        output_dtype: that floating-point outputs of the model (not of the units in it) are cast to. None: none.
        cast_forward_inputs: whether floating-point inputs of every unit are cast to `param_dtype`.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True

    def __post_init__(self) -> None:
        for name in ("param_dtype", "reduce_dtype", "output_dtype"):
            dtype = getattr(self, name)
            if dtype is not None and dtype not in FLOATS:
                raise ValueError(
                    f"MixedPrecision: {name} is {dtype}; accepted: float32, bfloat16, float16, None"
                )
        if not isinstance(self.cast_forward_inputs, bool):
            raise TypeError(
                f"MixedPrecision: cast_forward_inputs is {self.cast_forward_inputs!r}; it must be True or False"
            )

    @property
    def input_dtype(self) -> torch.dtype | None:
        """What the inputs of units are cast to."""
        return self.param_dtype if self.cast_forward_inputs else None
