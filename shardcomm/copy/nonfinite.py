"""Flags for NaN and Inf: one int32 element, which the kernels that write gradients set to 1 and never clear."""

from __future__ import annotations

import torch

from shardcomm.arguments.checks import check_has_memory


def flag_address(operation: str, flag: torch.Tensor | None, device: torch.device) -> int:
    """The address of `flag`; 0 for None.

    Raises:
        TypeError: `flag` is no tensor.
        ValueError: `flag` is not one int32 element on `device`, or has no memory.
    """
    if flag is None:
        return 0
    if not isinstance(flag, torch.Tensor):
        raise TypeError(
            f"{operation}: nonfinite is a {type(flag).__name__}; it must be a torch.Tensor"
        )
    if flag.dtype != torch.int32 or flag.numel() != 1 or flag.device != device:
        raise ValueError(
            f"{operation}: nonfinite is {flag.numel()} elements of {flag.dtype} on {flag.device}; it must be one of "
            f"torch.int32 on {device}"
        )
    check_has_memory(f"{operation}: nonfinite", flag)
    return flag.data_ptr()


def look(written: torch.Tensor, flag: torch.Tensor) -> None:
    """Sets `flag` if an element of `written` is NaN or Inf. It reads all of it, for writers that do not look."""
    if written.is_floating_point() and written.numel():
        least, largest = torch.aminmax(written)  # NaN is both of them
        flag |= ~(least.isfinite() & largest.isfinite())
