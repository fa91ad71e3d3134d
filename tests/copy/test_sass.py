"""The machine code of the kernels, in the extension as it was built: what can be held to it without a GPU.

A GPU hides the latency of its memory by what it has under way. An H200 needs about 33 KB of loads under way on each
multiprocessor for its 4.3 TB/s. A kernel's are 16 bytes x loads of a thread before it waits x 256 threads x resident
blocks, which its registers bound. Asked for is twice that: half of the time a thread converts and stores.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import pytest

from support.dumped_extension import dumped, names_of, output_of

THREADS = 256
REGISTERS = 65536
MOST_BLOCKS = 2048 // THREADS
NEEDED_BYTES = 2 * 33_000

# For each loop over vectors, the 16-byte loads that a thread issues before it uses the first of them.
HOT = {
    # Pack, four vectors: of 8 elements, which are two loads of float32; of one load, moved as they are.
    "copy_tiles<Watched<Converted<float, BFloat16>>, 256>": [8],
    "copy_tiles<Watched<Converted<BFloat16, float>>, 256>": [4],
    "copy_tiles<Moved<unsigned short>, 256>": [4],
    "copy_tiles<Moved<unsigned int>, 256>": [4],
    # Unpack: of each vector one load of the source, and two of the float32 that it is added to.
    "copy_tiles<Watched<Accumulated<BFloat16, float>>, 256>": [12],
    "copy_tiles<Watched<Accumulated<float, float>>, 256>": [8],
    # The cast of a gather.
    "copy_run<Converted<float, BFloat16>>": [8],
    "copy_run<Moved<unsigned int>>": [4],
    # Of one source four vectors, and four or eight loads of the destination; of two sources also; of four, two vectors,
    # of which nvcc 13.0 moves the four loads of the second behind those of the first. (Of more, one vector of four
    # sources at a time: the others' combined values need the registers.)
    "reduce_run<float, float, Sum>": [6, 8, 12],
    "reduce_run<BFloat16, BFloat16, Sum>": [6, 8, 12],
    "reduce_run<BFloat16, float, Sum>": [8, 12, 16],
}


@dataclass(frozen=True)
class Instruction:
    address: int
    opcode: str  # LDG.E.128
    operands: tuple[str, ...]  # the first is what it writes, unless it stores

    @property
    def is_vector_load(self) -> bool:
        return self.opcode.startswith("LDG.") and ".128" in self.opcode

    @property
    def is_store(self) -> bool:
        return self.opcode.startswith("STG")

    def target(self) -> int | None:
        """Of a jump."""
        found = re.search(r"0x[0-9a-f]+", self.operands[-1]) if self.operands else None
        return int(found[0], 16) if self.opcode.startswith("BRA") and found else None

    def reads(self) -> set[int]:
        writes_first = not self.is_store and self.target() is None
        return registers(self.operands[1:] if writes_first else self.operands)

    def loaded(self) -> set[int]:
        (first,) = registers(self.operands[:1])
        return set(range(first, first + 4))


@dataclass(frozen=True)
class Kernel:
    instructions: list[Instruction]
    registers: int
    stack_bytes: int

    def vector_loops(self) -> list[list[Instruction]]:
        """Innermost loops with 16-byte loads."""
        spans = [
            (to, each.address)
            for each in self.instructions
            if (to := each.target()) is not None and to < each.address
        ]
        inner = [
            (begin, end)
            for begin, end in spans
            if not any(begin <= b and e <= end for b, e in spans if (b, e) != (begin, end))
        ]
        bodies = [[i for i in self.instructions if a <= i.address <= b] for a, b in inner]
        return [body for body in bodies if any(i.is_vector_load for i in body)]

    def blocks(self) -> int:
        allocated = -(-self.registers // 8) * 8
        return min(MOST_BLOCKS, REGISTERS // (allocated * THREADS))


def registers(operands: tuple[str, ...]) -> set[int]:
    return {int(number) for each in operands for number in re.findall(r"\bR(\d+)\b", each)}


def loads_before_first_use(loop: list[Instruction]) -> int:
    loads, waited_for = 0, set[int]()
    for each in loop:
        if each.reads() & waited_for or each.is_store:
            break
        if each.is_vector_load:
            loads += 1
            waited_for |= each.loaded()
    return loads


def divides(each: Instruction) -> bool:
    """An integer division is a call, or a reciprocal in floating point with corrections."""
    return each.opcode.startswith(("CALL", "I2F", "MUFU.RCP"))


@pytest.fixture(scope="module")
def kernels() -> dict[str, Kernel]:
    """Those for sm_90, by name."""
    usage, sass = dumped("-res-usage", "-arch", "sm_90"), dumped("-sass", "-arch", "sm_90")
    used = {
        name: (int(count), int(stack) + int(local))
        for name, count, stack, local in re.findall(
            r"Function (\S+):\s+REG:(\d+) STACK:(\d+) .*?LOCAL:(\d+)", usage
        )
    }
    code_of = {
        part.split(maxsplit=1)[0]: [
            Instruction(int(address, 16), opcode, tuple(rest.split(",")) if rest.strip() else ())
            for address, opcode, rest in re.findall(
                r"/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)([^;/]*);", part
            )
        ]
        for part in sass.split("Function : ")[1:]
    }
    names = names_of([*code_of])
    return {names[mangled]: Kernel(code, *used[mangled]) for mangled, code in code_of.items()}


@pytest.mark.parametrize("name", HOT)
def test_loads_are_under_way_before_any_is_used(kernels: dict[str, Kernel], name: str) -> None:
    # nvcc may have peeled more loops off; those that are asked for must be among them.
    wanted = HOT[name]
    found = sorted(map(loads_before_first_use, kernels[name].vector_loops()))[-len(wanted) :]
    assert len(found) == len(wanted), f"{found} loops over vectors, {wanted} wanted"
    assert all(have >= want for have, want in zip(found, wanted, strict=True)), (
        f"16-byte loads before the first use: {found}, at least {wanted} wanted; by "
        + output_of("nvcc", "--version").splitlines()[-1]
    )


@pytest.mark.parametrize("name", HOT)
def test_registers_leave_room_for_enough_of_them(kernels: dict[str, Kernel], name: str) -> None:
    kernel = kernels[name]
    under_way = 16 * HOT[name][0] * THREADS * kernel.blocks()
    assert under_way >= NEEDED_BYTES, f"{kernel.registers} registers, {kernel.blocks()} blocks"


@pytest.mark.parametrize("name", HOT)
def test_vectors_are_stored_whole_and_found_without_a_division(
    kernels: dict[str, Kernel], name: str
) -> None:
    for loop in kernels[name].vector_loops():
        assert not [each for each in loop if divides(each)]
        assert all(".128" in each.opcode for each in loop if each.is_store)


def test_no_kernel_keeps_anything_in_local_memory(kernels: dict[str, Kernel]) -> None:
    """Neither registers that were spilled, nor an array that is indexed by what is no constant."""
    assert len(kernels) > len(HOT)
    for name, kernel in kernels.items():
        assert kernel.stack_bytes == 0, name
        assert not [i for i in kernel.instructions if i.opcode.startswith(("LDL", "STL"))], name
