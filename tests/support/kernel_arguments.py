"""The parameters of the CUDA kernels, which mirror structs of `csrc/copy`.

`Kernel.run` compares their sizes with those that the compiler gave the parameters.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from ctypes import c_bool, c_double, c_float, c_int32, c_int64, c_void_p

MOST_SOURCES = 256  # kMostSources
OPERANDS = (256, 4000)  # kFewOperands, kMostOperands
SEGMENTS = (40, 1300)  # kFewBlockSegments, kMostBlockSegments


class Reduction(ctypes.Structure):
    """Of thread_reduce.h."""

    _fields_ = (
        ("sources", c_void_p * MOST_SOURCES),
        ("num_sources", c_int32),
        ("dst", c_void_p),
        ("count", c_int64),
        ("divisor", c_int32),
        ("mean", c_double),
        ("scale", c_float),
        ("accumulate", c_bool),
        ("is_whole", c_bool),
        ("nonfinite", c_void_p),
    )


def operands(addresses: Sequence[int | None]) -> tuple[ctypes.Structure, int]:
    """Operands of thread_copy.h, and how many they have room for."""
    capacity = _capacity_for(len(addresses), OPERANDS)
    fields = (("at", c_void_p * capacity),)
    return _structure(fields)((c_void_p * capacity)(*addresses)), capacity


class Tile(ctypes.Structure):
    """Of copy_plan.h, where it is a Segment."""

    _fields_ = (
        ("src", c_int32),
        ("dst", c_int32),
        ("src_offset", c_int64),
        ("src_pitch", c_int64),
        ("dst_offset", c_int64),
        ("dst_pitch", c_int64),
        ("rows", c_int64),
        ("cols", c_int64),
    )


class WirePart(ctypes.Structure):
    """Of thread_blocks.h."""

    _fields_ = (("codes", c_void_p), ("scales", c_void_p), ("block", c_int32))


class _Segment(ctypes.Structure):
    """An EncodedSegment or a DecodedSegment of blocks.h."""

    _fields_ = (("elements", c_void_p), ("count", c_int64), ("first_block", c_int64))


def segment_table(
    rows: Sequence[tuple[int, int, int]], first: int, last: int
) -> tuple[ctypes.Structure, int]:
    """A SegmentTable of thread_blocks.h, and how many it has room for."""
    capacity = _capacity_for(len(rows), SEGMENTS)
    segments = _Segment * capacity
    fields = (("at", segments), ("count", c_int32), ("first", c_int64), ("last", c_int64))
    return _structure(fields)(segments(*rows), len(rows), first, last), capacity


class SummedParts(ctypes.Structure):
    """Of thread_blocks.h."""

    _fields_ = (
        ("first", WirePart),
        ("parts", c_int32),
        ("stride", c_int64),
        ("dst", c_void_p),
        ("count", c_int64),
        ("scale", c_float),
        ("accumulate", c_bool),
        ("nonfinite", c_void_p),
    )


def _capacity_for(count: int, capacities: Sequence[int]) -> int:
    return next(each for each in capacities if count <= each)


@functools.cache
def _structure(fields: tuple[tuple[str, type], ...]) -> type[ctypes.Structure]:
    return type("Structure", (ctypes.Structure,), {"_fields_": fields})
