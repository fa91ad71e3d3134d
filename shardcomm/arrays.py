"""Arrays of other libraries (NumPy, CuPy, JAX, Numba), seen as tensors; their memory stays where it is."""

from __future__ import annotations

from typing import Any, Protocol

import torch


class HasDLPack(Protocol):
    """An array that can be seen through DLPack."""

    def __dlpack__(self, *, stream: Any = ...) -> Any:
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
        ValueError: `array` is read-only and to be `written`, or runs backwards in memory, as no tensor can.
    """
    if isinstance(array, torch.Tensor):
        return array
    for protocol in ("__array_interface__", "__cuda_array_interface__"):
        _check(name, getattr(array, protocol, None), written)
    if hasattr(array, "__dlpack__"):
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


def _check(name: str, interface: dict[str, Any] | None, written: bool) -> None:
    if interface is None:
        return
    strides = interface.get("strides")
    if strides and min(strides) < 0:
        raise ValueError(f"{name} has strides {strides} in bytes; it must be contiguous")
    _, read_only = interface["data"]
    if written and read_only:
        raise ValueError(f"{name} is a read-only array; it is written to")
