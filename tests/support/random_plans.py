"""Random CopyPlans, and what PyTorch makes of them."""

from __future__ import annotations

import torch
from hypothesis import strategies as st
from torch import Tensor

from shardcomm.copy.segment import ZEROS, Segment

FLOATS = [torch.float32, torch.bfloat16, torch.float16]
OTHERS = [torch.uint8, torch.int32, torch.int64, torch.float64]
UNKNOWN_TO_CORE = [torch.int8, torch.bool, torch.int16, torch.complex64, torch.float8_e4m3fn]
# Of a copy: to a narrower and to a wider type, and as they are, of each size.
SOME_PAIRS = [
    (torch.float32, torch.bfloat16),
    (torch.float16, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.float32, torch.float32),
    (torch.uint8, torch.uint8),
    (torch.int64, torch.int64),
]
TILE_ELEMENTS = 16384
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


RandomPlan = tuple[list[Segment], list[int], list[int]]
"""Segments, and how many elements each source and each destination needs."""


def bits(x: Tensor) -> Tensor:
    return x.view(BITS[x.element_size()])


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Bit for bit, except that any NaN equals any NaN."""
    nan = a.isnan()
    return torch.equal(nan, b.isnan()) and torch.equal(bits(a)[~nan], bits(b)[~nan])


RANDOM = torch.randn(5_000_000, generator=torch.Generator().manual_seed(21))


def values(count: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Random values; other ones for another seed."""
    random = RANDOM[1000 * seed :]
    if dtype.is_floating_point and dtype.itemsize > 1:
        return random[:count].to(dtype, copy=True)
    return (random[: count * dtype.itemsize] > 0).to(torch.uint8).view(dtype)


def whole(n: int) -> list[Segment]:
    """A plan that copies one run of elements."""
    return [Segment(0, 0, 0, n, 0, n, 1, n)]


def rectangle(flat: Tensor, offset: int, pitch: int, rows: int, cols: int) -> Tensor:
    return flat.as_strided((rows, cols), (pitch, 1), flat.storage_offset() + offset)


def expect(
    segments: list[Segment],
    sources: list[Tensor | None],
    destinations: list[Tensor],
    scale: float = 1.0,
    accumulate: bool = False,
) -> list[Tensor]:
    """What PyTorch makes of it, one segment after the other."""
    results = [destination.clone() for destination in destinations]
    for s in segments:
        to = rectangle(results[s.dst], s.dst_offset, s.dst_pitch, s.rows, s.cols)
        source = None if s.src == ZEROS else sources[s.src]
        if source is None:
            if not accumulate:
                to.zero_()
            continue
        value = rectangle(source, s.src_offset, s.src_pitch, s.rows, s.cols)
        if scale != 1.0 or accumulate:
            value = value.float() * scale
        to.copy_(to.float() + value if accumulate else value)
    return results


@st.composite
def plans(draw: st.DrawFn) -> RandomPlan:
    """Random segments with disjoint destinations, and how many elements the operands need."""
    src_sizes, dst_sizes = [0] * 3, [0] * 2
    segments = []
    used_sources = used_destinations = 0
    for _ in range(draw(st.integers(1, 4))):
        rows = draw(st.integers(0, 5))
        cols = draw(st.one_of(*[st.integers(0, 40)] * 7, st.integers(9000, TILE_ELEMENTS + 500)))
        src, dst = draw(st.integers(ZEROS, 2)), draw(st.integers(0, 1))
        src_offset, src_gap, dst_gap = (draw(st.integers(0, 9)) for _ in range(3))
        dst_offset = dst_sizes[dst] + draw(st.integers(0, 9))
        segments.append(
            Segment(src, dst, src_offset, cols + src_gap, dst_offset, cols + dst_gap, rows, cols)
        )
        dst_sizes[dst] = dst_offset + rows * (cols + dst_gap)
        if src != ZEROS:
            src_sizes[src] = max(src_sizes[src], src_offset + rows * (cols + src_gap))
        used_sources = max(used_sources, src + 1)
        used_destinations = max(used_destinations, dst + 1)
    return segments, src_sizes[:used_sources], dst_sizes[:used_destinations]
