"""The machine that executes PTX: what it computes, how threads part and meet, and what it refuses."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
import torch

from support.awkward_floats import awkward_floats
from support.ptx_machine import Kernel
from support.ptx_memory import Memory, MemoryFault, Region
from support.ptx_operations import OPERATIONS, TYPES
from support.random_plans import same_bits


def kernel_of(*lines: str) -> Kernel:
    return Kernel(
        "k(\n.param .u64 .ptr .global .align 1 k_0,\n.param .f32 k_1\n)\n.reqntid 32"
        "\n{\n.reg .pred %p<9>;\n.reg .b16 %rs<9>;\n.reg .b32 %r<9>;\n.reg .b64 %rd<9>;\n"
        + ";\n".join(["ld.param.b64 %rd0, [k_0]", *lines, "ret;"])
        + "\n}\n"
    )


def test_threads_part_and_meet() -> None:
    kernel = kernel_of(
        "mov.u32 %r0, %tid.x",
        "mov.b32 %r1, 0",
        "mov.b32 %r2, 0",
        "setp.eq.u32 %p0, %r0, 0",
        "@%p0 bra $meet",
        "$again: add.s32 %r2, %r2, 1",
        "add.s32 %r1, %r1, %r2",
        "setp.lt.u32 %p1, %r2, %r0",
        "@%p1 bra $again",
        "$meet: shfl.sync.bfly.b32 %r3, %r1, 1, 31, -1",
        "{ .reg .pred %p1; setp.gt.u32 %p1, %r0, 3; @!%p1 bra $out; }",
        "mul.wide.u32 %rd1, %r0, 4",
        "add.s64 %rd1, %rd0, %rd1",
        "st.global.b32 [%rd1], %r3",
        "$out: ret",
    )
    memory, sums = Memory(), torch.full((32,), -1, dtype=torch.int32)
    memory.add(Region.of_tensor(sums, writable=True))
    kernel.run(1, [sums.data_ptr()], 0, memory)
    partners = [thread ^ 1 for thread in range(32)]
    expected = [sum(range(partner + 1)) for partner in partners]
    assert sums.tolist() == [-1] * 4 + expected[4:]


@pytest.mark.parametrize(
    ("line", "error", "says"),
    [
        ("st.global.b32 [%rd0+12], %r0", MemoryFault, "stored to .* where there is no buffer"),
        ("ld.global.b32 %r0, [%rd0+-4]", MemoryFault, "loaded from .* where there is no buffer"),
        ("ld.global.v2.b32 {%r0, %r1}, [%rd0+4]", MemoryFault, "not aligned to 8 bytes"),
        ("st.global.b16 [%rd0+9], %rs0", MemoryFault, "not aligned to 2 bytes"),
        (
            "mov.u32 %r0, %tid.x; setp.lt.u32 %p0, %r0, 3; @%p0 ret; bar.sync 0",
            NotImplementedError,
            "only some threads",
        ),
        (
            "mov.u32 %r0, %tid.x; setp.lt.u32 %p0, %r0, 3; @%p0 ret; shfl.sync.bfly.b32 %r1, %r0, 8, 31, -1",
            NotImplementedError,
            "a member of the warp's exchange is not here",
        ),
        ("shfl.sync.bfly.b32 %r1, %r0, 8, 31, 255", NotImplementedError, "a member of"),
        # Only for what nothing writes while the kernel runs.
        ("ld.global.nc.b32 %r0, [%rd0]", MemoryFault, "loaded from .* where there is no buffer"),
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
        ("ld.global.ca.b32 %r0, [%rd0]", "does not know 'ld.global.ca"),
        ("shfl.sync.bfly.b32 %r0, %r0, 1, 15, -1", "some threads of a warp"),
        ("bra $nowhere", "does not know 'bra"),
    ],
)
def test_the_machine_says_what_it_does_not_know(line: str, says: str) -> None:
    with pytest.raises(NotImplementedError, match=says):
        kernel_of(line)


@pytest.mark.parametrize(
    ("operands", "result"),
    [("%r0, %r1, 0x0123U", 0x00112233), ("%r1, %r0, 0x4567", 0x00112233)],
)
def test_a_permutation_reads_no_register_of_which_it_takes_no_byte(
    operands: str, result: int
) -> None:
    kernel = kernel_of(
        "mov.b32 %r0, 0x33221100", f"prmt.b32 %r2, {operands}", "st.global.b32 [%rd0], %r2"
    )
    memory, value = Memory(), torch.zeros(1, dtype=torch.int32)
    memory.add(Region.of_tensor(value, writable=True))
    kernel.run(1, [value.data_ptr()], 0, memory)
    assert value.item() == result


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
        ("mul.wide.u16", (2**15, 6), 3 * 2**16),
        ("cvt.s16.s8", (-3,), -3),
        ("cvt.u64.s32", (-1,), 2**64 - 1),
        ("cvt.rzi.s32.f32", (float("nan"),), 0),
        ("cvt.rzi.s32.f32", (-1e30,), -(2**31)),
        ("cvt.rzi.s32.f32", (float("inf"),), 2**31 - 1),
        ("cvt.rzi.s32.f32", (-1.9,), -1),
        ("cvt.rn.f16x2.f32", (1.0, -2.0), 0x3C00C000),
        ("cvt.rn.bf16.f32", (0x3F808000,), 0x3F80),
        ("cvt.rn.bf16.f32", (0x3F818000,), 0x3F82),
        ("cvt.rn.bf16.f32", (0xFF7F8000,), 0xFF80),
        ("cvt.rn.bf16.f32", (0xFF800001,), 0x7FFF),
        ("cvt.rn.f32.f64", (1 + 2.0**-24,), 1.0),
        ("abs.f64", (0x8000000000000001,), 1),
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
