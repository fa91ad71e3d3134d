"""Checks of what collectives are called with. Each error names the operation, the argument, and what is accepted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

import torch

from shardcomm import _C
from shardcomm.arguments.arrays import ArrayLike, as_tensor
from shardcomm.arguments.checks import check_has_memory, check_list
from shardcomm.arguments.scalars import is_whole
from shardcomm.comm.words import Use
from shardcomm.stream.streams import AnyEvent, keep_until

RED_OPS = {"sum": _C.RedOp.sum, "avg": _C.RedOp.avg, "max": _C.RedOp.max, "min": _C.RedOp.min}

_QUANTISED = (torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4)
_STRIDED = torch.strided
_MOST_BYTES = 1 << 62  # of all ranks together: the most that the core can count


def check_allocation(numel: int, dtype: torch.dtype, use: str, size: int) -> None:
    """Checks the arguments of `allocate` on `size` ranks.

    Raises:
        ValueError: `use` or `numel` is none of the accepted values, or there cannot be that much memory.
        TypeError: `dtype` is no dtype, or a quantised one.
    """
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
    """`array` as a tensor whose memory holds its values; a lazily negated view is copied.

    It checks enough for the dtypes with which the core computes; `check_movable` does for the others.

    Raises:
        TypeError: `array` is no array, or no dense one.
        ValueError: `array` is not contiguous, not on `device`, or without memory, or it is a lazily negated view and
            will be `written`.
    """
    tensor = array if type(array) is torch.Tensor else _opened(operation, name, array, written)
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
    check_has_memory(f"{operation}: {name}", tensor)
    return resolved(operation, name, tensor, written=written) if tensor.is_neg() else tensor


def _opened(operation: str, name: str, array: ArrayLike, written: bool) -> torch.Tensor:
    if (refuse := getattr(type(array), "refuse_collective", None)) is not None:
        refuse(array, operation)  # sharded parameters have it: each rank has other rows
    if isinstance(array, torch.Tensor):
        return array
    return as_tensor(f"{operation}: {name}", array, written=written)


def check_movable(operation: str, name: str, tensor: torch.Tensor) -> None:
    """Checks that the memory of `tensor` holds its values, for dtypes that are only moved.

    Raises:
        TypeError: It is quantised, so that its values are more than its elements.
        ValueError: It is a view that conjugates or negates its elements.
    """
    if tensor.is_quantized:
        raise _no_tensor_of(operation, name, tensor.dtype)
    resolved(operation, name, tensor, written=True)


def resolved(operation: str, name: str, tensor: torch.Tensor, *, written: bool) -> torch.Tensor:
    """`tensor`, copied if it is a view that negates or conjugates when it is read.

    Raises:
        ValueError: It is such a view, and will be `written`.
    """
    if not (tensor.is_neg() or tensor.is_conj()):
        return tensor
    if written:
        raise ValueError(
            f"{operation}: {name} is a view that negates or conjugates what is in memory (is_neg() or is_conj()); "
            f"give {name}.resolve_neg().resolve_conj(), which is a tensor of its own"
        )
    return tensor.detach().resolve_neg().resolve_conj()


def checked_parts(
    operation: str,
    ranks: tuple[int, int],
    counts: Sequence[int] | None,
    *,
    recv: torch.Tensor,
    send: torch.Tensor,
    whole: str,
) -> int | tuple[int, ...]:
    """The length of each rank's part in elements: one number if all are equal, else one for each rank.

    Args:
        operation: The collective's name, for the errors.
        ranks: This rank, and how many there are.
        counts: As the caller gave them; None: equal parts.
        recv: The operand that is written.
        send: The operand that is read.
        whole: "recv" or "send": which operand holds all parts. The other one is this rank's part.

    Raises:
        TypeError: `counts` is no list.
        ValueError: There is not one count for each rank, or the operands are of other sizes than the parts.
    """
    full, part = (recv, send) if whole == "recv" else (send, recv)
    rank, size = ranks
    if counts is None:
        numel = part.numel()
        if full.numel() != size * numel:
            raise ValueError(
                f"{operation}: recv has {recv.numel()} elements and send has {send.numel()}; with {size} ranks "
                f"{whole} must have {size} x {numel} = {size * numel}"
            )
        return numel
    check_list(operation, "counts", counts)
    if len(counts) != size:
        raise ValueError(
            f"{operation}: counts has {len(counts)} entries; it must have one for each of the {size} ranks"
        )
    for index, count in enumerate(counts):
        if not is_whole(count, 0, _MOST_BYTES):
            raise ValueError(
                f"{operation}: counts[{index}] is {count!r}; it must be a whole number of elements, 0 or more"
            )
    if full.numel() != sum(counts) or part.numel() != counts[rank]:
        name = "send" if whole == "recv" else "recv"
        raise ValueError(
            f"{operation}: recv has {recv.numel()} elements and send has {send.numel()}; by counts {list(counts)} "
            f"{whole} must have {sum(counts)} and {name}, of rank {rank}, {counts[rank]}"
        )
    return tuple(counts)


def check_gather(
    operation: str,
    ranks: tuple[int, int],
    counts: Sequence[int] | None,
    *,
    recv: torch.Tensor,
    send: torch.Tensor,
) -> list[int]:
    """The length of each part of an all-gather, for transports without the core, which checks overlaps itself.

    Raises:
        TypeError: As `checked_parts`.
        ValueError: As `checked_parts`; or the operands overlap in another way than in place.
    """
    parts = checked_parts(operation, ranks, counts, recv=recv, send=send, whole="recv")
    begin, end = _own(ranks, parts)
    if overlap(recv, send) and not is_part(send, recv, begin):
        raise ValueError(
            f"{operation}: send overlaps recv; it must lie apart from it or, in place, be this rank's part of it, here "
            f"recv[{begin} : {end}], of recv's dtype"
        )
    return lengths(parts, ranks[1])


def check_scatter(
    operation: str,
    ranks: tuple[int, int],
    counts: Sequence[int] | None,
    *,
    recv: torch.Tensor,
    send: torch.Tensor,
) -> list[int]:
    """The length of each part of a reduce-scatter; otherwise as `check_gather`."""
    parts = checked_parts(operation, ranks, counts, recv=recv, send=send, whole="send")
    begin, end = _own(ranks, parts)
    if overlap(recv, send) and not is_part(recv, send, begin):
        raise ValueError(
            f"{operation}: recv overlaps send, of which other ranks read; it must lie apart from it or, in place, be "
            f"this rank's part of it, here send[{begin} : {end}], of send's dtype"
        )
    return lengths(parts, ranks[1])


def lengths(parts: int | tuple[int, ...], size: int) -> list[int]:
    """The length of each rank's part, from what `checked_parts` returned."""
    return [parts] * size if isinstance(parts, int) else list(parts)


