"""A parameter to be laid out: its shape, and how it may be cut."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from shardcomm.arguments.scalars import is_whole

_MOST_ELEMENTS = 1 << 60


@dataclass(frozen=True)
class RowBlock:
    """A granularity: blocks of this many rows stay together on one rank.

    Attributes:
        rows: How many rows a block has, at least 1.

    Raises:
        ValueError: `rows` is no whole number of at least 1.
    """

    rows: int

    def __post_init__(self) -> None:
        if not is_whole(self.rows, 1, _MOST_ELEMENTS):
            raise ValueError(f"RowBlock: rows is {self.rows!r}; it must be at least 1, and whole")


Granularity = Literal["element", "row", "tensor"] | RowBlock
"""The smallest piece of a parameter that stays on one rank: an element, a row (an index of the dim that is cut), a
block of rows, or the whole tensor, which one rank then owns."""

ShardDim = int | Literal["auto"]
"""The dim whose indices are the rows of a parameter; "auto" takes the one that makes the least padding."""


@dataclass(frozen=True)
class ParamSpec:
    """A parameter to be laid out.

    Attributes:
        name: The parameter's name, for messages and drawings.
        shape: The parameter's full shape.
        granularity: The smallest piece that stays on one rank: "element", "row" (an index of `shard_dim`),
            `RowBlock(n)` rows, or "tensor" (one rank owns the whole parameter).
        shard_dim: The dim whose indices are the rows. It is stored outermost. A negative number counts from the last
            dim. "auto" takes the dim with which the layout has the least padding, and 0 where others have no less.

    Raises:
        ValueError: A value is none of the accepted.
    """

    name: str
    shape: tuple[int, ...]
    granularity: Granularity = "row"
    shard_dim: ShardDim = 0

    def __post_init__(self) -> None:
        if not isinstance(self.shape, tuple) or not all(
            is_whole(size, 0, _MOST_ELEMENTS) for size in self.shape
        ):
            raise ValueError(
                f"ParamSpec {self.name!r}: shape is {self.shape!r}; it must be a tuple; sizes must be at least 0, "
                "and whole"
            )
        if self.granularity not in ("element", "row", "tensor") and not isinstance(
            self.granularity, RowBlock
        ):
            raise ValueError(
                f"ParamSpec {self.name!r}: granularity is {self.granularity!r}; accepted: 'element', 'row', "
                "'tensor', RowBlock(n)"
            )
        dims = max(len(self.shape), 1)
        if self.shard_dim != "auto" and not (is_whole(self.shard_dim, -dims, dims - 1)):
            raise ValueError(
                f"ParamSpec {self.name!r}: shard_dim is {self.shard_dim!r}; accepted for shape {self.shape}: "
                f"{-dims} to {dims - 1}, 'auto'"
            )
