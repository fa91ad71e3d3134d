"""Where a layout has put a parameter, and what one rank holds of it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from shardcomm.layout.param_spec import ParamSpec


@dataclass(frozen=True)
class Placement:
    """Where a parameter lies in the flat buffer.

    Attributes:
        spec: The parameter.
        shard_dim: The dim whose indices are rows, with "auto" and negative numbers resolved: 0 or more.
        offset: The place of its first element in the flat buffer, in elements.
        numel: How many elements it has.
        stored_shape: Its shape with `shard_dim` outermost.
    """

    spec: ParamSpec
    shard_dim: int
    offset: int
    numel: int
    stored_shape: tuple[int, ...]

    @property
    def row_numel(self) -> int:
        """How many elements a row has; 1 for granularity "element"."""
        return 1 if self.spec.granularity == "element" else math.prod(self.stored_shape[1:])

    @property
    def num_rows(self) -> int:
        """How many rows the parameter has; its elements for granularity "element"."""
        return self.numel if self.spec.granularity == "element" else (*self.stored_shape, 1)[0]

    def is_elsewhere(self, piece: Piece) -> bool:
        """Whether another rank than that of `piece` owns the parameter, its gradient and its optimizer state."""
        return self.spec.granularity == "tensor" and piece.numel < self.numel


@dataclass(frozen=True)
class Piece:
    """What one rank holds of one parameter: the rows `start` to `stop`.

    Attributes:
        start: The first of its rows (of its elements, for granularity "element").
        stop: The row, or element, after the last.
        offset: The place of its first element in the rank's shard, in elements.
        numel: How many elements it has.
        shape: The shape of the piece as it is stored: (rows, ...). For granularity "element" it is a run, unless it is
            all of the parameter: (numel, 1, ..., 1), with as many dims as the parameter.
    """

    start: int
    stop: int
    offset: int
    numel: int
    shape: tuple[int, ...]
