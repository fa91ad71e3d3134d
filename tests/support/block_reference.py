"""Block formats from their definition, in float64, where all of it is exact; and blocks that are hard to encode."""

from __future__ import annotations

import random

import numpy as np
import torch
from torch import Tensor

from shardcomm.copy.blocks import BlockFormat, BlockSegment, encode

LIMITS = {"mxint8": 127 / 64, "mxfp8": 448.0}
WIRE_ALIGN = 128
FORMATS = [
    BlockFormat(name, block, rounding)  # type: ignore[arg-type]
    for name in ("mxint8", "mxfp8")
    for block in (32, 64, 128)
    for rounding in ("nearest", "stochastic")
]


def rows(segments: list[BlockSegment]) -> list[tuple[int, int, int]]:
    """The segments as the core's own functions take them."""
    return [(s.tensor.data_ptr(), s.tensor.numel(), s.first_block) for s in segments]


def aligned(nbytes: int) -> Tensor:
    """Bytes that begin where communication memory may begin; all of them ones, which nobody has written."""
    room = torch.full((nbytes + WIRE_ALIGN,), 255, dtype=torch.uint8)
    start = -room.data_ptr() % WIRE_ALIGN
    return room[start : start + nbytes]


def philox(key: int, counters: np.ndarray) -> np.ndarray:
    """Philox4x32-10 as Salmon et al. define it: four words of each counter of 64 bits, as uint64 of shape (n, 4)."""
    low = np.uint64(0xFFFFFFFF)
    shift = np.uint64(32)
    c = [counters & low, counters >> shift, np.zeros_like(counters), np.zeros_like(counters)]
    k = [key & 0xFFFFFFFF, key >> 32]
    for _ in range(10):
        first, second = np.uint64(0xD2511F53) * c[0], np.uint64(0xCD9E8D57) * c[2]
        c = [
            (second >> shift) ^ c[1] ^ np.uint64(k[0]),
            second & low,
            (first >> shift) ^ c[3] ^ np.uint64(k[1]),
            first & low,
        ]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return np.stack(c, axis=1)


