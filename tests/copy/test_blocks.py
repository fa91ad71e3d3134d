"""Block formats on the CPU, against their definition in float64."""

from __future__ import annotations

from dataclasses import FrozenInstanceError

import numpy as np
import pytest
import torch
from torch import Tensor

from shardcomm import _C
from shardcomm.copy.blocks import BlockFormat, BlockSegment, decode, decode_sum, encode
from shardcomm.copy.wire_stats import WireStats
from support.block_reference import (
    aligned,
    bounds_of,
    encoded,
    hard_blocks,
    philox,
    random_words,
    values_of,
    wire_of,
)
from support.instruction_sets import instruction_set  # noqa: F401 (a fixture)
from support.random_plans import FLOATS, same_bits

NAMES = ("mxint8", "mxfp8")
BLOCKS = (32, 64, 128)
SEED = 0x0123456789ABCDEF


def encoded_blocks(format: BlockFormat, blocks: Tensor, stats: WireStats | None = None) -> Tensor:
    wire = aligned(format.nbytes(blocks.numel()))
    encode(format, [BlockSegment(blocks.contiguous(), 0)], wire, seed=SEED, stats=stats)
    return wire


def expected_wire(format: BlockFormat, blocks: Tensor) -> Tensor:
    random = random_words(SEED, blocks.numel()) if format.rounding == "stochastic" else None
    codes, scales = encoded(format.name, blocks.double(), random)
    return wire_of(codes, scales, format.nbytes(blocks.numel()))


def check_against_definition(format: BlockFormat, blocks: Tensor) -> None:
    stats = WireStats()
    wire = encoded_blocks(format, blocks, stats)
    expected = expected_wire(format, blocks)
    assert torch.equal(wire, expected)
    assert torch.equal(encoded_blocks(format, blocks), expected)  # without stats: other loops

    codes = wire[: blocks.numel()].view(len(blocks), format.block)
    room = wire.numel() // (format.block + 1)
    scales = wire[room * format.block :][: len(blocks)]
    values = values_of(format.name, codes, scales)
    decoded = torch.empty_like(blocks)
    decode(format, wire, [BlockSegment(decoded, 0)])
    assert same_bits(decoded, values.float())
    assert torch.equal(decoded.isnan().any(1), ~blocks.isfinite().all(1))

    bounds = bounds_of(format.name, blocks.double(), scales, format.rounding == "stochastic")
    errors = (values - blocks.double()).abs().nan_to_num(0)
    assert (errors <= bounds[:, None]).all()
    assert stats.flagged == int((scales == 255).sum())
    assert stats.seen == pytest.approx(float(errors.max()), rel=2**-23)
    assert float(bounds.max()) <= stats.bound <= float(bounds.max()) * (1 + 2**-20) + 2**-149


