"""The CUDA executor of block formats against the CPU's: its kernels' code walked, and, where there is a GPU, run."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from shardcomm import _C
from shardcomm.arguments.dtype import core_dtype
from shardcomm.copy.blocks import BlockFormat, BlockSegment, core_format, decode, decode_sum, encode
from shardcomm.copy.wire_stats import WireStats
from support.block_reference import FORMATS, aligned, encoded_parts, hard_blocks, rows
from support.random_plans import FLOATS, same_bits

SEED = 0xFEDCBA9876543210


def walk_encode(
    format: BlockFormat,
    segments: list[BlockSegment],
    wire: Tensor,
    stats: WireStats,
    teams: int,
    most_segments: int,
) -> None:
    dtype = core_dtype(segments[0].tensor.dtype)
    _C.walk_encode_blocks(
        core_format(format), rows(segments), dtype, wire.data_ptr(), wire.numel(), SEED,
        stats.numbers.data_ptr(), teams, most_segments,
    )  # fmt: skip


def walk_decode(
    format: BlockFormat, wire: Tensor, segments: list[BlockSegment], teams: int, most_segments: int
) -> None:
    dtype = core_dtype(segments[0].tensor.dtype)
    _C.walk_decode_blocks(
        core_format(format), wire.data_ptr(), wire.numel(), rows(segments), dtype, teams,
        most_segments,
    )  # fmt: skip


def some_segments(
    block: int, dtype: torch.dtype, rng: random.Random
) -> tuple[list[BlockSegment], int, list[Tensor]]:
    """Segments of hard values that begin anywhere in a vector, with gaps; the end of them; guarded destinations."""
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    values = hard_blocks(300, 32, generator).view(-1).to(dtype)
    segments, guarded, first = [], [], 0
    for _ in range(rng.randrange(1, 9)):
        count = rng.choice([0, 1, block - 1, block, 3 * block, rng.randrange(5 * block)])
        start = rng.randrange(9)
        first += rng.choice([0, 0, 1, 7])
        segments.append(
            BlockSegment(
                values[start:][:count].clone() if start % 2 else values[start:][:count], first
            )
        )
        guarded.append(torch.full((start + count + 8,), 7.0, dtype=dtype))
        first += -(-count // block)
    return segments, first, guarded


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_walked_kernels_encode_and_decode_as_the_cpu_does(
    format: BlockFormat, dtype: torch.dtype, seed: int
) -> None:
    rng = random.Random(seed)
    for _ in range(30):
        segments, end, guarded = some_segments(format.block, dtype, rng)
        nbytes = format.nbytes((end + rng.randrange(3)) * format.block)
        launch = {"teams": rng.choice([1, 3, 64]), "most_segments": rng.choice([1, 2, 1300])}
        by_cpu, by_kernel = aligned(nbytes), aligned(nbytes)
        stats, walked_stats = WireStats(), WireStats()
        encode(format, segments, by_cpu, seed=SEED, stats=stats)
        walk_encode(format, segments, by_kernel, walked_stats, **launch)
        assert torch.equal(by_kernel, by_cpu)
        assert torch.equal(walked_stats.numbers, stats.numbers)

        starts = [
            len(each) - 8 - s.tensor.numel() for each, s in zip(guarded, segments, strict=True)
        ]
        there = [
            BlockSegment(each[start:-8], s.first_block)
            for each, start, s in zip(guarded, starts, segments, strict=True)
        ]
        expected = [BlockSegment(torch.empty_like(s.tensor), s.first_block) for s in segments]
        walk_decode(format, by_cpu, there, **launch)
        decode(format, by_cpu, expected)
        for result, wanted, each, start in zip(there, expected, guarded, starts, strict=True):
            assert same_bits(result.tensor, wanted.tensor)
            assert (each[:start] == 7).all()
            assert (each[-8:] == 7).all()


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("format", [f for f in FORMATS if f.rounding == "nearest"], ids=str)
def test_walked_kernels_sum_as_the_cpu_does(
    format: BlockFormat, dtype: torch.dtype, accumulate: bool, seed: int
) -> None:
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    for parts in (1, 2, 4, 5, 9):
        numel, start = rng.choice([1, 31, 128, 1000]), rng.randrange(5)
        wires = encoded_parts(format, parts, numel, generator)
        before = torch.randn(start + numel, generator=generator).to(dtype)
        by_cpu, by_kernel = before.clone(), before.clone()
        flags = [torch.zeros(1, dtype=torch.int32) for _ in range(2)]
        decode_sum(
            format, wires, parts, by_cpu[start:],
            scale=0.7, accumulate=accumulate, nonfinite=flags[0],
        )  # fmt: skip
        _C.walk_decode_sum(
            core_format(format), wires.data_ptr(), parts, by_kernel[start:].data_ptr(), numel,
            core_dtype(dtype), 0.7, accumulate, flags[1].data_ptr(), rng.choice([1, 5, 64]),
        )  # fmt: skip
        assert same_bits(by_kernel, by_cpu)
        assert torch.equal(*flags)


def test_impossible_launches_are_refused() -> None:
    segment = [BlockSegment(torch.ones(32), 0)]
    for launch in ({"teams": 0, "most_segments": 1}, {"teams": 1, "most_segments": 1301}):
        with pytest.raises(ValueError, match="at least one team, and 1 to 1300 segments"):
            walk_encode(FORMATS[0], segment, aligned(128), WireStats(), **launch)


# On a GPU.


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_gpu_writes_what_the_cpu_writes(format: BlockFormat, dtype: torch.dtype, seed: int) -> None:
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    large = [BlockSegment(hard_blocks(20_000, 32, generator).view(-1).to(dtype), 0)]
    many = [BlockSegment(torch.full((5,), float(i)).to(dtype), i) for i in range(3000)]
    cases = [(large, 20_000), (many, 3000)]
    cases += [some_segments(format.block, dtype, rng)[:2] for _ in range(20)]
    for segments, end in cases:
        nbytes = format.nbytes(end * format.block)
        by_cpu = aligned(nbytes)
        stats, gpu_stats = WireStats(), WireStats("cuda")
        encode(format, segments, by_cpu, seed=SEED, stats=stats)
        wire = torch.full((nbytes,), 255, dtype=torch.uint8, device="cuda")
        there = [BlockSegment(s.tensor.cuda(), s.first_block) for s in segments]
        encode(format, there, wire, seed=SEED, stats=gpu_stats)
        assert torch.equal(wire.cpu(), by_cpu)
        assert torch.equal(gpu_stats.numbers.cpu(), stats.numbers)
        expected = [BlockSegment(torch.empty_like(s.tensor), s.first_block) for s in segments]
        decode(format, by_cpu, expected)
        decode(format, wire, there)
        for result, wanted in zip(there, expected, strict=True):
            assert same_bits(result.tensor.cpu(), wanted.tensor)


@pytest.mark.gpu
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("format", [f for f in FORMATS if f.rounding == "nearest"], ids=str)
def test_gpu_sums_as_the_cpu_does(
    format: BlockFormat, dtype: torch.dtype, accumulate: bool, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parts, numel in ((1, 100), (2, 40_003), (4, 64), (9, 5000)):
        wires = encoded_parts(format, parts, numel, generator)
        before = torch.randn(numel, generator=generator).to(dtype)
        by_cpu, by_gpu = before.clone(), before.cuda()
        decode_sum(format, wires, parts, by_cpu, scale=0.7, accumulate=accumulate)
        flag = torch.zeros(1, dtype=torch.int32, device="cuda")
        decode_sum(
            format, wires.cuda(), parts, by_gpu,
            scale=0.7, accumulate=accumulate, nonfinite=flag,
        )  # fmt: skip
        assert same_bits(by_gpu.cpu(), by_cpu)
        assert flag.item() == int(not by_cpu.isfinite().all())
