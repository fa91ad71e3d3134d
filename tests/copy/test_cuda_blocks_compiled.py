"""What nvcc makes of the CUDA kernels of block formats, executed on the CPU, against the CPU executor."""

from __future__ import annotations

import functools
from ctypes import Structure

import pytest
import torch
from torch import Tensor

from shardcomm.copy.blocks import BlockFormat, BlockSegment, decode, decode_sum, encode
from shardcomm.copy.wire_stats import WireStats
from support.awkward_floats import mixed
from support.block_reference import (
    aligned,
    encoded_parts,
    fractions_as_the_random_numbers,
    hard_blocks,
    hard_segments,
    rows,
)
from support.kernel_arguments import SEGMENTS, SummedParts, WirePart, segment_table
from support.played_kernels import TYPE_NAMES, flags, launch
from support.random_plans import FLOATS, same_bits

pytestmark = pytest.mark.slow

SEED = 0xFEDCBA9876543210
CODES = {"mxint8": "MxInt8", "mxfp8": "MxFp8"}


def part_of(format: BlockFormat, wire: Tensor) -> WirePart:
    blocks = wire.numel() // (format.block + 1)
    return WirePart(wire.data_ptr(), wire.data_ptr() + blocks * format.block, format.block)


def table(segments: list[BlockSegment], blocks: int) -> tuple[Structure, int]:
    present = [segment for segment in segments if segment.tensor.numel() > 0]
    return segment_table(rows(present), 0, blocks)


