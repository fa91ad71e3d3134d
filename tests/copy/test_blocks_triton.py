"""The Triton executor of block formats, against the CPU executor, whose results are those of the definition.

On a GPU where there is one. Elsewhere the machine of `support/ptx_machine.py` runs the instructions that Triton's
compiler makes for a GPU.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from shardcomm.arguments.dtype import core_dtype
from shardcomm.copy.blocks import BlockFormat, BlockSegment, decode, decode_sum, encode
from shardcomm.copy.wire_stats import WireStats
from support.block_reference import (
    FORMATS,
    aligned,
    encoded_parts,
    fractions_as_the_random_numbers,
    hard_segments,
    rows,
)
from support.random_plans import FLOATS, same_bits

pytest.importorskip("triton", reason="the Triton executor needs triton: pip install triton")

from shardcomm.copy import blocks_triton
from support.played_triton import DEVICE, triton_gpu, why_not

pytestmark = [pytest.mark.skipif(bool(why_not()), reason=why_not()), pytest.mark.slow]

SEED = 0xFEDCBA9876543210


def there(segments: list[BlockSegment]) -> list[BlockSegment]:
    return [BlockSegment(s.tensor.to(DEVICE, copy=True), s.first_block) for s in segments]


def check_blocks(
    format: BlockFormat,
    segments: list[BlockSegment],
    tallies: bool = True,
    capability: int = 90,
) -> Tensor:
    """Triton makes the CPU's wire of the segments, and of that the CPU's elements. Returns the wire."""
    last = segments[-1]
    blocks = last.first_block + -(-last.tensor.numel() // format.block) + 3
    dtype, nbytes = core_dtype(last.tensor.dtype), format.nbytes(blocks * format.block)
    by_cpu, stats = aligned(nbytes), WireStats()
    encode(format, segments, by_cpu, seed=SEED, stats=stats)
    expected = [BlockSegment(torch.empty_like(s.tensor), s.first_block) for s in segments]
    decode(format, by_cpu, expected)

    wire, stats_there = aligned(nbytes).to(DEVICE), WireStats(DEVICE)
    with triton_gpu(capability) as gpu:
        sources = there(segments)
        gpu.may_read(*[source.tensor for source in sources])
        gpu.may_write(wire, stats_there.numbers)
        blocks_triton.encode(
            format.name, format.block, format.rounding == "stochastic", rows(sources), dtype, wire,
            SEED, stats_there.numbers.data_ptr() if tallies else 0, None,
        )  # fmt: skip
    assert torch.equal(wire.cpu(), by_cpu)
    assert torch.equal(stats_there.numbers.cpu(), stats.numbers * tallies)

    with triton_gpu(capability) as gpu:
        results = there(
            [BlockSegment(torch.full_like(s.tensor, 3), s.first_block) for s in segments]
        )
        gpu.may_read(wire)
        gpu.may_write(*[result.tensor for result in results])
        blocks_triton.decode(format.name, format.block, wire, rows(results), dtype, None)
    for result, wanted in zip(results, expected, strict=True):
        assert same_bits(result.tensor.cpu(), wanted.tensor)
    return by_cpu


# A compilation takes half a second.
@pytest.mark.parametrize("format", [f for f in FORMATS if f.block != 64 or f.rounding != "nearest"])
def test_blocks_are_encoded_and_decoded_as_by_the_cpu(format: BlockFormat, seed: int) -> None:
    check_blocks(format, hard_segments(format, torch.float32, seed))


@pytest.mark.parametrize(
    ("format", "dtype"),
    [(BlockFormat("mxint8"), torch.bfloat16), (BlockFormat("mxfp8"), torch.float16)],
)
def test_blocks_of_narrow_floats_are_encoded_as_by_the_cpu(
    format: BlockFormat, dtype: torch.dtype, seed: int
) -> None:
    check_blocks(format, hard_segments(format, dtype, seed), tallies=False)


@pytest.mark.parametrize("name", ["mxint8", "mxfp8"])
def test_a_fraction_that_equals_the_random_number_is_rounded_down(name: str) -> None:
    elements, codes = fractions_as_the_random_numbers(name, SEED)
    wire = check_blocks(BlockFormat(name, 32, "stochastic"), [BlockSegment(elements, 0)])  # type: ignore[arg-type]
    known = codes >= 0
    assert torch.equal(wire[:2048][known], codes[known].to(torch.uint8))


def check_sum(
    format: BlockFormat,
    dtype: torch.dtype,
    parts: int,
    numel: int,
    accumulate: bool,
    watched: bool,
    seed: int,
    capability: int = 90,
) -> None:
    """Triton sums the wires of ranks as the CPU does."""
    generator = torch.Generator().manual_seed(seed)
    wires = encoded_parts(format, parts, numel, generator)
    before = torch.randn(numel, generator=generator).to(dtype)
    by_cpu, by_triton = before.clone(), before.to(DEVICE, copy=True)
    wires_there = wires.to(DEVICE)
    flag, wanted_flag = (torch.zeros(1, dtype=torch.int32, device=at) for at in (DEVICE, "cpu"))
    decode_sum(
        format, wires, parts, by_cpu, scale=0.7, accumulate=accumulate,
        nonfinite=wanted_flag if watched else None,
    )  # fmt: skip
    with triton_gpu(capability) as gpu:
        gpu.may_read(wires_there)
        gpu.may_write(by_triton, flag)
        blocks_triton.decode_sum(
            format.name, format.block, wires_there, parts, by_triton, core_dtype(dtype), 0.7,
            accumulate, flag.data_ptr() if watched else 0, None,
        )  # fmt: skip
    assert same_bits(by_triton.cpu(), by_cpu)
    assert flag.cpu() == wanted_flag


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", ["mxint8", "mxfp8"])
def test_parts_are_summed_as_by_the_cpu(name: str, dtype: torch.dtype, seed: int) -> None:
    format = BlockFormat(name)  # type: ignore[arg-type]
    if dtype == torch.float32:
        check_sum(format, dtype, 1, 100, accumulate=False, watched=False, seed=seed)
    check_sum(format, dtype, 3, 2083, accumulate=True, watched=True, seed=seed)


@pytest.mark.parametrize("capability", [80, 100])
def test_other_gpus_compute_the_same(capability: int, seed: int) -> None:
    format = BlockFormat("mxfp8", 32, "stochastic")
    segments = hard_segments(format, torch.float32, seed)
    check_blocks(format, segments, capability=capability)
    check_sum(
        BlockFormat("mxint8"), torch.bfloat16, 3, 2083, accumulate=True, watched=True,
        seed=seed, capability=capability,
    )  # fmt: skip
