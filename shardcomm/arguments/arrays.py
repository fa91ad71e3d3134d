"""Arrays of other libraries (NumPy, CuPy, JAX, Numba) and buffers as tensors on the same memory."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch


class HasDLPack(Protocol):
    """An array that can be seen through DLPack."""

    def __dlpack__(self, *, stream: Any = ..., max_version: Any = ...) -> Any:
        """A capsule around the array."""

    def __dlpack_device__(self) -> Any:
        """The device on which the array is."""


class HasCudaArrayInterface(Protocol):
    """An array of a CUDA device."""

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """The array's address, shape, strides and type."""


ArrayLike = torch.Tensor | HasDLPack | HasCudaArrayInterface | bytes | bytearray | memoryview


def as_tensor(name: str, array: ArrayLike, *, written: bool = False) -> torch.Tensor:
    """`array` itself if it is a tensor, else a tensor on the same memory.

    It uses DLPack (https://dmlc.github.io/dlpack) if the array has it, which also makes torch's current stream wait for
    what the array's library still computes. Otherwise it uses `__cuda_array_interface__`, or Python's buffer protocol
    (bytearray, memoryview, array.array; a buffer that is read-only is copied).

    Args:
        name: What the errors call the array.
        array: The array.
        written: Whether it will be written to.

    Raises:
        TypeError: `array` has none of the three, a buffer of elements that no tensor has, or no values yet, as in
            `jax.jit`; or it is a masked array of NumPy, whose masked elements have no values.
        ValueError: `array` was deleted; or it is read-only, as all arrays of JAX are, and will be `written`; or it runs
            backwards in memory, which a tensor cannot.
    """
    if isinstance(array, torch.Tensor):
        return array
    if isinstance(array, getattr(sys.modules.get("jax"), "Array", ())):
        _check_jax(name, array, written)
    if isinstance(array, np.ma.MaskedArray):
        raise TypeError(
            f"{name} is a masked array, and no tensor has a mask; give what its filled() returns, or its data and its "
            "mask apart"
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
        return _read_by(torch.utils.dlpack.from_dlpack, name, array)
    if hasattr(array, "__cuda_array_interface__"):
        return _read_by(torch.as_tensor, name, array)
    try:
        view = memoryview(array)
    except TypeError:
        raise TypeError(
            f"{name} is a {type(array).__name__}; accepted: a torch.Tensor, or an array with __dlpack__, "
            "__cuda_array_interface__ or the buffer protocol"
        ) from None
    return _of_buffer(name, view, written)


def _read_by(read: Callable[[Any], torch.Tensor], name: str, array: Any) -> torch.Tensor:
    try:
        return read(array)
    except Exception as error:  # of the array's library, which raises what it likes
        kind = getattr(array, "dtype", type(array).__name__)
        raise TypeError(f"{name} is an array of {kind}: {error}") from error


def _check_jax(name: str, array: Any, written: bool) -> None:
    if isinstance(array, getattr(sys.modules.get("jax.core"), "Tracer", ())):
        raise TypeError(
            f"{name} is a JAX array without values, as inside of jax.jit, jax.grad and jax.vmap; call the collectives "
            "of shardcomm.jax there"
        )
    # JAX does not mark its arrays as read-only, but says that to write to them is undefined (to_dlpack in
    # jax/_src/dlpack.py).
    if written:
        raise ValueError(
            f"{name} is a JAX array, which cannot change; give a torch.Tensor or a NumPy array, and make a JAX array "
            "of it afterwards (jax.dlpack.from_dlpack)"
        )
    if hasattr(array, "is_deleted") and array.is_deleted():
        raise ValueError(
            f"{name} is a JAX array that was deleted, or donated to a function of jax.jit"
        )


def _of_buffer(name: str, view: memoryview, written: bool) -> torch.Tensor:
    if written and view.readonly:
        raise ValueError(f"{name} is a read-only buffer; it is written to")
    if not view.c_contiguous:
        raise ValueError(f"{name} has strides {view.strides} in bytes; it must be contiguous")
    try:
        return torch.from_numpy(np.array(view, copy=True if view.readonly else None))
    except TypeError:
        raise TypeError(
            f"{name} is a buffer of elements of format {view.format!r}; no tensor has such elements"
        ) from None


def _check(name: str, interface: dict[str, Any], written: bool) -> None:
    strides = interface.get("strides")
    if strides and min(strides) < 0:
        raise ValueError(f"{name} has strides {strides} in bytes; it must be contiguous")
    _, read_only = interface["data"]
    if written and read_only:
        raise ValueError(f"{name} is a read-only array; it is written to")


def _is_read_only(array: Any) -> bool:
    """Whether DLPack marks the array's memory as read-only, which it can since 1.0. Torch would ignore that."""
    try:
        capsule = array.__dlpack__(max_version=(1, 0))
    except Exception:  # it knows no versions; of other trouble torch will tell
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
