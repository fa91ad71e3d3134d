"""What Triton's compiler makes of the kernels, executed on the CPU, against the CPU executor.

Triton's interpreter runs the kernels' Python: it fuses no product with a sum, and needs no alignment. Here the machine
of `support/ptx_machine.py` runs the instructions that the compiler makes for a GPU.

The PTX ISA leaves open which NaN an instruction computes. NVIDIA's GPUs have one, and a CPU keeps an operand's payload:
a comparison takes any NaN for any NaN, except of copies that only move.
"""

from __future__ import annotations

import ctypes
import random
from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shardcomm.arguments.dtype import core_dtype
from shardcomm.copy.blocks import BlockFormat, BlockSegment, decode, decode_sum, encode
from shardcomm.copy.plan import CopyPlan
from shardcomm.copy.segment import ZEROS, Segment
from shardcomm.copy.wire_stats import WireStats
from support.awkward_floats import awkward_floats, every_16_bit_pattern
from support.block_reference import FORMATS, aligned, hard_blocks, random_words, rows
from support.random_plans import FLOATS, RandomPlan, bits, plans, same_bits, values

pytest.importorskip("triton", reason="the Triton executor needs triton: pip install triton")

from support.played_triton import compiled_executors, played_gpu, why_not
from support.ptx_machine import Kernel
from support.ptx_memory import Memory, MemoryFault, Region
from support.ptx_operations import OPERATIONS, TYPES

pytestmark = [pytest.mark.skipif(bool(why_not()), reason=why_not()), pytest.mark.slow]

CPU = torch.device("cpu")
SEED = 0xFEDCBA9876543210


@pytest.fixture(scope="module")
def executors() -> Iterator[SimpleNamespace]:
    with compiled_executors() as modules:
        yield modules


def check_copy(
    executors: SimpleNamespace,
    segments: list[Segment],
    sources: list[Tensor | None],
    destinations: list[Tensor],
    scale: float = 1.0,
    accumulate: bool = False,
    watched: bool = False,
    capability: int = 90,
) -> None:
    """The compiled copy writes what the CPU executor writes, and touches nothing but the operands."""
    src_dtype = next((each.dtype for each in sources if each is not None), destinations[0].dtype)
    plan = CopyPlan(tuple(segments), src_dtype, destinations[0].dtype)
    by_cpu, compiled = ([each.clone() for each in destinations] for _ in range(2))
    flags = torch.zeros(2, dtype=torch.int32).split(1)
    plan.bind(sources, by_cpu).run(
        scale=scale, accumulate=accumulate, nonfinite=flags[0] if watched else None
    )
    with played_gpu(capability) as gpu:
        gpu.may_read(*sources)
        gpu.may_write(*compiled, flags[1])
        executors.triton.TritonCopy(
            plan.core,
            plan.source_pointers(sources, CPU),
            [each.data_ptr() for each in compiled],
            CPU,
        ).run(scale, accumulate, flags[1].data_ptr() if watched else 0)
    computes = src_dtype != destinations[0].dtype or scale != 1.0 or accumulate or watched
    for result, expected in zip(compiled, by_cpu, strict=True):
        if computes:
            assert same_bits(result, expected)
        else:
            assert torch.equal(bits(result), bits(expected))
    assert flags[1] == flags[0]


def whole(n: int) -> list[Segment]:
    return [Segment(0, 0, 0, n, 0, n, 1, n)]


@pytest.mark.parametrize("dst_dtype", FLOATS)
@pytest.mark.parametrize("src_dtype", FLOATS)
def test_every_conversion_is_the_cpus(
    executors: SimpleNamespace, src_dtype: torch.dtype, dst_dtype: torch.dtype
) -> None:
    narrow = src_dtype != torch.float32
    source = (
        every_16_bit_pattern().view(src_dtype) if narrow else awkward_floats()[::3].contiguous()
    )
    n = source.numel()
    check_copy(executors, whole(n), [source], [torch.zeros(n, dtype=dst_dtype)])


