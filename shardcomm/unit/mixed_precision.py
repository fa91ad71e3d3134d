"""In what a unit computes, and in what parameters and gradients travel; the shard keeps its own (master) dtype."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import nn

from shardcomm.arguments.dtype import FLOATS
from shardcomm.copy.blocks import BlockFormat, ReduceFormat, check_reduce_format, check_repeats

GatherFormatOf = BlockFormat | Callable[[str, nn.Parameter], BlockFormat | None]
"""A block format for all matrices, or a function of a parameter's name and the parameter; None: no block format."""


@dataclass(frozen=True)
class MixedPrecision:
    """The dtypes of a step, as in PyTorch FSDP2's `MixedPrecisionPolicy`.

    Shards and their gradients keep the parameters' own dtype, usually float32. Accepted dtypes: float32, bfloat16,
    float16 and None.

    Attributes:
        param_dtype: The dtype of the full parameters, and so of computation and of what a gather sends. None: the
            parameter's own.
        gather_format: The block format in which gathers send parameters, from the shards' own dtype. Computation is in
            `param_dtype`, with what the format stands for. A `BlockFormat` is for parameters of two dims and more, so
            that norms and biases stay as they are, in the same gather; a function decides for each parameter, and
            returns a BlockFormat or None. `engine.wire_error()` says how far the parameters are from those of the
            shards.
        reduce_dtype: The dtype in which gradients are sent. None: `param_dtype`. Sums are always taken in float32 or
            wider.
        reduce_format: In what the ranks of a host send the sums of their gradients to other hosts, over transport
            "hosts": torch.bfloat16, or a `BlockFormat`, which may round stochastically. Within a host gradients have
            `reduce_dtype`. `engine.wire_error("reduce")` says how far the sums are from those that were sent. None:
            float32.
        output_dtype: The dtype to which floating-point outputs of the model are cast (not outputs of the units in it).
            None: they are not cast.
        cast_forward_inputs: Whether the floating-point inputs of every unit are cast to `param_dtype`.

    Raises:
        ValueError: A dtype is not accepted, or `gather_format` rounds stochastically.
        TypeError: `cast_forward_inputs` is no bool, `gather_format` neither a BlockFormat nor a function, or
            `reduce_format` neither torch.bfloat16 nor a BlockFormat.

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
    # Not in the repr, by which ranks compare: functions differ there. The formats of parameters are compared instead.
    gather_format: GatherFormatOf | None = field(default=None, repr=False)
    reduce_format: ReduceFormat | None = None

    def __post_init__(self) -> None:
        for name in ("param_dtype", "reduce_dtype", "output_dtype"):
            dtype = getattr(self, name)
            if dtype is not None and dtype not in FLOATS:
                raise ValueError(
                    f"MixedPrecision: {name} is {dtype!r}; accepted: {', '.join(map(str, FLOATS))}, None"
                )
        if not isinstance(self.cast_forward_inputs, bool):
            raise TypeError(
                f"MixedPrecision: cast_forward_inputs is {self.cast_forward_inputs!r}; it must be True or False"
            )
        check_reduce_format("MixedPrecision: reduce_format", self.reduce_format)
        if isinstance(self.gather_format, BlockFormat):
            check_repeats("MixedPrecision: gather_format", self.gather_format)
        elif self.gather_format is not None and (
            isinstance(self.gather_format, type) or not callable(self.gather_format)
        ):
            raise TypeError(
                f"MixedPrecision: gather_format is {self.gather_format!r}; it must be a shardcomm.BlockFormat such as "
                'BlockFormat("mxint8"), a function of a name and a parameter that returns one or None, or None'
            )

    def gather_format_of(self, name: str, param: nn.Parameter) -> BlockFormat | None:
        """The block format in which gathers send a parameter.

        Args:
            name: The parameter's name in the model.
            param: The parameter.

        Returns:
            The format; None: gathers send `param_dtype`.

        Raises:
            TypeError: The function that was given returned something else.
            ValueError: It returned a format that rounds stochastically, or one for a parameter of another dtype than
                float32, bfloat16 and float16.
        """
        given = self.gather_format
        if given is None or isinstance(given, BlockFormat):
            return given if param.ndim > 1 and param.dtype in FLOATS else None
        format = given(name, param)
        what = f"gather_format({name!r})"
        if not isinstance(format, BlockFormat | None):
            raise TypeError(f"{what} returned {format!r}; it must return a BlockFormat or None")
        if format is not None:
            check_repeats(f"what {what} returned", format)
            if param.dtype not in FLOATS:
                raise ValueError(
                    f"{what} returned {format} for a parameter of {param.dtype}; block formats are for float32, "
                    "bfloat16 and float16: return None"
                )
        return format

    @property
    def input_dtype(self) -> torch.dtype | None:
        """The dtype to which the inputs of units are cast; None: they are not cast."""
        return self.param_dtype if self.cast_forward_inputs else None
