"""Reductions of a sharded tensor to one value, such as its mean or its largest element: the whole's.

Each rank reduces its rows, and an all-reduce makes the value that of the whole, at once. So every rank must call it.
The all-reduce has a tag of its own, so that another collective in its place is an error.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from shardcomm.parameter.holders import complete
from shardcomm.parameter.plain import plain
from shardcomm.parameter.whole import Whole


def is_reduction(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether `func`, called with these arguments, reduces a sharded tensor to one value that `reduced` can give."""
    if func not in _REDUCTIONS or not hasattr(args[0] if args else None, "whole"):
        return False
    if len(args) > 2 or (len(args) == 2 and not isinstance(args[1], bool)):
        return False  # along a dim, or of two tensors
    with plain():
        known = args[0].is_floating_point() or args[0].dtype is torch.bool
    return known and kwargs.get("dim") is None and kwargs.keys() <= _OPTIONS


def reduced(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """What `func` gives for the whole tensor, for arguments of which `is_reduction` is true; collective."""
    tensor = args[0]
    whole: Whole = tensor.whole
    with plain():
        rows = tensor.detach().as_subclass(torch.Tensor)
        # Torch says which dtype the value has, or what is wrong with the arguments.
        dtype = func(rows.new_ones(2), *args[1:], **kwargs).dtype
        options = {"correction": kwargs.get("correction"), "unbiased": kwargs.get("unbiased", True)}
        if len(args) == 2:
            options["unbiased"] = args[1]
        value = _REDUCTIONS[func](_Rows(rows, whole, func.__name__), options).to(dtype)
        if not (torch.is_grad_enabled() and tensor.requires_grad):
            return value
        looked_at: torch.Tensor = _ToLookAt.apply(tensor, value, whole, func.__name__)  # type: ignore[no-untyped-call]
    return looked_at


class _Rows:
    """A rank's rows, and the values that all ranks have between them."""

    def __init__(self, values: torch.Tensor, whole: Whole, name: str) -> None:
        self.whole, self._what = whole, f"{name} of {whole.name!r}"
        low = values.dtype in (torch.float16, torch.bfloat16, torch.bool)
        self.values = values.float() if low else values
        self.numel = whole.outline.numel()

    def total(self, of: torch.Tensor) -> torch.Tensor:
        """The sum of `of`, which has the rows' shape, over all ranks."""
        part = of.sum().double().view(1)
        return self._combined(part if self.whole.counts else torch.zeros_like(part), "sum")

    def largest(self, of: torch.Tensor) -> torch.Tensor:
        """The largest element of `of` over all ranks, or NaN if there is one; not all transports' "max" says so."""
        part = of.new_tensor([-math.inf, 0.0], dtype=torch.float64)
        if of.numel():
            is_nan = of.isnan()
            part[0] = of.masked_fill(is_nan, -math.inf).max()
            part[1] = is_nan.any()
        largest, any_nan = self._combined(part, "max").unbind()
        return largest.masked_fill(any_nan > 0, math.nan)

    def mean(self) -> torch.Tensor:
        return self.total(self.values) / self.numel

    def variance(self, options: dict[str, Any]) -> torch.Tensor:
        correction = options["correction"]
        if correction is None:
            correction = 1 if options["unbiased"] else 0
        squares = self.total((self.values - self.mean().to(self.values.dtype)).square())
        degrees: float = max(self.numel - correction, 0)
        return squares / degrees

    def _combined(self, part: torch.Tensor, op: Any) -> torch.Tensor:
        mesh = self.whole.holders.mesh
        buffer = part.to(mesh.device)
        complete(mesh.all_reduce_shards, buffer, op, self._what)
        return buffer.to(self.values.device).squeeze()


class _ToLookAt(torch.autograd.Function):
    """Lets a value be read where gradients are enabled, and refuses its backward, which would be of rows alone."""

    @staticmethod
    def forward(ctx: Any, of: torch.Tensor, value: torch.Tensor, whole: Whole, name: str) -> Any:
        ctx.whole, ctx.name = whole, name
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        ctx.whole.refuse_derivative(f"{ctx.name} to differentiate")


_Reduction = Callable[[_Rows, dict[str, Any]], torch.Tensor]

_BY_NAME: dict[str, _Reduction] = {
    "sum": lambda rows, _: rows.total(rows.values),
    "mean": lambda rows, _: rows.mean(),
    "var": lambda rows, options: rows.variance(options),
    "std": lambda rows, options: rows.variance(options).sqrt(),
    "max": lambda rows, _: rows.largest(rows.values),
    "amax": lambda rows, _: rows.largest(rows.values),
    "min": lambda rows, _: -rows.largest(-rows.values),
    "amin": lambda rows, _: -rows.largest(-rows.values),
    "any": lambda rows, _: rows.total(rows.values != 0) > 0,
    "all": lambda rows, _: rows.total(rows.values != 0) == rows.numel,
    "count_nonzero": lambda rows, _: rows.total(rows.values != 0),
}

_REDUCTIONS: dict[Any, _Reduction] = {
    getattr(of, name): reduction
    for name, reduction in _BY_NAME.items()
    for of in (torch, torch.Tensor)
}

_OPTIONS = {"dim", "dtype", "correction", "unbiased"}