def random_words(seed: int, elements: int, first: int = 0) -> Tensor:
    """The upper 24 bits of the word of each element from `first`, a multiple of 4, on."""
    counters = np.arange(first // 4, first // 4 + -(-elements // 4), dtype=np.uint64)
    words = philox(seed, counters).reshape(-1)[:elements]
    return torch.from_numpy((words >> np.uint64(8)).astype(np.int64))


def scales_of(name: str, blocks: Tensor) -> Tensor:
    """The smallest s with max |element| <= limit * 2^(s - 127), found by trying; 255 for NaN and Inf. Int64."""
    largest = blocks.abs().amax(1)
    guess = torch.frexp(largest / LIMITS[name])[1].to(torch.int64) + 127
    scales = torch.full_like(guess, 254)
    for s in (guess + 1, guess, guess - 1, guess - 2):
        fits = largest <= LIMITS[name] * torch.ldexp(torch.ones_like(largest), s - 127)
        scales = torch.where(fits & (s >= 0) & (s <= 254), s, scales)
    scales = torch.where(largest == 0, 0, scales)
    least = largest <= LIMITS[name] * 2.0**-127
    scales = torch.where(least, 0, scales)
    return torch.where(largest.isfinite(), scales, 255)


def encoded(name: str, blocks: Tensor, random: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Codes and scales, as uint8, of float64 blocks of shape (n, block). `random`: as `random_words` gives them."""
    scales = scales_of(name, blocks)
    flagged = (scales == 255)[:, None]
    units = torch.ldexp(torch.ones(len(blocks), dtype=torch.float64), scales - 127)[:, None]
    y = torch.where(flagged, 0.0, blocks / units)
    if name == "mxint8":
        y = y * 64
        if random is None:
            whole = y.round()  # ties to even
        else:
            down = y.abs().floor()
            up = random.view_as(y) + 1 <= (y.abs() - down) * 2.0**24
            whole = (down + up).copysign(y)
        codes = whole.clamp(-127, 127).to(torch.int8).view(torch.uint8)
    else:
        if random is not None:
            exponent = torch.frexp(y)[1].clamp(min=-5) - 1
            step = torch.ldexp(torch.ones_like(y), exponent - 3)
            down = (y.abs() / step).floor()
            up = random.view_as(y) + 1 <= (y.abs() / step - down) * 2.0**24
            y = ((down + up) * step).copysign(y)
        codes = y.to(torch.float32).to(torch.float8_e4m3fn).view(torch.uint8)
    return torch.where(flagged, 0, codes), scales.to(torch.uint8)


def values_of(name: str, codes: Tensor, scales: Tensor) -> Tensor:
    """The float64 values of codes of shape (n, block)."""
    units = torch.ldexp(torch.ones(len(scales), dtype=torch.float64), scales.to(torch.int64) - 127)
    if name == "mxint8":
        values = codes.view(torch.int8).double() / 64
    else:
        values = codes.view(torch.float8_e4m3fn).float().double()
    return torch.where((scales == 255)[:, None], torch.nan, values * units[:, None])


def bounds_of(name: str, blocks: Tensor, scales: Tensor, stochastic: bool) -> Tensor:
    """The bound of each block that is not flagged; 0 of one that is. Float64."""
    one = torch.ones(len(blocks), dtype=torch.float64)
    largest = blocks.abs().amax(1)
    exponents = scales.to(torch.int64) - 127
    if name == "mxint8":
        bounds = torch.ldexp(one, exponents - 7)
        bounds = torch.where(largest > 127 / 64 * 2.0**127, 2 * bounds, bounds)
    else:
        bounds = torch.maximum(largest * 2.0**-4, torch.ldexp(one, exponents - 10))
    if stochastic:
        saturates = (largest > 127 / 64 * 2.0**127) & (name == "mxint8")
        bounds = torch.where(saturates, bounds, 2 * bounds)
    return torch.where(scales == 255, 0.0, bounds)


def wire_of(codes: Tensor, scales: Tensor, nbytes: int) -> Tensor:
    """A wire part: all blocks that it has room for, and zeros behind the scales."""
    block = codes.shape[1]
    room = nbytes // (block + 1)
    wire = torch.zeros(nbytes, dtype=torch.uint8)
    wire[: codes.numel()] = codes.reshape(-1)
    wire[room * block : room * block + len(scales)] = scales
    return wire


def hard_blocks(count: int, block: int, generator: torch.Generator) -> Tensor:
    """Float32 blocks of shape (count, block), of nine kinds in equal shares."""

    def integers(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator)

    def floats(bits: Tensor) -> Tensor:
        return bits.to(torch.int32).view(torch.float32)

    n = -(-count // 9)
    bits = integers(-(2**31), 2**31, n, block)
    anything = floats(bits)
    finite = floats(torch.where((bits & 0x7F800000) == 0x7F800000, bits & ~0x40000000, bits))
    # One exponent, and those a little below it, over the whole range.
    exponents = (integers(0, 255, n, 1) - integers(0, 12, n, block)).clamp(min=0)
    near = floats((bits & ~0x7F800000) | exponents << 23)
    subnormal = floats(bits & ~0x7F800000)
    # Ties, and their neighbours: multiples of half a step of mxint8 and of mxfp8.
    largest = integers(1, 255, n, 1)
    halves = integers(-254, 255, n, block).double() / 2
    ties = torch.ldexp(halves, largest - 127 - 6).clamp(-3.4e38, 3.4e38).float()
    ties = floats(ties.view(torch.int32) + integers(-1, 2, n, block))
    eighths = integers(-32, 33, n, block).double() / 2
    coarse = torch.ldexp(eighths, largest - 127 - integers(0, 20, n, block))
    coarse = coarse.clamp(-3.4e38, 3.4e38).float()
    # One huge element among tiny ones.
    spike = floats((bits & ~0x7F800000) | integers(0, 40, n, block) << 23)
    spike[torch.arange(n), integers(0, block, n)] = floats(integers(0x40000000, 0x7F800000, n))
    # Limits of scales, and their neighbours; a number and its negative.
    limit = torch.where(integers(0, 2, n, 1) == 0, 0x7E0000, 0x600000)
    edge = (largest - integers(0, 2, n, block)) << 23 | limit
    edge = (edge + integers(-1, 2, n, block)).clamp(0, 0x7F7FFFFF)
    edges = floats(edge) * (1 - 2 * integers(0, 2, n, block)).float()
    top = floats((integers(0x7F7DFFF0, 0x7F800000, n, block)).to(torch.int64))
    all_kinds = torch.cat([anything, finite, near, subnormal, ties, coarse, spike, edges, top])
    special = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0, -0.0])
    chosen = integers(0, 40 * block, len(all_kinds), block)  # in one of about eight blocks
    all_kinds = torch.where(chosen < 5, special[chosen.clamp(max=4)], all_kinds)
    return all_kinds[torch.randperm(len(all_kinds), generator=generator)[:count]]


def hard_segments(format: BlockFormat, dtype: torch.dtype, seed: int) -> list[BlockSegment]:
    """Segments of hard blocks, with gaps between some of them."""
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    segments, first = [], 0
    for count in (0, 1, format.block - 1, 3 * format.block, 2100, 33):  # a tile has 2048
        first += rng.choice([0, 0, 1, 70])
        blocks = hard_blocks(-(-count // 32), 32, generator) if count else torch.empty(0)
        segments.append(BlockSegment(blocks.view(-1)[:count].to(dtype), first))
        first += -(-count // format.block)
    return segments


def encoded_parts(
    format: BlockFormat, parts: int, numel: int, generator: torch.Generator
) -> Tensor:
    """The wires of ranks, one behind the other, each of hard blocks as the CPU encodes them."""
    nbytes = format.nbytes(numel)
    wires = aligned(parts * nbytes)
    for part in range(parts):
        numbers = hard_blocks(-(-numel // 32), 32, generator).view(-1)[:numel]
        encode(format, [BlockSegment(numbers, 0)], wires[part * nbytes :][:nbytes])
    return wires


def fractions_as_the_random_numbers(name: str, seed: int) -> tuple[Tensor, Tensor]:
    """2048 elements in blocks of 32, and their codes by stochastic rounding.

    The fraction of every other element equals the element's random number, and is rounded down; the others' are the
    next larger ones, and are rounded up. Of the first element of a block, which gives the scale, the code is -1.
    """
    largest, step = {"mxint8": (1.5, 2.0**-6), "mxfp8": (256.0, 2.0**-9)}[name]
    above = torch.arange(2048) % 2
    elements = ((random_words(seed, 2048) + above) * step * 2.0**-24).float()
    elements[::32] = largest  # from which each block's scale is 1
    above[::32] = -1
    return elements, above
