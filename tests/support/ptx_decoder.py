"""A step of the machine that executes PTX, for each instruction of a kernel: what it reads, computes and writes."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np

from support.ptx_memory import Lanes, Memory
from support.ptx_operations import OPERATIONS, TYPES
from support.ptx_text import KernelText

WARP = 32

Registers = dict[str, Lanes]
Read = Callable[[Registers], Lanes]
Write = Callable[[Registers, Lanes, "Lanes | None"], None]


@dataclass
class Block:
    """A block as it runs: registers have bits, without a sign, and predicates are bools."""

    global_memory: Memory
    shared_memory: Memory
    local_memory: Memory  # that of a thread behind that of another
    parameters: Memory
    registers: Registers


class Jump(NamedTuple):
    """Where the threads of a mask, or all of them, go on."""

    target: int
    threads: Lanes | None


Step = Callable[[Block, "Lanes | None"], "Jump | None"]
"""Does an instruction for the threads of a mask, or for all. It returns a jump, unless all go on behind it."""


class Decoder:
    """Of one kernel. `addresses` has those of what has a name: parameters, and shared memory."""

    def __init__(self, kernel: KernelText, addresses: Mapping[str, int]) -> None:
        self._threads, self._types = kernel.threads, kernel.registers
        self._labels, self._end = kernel.labels, len(kernel.instructions)
        self._addresses, self._local_bytes = addresses, kernel.local_bytes

    def decode(self, text: str) -> Step:
        try:
            guard, opcode, rest = _parts(r"(@!?%\w+\s)?\s*([\w.:]+)(.*)", text)
            operands = re.findall(r"\{[^}]*\}|\[[^]]*\]|[^,\s]+", rest)
            step = self._decode_unguarded(opcode, operands)
        except (KeyError, ValueError, IndexError) as error:
            raise NotImplementedError(f"the machine does not know {text!r}: {error}") from error
        if not guard:
            return step
        negated, predicate = guard[1] == "!", guard.strip(" @!\t")

        def guarded(block: Block, here: Lanes | None) -> Jump | None:
            wanted = block.registers[predicate] ^ negated
            left_out = ~wanted if here is None else here & ~wanted
            if not left_out.any():
                return step(block, here)
            active = wanted if here is None else here & wanted
            return step(block, active) if active.any() else None

        return guarded

    def _decode_unguarded(self, opcode: str, operands: list[str]) -> Step:
        name, *modifiers = opcode.split(".")
        step: Step
        match name, modifiers:
            case "mov", [kind] if "{" in operands[0] + operands[1]:
                step = self._packing(kind, operands)
            case "prmt", ["b32"]:
                step = self._computation(opcode, self._selected(*operands))
            case _ if opcode in OPERATIONS:
                step = self._computation(opcode, operands)
            case "add" | "sub" | "mul", ["f32" | "f32x2"]:
                # "Floating Point Instructions: mul": without a rounding modifier there is no one result.
                raise ValueError("ptxas may fuse a product with a sum")
            case "ld" | "st" | "atom", _:
                step = self._access(name, modifiers, operands)
            case "shfl" | "redux" | "ldmatrix", _:
                step = self._among_threads(name, modifiers, operands)
            case "bra" | "ret" | "bar", _:
                step = self._flow(opcode, operands)
            case _:
                raise ValueError(opcode)
        return step

    def _access(self, name: str, modifiers: list[str], operands: list[str]) -> Step:
        match name, modifiers:
            case "ld", [kind]:
                # nvcc knows which pointers are to global memory. What is left are pointers to parameters.
                return self._load("param", kind, 1, operands)
            case "ld", ["global", "nc", *vector, kind]:
                return self._load("nc", kind, _count(vector), operands)
            case "ld", [space, *vector, kind]:
                return self._load(space, kind, _count(vector), operands)
            case "st", [space, *vector, kind]:
                return self._store(space, kind, _count(vector), operands)
            case "atom", ["global", function, kind] | ["global", "gpu", "acq_rel", function, kind]:
                return self._atomic(function, kind, operands)
        raise ValueError(name)

    def _among_threads(self, name: str, modifiers: list[str], operands: list[str]) -> Step:
        match name, modifiers:
            case "shfl", ["sync", "bfly", "b32"]:
                return self._exchange(operands)
            case "redux", ["sync", function, kind]:
                return self._warp_reduction(function, kind, operands)
            case "ldmatrix", ["sync", "aligned", "m8n8", count, "shared", "b16"]:
                return self._matrix_load(_count([count.replace("x", "v")]), operands)
        raise ValueError(name)

    def _flow(self, opcode: str, operands: list[str]) -> Step:
        if opcode == "bar.sync":
            return lambda block, active: _check_all(active)
        if opcode == "bar.red.or.pred":
            return self._barrier_with_any(operands)
        if opcode not in ("bra", "bra.uni", "ret"):
            raise ValueError(opcode)
        target = self._labels[operands[0]] if operands else self._end
        return lambda block, active: Jump(target, active)

    def _barrier_with_any(self, operands: list[str]) -> Step:
        destination, _, source = operands
        read, write = self._reader(source, "pred"), self._writer(destination, "pred")

        def step(block: Block, active: Lanes | None) -> None:
            _check_all(active)
            write(block.registers, self._all(read(block.registers).any(), "pred"), None)

        return step

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

    def _selected(self, destination: str, a: str, b: str, selector: str) -> list[str]:
        """ "Data Movement and Conversion Instructions: prmt": a constant selector may take all bytes of one operand.

        The compiler then gives any register as the other, even one that nothing has written to. It is not read here.
        """
        if not selector.startswith("%"):
            sources = {self._constant(selector) >> shift & 4 for shift in range(0, 16, 4)}
            if 0 not in sources:
                a = b
            if 4 not in sources:
                b = a
        return [destination, a, b, selector]

    def _load(self, space: str, kind: str, count: int, operands: list[str]) -> Step:
        writes = [self._writer(each, kind) for each in _elements(operands[0])]
        assert len(writes) == count
        address, memory = self._address(operands[1], space), _memory(space)

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
        address, memory = self._address(operands[0], space), _memory(space)

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
        """shfl.sync.bfly: a thread gets the value of the one whose number differs in these bits.

        Behind a "|" stands a predicate, which nothing reads.
        """
        destination, source, bits, clamp, members = operands
        if clamp != "31":
            raise ValueError("some threads of a warp")
        numbers = np.arange(self._threads)
        read = self._reader(source, "b32")
        write = self._writer(destination.partition("|")[0], "b32")
        bits_of, members_of = self._reader(bits, "b32"), self._reader(members, "b32")

        def step(block: Block, active: Lanes | None) -> None:
            partners = numbers ^ (bits_of(block.registers) % WARP)
            _check_members(members_of(block.registers), partners, active)
            write(block.registers, read(block.registers)[partners], active)

        return step

    def _warp_reduction(self, function: str, kind: str, operands: list[str]) -> Step:
        destination, source, members = operands
        combine = {"add": np.add, "min": np.minimum, "max": np.maximum}[function]
        read, write = self._reader(source, kind), self._writer(destination, kind)
        members_of = self._reader(members, "b32")

        def step(block: Block, active: Lanes | None) -> None:
            _check_all(active)
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
            _check_all(active)
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
        beginning = register.rstrip("0123456789xyz")
        return TYPES[self._types.get(register) or self._types[beginning]]

    def _constant(self, text: str) -> int:
        """The bits of a constant, or the address of what has this name."""
        if text in self._addresses:
            return self._addresses[text]
        if text.startswith(("0f", "0d")):
            return int(text[2:], 16)
        return int(text.rstrip("U"), 0)

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
            constant = self._all(self._constant(operand), kind)
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

    def _address(self, operand: str, space: str = "") -> Read:
        base, written = _parts(r"\[\s*(%?\w+)\s*(?:\+\s*(-?\d+))?\s*\]", operand)
        offset = np.full(self._threads, int(written or 0) % 2**64, np.uint64)
        if space == "local":
            offset += np.arange(self._threads, dtype=np.uint64) * np.uint64(self._local_bytes)
        if base[0] != "%":
            constant = self._all(self._constant(base), "b64") + offset
            return lambda registers: constant
        read = self._reader(base, f"b{self._held(base).itemsize * 8}")
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


def _check_all(active: Lanes | None) -> None:
    if active is not None:
        raise NotImplementedError("only some threads of the block come here")


def _check_members(members: Lanes, partners: Lanes, active: Lanes | None) -> None:
    """All that a thread names as members are here, name the same ones, and its partner is one of them."""
    here = np.ones(len(members), bool) if active is None else active
    lanes = np.arange(WARP, dtype=np.uint32)
    here_in_warp = np.repeat((here.reshape(-1, WARP) << lanes).sum(1, dtype=np.uint32), WARP)
    is_well = (members & ~here_in_warp) == 0
    for threads in (np.arange(len(members)), partners):
        is_well &= (members >> lanes[threads % WARP] & 1 == 1) & (members[threads] == members)
    if not is_well[here].all():
        raise NotImplementedError("a member of the warp's exchange is not here")


def _memory(space: str) -> Callable[[Block], Memory]:
    if space == "global":
        return lambda block: block.global_memory
    if space == "nc":
        return lambda block: block.global_memory.only_read
    if space == "local":
        return lambda block: block.local_memory
    if space == "shared":
        return lambda block: block.shared_memory
    if space == "param":
        return lambda block: block.parameters
    raise ValueError(space)


def _elements(operand: str) -> list[str]:
    return re.findall(r"[^\s,{}]+", operand)
