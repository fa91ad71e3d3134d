"""A segment: a rectangle of elements that a copy plan moves, or fills with zeros."""

from __future__ import annotations

from typing import NamedTuple

ZEROS = -1
"""The `src` of a segment that writes zeros."""


class Segment(NamedTuple):
    """A rectangle to copy: `rows` x `cols` elements of one source to one destination.

    Offsets and pitches count elements of their own side.

    Attributes:
        src: The number of the source; -1 writes zeros.
        dst: The number of the destination.
        src_offset: The place of the first element in the source.
        src_pitch: The distance from one row to the next in the source, at least `cols`.
        dst_offset: The place of the first element in the destination.
        dst_pitch: The distance from one row to the next in the destination, at least `cols`.
        rows: How many rows.
        cols: How many elements a row has.
    """

    src: int
    dst: int
    src_offset: int
    src_pitch: int
    dst_offset: int
    dst_pitch: int
    rows: int
    cols: int


def draw(segment: Segment) -> str:
    """A line such as `1[40:]  2 x 3 / 8 -> 0[16:]  2 x 3`.

    It says: 2 rows of 3 elements; in source 1 they begin at element 40, and a row starts every 8 elements.
    """
    s = segment
    source = "zeros" if s.src == ZEROS else _draw_side(s, s.src, s.src_offset, s.src_pitch)
    return f"{source} -> {_draw_side(s, s.dst, s.dst_offset, s.dst_pitch)}"


def _draw_side(segment: Segment, operand: int, offset: int, pitch: int) -> str:
    has_gaps = segment.rows > 1 and pitch != segment.cols
    gaps = f" / {pitch}" if has_gaps else ""
    return f"{operand}[{offset}:]  {segment.rows} x {segment.cols}{gaps}"
