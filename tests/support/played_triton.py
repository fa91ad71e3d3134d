"""A GPU for Triton: the one that is here; else, with Triton's real compiler, the machine that executes PTX.

Triton's own launch decides what is compiled: the arguments' types and alignment, the constants, the options.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from support.ptx_machine import Kernel
from support.ptx_memory import Memory, Region
from support.ptx_text import texts_of

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
"""Where the operands of Triton's kernels are."""


class Gpu:
    """This machine's. Of a played one, `may_read` and `may_write` say what a kernel may touch."""

    def may_read(self, *tensors: Tensor | None) -> None:
        pass

    def may_write(self, *tensors: Tensor) -> None:
        pass


class PlayedGpu(Gpu):
    """A GPU whose memory is the CPU's tensors that `may_read` and `may_write` name.

    A kernel may also read the tensors that are its arguments.
    """

    def __init__(self) -> None:
        self.memory = Memory()

    def may_read(self, *tensors: Tensor | None) -> None:
        for tensor in tensors:
            if tensor is not None:
                self.memory.add(Region.of_tensor(tensor, writable=False))

    def may_write(self, *tensors: Tensor) -> None:
        for tensor in tensors:
            self.memory.add(Region.of_tensor(tensor, writable=True))

    def launch(self, compiled: Any, blocks: int, arguments: tuple[Any, ...]) -> None:
        """Runs one of Triton's compiled kernels."""
        values = [
            value
            for value, type in zip(arguments, compiled.src.signature.values(), strict=True)
            if type != "constexpr"
        ]
        tensors = [value for value in values if isinstance(value, Tensor)]
        pointers = [value.data_ptr() if isinstance(value, Tensor) else value for value in values]
        with self.memory.readable_too(*tensors):
            _decoded(compiled.asm["ptx"]).run(
                blocks, pointers, compiled.metadata.shared, self.memory
            )


def why_not() -> str:
    """Why there is no GPU for Triton here, not even a played one; "" if there is."""
    if DEVICE.type == "cuda":
        return ""
    try:
        import triton.language
        from triton.backends.compiler import GPUTarget  # noqa: F401
        from triton.compiler import CompiledKernel
        from triton.runtime.driver import driver
        from triton.runtime.jit import JITFunction
    except ImportError as error:
        return f"the Triton executor needs a newer Triton: {error}"
    if not isinstance(getattr(CompiledKernel, "run", None), property) or not hasattr(
        driver, "_active"
    ):
        return f"Triton {triton.__version__} launches kernels in another way"
    if not isinstance(triton.language.standard._elementwise_max, JITFunction):
        return "Triton was imported for its interpreter: TRITON_INTERPRET was set"
    return ""


class HostTable:
    """`Table` of shardcomm.copy.triton, which the machine reads where it is."""

    def __init__(self, rows: Tensor, _device: torch.device) -> None:
        self._rows = rows

    def on_current_stream(self) -> Tensor:
        return self._rows


@contextmanager
def triton_gpu(capability: int = 90) -> Iterator[Gpu]:
    """While it lasts, Triton's kernels run: on this machine's GPU, or on a played one, 90 for sm_90."""
    if DEVICE.type == "cuda":
        yield Gpu()
        return
    from triton.backends.compiler import GPUTarget
    from triton.compiler import CompiledKernel
    from triton.runtime.driver import driver

    from shardcomm.copy import blocks_triton
    from shardcomm.copy import triton as copy_triton

    gpu = PlayedGpu()

    def run(compiled: Any) -> Callable[..., None]:
        def launch(x: int, y: int, z: int, *rest: Any) -> None:
            assert (y, z) == (1, 1)
            # After the stream, the function, two kinds of metadata, and two hooks.
            gpu.launch(compiled, x, rest[6:])

        return launch

    with pytest.MonkeyPatch.context() as patch:
        for module in (copy_triton, blocks_triton):
            patch.setattr(module, "check_device", lambda device: None)
            patch.setattr(module, "Table", HostTable)
        patch.setattr(torch.accelerator, "device_index", lambda index: nullcontext())
        patch.setattr(CompiledKernel, "run", property(run))
        patch.setattr(CompiledKernel, "launch_metadata", lambda *arguments: None)
        played = SimpleNamespace(
            get_current_target=lambda: GPUTarget("cuda", capability, 32),
            # Triton keeps what it has compiled by device.
            get_current_device=lambda: capability,
            get_current_stream=lambda device: 0,
        )
        patch.setattr(driver, "_active", played)
        yield gpu


@functools.cache
def _decoded(ptx: str) -> Kernel:
    (text,) = texts_of(ptx).values()
    return Kernel(text)
