"""Torch's dtypes and the core's. Only this module knows both."""

import torch

from shardcomm import _C

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
"""The dtypes between which copies and reduces convert."""

_CORE_DTYPES = {
    torch.uint8: _C.DType.u8,
    torch.int32: _C.DType.i32,
    torch.int64: _C.DType.i64,
    torch.float16: _C.DType.f16,
    torch.bfloat16: _C.DType.bf16,
    torch.float32: _C.DType.f32,
    torch.float64: _C.DType.f64,
}


def core_dtype(dtype: torch.dtype, what: str = "a tensor") -> _C.DType:
    """The core's name for `dtype`, with which the core can compute; `what` has it, as "all_reduce: buffer".

    Raises:
        TypeError: The core does not know the arithmetic of `dtype`.
    """
    try:
        return _CORE_DTYPES[dtype]
    except KeyError:
        accepted = ", ".join(str(known) for known in _CORE_DTYPES)
        raise TypeError(f"{what} is of {dtype}; accepted: {accepted}") from None


def wire_dtype(dtype: torch.dtype) -> tuple[_C.DType, int]:
    """How an element of `dtype` travels when it is only moved: the core's dtype, and how many elements of that.

    An element of a dtype that the core does not know travels as its bytes.
    """
    if dtype in _CORE_DTYPES:
        return _CORE_DTYPES[dtype], 1
    return _C.DType.u8, dtype.itemsize


def movable(flat: torch.Tensor) -> torch.Tensor:
    """`flat` as every transport can move it: as bytes if the core does not know its dtype."""
    return flat if flat.dtype in _CORE_DTYPES else flat.view(torch.uint8)
