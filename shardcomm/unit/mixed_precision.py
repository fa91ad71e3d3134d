"""Which dtype a unit computes in and which one its gradients travel in; the shard keeps its own (master) dtype."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from shardcomm.arguments.dtype import FLOATS


@dataclass(frozen=True)
class MixedPrecision:
    """The dtypes of a step, as in PyTorch FSDP2's `MixedPrecisionPolicy`.

    Shards and their gradients keep the parameters' own dtype, usually float32. Accepted dtypes: float32, bfloat16,
    float16 and None.

    Attributes:
        param_dtype: The dtype of the full parameters, and so of computation and of what a gather sends. None: the
            parameter's own.
        reduce_dtype: The dtype in which gradients are sent. None: `param_dtype`. Sums are always taken in float32 or
            wider.
        output_dtype: The dtype to which floating-point outputs of the model are cast (not outputs of the units in it).
            None: they are not cast.
        cast_forward_inputs: Whether the floating-point inputs of every unit are cast to `param_dtype`.

    Raises:
        ValueError: A dtype is not accepted.
        TypeError: `cast_forward_inputs` is no bool.

    Example:
        ```python
        half = shardcomm.MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        engine = shardcomm.fully_shard(torch.nn.Linear(64, 64), comm, mixed_precision=half)
        ```
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
        """The dtype to which the inputs of units are cast; None: they are not cast."""
        return self.param_dtype if self.cast_forward_inputs else None