@pytest.mark.parametrize("dst_dtype", FLOATS)
def test_a_product_is_rounded_before_it_is_added(
    executors: SimpleNamespace, dst_dtype: torch.dtype
) -> None:
    source = awkward_floats()[::29].contiguous()
    n = source.numel()
    segments = [*whole(n), Segment(ZEROS, 0, 0, 9, n, 9, 1, 9)]
    destination = awkward_floats()[1 : 1 + n + 9].to(dst_dtype)
    for scale in (0.75, 1 / 3, 2.0**-130, -float("inf")):
        for accumulate in (False, True):
            check_copy(executors, segments, [source], [destination], scale, accumulate)
    numbers = torch.randn(n, generator=torch.Generator().manual_seed(1))
    check_copy(executors, segments, [numbers], [destination], 1 / 3, accumulate=True)


@settings(max_examples=25, deadline=None)
@given(
    plan=plans(),
    dtypes=st.sampled_from(
        [
            (torch.float32, torch.bfloat16),
            (torch.float16, torch.float32),
            (torch.uint8, torch.uint8),
            (torch.int64, torch.int64),
        ]
    ),
    accumulate=st.booleans(),
    missing=st.sampled_from([None, 0, 1]),
)
def test_random_plans_are_copied_as_by_the_cpu(
    executors: SimpleNamespace,
    plan: RandomPlan,
    dtypes: tuple[torch.dtype, torch.dtype],
    accumulate: bool,
    missing: int | None,
) -> None:
    segments, src_sizes, dst_sizes = plan
    sources: list[Tensor | None] = [
        None if i == missing else values(size, dtypes[0], seed=i)
        for i, size in enumerate(src_sizes)
    ]
    # Where a plan does not write, the comparison shows that nothing did.
    destinations = [values(size, dtypes[1], seed=9) for size in dst_sizes]
    adds = accumulate and dtypes[0] != dtypes[1]
    check_copy(executors, segments, sources, destinations, 0.3 if adds else 1.0, adds)


@pytest.mark.parametrize(
    "dtypes",
    [
        (torch.float32, torch.bfloat16),
        (torch.float16, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.float32, torch.float32),
        (torch.uint8, torch.uint8),
        (torch.int64, torch.int64),
    ],
)
def test_rows_of_any_alignment_in_vectors_and_what_is_left(
    executors: SimpleNamespace, dtypes: tuple[torch.dtype, torch.dtype]
) -> None:
    for odd in ("rows", "src_offset", "dst_offset", "src_pitch", "dst_pitch"):
        for count in (1, 3):
            segments, end = [], 0
            for cols in (5, 16, 17, 48, 63, 2064):
                even = Segment(0, 0, 32, 4096, end, 4096, count, cols)
                segments.append(even._replace(**{odd: getattr(even, odd) + 1}))
                end += 4 * 4096 + 16
            size = end + 4096
            sources: list[Tensor | None] = [values(4 * 4096 + 32, dtypes[0], 1)]
            check_copy(executors, segments, sources, [values(size, dtypes[1], 2)])


def test_a_plain_copy_keeps_the_payloads_of_nans(executors: SimpleNamespace) -> None:
    for dtype in FLOATS[1:]:
        source = every_16_bit_pattern().view(dtype)
        check_copy(executors, whole(2**16), [source], [torch.zeros_like(source)])


@pytest.mark.parametrize("dtype", FLOATS)
def test_the_flag_is_set_if_what_is_written_is_not_finite(
    executors: SimpleNamespace, dtype: torch.dtype
) -> None:
    segments = [Segment(0, 0, 0, 1000, 1, 1000, 1, 1000), Segment(1, 0, 0, 30, 1002, 30, 1, 30)]
    for value in (1.0, 1e5, float("nan"), float("inf"), -float("inf")):
        for at in (0, 999):
            source, before = torch.ones(1000), torch.ones(1100, dtype=dtype)
            source[at] = value
            before[0] = float("nan")  # not written
            check_copy(executors, segments, [source, None], [before], accumulate=True, watched=True)
            if dtype == torch.float32:
                check_copy(executors, segments, [source, None], [before], watched=True)


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


