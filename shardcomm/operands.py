"""What collectives are called with, checked: each error names the operation, the argument, and what is accepted."""

from __future__ import annotations

from typing import get_args

import torch

from shardcomm import _C
from shardcomm.arrays import ArrayLike, as_tensor
from shardcomm.communicator import Use
from shardcomm.streams import Event, Stream, keep_until

RED_OPS = {"sum": _C.RedOp.sum, "avg": _C.RedOp.avg, "max": _C.RedOp.max, "min": _C.RedOp.min}


def check_allocation(numel: int, dtype: torch.dtype, use: str) -> None:
    """ValueError, or TypeError for a dtype that is none, unless `allocate` can be called so."""
    if use not in get_args(Use):
        raise ValueError(f"allocate: use is {use!r}; accepted: 'gather', 'reduce'")
    if not isinstance(numel, int) or not 0 <= numel < 1 << 56:
        raise ValueError(f"allocate: numel is {numel!r}; it must be a whole number of at least 0")
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"allocate: dtype is {dtype!r}; it must be a torch.dtype")


def checked(operation: str, name: str, array: ArrayLike, device: torch.device) -> torch.Tensor:
    """`array` as a tensor; TypeError if it is none, ValueError unless it is contiguous and on `device`."""
    tensor = as_tensor(f"{operation}: {name}", array, written=name != "send")
    if not tensor.is_contiguous():
        raise ValueError(
            f"{operation}: {name} has strides {tensor.stride()} for shape {tuple(tensor.shape)}; "
            "it must be contiguous"
        )
    if tensor.device != device:
        raise ValueError(
            f"{operation}: {name} is on {tensor.device}; this communicator works on {device}"
        )
    return tensor


def check_sizes(
    operation: str, size: int, *, recv: torch.Tensor, send: torch.Tensor, whole: str
) -> None:
    """ValueError unless the one named `whole` holds one of the other for each of `size` ranks."""
    full, part = (recv, send) if whole == "recv" else (send, recv)
    if full.numel() != size * part.numel():
        raise ValueError(
            f"{operation}: recv has {recv.numel()} elements and send has {send.numel()}; with {size} ranks "
            f"{whole} must have {size} x {part.numel()} = {size * part.numel()}"
        )


def red_op(operation: str, op: str) -> _C.RedOp:
    """The core's reduction of this name; ValueError for another."""
    if not isinstance(op, str) or op not in RED_OPS:
        raise ValueError(f"{operation}: op is {op!r}; accepted: {', '.join(map(repr, RED_OPS))}")
    return RED_OPS[op]


def check_root(root: int, size: int) -> None:
    """ValueError unless `root` is a rank."""
    if not (isinstance(root, int) and 0 <= root < size):
        raise ValueError(f"broadcast: root is {root!r}; it must be a rank, 0 to {size - 1}")


def queued(stream: Stream | None, *tensors: torch.Tensor | None) -> Event | None:
    """The end of what was queued on `stream`, until which its `tensors` are kept; None without a stream."""
    if stream is None:
        return None
    event = stream.record()
    keep_until(event, *tensors)
    return event
