"""Where every element of a unit's parameters lives: its offset in the flat buffer, and on which rank.

An example: two parameters, a of 4 rows x 6 elements and b of 5 rows x 4, over 2 ranks. They have 44 elements in all. A
shard length S of 22 would be enough, but it would cut row a3 (18 to 24); with b first it would cut a row of a as well.
The smallest S that cuts no row is 24::

    flat    0     6     12    18    24  28  32  36  40  44  48
            [ a0  | a1  | a2  | a3  ][b0 |b1 |b2 |b3 |b4 |....]      .... is padding, 4 of 48
            [------ rank 0, S -------][------ rank 1, S ------]

A shard boundary never cuts a granule (a row, a block of rows, or the whole parameter), every parameter is one
contiguous, aligned range, and all shards are equally long. The price of that is padding. A parameter that spans several
boundaries forces S to be a multiple of its granule; one that fits between two boundaries forces nothing.

If each parameter has one owner, given as `owners`, a shard is as long as what its rank owns. With a and b as above, c
of 6 elements, and owners [1, 0, 1]::

    flat    0                   20                      44    50
            [         b         ][          a           |  c  ]      no padding but for alignment
            [------ rank 0 -----][---------- rank 1 ----------]
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise

from shardcomm import _C
from shardcomm.arguments.checks import check_list
from shardcomm.arguments.scalars import is_whole
from shardcomm.layout.param_spec import ParamSpec, RowBlock
from shardcomm.layout.placement import Piece, Placement


@dataclass(frozen=True)
class Layout:
    """Where every element of a unit's parameters lives. [`Layout.plan`][shardcomm.Layout.plan] makes it.

    `repr()` draws which rows each rank holds.

    Attributes:
        placements: Where each parameter lies in the flat buffer, in the given order.
        world_size: How many ranks share the unit.
        shard_numels: How many elements each rank's shard has: S for each rank, or with owners what each rank owns.
        align: The alignment in elements: every parameter and every shard starts at a multiple of it.
        forced_by: The names of the parameters that force S to be a multiple of their granule.

    Example:
        ```python
        layout = shardcomm.Layout.plan(
            [shardcomm.ParamSpec("a", (4, 6)), shardcomm.ParamSpec("b", (5, 4))], world_size=2, align_bytes=4
        )
        assert layout.shard_numel == 24
        assert layout.piece(rank=1, index=1).stop == 5  # rank 1 has all five rows of b
        ```
    """

    placements: tuple[Placement, ...]
    world_size: int
    shard_numels: tuple[int, ...]
    align: int
    forced_by: tuple[str, ...]

    def __post_init__(self) -> None:
        check_list("Layout", "placements", self.placements)

    @classmethod
    def plan(
        cls,
        params: Sequence[ParamSpec],
        world_size: int,
        *,
        align_bytes: int = 128,
        itemsize: int = 4,
        owners: Sequence[int] | None = None,
    ) -> Layout:
        """Finds the offsets of parameters, and the smallest shard length S.

        The result is deterministic: equal arguments give equal layouts on all ranks.

        Args:
            params: The parameters, in order.
            world_size: How many ranks share them.
            align_bytes: The alignment of every parameter and every shard, in bytes; a multiple of `itemsize`.
            itemsize: The bytes of the smallest element that the flat buffer will hold, so that `align_bytes` holds in
                all dtypes.
            owners: The rank that owns each parameter; all granularities must be "tensor" then. None: parameters have no
                owners, and all shards are equally long.

        Returns:
            The layout, the same on all ranks.

        Raises:
            TypeError: `params` or `owners` is no list, or an entry of `params` is no ParamSpec.
            ValueError: An argument is out of range.
        """
        check_list("Layout.plan", "params", params)
        for spec in params:
            if not isinstance(spec, ParamSpec):
                raise TypeError(
                    f"Layout.plan: params contains a {type(spec).__name__}; each must be a ParamSpec"
                )
        if not (is_whole(itemsize, 1) and is_whole(align_bytes, 1)) or align_bytes % itemsize:
            raise ValueError(
                f"Layout.plan: align_bytes is {align_bytes!r} and itemsize {itemsize!r}; align_bytes must be a "
                "multiple of itemsize, both whole and at least 1"
            )
        if not is_whole(world_size, 1):
            raise ValueError(
                f"Layout.plan: world_size is {world_size!r}; it must be at least 1, whole, and below 2**31"
            )
        align = align_bytes // itemsize
        if owners is not None:
            _check_owners(owners, params, world_size)
            return cls._plan_owned(params, owners, world_size, align)
        best: Layout | None = None
        for dims in _dim_choices(params):
            layout = cls._plan_stored(params, dims, world_size, align)
            if best is None or layout.shard_numel < best.shard_numel:
                best = layout
        assert best is not None
        return best

    @classmethod
    def _plan_stored(
        cls, params: Sequence[ParamSpec], dims: Sequence[int], world_size: int, align: int
    ) -> Layout:
        unplaced = _unplaced(params, dims)
        extents = [(p.num_rows, p.row_numel, _granule_rows(p)) for p in unplaced]
        shard_numel, offsets, forced = _C.plan_layout(extents, world_size, align)
        placements = tuple(map(_placed, unplaced, offsets))
        forced_by = tuple(params[i].name for i in forced)
        return cls(placements, world_size, (shard_numel,) * world_size, align, forced_by)

    @classmethod
    def _plan_owned(
        cls, params: Sequence[ParamSpec], owners: Sequence[int], world_size: int, align: int
    ) -> Layout:
        unplaced = _unplaced(params, _dim_choices(params)[0])
        lengths = [-(-p.numel // align) * align for p in unplaced]
        numels, offsets = [0] * world_size, [0] * len(unplaced)
        end = 0
        for index in sorted(range(len(unplaced)), key=lambda index: owners[index]):
            offsets[index] = end
            end += lengths[index]
            numels[owners[index]] += lengths[index]
        return cls(tuple(map(_placed, unplaced, offsets)), world_size, tuple(numels), align, ())

    @property
    def shard_numel(self) -> int:
        """How many elements the longest shard has. Without owners all shards are that long."""
        return max(self.shard_numels)

    @cached_property
    def counts(self) -> tuple[int, ...] | None:
        """`shard_numels` as the argument `counts` of a `Communicator`'s collectives; None if all are equal."""
        return None if len(set(self.shard_numels)) == 1 else self.shard_numels

    @cached_property
    def starts(self) -> Sequence[int]:
        """Where each rank's shard begins in the flat buffer, in elements; the last entry is the buffer's end."""
        length = self.shard_numels[0]
        if self.counts is None and length:
            return range(0, length * self.world_size + 1, length)
        return tuple(accumulate(self.shard_numels, initial=0))

    @property
    def flat_numel(self) -> int:
        """How many elements the flat buffer has: all shards together."""
        return self.starts[-1]

    @property
    def numel(self) -> int:
        """How many elements the parameters have, without padding."""
        return sum(placement.numel for placement in self.placements)

    @property
    def padding(self) -> int:
        """How many elements of the flat buffer belong to no parameter."""
        return self.flat_numel - self.numel

    @property
    def padding_fraction(self) -> float:
        """The padding as a fraction of the parameters' elements."""
        return self.padding / self.numel if self.numel else 0.0

    def piece(self, rank: int, index: int) -> Piece:
        """What one rank holds of one parameter; an empty piece if it holds nothing.

        Args:
            rank: The rank, 0 to `world_size` - 1.
            index: The parameter's number in `placements`.

        Returns:
            The rows, and where they begin in the rank's shard, in elements.
        """
        p = self.placements[index]
        shard_start, shard_stop = self.starts[rank : rank + 2]
        begin = max(p.offset, shard_start)
        end = min(p.offset + p.numel, shard_stop)
        if begin >= end:
            begin = end = min(max(p.offset, shard_start), p.offset + p.numel)
        row = max(p.row_numel, 1)
        start, stop = (begin - p.offset) // row, (end - p.offset) // row
        offset = begin - shard_start if end > begin else 0
        if end - begin == p.numel:
            shape = p.stored_shape
        elif p.stored_shape and p.spec.granularity != "element":
            shape = (stop - start, *p.stored_shape[1:])
        else:
            shape = (end - begin, *(1,) * (len(p.stored_shape) - 1))
        return Piece(start, stop, offset, end - begin, shape)

    def parts(self, number: int) -> list[int]:
        """Cuts the flat buffer into parts that have equal numbers of shards.

        Args:
            number: How many parts; it must divide `world_size`.

        Returns:
            How many elements each part has.
        """
        bounds = self.starts[:: self.world_size // number]
        return [stop - start for start, stop in pairwise(bounds)]

    def gaps(self) -> tuple[tuple[int, int], ...]:
        """The padding: the ranges [start, stop) of the flat buffer that no parameter covers, in order."""
        found = []
        cursor = 0
        for p in sorted(self.placements, key=lambda p: p.offset):
            if p.numel == 0:
                continue
            if p.offset > cursor:
                found.append((cursor, p.offset))
            cursor = p.offset + p.numel
        if cursor < self.flat_numel:
            found.append((cursor, self.flat_numel))
        return tuple(found)

    def __repr__(self) -> str:
        lengths = f"S = {self.shard_numel}" if self.counts is None else f"S = {list(self.counts)}"
        lines = [
            f"Layout({len(self.placements)} parameters over {self.world_size} ranks, {lengths}, "
            f"padding {self.padding} = {self.padding_fraction:.2%}"
            + (f", forced by {', '.join(self.forced_by)})" if self.forced_by else ")")
        ]
        shown = 4
        for rank in range(min(self.world_size, shown)):
            held = [
                f"{p.spec.name}[{piece.start}:{piece.stop}] at {piece.offset}"
                for i, p in enumerate(self.placements)
                if (piece := self.piece(rank, i)).numel
            ]
            lines.append(f"  rank {rank}: " + (", ".join(held) or "(padding only)"))
        if self.world_size > shown:
            lines.append(f"  ... {self.world_size - shown} more ranks")
        return "\n".join(lines)


def _unplaced(params: Sequence[ParamSpec], dims: Sequence[int]) -> list[Placement]:
    return [
        Placement(spec, dim, 0, math.prod(spec.shape), _outermost(spec.shape, dim))
        for spec, dim in zip(params, dims, strict=True)
    ]


def _placed(placement: Placement, offset: int) -> Placement:
    return replace(placement, offset=offset)


def _check_owners(owners: Sequence[int], params: Sequence[ParamSpec], world_size: int) -> None:
    check_list("Layout.plan", "owners", owners)
    if len(owners) != len(params):
        raise ValueError(
            f"Layout.plan: owners has {len(owners)} entries; it must have one for each of {len(params)} params"
        )
    for owner, spec in zip(owners, params, strict=True):
        if not is_whole(owner, 0, world_size - 1):
            raise ValueError(
                f"Layout.plan: the owner of {spec.name!r} is {owner!r}; it must be a rank, 0 to {world_size - 1}"
            )
        if spec.granularity != "tensor":
            raise ValueError(
                f"Layout.plan: {spec.name!r} has an owner and granularity {spec.granularity!r}; with owners it must "
                "be 'tensor' for all params"
            )


def _outermost(shape: tuple[int, ...], dim: int) -> tuple[int, ...]:
    return shape if not shape else (shape[dim], *shape[:dim], *shape[dim + 1 :])


def _granule_rows(placement: Placement) -> int:
    granularity = placement.spec.granularity
    if isinstance(granularity, RowBlock):
        return granularity.rows
    return max(placement.num_rows, 1) if granularity == "tensor" else 1


def _dim_choices(params: Sequence[ParamSpec]) -> list[list[int]]:
    """Choices of the dims that are left to "auto": first all 0, then for each row size the dims that fit it best."""
    fixed = [
        0 if spec.shard_dim == "auto" else spec.shard_dim % max(len(spec.shape), 1)
        for spec in params
    ]
    free = [i for i, spec in enumerate(params) if spec.shard_dim == "auto" and len(spec.shape) > 1]
    choices = [fixed]
    row_sizes = {_row(params[i].shape, dim) for i in free for dim in range(len(params[i].shape))}
    for favoured in sorted(row_sizes):
        dims = list(fixed)
        for i in free:
            shape = params[i].shape
            dims[i] = min(
                range(len(shape)), key=lambda d: (math.lcm(favoured, max(_row(shape, d), 1)), d)
            )
        if dims not in choices:
            choices.append(dims)
    return choices


def _row(shape: tuple[int, ...], dim: int) -> int:
    return math.prod(shape[:dim]) * math.prod(shape[dim + 1 :])
