"""Arrays of other libraries (NumPy, CuPy, JAX, Numba), seen as tensors; their memory stays where it is."""

from __future__ import annotations

import ctypes
import sys
from typing import Any, Protocol

import torch


class HasDLPack(Protocol):
    """An array that can be seen through DLPack."""

    def __dlpack__(self, *, stream: Any = ..., max_version: Any = ...) -> Any:
        """A capsule around the array."""

    def __dlpack_device__(self) -> Any:
        """Where it is."""


class HasCudaArrayInterface(Protocol):
    """An array of a CUDA device."""

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """Its address, shape, strides and type."""


ArrayLike = torch.Tensor | HasDLPack | HasCudaArrayInterface


def as_tensor(name: str, array: ArrayLike, *, written: bool = False) -> torch.Tensor:
    """`array` itself if it is a tensor, else a tensor on the same memory.

    By DLPack (https://dmlc.github.io/dlpack) where the array has it, which also makes torch's current stream wait
    for what the array's library still computes; else by `__cuda_array_interface__`.

    Raises:
        TypeError: `array` has neither; the message calls it `name`.
        ValueError: `array` is read-only, as those of JAX all are, and to be `written`, or runs backwards in memory, as
            no tensor can.
    """
    if isinstance(array, torch.Tensor):
        return array
    # JAX lets whoever takes the memory of its arrays write there, and says that this is undefined (to_dlpack in
    # jax/_src/dlpack.py).
    if written and isinstance(array, getattr(sys.modules.get("jax"), "Array", ())):
        raise ValueError(
            f"{name} is a JAX array, which cannot change; give a torch.Tensor or a NumPy array, and make a JAX array "
            "of it afterwards (jax.dlpack.from_dlpack)"
        )
    interfaces = [
        interface
        for protocol in ("__array_interface__", "__cuda_array_interface__")
        if (interface := getattr(array, protocol, None)) is not None
    ]
    for interface in interfaces:
        _check(name, interface, written)
    if hasattr(array, "__dlpack__"):
        if written and not interfaces and _is_read_only(array):
            raise ValueError(f"{name} is a read-only array; it is written to")
        try:
            return torch.utils.dlpack.from_dlpack(array)
        except BufferError as error:
            raise TypeError(f"{name}: {error}") from error
    if hasattr(array, "__cuda_array_interface__"):
        return torch.as_tensor(array)
    raise TypeError(
        f"{name} is a {type(array).__name__}; accepted: a torch.Tensor, or an array with __dlpack__ or "
        "__cuda_array_interface__"
    )


def _check(name: str, interface: dict[str, Any], written: bool) -> None:
    strides = interface.get("strides")
    if strides and min(strides) < 0:
        raise ValueError(f"{name} has strides {strides} in bytes; it must be contiguous")
    _, read_only = interface["data"]
    if written and read_only:
        raise ValueError(f"{name} is a read-only array; it is written to")


def _is_read_only(array: Any) -> bool:
    """What DLPack says of its memory since 1.0. Torch, which asks for that version, too, writes there all the same."""
    try:
        capsule = array.__dlpack__(max_version=(1, 0))
    except (TypeError, BufferError):  # it knows no versions; torch meets what else is wrong
        return False
    if not _is_capsule(capsule, b"dltensor_versioned"):
        return False
    managed = ctypes.cast(_pointer_of(capsule, b"dltensor_versioned"), ctypes.POINTER(_Versioned))
    return bool(managed.contents.flags & 1)  # DLPACK_FLAG_BITMASK_READ_ONLY


class _Versioned(ctypes.Structure):
    """The beginning of DLManagedTensorVersioned (dlpack.h)."""

    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
    )


_is_capsule = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_IsValid", ctypes.pythonapi)
)
_pointer_of = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)
