"""The Triton executor of block formats, against the CPU executor, whose results are those of the definition.

Compiled where there is a GPU; by Triton's interpreter, on the CPU, elsewhere.
"""

from __future__ import annotations

import random

import pytest
import torch

from shardcomm.arguments.dtype import core_dtype
from shardcomm.copy.blocks import BlockFormat, BlockSegment, decode, decode_sum, encode
from shardcomm.copy.wire_stats import WireStats
from support.block_reference import FORMATS, aligned, hard_blocks, rows
from support.random_plans import FLOATS, same_bits

pytest.importorskip("triton", reason="the Triton executor needs triton: pip install triton")

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")

# Read where a kernel is defined: Triton itself, and what else uses it in this process, compile.
with pytest.MonkeyPatch.context() as environment:
    if DEVICE.type == "cpu":
        environment.setenv("TRITON_INTERPRET", "1")
    from shardcomm.copy import blocks_triton

pytestmark = [
    # The interpreter's numpy reports each overflow, of numbers that are not chosen.
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.slow,
]

SEED = 0xFEDCBA9876543210


def there(segments: list[BlockSegment]) -> list[BlockSegment]:
    return [BlockSegment(s.tensor.to(DEVICE, copy=True), s.first_block) for s in segments]


# How elements are read does not depend on the length of blocks; the interpreter is slow.
CASES = [
    (format, dtype)
    for format in FORMATS
    for dtype in FLOATS
    if format.block == 32 or dtype == torch.float32
]


@pytest.mark.parametrize(("format", "dtype"), CASES)
def test_triton_encodes_and_decodes_as_the_cpu_does(
    format: BlockFormat, dtype: torch.dtype, seed: int
) -> None:
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    segments, first = [], 0
    for count in (0, 1, format.block - 1, 3 * format.block, 2100, 33):  # a tile has 2048
        first += rng.choice([0, 0, 1, 70])
        blocks = hard_blocks(-(-count // 32), 32, generator) if count else torch.empty(0)
        segments.append(BlockSegment(blocks.view(-1)[:count].to(dtype), first))
        first += -(-count // format.block)
    nbytes = format.nbytes((first + 3) * format.block)
    by_cpu, stats = aligned(nbytes), WireStats()
    encode(format, segments, by_cpu, seed=SEED, stats=stats)

    wire, triton_stats = aligned(nbytes).to(DEVICE), WireStats(DEVICE)
    sources = there(segments)
    stochastic = format.rounding == "stochastic"
    blocks_triton.encode(
        format.name, format.block, stochastic, rows(sources), core_dtype(dtype), wire, SEED,
        triton_stats.numbers.data_ptr(), None,
    )  # fmt: skip
    assert torch.equal(wire.cpu(), by_cpu)
    assert torch.equal(triton_stats.numbers.cpu(), stats.numbers)

    expected = [BlockSegment(torch.empty_like(s.tensor), s.first_block) for s in segments]
    decode(format, by_cpu, expected)
    results = there(expected)
    blocks_triton.decode(format.name, format.block, wire, rows(results), core_dtype(dtype), None)
    for result, wanted in zip(results, expected, strict=True):
        assert same_bits(result.tensor.cpu(), wanted.tensor)


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", ["mxint8", "mxfp8"])
@pytest.mark.parametrize(("parts", "numel"), [(1, 100), (3, 2083)])
def test_triton_sums_as_the_cpu_does(
    parts: int, numel: int, name: str, dtype: torch.dtype, accumulate: bool, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    format = BlockFormat(name)  # type: ignore[arg-type]
    nbytes = format.nbytes(numel)
    wires = aligned(parts * nbytes)
    for part in range(parts):
        values = hard_blocks(-(-numel // 32), 32, generator).view(-1)[:numel]
        encode(format, [BlockSegment(values, 0)], wires[part * nbytes :][:nbytes])
    before = torch.randn(numel, generator=generator).to(dtype)
    by_cpu, by_triton = before.clone(), before.to(DEVICE, copy=True)
    flags = [torch.zeros(1, dtype=torch.int32, device=where) for where in ("cpu", DEVICE)]
    decode_sum(format, wires, parts, by_cpu, scale=0.7, accumulate=accumulate, nonfinite=flags[0])
    blocks_triton.decode_sum(
        name, 32, wires.to(DEVICE), parts, by_triton, core_dtype(dtype), 0.7, accumulate,
        flags[1].data_ptr(), None,
    )  # fmt: skip
    assert same_bits(by_triton.cpu(), by_cpu)
    assert torch.equal(flags[1].cpu(), flags[0])