@pytest.mark.usefixtures("instruction_set")
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("name", NAMES)
def test_hard_blocks_have_the_codes_scales_and_bounds_of_the_definition(
    name: str, block: int, rounding: str, seed: int, hard_block_count: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    format = BlockFormat(name, block, rounding)  # type: ignore[arg-type]
    for begin in range(0, hard_block_count, 10_000):
        count = min(10_000, hard_block_count - begin)
        check_against_definition(format, hard_blocks(count, block, generator))


@pytest.mark.parametrize("name", NAMES)
def test_each_block_alone_keeps_its_bound(name: str, seed: int) -> None:
    format = BlockFormat(name)  # type: ignore[arg-type]
    for block in hard_blocks(300, 32, torch.Generator().manual_seed(seed)):
        check_against_definition(format, block[None])
    for exponent in range(-149, -115):  # where steps of subnormal codes are the bound
        check_against_definition(format, torch.full((1, 32), 1.7).ldexp(torch.tensor(exponent)))


@pytest.mark.usefixtures("instruction_set")
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("name", NAMES)
def test_small_elements_of_one_size_beside_a_large_one(name: str, block: int) -> None:
    format = BlockFormat(name, block)  # type: ignore[arg-type]
    every = torch.arange(105 << 7, 128 << 7, dtype=torch.int32) << 16  # bfloat16 from 2^-22 to 2
    small = torch.cat([every - 1, every, every + 1]).view(torch.float32)
    blocks = small[:, None].repeat(1, block)
    blocks[:, 1::2].neg_()
    blocks[:, block // 2] = 1.5
    check_against_definition(format, blocks)
    for dtype in FLOATS[1:]:
        narrow = blocks.to(dtype)
        assert torch.equal(encoded_blocks(format, narrow), expected_wire(format, narrow.float()))


@pytest.mark.usefixtures("instruction_set")
@pytest.mark.parametrize("dtype", FLOATS[1:])
@pytest.mark.parametrize("name", NAMES)
def test_narrow_sources_encode_as_their_float32_values(name: str, dtype: torch.dtype) -> None:
    every = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype)
    for blocks in (every.view(-1, 32), every.view(256, 256).T.contiguous().view(-1, 32)):
        for rounding in ("nearest", "stochastic"):
            format = BlockFormat(name, 32, rounding)  # type: ignore[arg-type]
            wire = aligned(format.nbytes(blocks.numel()))
            encode(format, [BlockSegment(blocks, 0)], wire, seed=SEED)
            assert torch.equal(wire, expected_wire(format, blocks.float()))


@pytest.mark.usefixtures("instruction_set")
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("name", NAMES)
def test_every_code_with_every_scale_decodes_to_its_value(
    name: str, block: int, dtype: torch.dtype
) -> None:
    codes = torch.arange(256, dtype=torch.uint8).repeat(256, 1).reshape(-1, block)
    scales = torch.arange(256, dtype=torch.uint8).repeat_interleave(256 // block)
    format = BlockFormat(name, block)  # type: ignore[arg-type]
    wire = aligned(format.nbytes(codes.numel()))
    wire.copy_(wire_of(codes, scales, wire.numel()))
    decoded = torch.empty(codes.shape, dtype=dtype)
    decode(format, wire, [BlockSegment(decoded, 0)])
    assert same_bits(decoded, values_of(name, codes, scales).float().to(dtype))


@pytest.mark.usefixtures("instruction_set")
@pytest.mark.parametrize("name", NAMES)
def test_every_code_with_every_scale_is_added_as_its_value(name: str) -> None:
    codes = torch.arange(256, dtype=torch.uint8).repeat(256, 1).reshape(-1, 32)
    scales = torch.arange(256, dtype=torch.uint8).repeat_interleave(256 // 32)
    format = BlockFormat(name)  # type: ignore[arg-type]
    nbytes = format.nbytes(codes.numel())
    wires = aligned(2 * nbytes)
    ones = torch.ones_like(codes)
    wires[:nbytes] = wire_of(ones, scales, nbytes)
    wires[nbytes:] = wire_of(codes, scales, nbytes)
    summed = torch.empty(codes.shape)
    decode_sum(format, wires, 2, summed)
    first, second = (values_of(name, each, scales).float() for each in (ones, codes))
    assert same_bits(summed, first + second)


def test_the_wire_of_one_block_is_what_the_specification_says() -> None:
    block = torch.zeros(32)
    block[:6] = torch.tensor([1.0, -0.5, 127 / 64, 1 / 64, 1 / 128, 3 / 128])
    wire = encoded_blocks(BlockFormat("mxint8"), block)
    assert wire[:6].view(torch.int8).tolist() == [64, -32, 127, 1, 0, 2]  # ties go to even codes
    assert wire[3 * 32] == 127  # 128 bytes have room for three blocks; their scales follow
    wire = encoded_blocks(BlockFormat("mxfp8"), block * 256)
    values = wire[:6].view(torch.float8_e4m3fn).float().tolist()
    assert values == [128.0, -64.0, 256.0, 2.0, 1.0, 3.0]
    assert wire[3 * 32] == 127 + 1  # 508 is more than 448
    assert encoded_blocks(BlockFormat("mxint8"), torch.zeros(32)).eq(0).all()


@pytest.mark.parametrize("block", BLOCKS)
def test_parts_have_room_for_their_elements_and_lie_aligned(block: int) -> None:
    format = BlockFormat("mxint8", block)
    for numel in (0, 1, block - 1, block, block + 1, 1000, 10**6 + 7):
        blocks = -(-numel // block)
        nbytes = format.nbytes(numel)
        assert nbytes % 128 == 0
        assert blocks * (block + 1) <= nbytes < blocks * (block + 1) + 128


@pytest.mark.usefixtures("instruction_set")
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("name", "block"), [("mxint8", 32), ("mxfp8", 64), ("mxfp8", 128)])
def test_segments_of_any_length_land_at_their_blocks_and_gaps_are_zeros(
    name: str, block: int, dtype: torch.dtype, threads: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    format = BlockFormat(name, block, "stochastic")  # type: ignore[arg-type]
    counts = [0, 1, block - 1, block, block + 1, 40 * block + 3, 3, 0, 20_000, 900_001, block]
    gaps = [1, 0, 0, 2, 0, 100, 0, 0, 1, 0, 3]
    tensors = [
        torch.randn(start + count, generator=generator).to(dtype)[start:]  # anywhere in a vector
        for start, count in enumerate(counts)
    ]
    first, firsts = 0, []
    for count, gap in zip(counts, gaps, strict=True):
        first += gap
        firsts.append(first)
        first += -(-count // block)
    packed = torch.zeros(first + 5, block)
    for tensor, at in zip(tensors, firsts, strict=True):
        packed.view(-1)[at * block :][: tensor.numel()] = tensor.float()
    wire = aligned(format.nbytes(packed.numel()))
    segments = [BlockSegment(tensor, at) for tensor, at in zip(tensors, firsts, strict=True)]
    encode(format, segments[::-1], wire, seed=SEED, threads=threads)
    assert torch.equal(wire, expected_wire(format, packed))

    whole = torch.empty(packed.numel(), dtype=dtype)
    decode(format, wire, [BlockSegment(whole, 0)], threads=threads)
    back = [torch.full((8 + tensor.numel() + 8,), 7.0, dtype=dtype) for tensor in tensors]
    views = [each[8:-8] for each in back]
    decode(format, wire, list(map(BlockSegment, views, firsts)), threads=threads)
    for each, view, at in zip(back, views, firsts, strict=True):
        assert same_bits(view, whole[at * block :][: view.numel()])
        assert (each[:8] == 7).all()
        assert (each[-8:] == 7).all()


@pytest.mark.usefixtures("instruction_set")
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("parts", "numel"), [(1, 5), (2, 3001), (4, 64), (7, 1_300_003), (40, 3001)]
)
def test_sums_are_those_of_the_decoded_parts_in_their_order(
    parts: int, numel: int, name: str, dtype: torch.dtype, accumulate: bool, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    format = BlockFormat(name)  # type: ignore[arg-type]
    nbytes = format.nbytes(numel)
    wires = aligned(parts * nbytes)
    decoded = torch.empty(parts, numel)
    for part in range(parts):
        wire = wires[part * nbytes :][:nbytes]
        source = torch.randn(numel, generator=generator) * (1.0, 0.0, 2.0**-120)[part % 3]
        encode(format, [BlockSegment(source, 0)], wire)
        decode(format, wire, [BlockSegment(decoded[part], 0)])
    before = torch.randn(numel, generator=generator).to(dtype)
    total = decoded[0].clone()
    for part in range(1, parts):
        total += decoded[part]
    unscaled = total.clone()
    total *= 0.3
    expected = (before.float() + total if accumulate else total).to(dtype)

    destination = before.clone()
    nonfinite = torch.zeros(1, dtype=torch.int32)
    decode_sum(
        format, wires, parts, destination,
        scale=0.3, accumulate=accumulate, nonfinite=nonfinite, threads=2,
    )  # fmt: skip
    assert same_bits(destination, expected)
    assert nonfinite.item() == 0

    for scale, sums in ((1.0, unscaled), (0.3, total)):  # stored as they are summed
        stored = torch.empty(numel)
        decode_sum(format, wires, parts, stored, scale=scale, threads=2)
        assert same_bits(stored, sums)


# From 4 MiB on, results go past the caches, to where vectors are aligned.
@pytest.mark.usefixtures("instruction_set")
@pytest.mark.parametrize("dtype", FLOATS[:2])
@pytest.mark.parametrize("name", NAMES)
def test_runs_too_large_for_the_caches(name: str, dtype: torch.dtype, seed: int) -> None:
    format, times = BlockFormat(name), 270  # type: ignore[arg-type]
    pattern = torch.randn(500 * 32, generator=torch.Generator().manual_seed(seed)).to(dtype)
    codes, scales = encoded(name, pattern.double().view(-1, 32))
    values = values_of(name, codes, scales).float().view(-1).repeat(times)
    nbytes = format.nbytes(values.numel())
    expected = wire_of(codes.repeat(times, 1), scales.repeat(times), nbytes)
    assert nbytes > 4 << 20

    wires = aligned(2 * nbytes)
    for wire in wires.view(2, -1):
        encode(format, [BlockSegment(pattern.repeat(times), 0)], wire, threads=2)
        assert torch.equal(wire, expected)
    for lead in (16, 1):  # at a vector's place, and not
        room = torch.full((lead + values.numel() + 8,), 7.0, dtype=dtype)
        decode(format, wires[:nbytes], [BlockSegment(room[lead:-8], 0)])
        assert same_bits(room[lead:-8], values.to(dtype))
        sums = torch.full((lead + values.numel() + 8,), 7.0)
        decode_sum(format, wires, 2, sums[lead:-8], threads=2)
        assert same_bits(sums[lead:-8], values + values)
        for edge in (room[:lead], room[-8:], sums[:lead], sums[-8:]):
            assert (edge == 7).all()


@pytest.mark.parametrize("name", NAMES)
def test_a_nan_in_one_part_is_in_the_sum_and_in_the_flag(name: str) -> None:
    format = BlockFormat(name)  # type: ignore[arg-type]
    nbytes = format.nbytes(100)
    wires = aligned(2 * nbytes)
    bad = torch.ones(100)
    bad[40] = torch.inf
    stats = WireStats()
    encode(format, [BlockSegment(torch.ones(100), 0)], wires[:nbytes], stats=stats)
    encode(format, [BlockSegment(bad, 0)], wires[nbytes:], stats=stats)
    assert stats.flagged == 1
    destination = torch.empty(100)
    nonfinite = torch.zeros(1, dtype=torch.int32)
    decode_sum(format, wires, 2, destination, nonfinite=nonfinite)
    assert nonfinite.item() == 1
    assert destination.isnan().nonzero().view(-1).tolist() == list(range(32, 64))


@pytest.mark.parametrize(
    ("key", "counter", "words"),
    [  # the known answers that Random123 is published with
        (0, 0, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ],
)
def test_the_reference_draws_the_published_words(key: int, counter: int, words: list[int]) -> None:
    assert philox(key, np.array([counter], dtype=np.uint64)).tolist() == [words]


@pytest.mark.parametrize("name", NAMES)
def test_stochastic_rounding_is_unbiased(name: str) -> None:
    """The mean of n roundings has a standard deviation of at most half a step / sqrt(n). Six of them are allowed."""
    seeds = 4096
    format = BlockFormat(name, 32, "stochastic")  # type: ignore[arg-type]
    block = torch.cat([torch.tensor([1.9]), torch.linspace(-1.3, 1.7, 31)])
    wire, decoded, total = aligned(128), torch.empty(32), torch.zeros(32, dtype=torch.float64)
    for seed in range(seeds):
        encode(format, [BlockSegment(block, 0)], wire, seed=seed)
        decode(format, wire, [BlockSegment(decoded, 0)])
        total += decoded
    step = 2.0**-6 if name == "mxint8" else 2.0**-3  # of E4M3 between 1 and 2
    tolerance = 6 * step / 2 / seeds**0.5
    assert ((total / seeds - block.double()).abs() <= tolerance).all()
    assert len(decoded.unique()) > 10


def test_stochastic_rounding_depends_on_the_seed_and_the_place_alone() -> None:
    format = BlockFormat("mxint8", 32, "stochastic")
    values = torch.full((640,), 0.7)
    values[::32] = 1.9
    wires = [aligned(format.nbytes(640)) for _ in range(3)]
    encode(format, [BlockSegment(values, 0)], wires[0], seed=5)
    parts = [BlockSegment(part, 2 * i) for i, part in enumerate(values.split(64))]
    encode(format, parts, wires[1], seed=5)
    encode(format, parts, wires[2], seed=6)
    assert torch.equal(wires[0], wires[1])
    assert not torch.equal(wires[0], wires[2])


@pytest.mark.usefixtures("instruction_set")
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("name", NAMES)
def test_a_processor_that_flushes_subnormals_writes_the_same(
    name: str, rounding: str, seed: int
) -> None:
    blocks = hard_blocks(5000, 32, torch.Generator().manual_seed(seed))
    format = BlockFormat(name, 32, rounding)  # type: ignore[arg-type]
    decoded = [torch.empty_like(blocks) for _ in range(2)]
    wires = [encoded_blocks(format, blocks)]
    decode(format, wires[0], [BlockSegment(decoded[0], 0)])
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush subnormals")
    try:
        wires.append(encoded_blocks(format, blocks))
        decode(format, wires[1], [BlockSegment(decoded[1], 0)])
    finally:
        torch.set_flush_denormal(False)
    assert torch.equal(*wires)
    assert same_bits(*decoded)


def test_work_on_a_stream_is_done_when_its_event_fires() -> None:
    format, stream = BlockFormat("mxfp8"), _C.Stream()
    source, wire, back = torch.randn(1000), aligned(format_bytes := 1152), torch.empty(1000)
    assert format.nbytes(1000) == format_bytes
    encode(format, [BlockSegment(source, 0)], wire, stream=stream)
    decode(format, wire, [BlockSegment(back, 0)], stream=stream)
    stream.record().wait()
    assert torch.allclose(back, source, rtol=2**-4, atol=2**-10)


def test_stats_add_up_until_they_are_reset() -> None:
    format, stats, wire = BlockFormat("mxint8"), WireStats(), aligned(128)
    encode(format, [BlockSegment(torch.full((32,), 1.01), 0)], wire, stats=stats)
    assert stats.bound == 2**-7
    seen = stats.seen
    assert 0 < seen <= stats.bound
    encode(format, [BlockSegment(torch.full((32,), 0.01), 0)], wire, stats=stats)
    assert (stats.bound, stats.seen) == (2**-7, seen)
    encode(format, [BlockSegment(torch.full((32,), torch.nan), 0)], wire, stats=stats)
    encode(format, [BlockSegment(torch.full((64,), torch.nan), 0)], wire, stats=stats)
    assert stats.flagged == 3
    stats.reset()
    assert (stats.bound, stats.seen, stats.flagged) == (0.0, 0.0, 0)
    assert repr(stats) == "WireStats(bound=0, seen=0, flagged=0)"


def test_a_format_is_a_value() -> None:
    format = BlockFormat("mxint8")
    assert format == BlockFormat("mxint8", 32, "nearest")
    assert hash(format) == hash(BlockFormat("mxint8"))
    with pytest.raises(FrozenInstanceError):
        format.block = 64  # type: ignore[misc]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("int8",), 'BlockFormat: name is \'int8\'; accepted: "mxint8" and "mxfp8"'),
        (("mxint8", 16), "BlockFormat: block is 16; accepted: 32, 64 and 128"),
        (("mxint8", True), "BlockFormat: block is True"),
        (("mxint8", 32, "up"), "BlockFormat: rounding is 'up'; accepted"),
    ],
)
def test_impossible_formats_are_refused(arguments: tuple[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BlockFormat(*arguments)  # type: ignore[arg-type]


FORMAT = BlockFormat("mxint8")
ONES = torch.ones(100)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda w: FORMAT.nbytes(-1), ValueError, "numel is -1"),
        (lambda w: encode("mxint8", [], w), TypeError, "format is a str; it must be a BlockFormat"),
        (lambda w: encode(FORMAT, [], [0]), TypeError, "encode: wire is a list"),
        (lambda w: encode(FORMAT, [], w.float()), TypeError, "encode: wire is torch.float32"),
        (lambda w: encode(FORMAT, [], w[::2]), TypeError, "flat contiguous"),
        (lambda w: encode(FORMAT, [], w[:100]), ValueError, "has 100 bytes"),
        (lambda w: encode(FORMAT, [], w[64:192]), ValueError, "not aligned to 128 bytes"),
        (lambda w: encode(FORMAT, [], w.to("meta")), TypeError, "wire is on meta"),
        (lambda w: encode(FORMAT, ONES, w), TypeError, "segments is a Tensor"),
        (lambda w: encode(FORMAT, [ONES], w), TypeError, r"segments\[0\] is a Tensor"),
        (lambda w: encode(FORMAT, [BlockSegment(ONES, -1)], w), ValueError, "first_block is -1"),
        (lambda w: encode(FORMAT, [BlockSegment(ONES, 4)], w), ValueError, "100 elements from block 4"),
        (lambda w: encode(FORMAT, [BlockSegment(ONES.double(), 0)], w), TypeError, "torch.float64"),
        (lambda w: encode(FORMAT, [BlockSegment(ONES[::2], 0)], w), ValueError, "not contiguous"),
        (
            lambda w: encode(FORMAT, [BlockSegment(ONES, 0), BlockSegment(ONES.half(), 4)], w),
            TypeError,
            "all must be of one dtype",
        ),
        (
            lambda w: encode(FORMAT, [BlockSegment(ONES, 3), BlockSegment(ONES, 0)], w),
            ValueError,
            "segments overlap at block 3",
        ),
        (lambda w: encode(FORMAT, [], w, seed=1 << 64), ValueError, "seed is 18446744073709551616"),
        (lambda w: encode(FORMAT, [], w, threads=0), ValueError, "threads is 0"),
        (lambda w: encode(FORMAT, [], w, stats=1), TypeError, "stats is a int"),
        (lambda w: encode(FORMAT, [], w, stats=WireStats("meta")), TypeError, "stats is on meta"),
        (lambda w: encode(FORMAT, [], w, stream=1), TypeError, "stream is a int"),
        (lambda w: decode(FORMAT, w, [BlockSegment(ONES, 99)]), ValueError, "from block 99"),
        (lambda w: decode_sum(FORMAT, w, 0, ONES), ValueError, "parts is 0"),
        (lambda w: decode_sum(FORMAT, w, 2, ONES), ValueError, r"wires has 256 bytes; 2 parts"),
        (lambda w: decode_sum(FORMAT, w, 1, ONES.int()), TypeError, "destination is torch.int32"),
    ],
)  # fmt: skip
def test_wrong_arguments_are_refused_with_a_sentence(call, error, message) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(error, match=message):
        call(aligned(256))
