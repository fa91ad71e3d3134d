"""The handlers by which XLA calls the C library.

They are one C++ file, `lib/jax/handlers.cpp` of this package, which is compiled where a machine first needs it, against
the headers that jaxlib brings: XLA supports handlers that were compiled against its headers of the last twelve months,
so that a library made when shardcomm was built would stop working.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import jax
import jaxlib

from shardcomm.files.compiled import compiled
from shardcomm.files.installed import get_library_dir
from shardcomm.interop.c_library import CLibrary

TARGET = "shardcomm_collective"
"""The name by which programs call the handlers."""

_CLOSED = -1  # of shardcomm_jax_check


class Library(CLibrary):
    """The C library, and the handlers."""

    def __init__(self) -> None:
        super().__init__()
        self._handlers = ctypes.CDLL(str(_compiled()))
        self._handlers.shardcomm_jax_add.restype = ctypes.c_int64
        for platform, name_in_xla in (("cpu", "cpu"), ("cuda", "CUDA")):
            handler = getattr(self._handlers, f"shardcomm_jax_on_{platform}")
            jax.ffi.register_ffi_target(TARGET, jax.ffi.pycapsule(handler), platform=name_in_xla)

    def add(self, comm: ctypes.c_void_p, size: int, device: int) -> int:
        """The number by which programs name the communicator; `close` gives back what `comm` holds."""
        return int(self._handlers.shardcomm_jax_add(comm, size, device))

    def check(self, number: int) -> bool:
        """Whether the communicator is open; raises CommError if its group has failed."""
        status = self._handlers.shardcomm_jax_check(ctypes.c_int64(number))
        if status == _CLOSED:
            return False
        self.raise_unless_ok(status)
        return True

    def close(self, number: int) -> None:
        """Leaves the group, and gives back what it holds. A second time it does nothing."""
        self._handlers.shardcomm_jax_close(ctypes.c_int64(number))


@cache
def library() -> Library:
    """The library; the first call of a process loads it, and the first of a machine compiles the handlers.

    Raises:
        RuntimeError: There is no C++ compiler, or it refuses; the error has its words.
    """
    return Library()


def _compiled() -> Path:
    source = Path(get_library_dir()) / "jax" / "handlers.cpp"
    options = ["-std=c++17", "-isystem", jax.ffi.include_dir()]
    return compiled("shardcomm.jax", f"jax-{jaxlib.__version__}", source, options)
