"""Called: calls something when backward comes by a tensor."""

from __future__ import annotations

import torch


class Called(torch.autograd.Function):
    """`Called.apply(x, call)` is a copy of `x`, whose backward calls `call()`."""

    @staticmethod
    def forward(ctx, x, call):  # type: ignore[no-untyped-def]
        ctx.call = call
        return x.clone()

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        ctx.call()
        return grad, None
