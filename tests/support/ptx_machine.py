"""Executes a kernel's PTX on the CPU: what Triton's compiler has made, where there is no GPU.

All threads of a block do an instruction before any does the next, and blocks run one after the other. So nothing here
notices a barrier that is missing, or blocks that race. Everything else that a kernel does shows: what it computes, bit
for bit, and each byte that it touches (`ptx_memory.py`).

What is not known here raises NotImplementedError, and so does a branch that only some threads of a block take.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import numpy as np

from support.ptx_memory import Lanes, Memory, Region
from support.ptx_operations import OPERATIONS, TYPES

WARP = 32

Registers = dict[str, Lanes]
Read = Callable[[Registers], Lanes]
Write = Callable[[Registers, Lanes, "Lanes | None"], None]


@dataclass
class Block:
    """A block as it runs: registers have bits, without a sign, and predicates are bools."""

    global_memory: Memory
    shared_memory: Memory
    parameters: Mapping[str, bytes]
    registers: Registers


Step = Callable[[Block, "Lanes | None"], "int | None"]
"""Does an instruction for the threads of a mask, or for all. It returns where to go on, unless that is the next one."""


class Kernel:
    """A kernel, decoded from the text of a module that has it alone."""

    def __init__(self, ptx: str) -> None:
        head, _, rest = ptx.partition(".visible .entry ")[2].partition("\n{\n")
        self._parameters = {
            name: type for type, name in re.findall(r"\.param \.(\w+)[^,\n]* (\w+)[,\n]", head)
        }
        (threads,) = re.findall(r"\.reqntid (\d+)", head)
        self._threads = int(threads)
        self._types = {"%tid.": "b32", "%ctaid.": "b32"}  # of registers, by their names' beginnings
        self._labels: dict[str, int] = {}
        self._texts: list[str] = []
        for line in rest.partition("\n}\n")[0].splitlines():
            self._read_line(line.partition("//")[0].strip())
        self._steps = [self._decode(text) for text in self._texts]

    def _read_line(self, line: str) -> None:
        if declared := re.fullmatch(r"\.reg \.(\w+)\s+(%[a-z]+)<\d+>;", line):
            self._types[declared[2]] = declared[1]
        elif label := re.fullmatch(r"(\$\w+):", line):
            self._labels[label[1]] = len(self._texts)
        elif line and line not in "{}" and not line.startswith((".loc", ".pragma")):
            self._texts += [each.strip() for each in line.split(";") if each.strip()]

    def run(
        self, blocks: int, arguments: Sequence[int | float], shared_bytes: int, memory: Memory
    ) -> None:
        """Launches it. Parameters past the arguments, which are Triton's own scratch memory, are null pointers."""
        padded = [*arguments, *[0] * (len(self._parameters) - len(arguments))]
        parameters = {
            name: _bytes_of(value, type)
            for (name, type), value in zip(self._parameters.items(), padded, strict=True)
        }
        with np.errstate(all="ignore"):
            for number in range(blocks):
                shared = Memory()
                shared.add(Region.shared(shared_bytes))
                registers = {"%tid.x": np.arange(self._threads, dtype=np.uint32)}
                registers |= {f"%ctaid.{axis}": self._all(0, "u32") for axis in "yz"}
                registers["%ctaid.x"] = self._all(number, "u32")
                self._run_block(Block(memory, shared, parameters, registers))

    def _run_block(self, block: Block) -> None:
        at = 0
        while at < len(self._steps):
            try:
                target = self._steps[at](block, None)
            except Exception as error:
                error.add_note(f"in block {block.registers['%ctaid.x'][0]}: {self._texts[at]}")
                raise
            at = at + 1 if target is None else target

    def _decode(self, text: str) -> Step:
        try:
            guard, opcode, rest = _parts(r"(@!?%p\d+\s)?\s*([\w.:]+)(.*)", text)
            operands = re.findall(r"\{[^}]*\}|\[[^]]*\]|[^,\s]+", rest)
            step = self._decode_unguarded(opcode, operands)
        except (KeyError, ValueError, IndexError) as error:
            raise NotImplementedError(f"the machine does not know {text!r}: {error}") from error
        if not guard:
            return step
        negated, predicate = guard[1] == "!", guard.strip(" @!\t")

        def guarded(block: Block, _: Lanes | None) -> int | None:
            active = block.registers[predicate] ^ negated
            if active.all():
                return step(block, None)
            return step(block, active) if active.any() else None

        return guarded

    def _decode_unguarded(self, opcode: str, operands: list[str]) -> Step:
        name, *modifiers = opcode.split(".")
        step: Step
        match name, modifiers:
            case "mov", [kind] if "{" in operands[0] + operands[1]:
                step = self._packing(kind, operands)
            case _ if opcode in OPERATIONS:
                step = self._computation(opcode, operands)
            case "add" | "sub" | "mul", ["f32" | "f32x2"]:
                # "Floating Point Instructions: mul": without a rounding modifier there is no one result.
                raise ValueError("ptxas may fuse a product with a sum")
            case "ld", ["param", kind]:
                step = self._parameter_load(kind, operands)
            case "ld", [space, *vector, kind]:
                step = self._load(space, kind, _count(vector), operands)
            case "st", [space, *vector, kind]:
                step = self._store(space, kind, _count(vector), operands)
            case "atom", ["global", "gpu", "acq_rel", function, kind]:
                step = self._atomic(function, kind, operands)
            case "shfl", ["sync", "bfly", "b32"]:
                step = self._exchange(operands)
            case "redux", ["sync", function, kind]:
                step = self._warp_reduction(function, kind, operands)
            case "ldmatrix", ["sync", "aligned", "m8n8", count, "shared", "b16"]:
                step = self._matrix_load(_count([count.replace("x", "v")]), operands)
            case "bra" | "ret" | "bar", _:
                step = self._flow(opcode, operands)
            case _:
                raise ValueError(opcode)
        return step

    def _flow(self, opcode: str, operands: list[str]) -> Step:
        if opcode == "bar.sync":
            return lambda block, active: None  # all threads are here
        if opcode not in ("bra", "bra.uni", "ret"):
            raise ValueError(opcode)
        target = self._labels[operands[0]] if operands else len(self._texts)
        return lambda block, active: _if_all(active, target)

    def _computation(self, opcode: str, operands: list[str]) -> Step:
        operation = OPERATIONS[opcode]
        write = self._writer(operands[0], operation.result)
        reads = [
            self._reader(operand, kind)
            for operand, kind in zip(operands[1:], operation.operands, strict=True)
        ]

        def step(block: Block, active: Lanes | None) -> None:
            registers = block.registers
            write(registers, operation.function(*[read(registers) for read in reads]), active)

        return step

    def _parameter_load(self, kind: str, operands: list[str]) -> Step:
        write, name = self._writer(operands[0], kind), operands[1].strip("[] ")
        assert TYPES[self._parameters[name]].itemsize == TYPES[kind].itemsize

        def step(block: Block, active: Lanes | None) -> None:
            (value,) = np.frombuffer(block.parameters[name], TYPES[kind])
            write(block.registers, np.full(self._threads, value), active)

        return step

    def _load(self, space: str, kind: str, count: int, operands: list[str]) -> Step:
        writes = [self._writer(each, kind) for each in _elements(operands[0])]
        assert len(writes) == count
        address, memory = self._address(operands[1]), _memory(space)

        def step(block: Block, active: Lanes | None) -> None:
            where = slice(None) if active is None else active
            values = np.zeros((self._threads, count), TYPES[kind])
            addresses = address(block.registers)[where]
            values[where] = memory(block).load(addresses, TYPES[kind], count)
            for write, value in zip(writes, np.ascontiguousarray(values.T), strict=True):
                write(block.registers, value, active)

        return step

    def _store(self, space: str, kind: str, count: int, operands: list[str]) -> Step:
        reads = [self._reader(each, kind) for each in _elements(operands[1])]
        assert len(reads) == count
        address, memory = self._address(operands[0]), _memory(space)

        def step(block: Block, active: Lanes | None) -> None:
            where = slice(None) if active is None else active
            values = np.stack([read(block.registers)[where] for read in reads], axis=1)
            memory(block).store(address(block.registers)[where], values)

        return step

    def _atomic(self, function: str, kind: str, operands: list[str]) -> Step:
        combine = OPERATIONS[f"{function}.{kind}"].function
        write, address = self._writer(operands[0], kind), self._address(operands[1])
        read = self._reader(operands[2], kind)

        def step(block: Block, active: Lanes | None) -> None:
            addresses, values = address(block.registers), read(block.registers)
            before = np.zeros_like(values)
            for thread in np.flatnonzero(
                np.ones(self._threads, bool) if active is None else active
            ):
                here, value = addresses[thread : thread + 1], values[thread : thread + 1]
                old = block.global_memory.load(here, value.dtype, 1)[0]
                before[thread] = old[0]
                block.global_memory.store(here, combine(old, value)[None])
            write(block.registers, before, active)

        return step

    def _exchange(self, operands: list[str]) -> Step:
        """shfl.sync.bfly among whole warps: a thread gets the value of the one whose number differs in these bits."""
        destination, source, bits, clamp, members = operands
        if (clamp, members) != ("31", "-1"):
            raise ValueError("some threads of a warp")
        partner = np.arange(self._threads) ^ int(bits)
        read, write = self._reader(source, "b32"), self._writer(destination, "b32")

        def step(block: Block, active: Lanes | None) -> None:
            _if_all(active, 0)
            write(block.registers, read(block.registers)[partner], None)

        return step

    def _warp_reduction(self, function: str, kind: str, operands: list[str]) -> Step:
        destination, source, members = operands
        combine = {"add": np.add, "min": np.minimum, "max": np.maximum}[function]
        read, write = self._reader(source, kind), self._writer(destination, kind)
        members_of = self._reader(members, "b32")

        def step(block: Block, active: Lanes | None) -> None:
            _if_all(active, 0)
            if (members_of(block.registers) != 0xFFFFFFFF).any():
                raise NotImplementedError("some threads of a warp")
            warps = read(block.registers).reshape(-1, WARP)
            reduced = combine.reduce(warps, axis=1, dtype=warps.dtype)
            write(block.registers, np.repeat(reduced, WARP), None)

        return step

    def _matrix_load(self, count: int, operands: list[str]) -> Step:
        """ "Warp Level Matrix Instructions: ldmatrix": eight threads have the addresses of a matrix's eight rows.

        A row has 16 bytes. Thread i of a warp gets the i-th 4 bytes of each matrix.
        """
        writes = [self._writer(each, "b32") for each in _elements(operands[0])]
        assert len(writes) == count
        address = self._address(operands[1])

        def step(block: Block, active: Lanes | None) -> None:
            _if_all(active, 0)
            of_rows = address(block.registers).reshape(-1, WARP)[:, : 8 * count]
            rows = block.shared_memory.load(of_rows.reshape(-1), np.uint32, 4)
            matrices = rows.reshape(-1, count, WARP)
            for number, write in enumerate(writes):
                write(block.registers, matrices[:, number].reshape(-1), None)

        return step

    def _packing(self, kind: str, operands: list[str]) -> Step:
        """A `mov` between a register and its parts, of which the first has the lowest bits."""
        packs = operands[1].startswith("{")
        parts = _elements(operands[1 if packs else 0])
        part = np.dtype(f"u{TYPES[kind].itemsize // len(parts)}")
        of_part = f"b{part.itemsize * 8}"
        if packs:
            reads = [self._reader(each, of_part) for each in parts]
            pack = self._writer(operands[0], kind)

            def step(block: Block, active: Lanes | None) -> None:
                values = np.stack([read(block.registers) for read in reads], axis=1)
                pack(block.registers, values.view(TYPES[kind])[:, 0], active)

        else:
            writes = [
                (i, self._writer(each, of_part)) for i, each in enumerate(parts) if each != "_"
            ]
            unpack = self._reader(operands[1], kind)

            def step(block: Block, active: Lanes | None) -> None:
                values = unpack(block.registers).copy().view(part).reshape(-1, len(parts))
                for i, write in writes:
                    write(block.registers, values[:, i], active)

        return step

    def _held(self, register: str) -> np.dtype[Any]:
        return TYPES[self._types[register.rstrip("0123456789xyz")]]

    def _all(self, value: int, kind: str) -> Lanes:
        dtype = TYPES[kind]
        if dtype.kind == "b":
            return np.full(self._threads, value != 0)
        return np.full(self._threads, value % (1 << dtype.itemsize * 8), f"u{dtype.itemsize}").view(
            dtype
        )

    def _reader(self, operand: str, kind: str) -> Read:
        wanted = TYPES[kind]
        if not operand.startswith("%"):
            constant = self._all(_constant(operand), kind)
            return lambda registers: constant
        held = self._held(operand)
        if held == wanted:
            return itemgetter(operand)
        if (held.kind == "b") != (wanted.kind == "b") or held.itemsize < wanted.itemsize:
            raise ValueError(f"{operand} has no {kind}")
        if held.itemsize == wanted.itemsize:
            return lambda registers: registers[operand].view(wanted)
        # "Operand Size Exceeding Instruction-Type Size": the lower bits.
        low = f"u{wanted.itemsize}"
        return lambda registers: registers[operand].astype(low).view(wanted)

    def _writer(self, operand: str, kind: str) -> Write:
        given, held = TYPES[kind], self._held(operand)
        if (held.kind == "b") != (given.kind == "b") or held.itemsize < given.itemsize:
            raise ValueError(f"{operand} has no room for a {kind}")
        # The same section: signed integers are extended by their sign, anything else by zeros.
        as_bits = np.dtype(f"{'i' if given.kind == 'i' else 'u'}{given.itemsize}")

        def write(registers: Registers, value: Lanes, active: Lanes | None) -> None:
            if value.dtype != held:
                value = value.view(as_bits).astype(held, copy=False)
            if active is not None:
                # Of a register that nothing was written to, the other threads have anything.
                value = np.where(active, value, registers.get(operand, np.full_like(value, 0xA5)))
            registers[operand] = value

        return write

    def _address(self, operand: str) -> Read:
        base, written = _parts(r"\[\s*(%?\w+)\s*(?:\+\s*(-?\d+))?\s*\]", operand)
        offset = np.uint64(int(written or 0) % 2**64)
        read = self._reader(base, f"b{self._held(base).itemsize * 8}") if base[0] == "%" else None
        if read is None:
            constant = self._all(_constant(base) + int(offset), "b64")
            return lambda registers: constant
        return lambda registers: read(registers).astype(np.uint64) + offset


