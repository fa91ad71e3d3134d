"""A CopyPlan says which rectangles move where; it is compiled once and run with fresh tensors every step.

Packing two tensors of 6 and 4 elements into a flat buffer of 12, with a hole at 6 that is zeroed::

    source 0  [a a a a a a]           segment: source 0, 1 x 6  ->  destination 0 at 0
    source 1  [b b b b]               segment: source 1, 1 x 4  ->  destination 0 at 8
                                      segment: zeros,    1 x 2  ->  destination 0 at 6
    flat      [a a a a a a 0 0 b b b b]

The dtype conversion is part of the copy. So are, at run time, scaling and accumulation into the destination.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from shardcomm import _C
from shardcomm.dtype import core_dtype


class Segment(NamedTuple):
    """`rows` x `cols` elements from source operand `src` to destination operand `dst`.

    Offsets, and pitches (from one row to the next), are in elements of that side. `src=-1` writes zeros.
    """

    src: int
    src_offset: int
    src_pitch: int
    dst: int
    dst_offset: int
    dst_pitch: int
    rows: int
    cols: int


ZEROS = -1


@dataclass(frozen=True)
class CopyPlan:
    """Segments from tensors of `src_dtype` to tensors of `dst_dtype`.

    f32, bf16 and f16 convert among each other, rounding to nearest even; other dtypes copy to themselves.

    Raises:
        ValueError: a segment has a negative size or overlapping rows, or the dtypes do not convert.
    """

    segments: tuple[Segment, ...]
    src_dtype: torch.dtype
    dst_dtype: torch.dtype
    core: _C.CopyPlan = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        core = _C.CopyPlan(self.segments, core_dtype(self.src_dtype), core_dtype(self.dst_dtype))
        object.__setattr__(self, "core", core)

    @classmethod
    def pack(
        cls,
        sizes: Sequence[int],
        offsets: Sequence[int],
        src_dtype: torch.dtype,
        dst_dtype: torch.dtype,
        zero_ranges: Sequence[tuple[int, int]] = (),
    ) -> CopyPlan:
        """Contiguous tensor i, of sizes[i] elements, goes to offsets[i] of one flat destination.

        `zero_ranges`: [start, stop) of the destination, written with zeros.
        """
        moves = [
            Segment(i, 0, size, 0, offset, size, 1, size)
            for i, (size, offset) in enumerate(zip(sizes, offsets, strict=True))
        ]
        zeros = [
            Segment(ZEROS, 0, 0, 0, start, stop - start, 1, stop - start)
            for start, stop in zero_ranges
        ]
        return cls((*moves, *zeros), src_dtype, dst_dtype)

    @classmethod
    def unpack(
        cls,
        sizes: Sequence[int],
        offsets: Sequence[int],
        src_dtype: torch.dtype,
        dst_dtype: torch.dtype,
    ) -> CopyPlan:
        """The mirror of `pack`: offsets[i] of one flat source goes to contiguous tensor i."""
        moves = [
            Segment(0, offset, size, i, 0, size, 1, size)
            for i, (size, offset) in enumerate(zip(sizes, offsets, strict=True))
        ]
        return cls(tuple(moves), src_dtype, dst_dtype)

    def run(
        self,
        sources: Sequence[torch.Tensor | None],
        destinations: Sequence[torch.Tensor],
        *,
        scale: float = 1.0,
        accumulate: bool = False,
        threads: int = 1,
    ) -> None:
        """destination = convert(scale * source), or, accumulating, convert(destination + scale * source).

        A source of None counts as zeros. Computed in f32.

        Raises:
            ValueError: an operand is missing, too small, not contiguous or of another dtype.
        """
        self._check("sources", sources, self.src_dtype, source=True)
        self._check("destinations", destinations, self.dst_dtype, source=False)
        bound = self.bind(destinations, scale=scale, accumulate=accumulate, threads=threads)
        bound.run([0 if s is None else s.data_ptr() for s in sources])

    def bind(
        self,
        destinations: Sequence[torch.Tensor],
        *,
        scale: float = 1.0,
        accumulate: bool = False,
        threads: int = 1,
    ) -> _C.BoundCopy:
        """For a hot path: run(source addresses, stream) with nothing checked again. Keep the destinations alive."""
        self._check("destinations", destinations, self.dst_dtype, source=False)
        addresses = [tensor.data_ptr() for tensor in destinations]
        return _C.BoundCopy(self.core, addresses, scale, accumulate, threads)

    def _check(
        self,
        name: str,
        tensors: Sequence[torch.Tensor | None],
        dtype: torch.dtype,
        *,
        source: bool,
    ) -> None:
        extents = self._extents(source)
        if len(tensors) != len(extents):
            raise ValueError(f"{name}: {len(tensors)} tensors given; the plan has {len(extents)}")
        for i, (tensor, extent) in enumerate(zip(tensors, extents, strict=True)):
            if tensor is None and source:
                continue
            if not isinstance(tensor, torch.Tensor) or tensor.dtype != dtype:
                kind = tensor.dtype if isinstance(tensor, torch.Tensor) else type(tensor).__name__
                raise ValueError(f"{name}[{i}] is {kind}; the plan takes {dtype}")
            if not tensor.is_contiguous() or tensor.device.type != "cpu":
                raise ValueError(f"{name}[{i}] must be contiguous and on the CPU")
            if tensor.numel() < extent:
                raise ValueError(
                    f"{name}[{i}] has {tensor.numel()} elements; the plan reaches to {extent}"
                )

    def _extents(self, source: bool) -> list[int]:
        """For each operand, how many elements the plan reaches."""
        count = self.core.num_sources if source else self.core.num_destinations
        extents = [0] * count
        for s in self.segments:
            operand, offset, pitch = (
                (s.src, s.src_offset, s.src_pitch) if source else (s.dst, s.dst_offset, s.dst_pitch)
            )
            if operand != ZEROS and s.rows > 0 and s.cols > 0:
                end = offset + (s.rows - 1) * pitch + s.cols
                extents[operand] = max(extents[operand], end)
        return extents

    def __repr__(self) -> str:
        lines = [
            f"CopyPlan({self.src_dtype} to {self.dst_dtype}, {self.core.elements} elements, "
            f"{self.core.num_tiles} tiles)"
        ]
        shown = 8
        for s in self.segments[:shown]:
            origin = "zeros" if s.src == ZEROS else f"source {s.src} at {s.src_offset}"
            lines.append(
                f"  {origin}, {s.rows} x {s.cols} -> destination {s.dst} at {s.dst_offset}"
            )
        if len(self.segments) > shown:
            lines.append(f"  ... {len(self.segments) - shown} more")
        return "\n".join(lines)