def check_blocks(
    format: BlockFormat,
    segments: list[BlockSegment],
    tallies: bool = True,
    grid: int = 1,
) -> Tensor:
    """The kernels make the CPU's wire of the segments, and of that its elements. Returns the wire."""
    last = segments[-1]
    dtype = last.tensor.dtype
    needed = last.first_block + -(-last.tensor.numel() // format.block) + 3
    nbytes = format.nbytes(needed * format.block)
    blocks = nbytes // (format.block + 1)
    by_cpu, stats = aligned(nbytes), WireStats()
    encode(format, segments, by_cpu, seed=SEED, stats=stats)

    wire, compiled_stats = aligned(nbytes), WireStats().numbers
    used = blocks * (format.block + 1)
    is_stochastic = str(format.rounding == "stochastic").lower()
    elements, capacity = table(segments, blocks)
    names = CODES[format.name], is_stochastic, TYPE_NAMES[dtype], capacity
    launch(
        "encode_blocks<{}, {}, {}, {}>".format(*names),
        grid,
        [
            elements,
            part_of(format, wire),
            SEED,
            compiled_stats.data_ptr() if tallies else 0,
            wire.data_ptr() + used,
            nbytes - used,
        ],
        [segment.tensor for segment in segments],
        [wire, compiled_stats],
    )
    assert torch.equal(wire, by_cpu)
    assert torch.equal(compiled_stats, stats.numbers * tallies)

    check_decode(format, wire, segments, grid)
    return wire


def check_decode(
    format: BlockFormat,
    wire: Tensor,
    segments: list[BlockSegment],
    grid: int = 1,
) -> None:
    """The kernel makes of a wire the CPU's elements, where such segments are."""
    results, expected = (
        [BlockSegment(torch.full_like(s.tensor, 3), s.first_block) for s in segments]
        for _ in range(2)
    )
    decode(format, wire, expected)
    blocks = wire.numel() // (format.block + 1)
    elements, capacity = table(results, blocks)
    names = CODES[format.name], TYPE_NAMES[segments[0].tensor.dtype], capacity
    launch(
        "decode_blocks<{}, {}, {}>".format(*names),
        grid,
        [elements, part_of(format, wire)],
        [wire],
        [result.tensor for result in results],
    )
    for result, wanted in zip(results, expected, strict=True):
        assert same_bits(result.tensor, wanted.tensor)


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("block", [32, 64, 128])
@pytest.mark.parametrize("name", ["mxint8", "mxfp8"])
def test_blocks_are_encoded_and_decoded_as_by_the_cpu(
    name: str, block: int, rounding: str, seed: int
) -> None:
    format = BlockFormat(name, block, rounding)  # type: ignore[arg-type]
    check_blocks(format, hard_segments(format, torch.float32, seed))
    others = hard_segments(format, torch.float32, seed + 1)
    tiny = [segment._replace(tensor=segment.tensor * 2.0**-110) for segment in others]
    check_blocks(format, tiny, grid=3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["mxint8", "mxfp8"])
def test_blocks_of_narrow_floats_are_encoded_as_by_the_cpu(
    name: str, dtype: torch.dtype, seed: int
) -> None:
    for rounding in ("nearest", "stochastic"):
        format = BlockFormat(name, 32, rounding)  # type: ignore[arg-type]
        segments = hard_segments(format, dtype, seed)
        check_blocks(format, segments, tallies=rounding == "nearest")


@pytest.mark.parametrize("name", ["mxint8", "mxfp8"])
def test_a_fraction_that_equals_the_random_number_is_rounded_down(name: str) -> None:
    elements, codes = fractions_as_the_random_numbers(name, SEED)
    wire = check_blocks(BlockFormat(name, 32, "stochastic"), [BlockSegment(elements, 0)])  # type: ignore[arg-type]
    known = codes >= 0
    assert torch.equal(wire[:2048][known], codes[known].to(torch.uint8))


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("name", ["mxint8", "mxfp8"])
def test_the_cost_of_each_block_is_the_cpus(name: str, rounding: str, seed: int) -> None:
    format = BlockFormat(name, 32, rounding)  # type: ignore[arg-type]
    blocks = hard_blocks(45, 32, torch.Generator().manual_seed(seed))
    blocks[0] = torch.tensor([1.0, -torch.finfo(torch.float32).max]).repeat(16)
    for block in blocks:
        check_blocks(format, [BlockSegment(block, 0)])


def test_segments_have_any_length_and_alignment(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for dtype in FLOATS:
        for misalignment in (0, 1):
            segments, first = [], 2
            # Without alignment, more segments than a kernel for a few has room for.
            for count in [*range(1, 17), 39, 62] * (1 + 2 * misalignment):
                numbers = hard_blocks(3, 32, generator).view(-1)[: misalignment + count].to(dtype)
                segments.append(BlockSegment(numbers[misalignment:], first))
                first += -(-count // 32) + count % 2
            assert (len(segments) > SEGMENTS[0]) == bool(misalignment)
            check_blocks(BlockFormat("mxint8"), segments)


@functools.cache
def random_wires(format: BlockFormat, elements: int, parts: int) -> Tensor:
    """Every code, and every scale. The scales of a sum's blocks are near each other, so that all parts matter."""
    generator = torch.Generator().manual_seed(11)
    nbytes = format.nbytes(elements)
    wires = aligned(parts * nbytes)
    wires[:] = torch.randint(0, 256, wires.shape, generator=generator, dtype=torch.uint8)
    of_part = wires.view(parts, nbytes)
    blocks = nbytes // (format.block + 1)
    base = torch.randint(0, 256, (blocks,), generator=generator)
    scales = base + torch.randint(0, 6, (parts, blocks), generator=generator)
    of_part[:, blocks * format.block :][:, :blocks] = scales.clamp(max=255)
    return wires


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", ["mxint8", "mxfp8"])
def test_any_wire_is_decoded_as_by_the_cpu(name: str, dtype: torch.dtype) -> None:
    format = BlockFormat(name)  # type: ignore[arg-type]
    segments = [BlockSegment(torch.zeros(32 * 1000 - 9, dtype=dtype), 0)]
    check_decode(format, random_wires(format, 32_000, 1), segments, grid=3)


def check_sum(
    format: BlockFormat,
    wires: Tensor,
    before: Tensor,
    accumulate: bool = False,
    watched: bool = True,
    grid: int = 1,
) -> None:
    """The kernel sums the wires of ranks as the CPU does."""
    nbytes = format.nbytes(before.numel())
    parts = wires.numel() // nbytes
    by_cpu, compiled = before.clone(), before
    flag, expected_flag = flags()
    decode_sum(
        format,
        wires,
        parts,
        by_cpu,
        scale=0.7,
        accumulate=accumulate,
        nonfinite=expected_flag if watched else None,
    )
    summed = SummedParts(
        first=part_of(format, wires[:nbytes]),
        parts=parts,
        stride=nbytes,
        dst=compiled.data_ptr(),
        count=compiled.numel(),
        scale=0.7,
        accumulate=accumulate,
        nonfinite=flag.data_ptr() if watched else None,
    )
    kernel = f"sum_blocks<{CODES[format.name]}, {TYPE_NAMES[before.dtype]}>"
    launch(kernel, grid, [summed], [wires], [compiled, flag])
    assert same_bits(compiled, by_cpu)
    assert flag == expected_flag


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", ["mxint8", "mxfp8"])
def test_parts_are_summed_as_by_the_cpu(name: str, dtype: torch.dtype, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parts in (1, 2, 3, 4, 5, 9):
        format = BlockFormat(name, (32, 64, 128)[parts % 3])  # type: ignore[arg-type]
        before = mixed(2128 + parts, dtype, parts, misalignment=parts % 2)
        wires = encoded_parts(format, parts, before.numel(), generator)
        check_sum(format, wires, before, accumulate=False, watched=parts > 2)
        check_sum(format, wires, before, accumulate=True, grid=parts % 4 + 1)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", ["mxint8", "mxfp8"])
def test_any_wires_are_summed_as_by_the_cpu(name: str, dtype: torch.dtype) -> None:
    format = BlockFormat(name)  # type: ignore[arg-type]
    for parts in (1, 4, 5):
        wires = random_wires(format, 16_000, parts)
        check_sum(format, wires, torch.zeros(16_000, dtype=dtype))


@pytest.mark.parametrize("dtype", FLOATS)
def test_the_flag_of_a_sum_is_set_by_any_element_that_is_not_finite(dtype: torch.dtype) -> None:
    format = BlockFormat("mxfp8")
    for at in (*range(8), 2050):
        for value in (1.0, 3e38):
            numbers = torch.ones(2051)
            numbers[at] = value
            wires = aligned(4 * format.nbytes(2051))
            for wire in wires.chunk(4):
                encode(format, [BlockSegment(numbers, 0)], wire)
            check_sum(format, wires, torch.zeros(2051, dtype=dtype))
