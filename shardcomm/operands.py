"""What collectives are called with, checked: each error names the operation, the argument, and what is accepted."""

from __future__ import annotations

from typing import get_args

import torch

from shardcomm import _C
from shardcomm.arrays import ArrayLike, as_tensor
from shardcomm.communicator import Use
from shardcomm.streams import Event, Stream, keep_until

RED_OPS = {"sum": _C.RedOp.sum, "avg": _C.RedOp.avg, "max": _C.RedOp.max, "min": _C.RedOp.min}

_QUANTISED = (torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4)
_STRIDED = torch.strided
_MOST_BYTES = 1 << 62  # of all ranks together: what the core can count


def check_allocation(numel: int, dtype: torch.dtype, use: str, size: int) -> None:
    """ValueError, or TypeError for a dtype that is none, unless `size` ranks can call `allocate` so."""
    if use not in get_args(Use):
        raise ValueError(f"allocate: use is {use!r}; accepted: 'gather', 'reduce'")
    if not isinstance(numel, int) or isinstance(numel, bool) or numel < 0:
        raise ValueError(f"allocate: numel is {numel!r}; it must be a whole number of at least 0")
    if not isinstance(dtype, torch.dtype) or dtype in _QUANTISED:
        raise TypeError(f"allocate: dtype is {dtype!r}; it must be a torch.dtype, not quantised")
    if numel * dtype.itemsize * size > _MOST_BYTES:
        raise ValueError(
            f"allocate: numel is {numel} of {dtype}, for {size} ranks; that is more memory than there can be"
        )


def checked(
    operation: str, name: str, array: ArrayLike, device: torch.device, *, written: bool = True
) -> torch.Tensor:
    """`array` as a tensor whose memory holds its values; a copy where it was a lazily negated view.

    For dtypes that the core computes with; `check_movable` is for the others.

    Raises:
        TypeError: it is no array, or no dense one.
        ValueError: it is not contiguous or not on `device`, or is such a view and `written`.
    """
    tensor = array
    if not isinstance(tensor, torch.Tensor):
        tensor = as_tensor(f"{operation}: {name}", array, written=written)
    if tensor.layout is not _STRIDED:
        raise _no_tensor_of(operation, name, tensor.layout)
    if not tensor.is_contiguous():
        raise ValueError(
            f"{operation}: {name} has strides {tensor.stride()} for shape {tuple(tensor.shape)}; "
            "it must be contiguous"
        )
    if tensor.device != device:
        raise ValueError(
            f"{operation}: {name} is on {tensor.device}; this communicator works on {device}"
        )
    return resolved(operation, name, tensor, written=written) if tensor.is_neg() else tensor


def check_movable(operation: str, name: str, tensor: torch.Tensor) -> None:
    """TypeError if the values of `tensor` are more than its elements, ValueError if they are their conjugates."""
    if tensor.is_quantized:
        raise _no_tensor_of(operation, name, tensor.dtype)
    resolved(operation, name, tensor, written=True)


def resolved(operation: str, name: str, tensor: torch.Tensor, *, written: bool) -> torch.Tensor:
    """`tensor`, copied if it is a view that negates or conjugates when it is read; ValueError if it is `written`."""
    if not (tensor.is_neg() or tensor.is_conj()):
        return tensor
    if written:
        raise ValueError(
            f"{operation}: {name} is a view that negates or conjugates what is in memory (is_neg() or is_conj()); "
            f"give {name}.resolve_neg().resolve_conj(), which is a tensor of its own"
        )
    return tensor.detach().resolve_neg().resolve_conj()


def check_sizes(
    operation: str, size: int, *, recv: torch.Tensor, send: torch.Tensor, whole: str
) -> None:
    """ValueError unless the one named `whole` holds one of the other for each of `size` ranks."""
    full, part = (recv, send) if whole == "recv" else (send, recv)
    numel = part.numel()
    if full.numel() != size * numel:
        raise ValueError(
            f"{operation}: recv has {recv.numel()} elements and send has {send.numel()}; with {size} ranks "
            f"{whole} must have {size} x {numel} = {size * numel}"
        )


def check_gather(
    operation: str, rank: int, size: int, *, recv: torch.Tensor, send: torch.Tensor
) -> None:
    """`check_sizes`, and ValueError if `send` overlaps `recv` but in place: for transports without the core."""
    check_sizes(operation, size, recv=recv, send=send, whole="recv")
    if overlap(recv, send) and not is_part(send, recv, rank):
        numel = send.numel()
        raise ValueError(
            f"{operation}: send overlaps recv; it must lie apart from it or, in place, be recv[rank * n : (rank + 1) * "
            f"n], here recv[{rank * numel} : {(rank + 1) * numel}], of recv's dtype"
        )


def check_scatter(
    operation: str, rank: int, size: int, *, recv: torch.Tensor, send: torch.Tensor
) -> None:
    """`check_sizes`, and ValueError if `recv` overlaps `send` but in place: for transports without the core."""
    check_sizes(operation, size, recv=recv, send=send, whole="send")
    if overlap(recv, send) and not is_part(recv, send, rank):
        numel = recv.numel()
        raise ValueError(
            f"{operation}: recv overlaps send, of which other ranks read; it must lie apart from it or, in place, be "
            f"send[rank * n : (rank + 1) * n], here send[{rank * numel} : {(rank + 1) * numel}], of send's dtype"
        )


def overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two contiguous tensors have memory in common."""
    apart = other.data_ptr() - one.data_ptr()
    return apart < one.nbytes if apart >= 0 else -apart < other.nbytes


def is_part(part: torch.Tensor, whole: torch.Tensor, rank: int) -> bool:
    """Whether `part` is that of `rank` in `whole`, as elements of one dtype: the one way to be in place."""
    return part.dtype == whole.dtype and part.data_ptr() == whole.data_ptr() + rank * part.nbytes


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


def _no_tensor_of(operation: str, name: str, kind: object) -> TypeError:
    return TypeError(
        f"{operation}: {name} is a tensor of {kind}; it must be a dense tensor that is not quantised, as its parts "
        "(values and indices, int_repr()) are"
    )