def _parts(pattern: str, text: str) -> list[str]:
    found = re.fullmatch(pattern, text, re.DOTALL)
    if found is None:
        raise ValueError(text)
    return [part or "" for part in found.groups()]


def _count(vector: list[str]) -> int:
    """Of the elements that each thread loads or stores: 4 for ["v4"]."""
    (modifier,) = vector or ["v1"]
    return int(modifier.removeprefix("v"))


def _if_all(active: Lanes | None, target: int) -> int:
    if active is not None and not active.all():
        raise NotImplementedError("only some threads of the block come here")
    return target


def _memory(space: str) -> Callable[[Block], Memory]:
    if space == "global":
        return lambda block: block.global_memory
    if space == "shared":
        return lambda block: block.shared_memory
    raise ValueError(space)


def _elements(operand: str) -> list[str]:
    return re.findall(r"[^\s,{}]+", operand)


def _constant(text: str) -> int:
    """The bits of a constant; of what is in shared memory its address, which is 0 as there is one such thing."""
    if text == "global_smem":
        return 0
    if text.startswith("0f"):
        return int(text[2:], 16)
    return int(text.rstrip("U"), 0)


def _bytes_of(value: int | float, type: str) -> bytes:
    if type == "f32":
        return struct.pack("<f", value)
    nbytes = TYPES[type].itemsize
    return (int(value) % (1 << 8 * nbytes)).to_bytes(nbytes, "little")
