"""Executes a kernel's PTX on the CPU: what Triton's compiler or nvcc has made, where there is no GPU.

Blocks run one after the other. Of a block's threads, those that are at the earliest place of the program do an
instruction, all at once: where some of them have jumped ahead, they wait there, and the others come to them. So nothing
here notices a barrier that is missing, or blocks that race. Everything else that a kernel does shows: what it computes,
bit for bit, and each byte that it touches (`ptx_memory.py`).

    place    0   1   2   3   4   5            @%p1 bra $5, at place 2, which threads b and c take
    step 3               a bc
    step 4                   a   bc           b and c wait until a is there, too

What is not known here raises NotImplementedError, and so does a barrier to which only some threads of a block come.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence

import numpy as np

from support.ptx_decoder import Block, Decoder
from support.ptx_memory import Lanes, Memory, Region
from support.ptx_operations import TYPES
from support.ptx_text import read_kernel

_PARAMETER_BYTES = 1 << 16  # from the address of a parameter to that of the next


class Kernel:
    """A kernel, decoded from its text: what `ptx_text.texts_of` gives."""

    def __init__(self, text: str) -> None:
        kernel = read_kernel(text)
        self._parameters, self._threads = kernel.parameters, kernel.threads
        # What is in shared memory has the address 0, as there is one such thing; in local memory also.
        self._addresses = {"global_smem": 0, kernel.local: 0} | {
            parameter.name: (k + 1) * _PARAMETER_BYTES
            for k, parameter in enumerate(kernel.parameters)
        }
        self._local_bytes = kernel.threads * kernel.local_bytes
        self._texts = kernel.instructions
        decoder = Decoder(kernel, self._addresses)
        self._steps = [decoder.decode(text) for text in self._texts]

    def run(
        self,
        blocks: int,
        arguments: Sequence[int | float | ctypes.Structure],
        shared_bytes: int,
        memory: Memory,
    ) -> None:
        """Launches it. Parameters past the arguments, which are Triton's own scratch memory, are null pointers."""
        padded = [*arguments, *[0] * (len(self._parameters) - len(arguments))]
        parameters = Memory()
        for parameter, value in zip(self._parameters, padded, strict=True):
            held = (
                bytes(value)
                if isinstance(value, ctypes.Structure)
                else _bytes_of(value, parameter.type)
            )
            assert len(held) == parameter.nbytes, f"{len(held)} bytes for {parameter}"
            parameters.add(Region.holding(self._addresses[parameter.name], held))
        sizes = {"%ntid": self._threads, "%nctaid": blocks, "%ctaid": 1}
        with np.errstate(all="ignore"):
            for number in range(blocks):
                shared, local = Memory(), Memory()
                shared.add(Region.of_block(shared_bytes))
                local.add(Region.of_block(self._local_bytes))
                registers = {"%tid.x": np.arange(self._threads, dtype=np.uint32)}
                registers |= {f"{name}.x": self._all(size) for name, size in sizes.items()}
                registers |= {f"%ctaid.{axis}": self._all(0) for axis in "yz"}
                registers["%ctaid.x"] = self._all(number)
                self._run_block(Block(memory, shared, local, parameters, registers))

    def _run_block(self, block: Block) -> None:
        at, here = 0, None  # the threads at this place, if not all are
        elsewhere: dict[int, Lanes] = {}  # the others, by the places at which they wait
        while at < len(self._steps):
            try:
                jump = self._steps[at](block, here)
            except Exception as error:
                error.add_note(f"in block {block.registers['%ctaid.x'][0]}: {self._texts[at]}")
                raise
            at += 1
            if jump is not None and jump.threads is here:
                at = jump.target
            elif jump is not None:
                _add(elsewhere, jump.target, jump.threads)
                here = ~jump.threads if here is None else here & ~jump.threads
            if elsewhere and min(elsewhere) <= at:
                _add(elsewhere, at, here)
                at = min(elsewhere)
                here = elsewhere.pop(at)
                here = None if here.all() else here

    def _all(self, value: int) -> Lanes:
        return np.full(self._threads, value, np.uint32)


def _add(elsewhere: dict[int, Lanes], at: int, threads: Lanes) -> None:
    elsewhere[at] = elsewhere[at] | threads if at in elsewhere else threads


def _bytes_of(value: int | float, type: str) -> bytes:
    if type == "f32":
        return struct.pack("<f", value)
    nbytes = TYPES[type].itemsize
    return (int(value) % (1 << 8 * nbytes)).to_bytes(nbytes, "little")
