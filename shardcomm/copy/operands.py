"""The tensors that a copy plan reads and writes: checked, and as the addresses that its executor takes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NoReturn

import torch
from torch import Tensor

from shardcomm.arguments.arrays import ArrayLike, as_tensor
from shardcomm.arguments.checks import LEAST_ADDRESS, check_has_memory, check_type
from shardcomm.arguments.dtype import wire_dtype


def checked_operands(
    sources: Sequence[ArrayLike | None], destinations: Sequence[ArrayLike], *, bound: bool
) -> tuple[list[Tensor | None], list[Tensor]]:
    """The sources and destinations of a copy as tensors. Those of a `bound` copy are never copied to become one."""
    read = as_tensors("sources", sources, copied=not bound)
    written = []
    for i, tensor in enumerate(as_tensors("destinations", destinations)):
        if tensor is None:
            raise TypeError(f"destinations[{i}] is None, it must be a tensor")
        written.append(tensor)
    return read, written


def as_tensors(
    role: str, arrays: Sequence[ArrayLike | None], *, copied: bool = False
) -> list[Tensor | None]:
    """The arrays of a role as tensors; None stays None. With `copied`, a view that negates is a copy."""
    check_type("CopyPlan", role, arrays, Iterable, "a list or a tuple")
    return [
        # Mostly they are plain tensors, and there may be a thousand: these are passed on as they are.
        array
        if array is None or (isinstance(array, Tensor) and not (array.is_neg() or array.is_conj()))
        else _in_memory(f"{role}[{i}]", array, written=role == "destinations", copied=copied)
        for i, array in enumerate(arrays)
    ]


def _in_memory(name: str, array: ArrayLike, *, written: bool, copied: bool) -> Tensor:
    """`array` as a tensor. A view that negates or conjugates memory is copied if `copied`, and refused otherwise."""
    tensor = as_tensor(name, array, written=written)
    if not copied and (tensor.is_neg() or tensor.is_conj()):
        raise ValueError(
            f"{name} is a view that negates or conjugates what is in memory (is_neg() or is_conj()); give its "
            ".resolve_neg().resolve_conj(), which is a tensor of its own"
        )
    return tensor.resolve_neg().resolve_conj()


def device_of(destinations: Sequence[Tensor]) -> torch.device:
    """The device that a copy runs on."""
    device = destinations[0].device if destinations else torch.device("cpu")
    if device.type == "meta":
        raise TypeError("destinations[0] is on meta; it must have memory")
    return device


def pointers_of(
    role: str,
    tensors: Sequence[Tensor | None],
    dtype: torch.dtype,
    wire_extents: Sequence[int],
    device: torch.device,
) -> list[int]:
    """The addresses of tensors, which are checked. Extents count elements as the core sees them."""
    if len(tensors) != len(wire_extents):
        raise ValueError(f"{role} has {len(tensors)} tensors, the plan has {len(wire_extents)}")
    items = wire_dtype(dtype)[1]
    addresses = []
    for tensor, extent in zip(tensors, wire_extents, strict=True):
        if tensor is None:
            addresses.append(0)
        elif (
            tensor.dtype is dtype
            and tensor.device == device
            and tensor.layout is torch.strided
            and tensor.is_contiguous()
            and tensor.numel() * items >= extent
        ):
            try:
                address = tensor.data_ptr()
            except RuntimeError:  # it stands for others, as inside of torch.vmap
                address = 0
            if address < LEAST_ADDRESS:
                check_has_memory(f"{role}[{len(addresses)}]", tensor)
            addresses.append(address)
        else:
            _refuse(f"{role}[{len(addresses)}]", tensor, dtype, extent // items, device)
    return addresses


def _refuse(
    name: str, tensor: Tensor, dtype: torch.dtype, extent: int, device: torch.device
) -> NoReturn:
    if tensor.layout is not torch.strided:
        raise TypeError(f"{name} is a tensor of {tensor.layout}, it must be dense")
    if tensor.dtype != dtype or tensor.device != device:
        raise TypeError(
            f"{name} is {tensor.dtype} on {tensor.device}, this copy takes {dtype} on {device}"
        )
    if not tensor.is_contiguous():
        raise ValueError(f"{name} is not contiguous, its strides are {tensor.stride()}")
    raise ValueError(f"{name} has {tensor.numel()} elements, the plan needs {extent}")
