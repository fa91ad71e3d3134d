"""torch dtypes as the core names them."""

from __future__ import annotations

import torch

from shardcomm import _C

_CORE = {
    torch.uint8: _C.DType.u8,
    torch.int32: _C.DType.i32,
    torch.int64: _C.DType.i64,
    torch.float16: _C.DType.f16,
    torch.bfloat16: _C.DType.bf16,
    torch.float32: _C.DType.f32,
    torch.float64: _C.DType.f64,
}


def core_dtype(dtype: torch.dtype) -> _C.DType:
    """The core's name for `dtype`.

    Raises:
        TypeError: the core does not know it; such tensors travel as bytes, through `.view(torch.uint8)`.
    """
    if dtype not in _CORE:
        raise TypeError(
            f"dtype is {dtype}; accepted: {', '.join(map(str, _CORE))}; view others as torch.uint8 to move them"
        )
    return _CORE[dtype]


def as_known(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor`, or its bytes if the core does not know its dtype."""
    return tensor if tensor.dtype in _CORE else tensor.view(torch.uint8)
