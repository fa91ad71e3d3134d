"""Checks of arguments. Errors name the function and the argument, what was given, and what is accepted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeGuard

import torch

LEAST_ADDRESS = 1 << 32
"""A tensor whose memory was freed has a lower one, unless it is a view far from the beginning."""

MOST_SECONDS = 1e9  # the most that a timedelta, and a wait, can take


@contextmanager
def said_by(function: str) -> Iterator[None]:
    """Puts the name of the public `function` before the text of a TypeError or ValueError that leaves it.

    It decorates functions whose arguments are checked by several others further down.
    """
    try:
        yield
    except (TypeError, ValueError) as error:
        error.args = (f"{function}: {error}", *error.args[1:])
        raise


def check_type(operation: str, name: str, value: object, kind: Any, accepted: str) -> None:
    """TypeError unless `value` is of `kind`, which the message calls `accepted`."""
    if not isinstance(value, kind):
        raise TypeError(f"{operation}: {name} is a {type(value).__name__}; it must be {accepted}")


def check_list(operation: str, name: str, value: object) -> None:
    """TypeError unless `value` is a sequence, such as a list or a tuple. A text is refused."""
    # The usual two types first: to ask an abstract class takes ten times as long.
    if isinstance(value, str) or not isinstance(value, (list, tuple, Sequence)):
        raise TypeError(
            f"{operation}: {name} is a {type(value).__name__}; it must be a list or a tuple"
        )


def check_flag(operation: str, name: str, value: object) -> None:
    """ValueError unless `value` is True or False. A text such as "no" would count as true."""
    if not isinstance(value, bool):
        raise ValueError(f"{operation}: {name} is {value!r}; it must be True or False")


def check_has_memory(name: str, tensor: torch.Tensor) -> None:
    """ValueError if `tensor` is of memory that was freed, as full parameters often are between their uses, or of none.

    Of none are DTensors, for instance, which hold another tensor, and what torch shows inside of `torch.vmap`.
    """
    # Torch adds the offset of a view even then.
    offset = tensor.storage_offset() * tensor.element_size()
    try:
        address = tensor.data_ptr()
    except RuntimeError as error:  # torch's words are for authors of kernels
        raise ValueError(f"{name} has no memory of its own: {_without_memory(tensor)}") from error
    if address == offset and tensor.numel() > 0:
        raise ValueError(f"{name} has no memory of its own: {_without_memory(tensor)}")


def _without_memory(tensor: torch.Tensor) -> str:
    """What a tensor without memory is, and what to give."""
    functorch = torch._C._functorch
    if functorch.is_functorch_wrapped_tensor(tensor) or torch._is_functional_tensor(tensor):
        return (
            "it stands for other tensors inside of torch.vmap, or a transform of torch.func; give a tensor outside of "
            "these"
        )
    kind = type(tensor).__name__
    if kind in ("FakeTensor", "FunctionalTensor"):
        return (
            "it has no values while torch.export or make_fx traces, and what is called with it is not traced; leave "
            "the call out of what is traced"
        )
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return f"it is a {kind}; give a plain tensor, such as DTensor's to_local()"
    if tensor._is_zerotensor():
        return "it is zeros that autograd has not written out; give its clone()"
    return "its storage was freed, as untyped_storage().resize_(0) does"


def is_seconds(seconds: object) -> TypeGuard[float]:
    """Whether `seconds` is a number above 0, at most 1e9."""
    is_number = isinstance(seconds, (int, float)) and not isinstance(seconds, bool)
    return is_number and 0 < seconds <= MOST_SECONDS  # type: ignore[operator]


def check_seconds(operation: str, name: str, seconds: object) -> None:
    """ValueError unless `is_seconds(seconds)`."""
    if not is_seconds(seconds):
        raise ValueError(
            f"{operation}: {name} is {seconds!r}; it must be a number above 0, at most 1e9"
        )
