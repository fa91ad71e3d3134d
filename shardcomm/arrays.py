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


def as_tensor(name: str, array: ArrayLike) -> torch.Tensor:
    """`array` itself if it is a tensor, else a tensor on the same memory.

    By DLPack (https://dmlc.github.io/dlpack) where the array has it, which also makes torch's current stream wait
    for what the array's library still computes; else by `__cuda_array_interface__`.

    Raises:
        TypeError: `array` has neither; the message calls it `name`.
    """
    if isinstance(array, torch.Tensor):
        return array
    if hasattr(array, "__dlpack__"):
        return torch.utils.dlpack.from_dlpack(array)
    if hasattr(array, "__cuda_array_interface__"):
        return torch.as_tensor(array)
    raise TypeError(
        f"{name} is a {type(array).__name__}; accepted: a torch.Tensor, or an array with __dlpack__ or "
        "__cuda_array_interface__"
    )
