"""A rank's part of a gather in a block format: its coded elements first, and behind them those that stay wide.

An example: a rank's shard has rows of two matrices, which are coded, a norm that stays wide, and padding::

    shard   |  rows of a  |..|  rows of b  |   norm   |......|
    part    | codes of a and b | their scales | norm, in the dtype to compute in |...|
            |<------------ coded_bytes ------>|<---- up to a multiple of 128 --->|

A layout may put parameters in any order, so that a shard can have several runs of either kind. Pure arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from shardcomm.copy.blocks import WIRE_ALIGN, BlockFormat
from shardcomm.layout.layout import Layout


class Run(NamedTuple):
    """Neighbouring elements of a shard that travel alike.

    Attributes:
        start: Its first element's place in the shard.
        numel: How many elements it has, padding between parameters included.
        place: Where it begins in the part: its first block if it is coded, and else its first element among the wide.
    """

    start: int
    numel: int
    place: int


@dataclass(frozen=True)
class WirePart:
    """What a rank sends in a gather in a block format.

    Attributes:
        coded: The runs that are coded.
        wide: The runs that stay wide.
        coded_bytes: The bytes of the codes and their scales, behind which the wide elements begin.
        nbytes: The bytes of all; like `coded_bytes` a multiple of 128.
    """

    coded: tuple[Run, ...]
    wide: tuple[Run, ...]
    coded_bytes: int
    nbytes: int

    @classmethod
    def of(
        cls, layout: Layout, rank: int, format: BlockFormat, coded: int, wide_itemsize: int
    ) -> WirePart:
        """The part of one rank.

        Args:
            layout: The bucket's layout.
            rank: The rank.
            format: How elements are coded.
            coded: How many parameters are coded: the first ones of `layout`.
            wide_itemsize: The bytes of an element that stays wide.
        """
        pieces = [(layout.piece(rank, i), i < coded) for i in range(len(layout.placements))]
        held = sorted((p.offset, p.offset + p.numel, is_coded) for p, is_coded in pieces if p.numel)
        blocks, wide_runs = _runs(held, True, format.block), _runs(held, False, 1)
        coded_bytes = format.nbytes(_end(blocks, format.block) * format.block)
        wide_bytes = _end(wide_runs, 1) * wide_itemsize
        return cls(blocks, wide_runs, coded_bytes, coded_bytes + _aligned(wide_bytes))


def part_bytes(
    layout: Layout, format: BlockFormat, coded: int, wide_itemsize: int
) -> tuple[int, ...]:
    """The bytes that each rank sends in a gather. The arguments are those of `WirePart.of`.

    Where shards are equally long, so are the parts: all are as long as the longest, since transports gather parts that
    differ by one broadcast a rank.
    """
    if layout.counts is not None:
        ranks: Iterable[int] = range(layout.world_size)
    else:  # of a million ranks most hold the same parameter alone
        ranks = sorted({rank for rank in _ends(layout) if rank < layout.world_size})
    sizes = [WirePart.of(layout, rank, format, coded, wide_itemsize).nbytes for rank in ranks]
    if layout.counts is not None:
        return tuple(sizes)
    return (max(sizes, default=0),) * layout.world_size


def _ends(layout: Layout) -> Iterable[int]:
    """The ranks that hold the first or the last element of a parameter, and the ranks behind the first ones."""
    for placement in layout.placements:
        if placement.numel:
            first = placement.offset // layout.shard_numel
            yield from (
                first,
                first + 1,
                (placement.offset + placement.numel - 1) // layout.shard_numel,
            )


def _runs(held: Iterable[tuple[int, int, bool]], of_coded: bool, unit: int) -> tuple[Run, ...]:
    """The runs of one kind; each begins at a whole unit of the part."""
    runs: list[Run] = []
    continues = False
    for start, stop, is_coded in held:
        if is_coded == of_coded:
            if continues:
                last = runs.pop()
                runs.append(last._replace(numel=stop - last.start))
            else:
                runs.append(Run(start, stop - start, _end(runs, unit)))
        continues = is_coded == of_coded
    return tuple(runs)


def _end(runs: list[Run] | tuple[Run, ...], unit: int) -> int:
    """Where the next run would begin."""
    return runs[-1].place + -(-runs[-1].numel // unit) if runs else 0


def _aligned(nbytes: int) -> int:
    return -(-nbytes // WIRE_ALIGN) * WIRE_ALIGN
