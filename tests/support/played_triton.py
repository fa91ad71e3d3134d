"""Triton with its real compiler and, in place of a GPU and its driver, the machine that executes PTX.

Triton's own launch decides what is compiled: the arguments' types and alignment, the constants, the options.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from torch import Tensor

from support.ptx_machine import Kernel
from support.ptx_memory import Memory, Region

_MODULES = ["block_element_triton", "triton", "blocks_triton"]


class PlayedGpu:
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
    """Why Triton cannot be played here; "" if it can."""
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


@contextmanager
def compiled_executors() -> Iterator[SimpleNamespace]:
    """The modules of the Triton executors, imported anew for the compiler, and willing to run on the CPU's tensors.

    In the same process others import them for Triton's interpreter: nobody else gets to see these.
    """
    package = importlib.import_module("shardcomm.copy")
    names = [f"{package.__name__}.{name}" for name in _MODULES]
    before = {name: sys.modules.pop(name, None) for name in names}
    attributes = {name: vars(package).pop(name, None) for name in _MODULES}
    try:
        with pytest.MonkeyPatch.context() as environment:
            environment.delenv("TRITON_INTERPRET", raising=False)
            modules = {
                short: importlib.import_module(name)
                for short, name in zip(_MODULES, names, strict=True)
            }
    finally:
        _put_back(sys.modules, before)
        _put_back(vars(package), attributes)
    for module in modules.values():
        vars(module)["check_device"] = lambda device: None
    yield SimpleNamespace(**modules)


def _put_back(names: dict[str, Any], before: dict[str, ModuleType | None]) -> None:
    for name, module in before.items():
        names.pop(name, None)
        if module is not None:
            names[name] = module


@contextmanager
def played_gpu(capability: int = 90) -> Iterator[PlayedGpu]:
    """While it lasts, Triton compiles for a GPU of this capability, 90 for sm_90, and launches on it."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import CompiledKernel
    from triton.runtime.driver import driver

    gpu = PlayedGpu()

    def run(compiled: Any) -> Callable[..., None]:
        def launch(x: int, y: int, z: int, *rest: Any) -> None:
            assert (y, z) == (1, 1)
            # After the stream, the function, two kinds of metadata, and two hooks.
            gpu.launch(compiled, x, rest[6:])

        return launch

    with pytest.MonkeyPatch.context() as patch:
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
    return Kernel(ptx)
