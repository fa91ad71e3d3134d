"""What nvcc makes of the CUDA kernels, executed on the CPU, against the CPU executors.

Elsewhere tests walk the kernels' code thread by thread, as a C++ compiler for CPUs understands it. Here the machine of
`support/ptx_machine.py` runs the instructions that the extension has for a GPU: its conversions, the exchanges of a
warp, the atomics, and what a thread makes of its place in the launch.

A NaN is any NaN, as in the comparisons of what Triton's compiler makes.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import c_void_p

import pytest
import torch
from torch import Tensor

from shardcomm import _C
from shardcomm.arguments.dtype import core_dtype
from shardcomm.copy.plan import CopyPlan
from shardcomm.copy.segment import ZEROS, Segment
from support.awkward_floats import every_16_bit_pattern, mixed, shuffled_floats
from support.kernel_arguments import MOST_SOURCES, OPERANDS, Reduction, Tile, operands
from support.played_kernels import TYPE_NAMES, flags, launch
from support.random_plans import FLOATS, SOME_PAIRS, bits, same_bits, values, whole

pytestmark = pytest.mark.slow

BITS = ["unsigned char", "unsigned short", "unsigned int", "unsigned long"]


def check_reduce(
    sources: Sequence[Tensor],
    before: Tensor,
    op: str = "sum",
    scale: float = 1.0,
    accumulate: bool = False,
    watched: bool = False,
    blocks: int = 1,
) -> None:
    """The kernel reduces into `before` what the CPU reduces into a copy of it."""
    src_dtype = sources[0].dtype
    by_cpu, compiled = before.clone(), before
    flag, expected_flag = flags()
    addresses = [source.data_ptr() for source in sources]
    _C.reduce(
        by_cpu.data_ptr(), core_dtype(by_cpu.dtype), scale, accumulate, addresses,
        core_dtype(src_dtype), getattr(_C.RedOp, op), by_cpu.numel(),
        nonfinite=expected_flag.data_ptr() if watched else 0,
    )  # fmt: skip
    divisor = len(sources) if op == "avg" else 1
    reduction = Reduction(
        sources=(c_void_p * MOST_SOURCES)(*addresses),
        num_sources=len(sources),
        dst=compiled.data_ptr(),
        count=compiled.numel(),
        divisor=divisor,
        mean=1 / divisor,
        scale=scale,
        accumulate=accumulate,
        is_whole=all(address % 16 == 0 for address in [*addresses, compiled.data_ptr()]),
        nonfinite=flag.data_ptr() if watched else None,
    )
    types = f"{TYPE_NAMES[src_dtype]}, {TYPE_NAMES[before.dtype]}"
    kernel = f"reduce_run<{types}, {op.title() if op != 'avg' else 'Sum'}>"
    launch(kernel, blocks, [reduction], sources, [compiled, flag])
    assert same_bits(compiled, by_cpu)
    assert flag == expected_flag


# More than one pass of a block, which takes four vectors a thread; vectors and some elements that are left.
COUNTS = {torch.float32: 4096 + 2051, torch.bfloat16: 8192 + 2053, torch.float16: 8192 + 2053}


@pytest.mark.parametrize("dst_dtype", FLOATS)
@pytest.mark.parametrize("src_dtype", FLOATS)
def test_floats_are_reduced_as_by_the_cpu(src_dtype: torch.dtype, dst_dtype: torch.dtype) -> None:
    for number in (1, 2, 3, 4, 5, 9):
        for count, misalignment, blocks in ((COUNTS[src_dtype], 0, 1), (601, 0, 3), (601, 3, 2)):
            sources = [mixed(count, src_dtype, k) for k in range(number)]
            sources[-1] = mixed(count, src_dtype, number, misalignment)
            before = mixed(count, dst_dtype, number + 1)
            check_reduce(sources, before, blocks=blocks)
            check_reduce(sources, before, "avg", 0.3, accumulate=True, watched=True, blocks=blocks)


@pytest.mark.parametrize("op", ["max", "min"])
@pytest.mark.parametrize("dtype", FLOATS)
def test_the_extremes_of_floats_are_those_of_the_cpu(dtype: torch.dtype, op: str) -> None:
    for number in (2, 3, 9):
        sources = [mixed(2051, dtype, k) for k in range(number)]
        check_reduce(sources, torch.zeros(2051, dtype=dtype), op, watched=True)


@pytest.mark.parametrize("dtype", [torch.float64, torch.uint8, torch.int32, torch.int64])
def test_other_elements_are_reduced_as_by_the_cpu(dtype: torch.dtype) -> None:
    for number in (1, 2, 3, 4, 9):
        for op in ("sum", "avg", "max", "min"):
            sources = [mixed(1027, dtype, k) for k in range(number)]
            watched = dtype.is_floating_point
            check_reduce(sources, mixed(1027, dtype, 9), op, accumulate=True, watched=watched)
            check_reduce([s[1:] for s in sources], mixed(1026, dtype, 9), op)


def test_many_sources_are_reduced_as_by_the_cpu() -> None:
    # Of more than 28, a thread takes one element at a time.
    for number in (8, 17, 27, 28, 29, 64, 100, 129, 200, MOST_SOURCES):
        sources = [values(301, torch.bfloat16, k) for k in range(number)]
        check_reduce(sources, values(301, torch.float32, 300), "avg", blocks=2)


@pytest.mark.parametrize("dtype", FLOATS)
def test_the_flag_of_a_reduction_is_set_by_any_element_that_is_not_finite(
    dtype: torch.dtype,
) -> None:
    for number in (1, 2, 3, 4, 5):
        for at in (*range(8), 2043, 2044, 2050):  # the elements of a vector, and behind the last
            for value in (-torch.finfo(dtype).max, (-1.0) ** at * float("inf")):
                sources = [torch.ones(2051, dtype=dtype) for _ in range(number)]
                sources[-1][at] = value
                check_reduce(sources, torch.zeros(2051, dtype=dtype), watched=True)


def check_run(source: Tensor, destination: Tensor, name: str, blocks: int = 1) -> None:
    """Like the launches of convert_cuda."""
    n = source.numel()
    plan = CopyPlan(tuple(whole(n)), source.dtype, destination.dtype)
    by_cpu = destination.clone()
    plan.run([source], [by_cpu])
    launch(
        f"copy_run<{name}>",
        blocks,
        [source.data_ptr(), destination.data_ptr(), n],
        [source],
        [destination],
    )
    if source.dtype == destination.dtype:
        assert torch.equal(bits(destination), bits(by_cpu))
    else:
        assert same_bits(destination, by_cpu)


@pytest.mark.parametrize(
    ("src_dtype", "dst_dtype"), [(src, dst) for src in FLOATS for dst in FLOATS if src != dst]
)
def test_every_conversion_is_the_cpus(src_dtype: torch.dtype, dst_dtype: torch.dtype) -> None:
    narrow = src_dtype != torch.float32
    name = f"Converted<{TYPE_NAMES[src_dtype]}, {TYPE_NAMES[dst_dtype]}>"
    source = every_16_bit_pattern().view(src_dtype) if narrow else shuffled_floats()[:200_000]
    check_run(source.clone(), torch.zeros(len(source), dtype=dst_dtype), name, blocks=2)
    for source_at, destination_at in ((0, 0), (3, 3), (1, 0), (4, 8)):
        for count in (0, 5, 1000, 5000):
            check_run(
                source[source_at:][:count],
                torch.zeros(count + destination_at, dtype=dst_dtype)[destination_at:],
                name,
            )


@pytest.mark.parametrize("name", BITS)
def test_runs_are_moved_as_by_the_cpu(name: str) -> None:
    dtype = [torch.uint8, torch.bfloat16, torch.float32, torch.int64][BITS.index(name)]
    source = values(40_000 // dtype.itemsize, dtype, 1)
    for source_at, destination_at in ((0, 0), (3, 3), (1, 0)):
        for count in (1, 900, len(source) - 3):
            destination = torch.zeros(count + destination_at, dtype=dtype)[destination_at:]
            check_run(source[source_at:][:count], destination, f"Moved<{name}>", blocks=2)


def check_tiles(
    segments: list[Segment],
    sources: list[Tensor | None],
    destinations: list[Tensor],
    scale: float = 1.0,
    accumulate: bool = False,
    blocks: int = 2,
) -> None:
    """Like the launches of CudaCopy, but that a tile has as many elements as on a CPU."""
    src_dtype = next(each.dtype for each in sources if each is not None)
    dst_dtype = destinations[0].dtype
    plan = CopyPlan(tuple(segments), src_dtype, dst_dtype)
    computes = src_dtype != dst_dtype or scale != 1.0 or accumulate
    by_cpu, compiled = ([each.clone() for each in destinations] for _ in range(2))
    flag, expected_flag = flags()
    plan.bind(sources, by_cpu).run(
        scale=scale, accumulate=accumulate, nonfinite=expected_flag if computes else None
    )
    addresses = [None if each is None else each.data_ptr() for each in [*sources, *compiled]]
    tiles = [Tile(src, len(sources) + dst, *rest) for src, dst, *rest in plan.core.tiles]
    tiles_there = torch.frombuffer(bytearray(b"".join(map(bytes, tiles))), dtype=torch.uint8)
    if computes:
        types = f"{TYPE_NAMES[src_dtype]}, {TYPE_NAMES[dst_dtype]}"
        name = f"Watched<{'Accumulated' if accumulate else 'Converted'}<{types}>>"
    else:
        name = f"Moved<{BITS[src_dtype.itemsize.bit_length() - 1]}>"
    table, capacity = operands(addresses)
    arguments = [
        tiles_there.data_ptr(),
        len(tiles),
        table,
        scale,
        flag.data_ptr() if computes else 0,
    ]
    reads = [tiles_there, *[each for each in sources if each is not None]]
    kernel = f"copy_tiles<{name}, {capacity}>"
    launch(kernel, blocks, arguments, reads, [*compiled, flag])
    for result, expected in zip(compiled, by_cpu, strict=True):
        if computes:
            assert same_bits(result, expected)
        else:
            assert torch.equal(bits(result), bits(expected))
    assert flag == expected_flag


@pytest.mark.parametrize("dtypes", SOME_PAIRS)
def test_tiles_are_copied_as_by_the_cpu(dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    src_dtype, dst_dtype = dtypes
    for odd in ("rows", "src_offset", "dst_offset", "src_pitch", "dst_pitch"):
        for count in (1, 3):
            segments, end = [], 0
            for k, cols in enumerate((5, 16, 63, 2064, 17)):
                even = Segment([0, 1, ZEROS, 0, 2][k], 0, 0, 4096, end, 4096, count, cols)
                segments.append(even._replace(**{odd: getattr(even, odd) + 1}))
                end += 4 * 4096 + 16
            sources = [values(4 * 4096 + 32, src_dtype, 1), values(4 * 4096, src_dtype, 2), None]
            destinations = [values(end, dst_dtype, 3)]
            check_tiles(segments, sources, destinations)
            if src_dtype.is_floating_point:
                check_tiles(segments, sources, destinations, 0.3, accumulate=True)


def test_many_operands_are_copied_as_by_the_cpu() -> None:
    number = OPERANDS[0] + 7
    segments = [Segment(k, 0, 0, 9, 9 * k, 9, 1, 9) for k in range(number)]
    sources = [values(9, torch.float32, k) for k in range(number)]
    check_tiles(segments, list(sources), [torch.zeros(9 * number)])


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("dtype", FLOATS)
def test_the_flag_of_a_copy_is_set_by_any_element_that_is_not_finite(
    dtype: torch.dtype, accumulate: bool
) -> None:
    destination = torch.zeros(2051, dtype=dtype)
    in_vectors = [(0, at) for at in (*range(8), 2043, 2044, 2050)]
    as_elements = [
        (1, at) for at in range(0, 2051, 256)
    ]  # a thread's, of a source that is misaligned
    for offset, at in in_vectors + as_elements:
        for value in (torch.finfo(dtype).max, (-1.0) ** at * float("inf")):
            source = torch.ones(2052)[offset:]
            source[at] = value
            check_tiles(whole(2051), [source], [destination], -1.0, accumulate)


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("dst_dtype", FLOATS)
@pytest.mark.parametrize("src_dtype", FLOATS)
def test_scaled_tiles_are_rounded_as_by_the_cpu(
    src_dtype: torch.dtype, dst_dtype: torch.dtype, accumulate: bool
) -> None:
    n = 20_011  # two tiles
    source, destination = shuffled_floats()[:n].to(src_dtype), mixed(n, dst_dtype, 7)
    for scale in (0.75, 1 / 3, 2.0**-130):
        check_tiles(whole(n), [source], [destination], scale, accumulate, blocks=1)
