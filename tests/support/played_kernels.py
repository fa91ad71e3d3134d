"""The extension's CUDA kernels on the machine that executes PTX, in place of a GPU."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from ctypes import Structure

import pytest
import torch
from torch import Tensor

from support.dumped_extension import dumped, names_of
from support.ptx_machine import Kernel
from support.ptx_memory import Memory, Region
from support.ptx_text import texts_of

TYPE_NAMES = {
    torch.float32: "float",
    torch.bfloat16: "BFloat16",
    torch.float16: "Half",
    torch.float64: "double",
    torch.uint8: "unsigned char",
    torch.int32: "int",
    torch.int64: "long",
}


def launch(
    kernel: str,
    blocks: int,
    arguments: Sequence[int | float | Structure],
    reads: Sequence[Tensor],
    writes: Sequence[Tensor],
) -> None:
    """Launches a kernel, by its name, where it can touch these tensors, and nothing else.

    Skips the test where the extension has no kernels, or there is no tool to read them.
    """
    memory = Memory()
    for tensor in reads:
        memory.add(Region.of_tensor(tensor, writable=False))
    for tensor in writes:
        memory.add(Region.of_tensor(tensor, writable=True))
    _kernel(kernel).run(blocks, arguments, 0, memory)


def flags() -> tuple[Tensor, Tensor]:
    """One for a kernel to set, and one for the CPU."""
    return torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)


@functools.cache
def _kernel(name: str) -> Kernel:
    return Kernel(_texts()[name])


@functools.cache
def _texts() -> dict[str, str]:
    texts = texts_of(dumped("-ptx"))
    if not texts:
        pytest.skip("shardcomm was built without PTX")
    return {name: texts[mangled] for mangled, name in names_of([*texts]).items()}