def _own(ranks: tuple[int, int], parts: int | tuple[int, ...]) -> tuple[int, int]:
    rank, size = ranks
    begin = sum(lengths(parts, size)[:rank])
    return begin, begin + lengths(parts, size)[rank]


def overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two contiguous tensors have memory in common."""
    apart = other.data_ptr() - one.data_ptr()
    return apart < one.nbytes if apart >= 0 else -apart < other.nbytes


def is_part(part: torch.Tensor, whole: torch.Tensor, begin: int) -> bool:
    """Whether `part` lies in `whole` from element `begin` on, in its dtype: the only way to be in place."""
    place = whole.data_ptr() + begin * whole.itemsize
    return part.dtype == whole.dtype and part.data_ptr() == place


def red_op(operation: str, op: str) -> _C.RedOp:
    """The core's reduction of this name; ValueError if there is none."""
    if not isinstance(op, str) or op not in RED_OPS:
        raise ValueError(f"{operation}: op is {op!r}; accepted: {', '.join(map(repr, RED_OPS))}")
    return RED_OPS[op]


def check_root(operation: str, root: int, size: int) -> None:
    """ValueError unless `root` is a rank."""
    if not (isinstance(root, int) and 0 <= root < size):
        raise ValueError(f"{operation}: root is {root!r}; it must be a rank, 0 to {size - 1}")


def keep_memory_until(event: AnyEvent, *tensors: torch.Tensor | None) -> None:
    """Keeps the memory that the tensors have now until `event` has fired, even if they are given other memory.

    `.data =` and `set_` do that, also while a collective runs.
    """
    keep_until(event, *[tensor.untyped_storage() for tensor in tensors if tensor is not None])


def _no_tensor_of(operation: str, name: str, kind: object) -> TypeError:
    return TypeError(
        f"{operation}: {name} is a tensor of {kind}; it must be a dense tensor that is not quantised, as its parts "
        "(values and indices, int_repr()) are"
    )
