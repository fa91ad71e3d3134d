"""The Triton executor of block formats: for GPUs that the compiled extension does not serve.

A program has up to 2048 elements of one segment: some blocks, each a row. What it computes of each stands in
`block_element_triton.py`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from shardcomm import _C
from shardcomm.copy.block_element_triton import (
    bound_of,
    from_units,
    in_units,
    philox,
    round_float,
    round_int,
    scale_of,
    value_of_code,
)
from shardcomm.copy.triton import (
    TRITON_FLOATS,
    Table,
    check_device,
    round_to,
    signed,
    to_float32,
)
from shardcomm.stream.streams import AnyStream

_TILE_ELEMENTS = 2048

Addresses = Sequence[tuple[int, int, int]]
"""Of each segment its address, its number of elements, and its first block."""


def encode(
    code: str,
    block: int,
    stochastic: bool,
    segments: Addresses,
    dtype: _C.DType,
    wire: Tensor,
    seed: int,
    stats: int,
    stream: AnyStream | None,
) -> None:
    """Queues what `encode_cpu` of `csrc/include/shardcomm/blocks.h` does, on `stream` or the current one.

    `stats` is the address of three numbers, or 0. Arguments have been checked.
    """
    check_device(wire.device)
    blocks = wire.numel() // (block + 1)
    rows = _tiles_of_wire(segments, dtype, block, blocks)
    tiles = Table(torch.tensor(rows, dtype=torch.int64), wire.device)

    def launch() -> None:
        wire[blocks * (block + 1) :].zero_()
        _encode_tile[(len(rows),)](
            tiles.on_current_stream(),
            wire,
            blocks,
            ctypes.c_int32(seed & 0xFFFFFFFF).value,
            ctypes.c_int32(seed >> 32).value,
            signed(stats),
            SRC=TRITON_FLOATS[dtype],
            IS_INT=code == "mxint8",
            STOCHASTIC=stochastic,
            TALLIES=stats != 0,
            BLOCK=block,
            ROWS=_TILE_ELEMENTS // block,
            enable_fp_fusion=False,
        )

    if blocks > 0:
        _run(launch, wire.device, stream)


def decode(
    code: str,
    block: int,
    wire: Tensor,
    segments: Addresses,
    dtype: _C.DType,
    stream: AnyStream | None,
) -> None:
    """Queues what `decode_cpu` does."""
    _sum(code, block, wire, wire.numel(), 1, segments, dtype, 1.0, False, 0, stream)


def decode_sum(
    code: str,
    block: int,
    wires: Tensor,
    parts: int,
    destination: Tensor,
    dtype: _C.DType,
    scale: float,
    accumulate: bool,
    nonfinite: int,
    stream: AnyStream | None,
) -> None:
    """Queues what `decode_sum_cpu` does. `nonfinite` is the address of a flag, or 0."""
    segments = [(destination.data_ptr(), destination.numel(), 0)]
    part_bytes = wires.numel() // parts
    scale = ctypes.c_float(scale).value
    _sum(
        code, block, wires, part_bytes, parts, segments, dtype, scale, accumulate, nonfinite, stream
    )


def _sum(
    code: str,
    block: int,
    wires: Tensor,
    part_bytes: int,
    parts: int,
    segments: Addresses,
    dtype: _C.DType,
    scale: float,
    accumulate: bool,
    nonfinite: int,
    stream: AnyStream | None,
) -> None:
    check_device(wires.device)
    rows = [tile for segment in segments for tile in _tiles_of(segment, dtype, block)]
    if not rows:
        return
    tiles = Table(torch.tensor(rows, dtype=torch.int64), wires.device)

    def launch() -> None:
        _sum_tile[(len(rows),)](
            tiles.on_current_stream(),
            wires,
            part_bytes,
            part_bytes // (block + 1),
            parts,
            scale,
            signed(nonfinite),
            DST=TRITON_FLOATS[dtype],
            IS_INT=code == "mxint8",
            ACCUMULATE=accumulate,
            WATCHED=nonfinite != 0,
            BLOCK=block,
            ROWS=_TILE_ELEMENTS // block,
            enable_fp_fusion=False,
        )

    _run(launch, wires.device, stream)


def _run(launch: Callable[[], object], device: torch.device, stream: AnyStream | None) -> None:
    with torch.accelerator.device_index(device.index):
        stream.enqueue(launch) if stream is not None else launch()


def _tiles_of(
    segment: tuple[int, int, int], dtype: _C.DType, block: int
) -> list[tuple[int, int, int, int]]:
    """Of each tile the address of its first element, how many it has, its first block, and how many blocks it has."""
    address, count, first_block = segment
    item_bytes = 4 if dtype == _C.DType.f32 else 2
    return [
        (
            signed(address + begin * item_bytes),
            elements := min(_TILE_ELEMENTS, count - begin),
            first_block + begin // block,
            -(-elements // block),
        )
        for begin in range(0, count, _TILE_ELEMENTS)
    ]


def _tiles_of_wire(
    segments: Addresses, dtype: _C.DType, block: int, blocks: int
) -> list[tuple[int, int, int, int]]:
    """The same, with tiles of no elements between the segments."""
    tiles = []
    at = 0
    for segment in [*sorted(segments, key=lambda s: s[2]), (0, 0, blocks)]:
        if segment[1] == 0 and segment[2] != blocks:
            continue
        most = _TILE_ELEMENTS // block
        tiles += [(0, 0, gap, min(most, segment[2] - gap)) for gap in range(at, segment[2], most)]
        tiles += _tiles_of(segment, dtype, block)
        at = segment[2] + -(-segment[1] // block)
    return tiles


@triton.jit(do_not_specialize=["seed_low", "seed_high", "stats"])
def _encode_tile(
    tiles,
    wire,
    wire_blocks,
    seed_low,
    seed_high,
    stats,
    SRC: tl.constexpr,
    IS_INT: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    TALLIES: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    tile = tiles + tl.program_id(0).to(tl.int64) * 4
    count = tl.load(tile + 1).to(tl.int32)
    at = tl.load(tile + 2)
    blocks = tl.load(tile + 3).to(tl.int32)
    row = tl.arange(0, ROWS)[:, None]
    index = row * BLOCK + tl.arange(0, BLOCK)[None, :]
    x = to_float32(_load(tl.load(tile), index, count, SRC, ROWS * BLOCK))

    magnitude = (x.to(tl.uint32, bitcast=True) & 0x7FFFFFFF).to(tl.int32)
    largest = tl.max(magnitude, 1)[:, None]
    flagged = largest >= 0x7F800000
    scale = scale_of(largest, IS_INT)
    FRACTION: tl.constexpr = 6 if IS_INT else 0
    y = tl.where(flagged, 0.0, in_units(x, scale, FRACTION))
    random = index
    if STOCHASTIC:
        element = at * BLOCK + index
        w0, w1, w2, w3 = philox(element // 4, seed_low, seed_high)
        which = (element % 4).to(tl.int32)
        word = tl.where(which < 2, tl.where(which == 0, w0, w1), tl.where(which == 2, w2, w3))
        random = (word >> 8).to(tl.int32)
    if IS_INT:
        code, error = round_int(y, random, STOCHASTIC)
    else:
        code, error = round_float(y, random, STOCHASTIC)

    inside = row < blocks
    tl.store(wire + (at * BLOCK + index), code.to(tl.uint8), mask=inside)
    stored = tl.where(flagged, 255, scale).to(tl.uint8)
    scales = (at * 0 + wire_blocks) * BLOCK  # in 64 bits, as `at` is
    tl.store(wire + (scales + at + row), stored, mask=inside)

    if TALLIES:
        counted = (row * BLOCK < count) & (flagged == 0)
        steps = tl.max(tl.abs(error).to(tl.int32, bitcast=True), 1)[:, None]
        seen = from_units(steps.to(tl.float32, bitcast=True), scale, FRACTION)
        seen = tl.where(counted, seen.to(tl.int32, bitcast=True), 0)
        bound = tl.where(counted, bound_of(largest, scale, IS_INT, STOCHASTIC), 0)
        numbers = stats.to(tl.int64).to(tl.pointer_type(tl.int32)) + tl.arange(0, 1)
        tl.atomic_max(numbers, tl.max(bound, 0))
        tl.atomic_max(numbers + 1, tl.max(seen, 0))
        nans = ((row * BLOCK < count) & flagged).to(tl.int32)
        tl.atomic_add(numbers + 2, tl.sum(nans, 0))


@triton.jit(do_not_specialize=["nonfinite"])
def _sum_tile(
    tiles,
    wires,
    part_bytes,
    wire_blocks,
    parts,
    scale,
    nonfinite,
    DST: tl.constexpr,
    IS_INT: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    WATCHED: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    tile = tiles + tl.program_id(0).to(tl.int64) * 4
    address = tl.load(tile)
    count = tl.load(tile + 1).to(tl.int32)
    at = tl.load(tile + 2)
    row = tl.arange(0, ROWS)[:, None]
    index = row * BLOCK + tl.arange(0, BLOCK)[None, :]
    code_at = at * BLOCK + index
    scale_at = (at * 0 + wire_blocks) * BLOCK + at + row  # in 64 bits, as `at` is
    has_block = row * BLOCK < count
    total = _decoded(wires + code_at, wires + scale_at, has_block, IS_INT)
    for _ in range(1, parts):
        code_at += part_bytes
        scale_at += part_bytes
        total += _decoded(wires + code_at, wires + scale_at, has_block, IS_INT)
    total = total * tl.full([1, 1], scale, tl.float32)
    if ACCUMULATE:
        total = to_float32(_load(address, index, count, DST, ROWS * BLOCK)) + total
    stored = round_to(total, DST)
    if WATCHED:
        is_finite = tl.abs(to_float32(stored)) < float("inf")
        flag = nonfinite.to(tl.int64).to(tl.pointer_type(tl.int32))
        tl.store(flag + 0 * index, 1, mask=(index < count) & (is_finite == 0))
    _store(address, index, count, stored, DST, ROWS * BLOCK)


@triton.jit
def _decoded(codes, scales, has_block, IS_INT: tl.constexpr):
    code = tl.load(codes, mask=has_block, other=0)
    scale = tl.load(scales, mask=has_block, other=0).to(tl.int32)
    FRACTION: tl.constexpr = 6 if IS_INT else 0
    return from_units(value_of_code(code, IS_INT), scale, FRACTION)


# Whole tiles at aligned addresses are read and written in vectors: a mask within a row would have Triton take element
# by element.
@triton.jit
def _load(address, index, count, TYPE: tl.constexpr, TILE: tl.constexpr):
    """The elements at `index` of the `count` that begin at `address`; zeros behind them."""
    first = address.to(tl.pointer_type(TYPE))
    if (count == TILE) & (address % 16 == 0):
        loaded = tl.load(tl.multiple_of(first, 16) + index)
    else:
        loaded = tl.load(first + index, mask=index < count, other=0)
    return loaded


@triton.jit
def _store(address, index, count, stored, TYPE: tl.constexpr, TILE: tl.constexpr):
    """Stores the first `count` elements from `address` on."""
    first = address.to(tl.pointer_type(TYPE))
    if (count == TILE) & (address % 16 == 0):
        tl.store(tl.multiple_of(first, 16) + index, stored)
    else:
        tl.store(first + index, stored, mask=index < count)
