"""Which of torch's operations are elementwise: their result on a rank's rows is the rows of their result."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from shardcomm.parameter.whole import Whole

# Elementwise, although torch's tags do not say so.
_ELEMENTWISE = {
    "aten::_to_copy",
    "aten::abs_",
    "aten::alias",
    "aten::clone",
    "aten::copy_",
    "aten::detach",
    "aten::empty_like",
    "aten::fill_",
    "aten::full_like",
    "aten::is_pinned",  # of all rows alike
    "aten::lift_fresh",
    "aten::masked_fill",
    "aten::masked_fill_",
    "aten::new_empty",
    "aten::new_full",
    "aten::new_ones",
    "aten::new_zeros",
    "aten::ones_like",
    "aten::scalar_tensor",  # a number, as torch.where makes one of
    "aten::zero_",
    "aten::zeros_like",
}

# Not elementwise, although torch calls them pointwise or they are among its operations on lists.
_NOT_ELEMENTWISE = {
    "aten::equal",
    "aten::_foreach_max",
    "aten::_foreach_mm",
    "aten::_foreach_norm",
    "aten::_foreach_powsum",
}

_ELEMENTWISE_FAMILIES = ("aten::_foreach_", "aten::_fused_ada", "aten::_fused_sgd")


class Elementwise(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode that refuses operations which are not elementwise. `of_values`: as in `Whole.refuse`."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False: torch's wrapper that skips dynamo imports all of torch.compile at the first operation."""
        return False

    def __init__(self, whole: Whole, name: str, *, of_values: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._whole = whole
        self._name = name
        self._of_values = of_values

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = func._schema.name
        if name in _NOT_ELEMENTWISE or not (
            torch.Tag.pointwise in func.tags
            or name in _ELEMENTWISE
            or name.startswith(_ELEMENTWISE_FAMILIES)
        ):
            self._whole.refuse(self._name, of_values=self._of_values)
        return func(*args, **(kwargs or {}))