def check_blocks(
    executors: SimpleNamespace,
    format: BlockFormat,
    segments: list[BlockSegment],
    tallies: bool = True,
    capability: int = 90,
) -> Tensor:
    """The compiled executor makes the CPU's wire of the segments, and of that the CPU's elements. Returns the wire."""
    last = segments[-1]
    blocks = last.first_block + -(-last.tensor.numel() // format.block) + 3
    dtype, nbytes = core_dtype(last.tensor.dtype), format.nbytes(blocks * format.block)
    by_cpu, stats = aligned(nbytes), WireStats()
    encode(format, segments, by_cpu, seed=SEED, stats=stats)
    expected = [BlockSegment(torch.empty_like(s.tensor), s.first_block) for s in segments]
    decode(format, by_cpu, expected)

    wire, compiled_stats = aligned(nbytes), WireStats()
    blocks_triton = executors.blocks_triton
    with played_gpu(capability) as gpu:
        gpu.may_read(*[segment.tensor for segment in segments])
        gpu.may_write(wire, compiled_stats.numbers)
        blocks_triton.encode(
            format.name, format.block, format.rounding == "stochastic", rows(segments), dtype, wire,
            SEED, compiled_stats.numbers.data_ptr() if tallies else 0, None,
        )  # fmt: skip
    assert torch.equal(wire, by_cpu)
    assert torch.equal(compiled_stats.numbers, stats.numbers * tallies)

    results = [BlockSegment(torch.full_like(s.tensor, 3), s.first_block) for s in segments]
    with played_gpu(capability) as gpu:
        gpu.may_read(wire)
        gpu.may_write(*[result.tensor for result in results])
        blocks_triton.decode(format.name, format.block, wire, rows(results), dtype, None)
    for result, wanted in zip(results, expected, strict=True):
        assert same_bits(result.tensor, wanted.tensor)
    return wire


# A compilation takes half a second.
@pytest.mark.parametrize("format", [f for f in FORMATS if f.block != 64 or f.rounding != "nearest"])
def test_blocks_are_encoded_and_decoded_as_by_the_cpu(
    executors: SimpleNamespace, format: BlockFormat, seed: int
) -> None:
    check_blocks(executors, format, hard_segments(format, torch.float32, seed))


@pytest.mark.parametrize(
    ("format", "dtype"),
    [(BlockFormat("mxint8"), torch.bfloat16), (BlockFormat("mxfp8"), torch.float16)],
)
def test_blocks_of_narrow_floats_are_encoded_as_by_the_cpu(
    executors: SimpleNamespace, format: BlockFormat, dtype: torch.dtype, seed: int
) -> None:
    check_blocks(executors, format, hard_segments(format, dtype, seed), tallies=False)


@pytest.mark.parametrize(
    ("name", "largest", "step"), [("mxint8", 1.5, 2.0**-6), ("mxfp8", 256.0, 2.0**-9)]
)
def test_a_fraction_that_equals_the_random_number_is_rounded_down(
    executors: SimpleNamespace, name: str, largest: float, step: float
) -> None:
    format = BlockFormat(name, 32, "stochastic")  # type: ignore[arg-type]
    random_numbers = random_words(SEED, 2048)
    above = torch.arange(2048) % 2
    elements = ((random_numbers + above) * step * 2.0**-24).float()
    elements[::32] = largest  # from which each block's scale is 1
    wire = check_blocks(executors, format, [BlockSegment(elements, 0)])
    codes, is_step = wire[:2048], torch.arange(2048) % 32 != 0
    assert torch.equal(codes[is_step], above[is_step].to(torch.uint8))


def check_sum(
    executors: SimpleNamespace,
    format: BlockFormat,
    dtype: torch.dtype,
    parts: int,
    numel: int,
    accumulate: bool,
    watched: bool,
    seed: int,
    capability: int = 90,
) -> None:
    """The compiled executor sums the wires of ranks as the CPU's does."""
    generator = torch.Generator().manual_seed(seed)
    nbytes = format.nbytes(numel)
    wires = aligned(parts * nbytes)
    for part in range(parts):
        numbers = hard_blocks(-(-numel // 32), 32, generator).view(-1)[:numel]
        encode(format, [BlockSegment(numbers, 0)], wires[part * nbytes :][:nbytes])
    before = torch.randn(numel, generator=generator).to(dtype)
    by_cpu, compiled = before.clone(), before.clone()
    flags = torch.zeros(2, dtype=torch.int32).split(1)
    options = {"scale": 0.7, "accumulate": accumulate}
    decode_sum(format, wires, parts, by_cpu, nonfinite=flags[0] if watched else None, **options)  # type: ignore[arg-type]
    with played_gpu(capability) as gpu:
        gpu.may_read(wires)
        gpu.may_write(compiled, flags[1])
        executors.blocks_triton.decode_sum(
            format.name, format.block, wires, parts, compiled, core_dtype(dtype), 0.7, accumulate,
            flags[1].data_ptr() if watched else 0, None,
        )  # fmt: skip
    assert same_bits(compiled, by_cpu)
    assert flags[1] == flags[0]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", ["mxint8", "mxfp8"])
def test_parts_are_summed_as_by_the_cpu(
    executors: SimpleNamespace, name: str, dtype: torch.dtype, seed: int
) -> None:
    format = BlockFormat(name)  # type: ignore[arg-type]
    if dtype == torch.float32:
        check_sum(executors, format, dtype, 1, 100, accumulate=False, watched=False, seed=seed)
    check_sum(executors, format, dtype, 3, 2083, accumulate=True, watched=True, seed=seed)


@pytest.mark.parametrize("capability", [80, 100])
def test_other_gpus_compute_the_same(
    executors: SimpleNamespace, capability: int, seed: int
) -> None:
    source, destination = values(6000, torch.float32, 1), values(6000, torch.bfloat16, 2)
    check_copy(
        executors, whole(6000), [source], [destination], 0.3, accumulate=True, watched=True,
        capability=capability,
    )  # fmt: skip
    format = BlockFormat("mxfp8", 32, "stochastic")
    segments = hard_segments(format, torch.float32, seed)
    check_blocks(executors, format, segments, capability=capability)
    check_sum(
        executors, BlockFormat("mxint8"), torch.bfloat16, 3, 2083, accumulate=True, watched=True,
        seed=seed, capability=capability,
    )  # fmt: skip


def kernel_of(*lines: str) -> Kernel:
    return Kernel(
        ".visible .entry k(\n.param .u64 .ptr .global .align 1 k_0,\n.param .f32 k_1\n)\n.reqntid 32"
        "\n{\n.reg .pred %p<9>;\n.reg .b16 %rs<9>;\n.reg .b32 %r<9>;\n.reg .b64 %rd<9>;\n"
        + ";\n".join(["ld.param.b64 %rd0, [k_0]", *lines, "ret;"])
        + "\n}\n"
    )


@pytest.mark.parametrize(
    ("line", "error", "says"),
    [
        ("st.global.b32 [%rd0+12], %r0", MemoryFault, "stored to .* where there is no buffer"),
        ("ld.global.b32 %r0, [%rd0+-4]", MemoryFault, "loaded from .* where there is no buffer"),
        ("ld.global.v2.b32 {%r0, %r1}, [%rd0+4]", MemoryFault, "not aligned to 8 bytes"),
        ("st.global.b16 [%rd0+9], %rs0", MemoryFault, "not aligned to 2 bytes"),
        ("mov.u32 %r0, %tid.x; setp.lt.u32 %p0, %r0, 3; @%p0 ret", NotImplementedError, "some"),
    ],
)
def test_the_machine_refuses(line: str, error: type[Exception], says: str) -> None:
    memory = Memory()
    buffer = torch.zeros(4, dtype=torch.int32)[:3]
    memory.add(Region.of_tensor(buffer, writable=True))
    kernel = kernel_of("mov.b32 %r0, 7", "mov.b16 %rs0, 7", line)
    with pytest.raises(error, match=says) as raised:
        kernel.run(1, [buffer.data_ptr()], 0, memory)
    assert raised.value.__notes__ == [f"in block 0: {line.rpartition('; ')[2]}"]
    assert not buffer.any()


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("mul.f32 %r0, %r0, %r0", "ptxas may fuse a product with a sum"),
        ("mul.rn.ftz.f32 %r0, %r0, %r0", "does not know 'mul.rn.ftz.f32"),
        ("ld.global.nc.b32 %r0, [%rd0]", "does not know 'ld.global.nc"),
        ("shfl.sync.bfly.b32 %r0, %r0, 1, 15, -1", "some threads of a warp"),
        ("bra $nowhere", "does not know 'bra"),
    ],
)
def test_the_machine_says_what_it_does_not_know(line: str, says: str) -> None:
    with pytest.raises(NotImplementedError, match=says):
        kernel_of(line)


@pytest.mark.parametrize(
    ("opcode", "operands", "result"),
    [
        ("prmt.b32", (0x33221100, 0x77665544, 0x3340), 0x33334400),
        ("prmt.b32", (0x80000000, 0x000000FF, 0xCB40), 0xFFFFFF00),
        ("bfe.u32", (0xFFFF1234, 4, 8), 0x23),
        ("bfe.u32", (0xF0000000, 28, 8), 0xF),
        ("bfe.s32", (0x00000840, 4, 8), -0x7C),
        ("bfe.s32", (-(2**31), 30, 8), -2),
        ("bfe.s32", (-1, 3, 0), 0),
        ("shl.b32", (1, 32), 0),
        ("shr.u32", (2**31, 40), 0),
        ("shr.s32", (-(2**31), 40), -1),
        ("div.s32", (-7, 2), -3),
        ("rem.s32", (-7, 2), -1),
        ("mul.hi.u32", (2**31, 6), 3),
        ("mul.wide.s32", (-(2**31), 4), -(2**33)),
        ("cvt.s16.s8", (-3,), -3),
        ("cvt.u64.s32", (-1,), 2**64 - 1),
        ("cvt.rzi.s32.f32", (float("nan"),), 0),
        ("cvt.rzi.s32.f32", (-1e30,), -(2**31)),
        ("cvt.rzi.s32.f32", (float("inf"),), 2**31 - 1),
        ("cvt.rzi.s32.f32", (-1.9,), -1),
        ("cvt.rn.f16x2.f32", (1.0, -2.0), 0x3C00C000),
        ("setp.ne.f32", (float("nan"), 1.0), False),
        ("setp.neu.f32", (float("nan"), 1.0), True),
    ],
)
def test_operations_are_those_of_the_ptx_isa(
    opcode: str, operands: tuple[float, ...], result: float
) -> None:
    operation = OPERATIONS[opcode]
    arrays = [
        np.array([each], TYPES[kind])
        for each, kind in zip(operands, operation.operands, strict=True)
    ]
    with np.errstate(all="ignore"):
        (found,) = operation.function(*arrays)
    assert found == np.array(result, TYPES[operation.result])


def test_a_fused_product_and_sum_is_rounded_once() -> None:
    fused = ctypes.CDLL("libm.so.6").fmaf
    fused.restype, fused.argtypes = ctypes.c_float, [ctypes.c_float] * 3
    awkward = awkward_floats()[torch.randperm(1 << 20, generator=torch.Generator().manual_seed(3))]
    plain = torch.randn(3000, generator=torch.Generator().manual_seed(4))
    numbers = torch.cat([awkward[:9000].view(3, -1), plain.view(3, -1)], dim=1).numpy()
    with np.errstate(all="ignore"):
        found = OPERATIONS["fma.rn.f32"].function(*numbers)
    expected = np.array([fused(*row) for row in numbers.T.tolist()], np.float32)
    assert same_bits(torch.from_numpy(found), torch.from_numpy(expected))
