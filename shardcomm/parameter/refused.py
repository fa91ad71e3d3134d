"""Which of torch's functions are refused of a rank's rows, whatever else they are given."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from shardcomm.parameter.draws import DRAWS
from shardcomm.parameter.whole import Whole

_COLLECTIVES = dist.all_reduce.__module__

# These take the rows out of torch, or look at sizes before torch's operation, which would be refused.
_REFUSED = {
    "__array__",
    "__bool__",
    "__complex__",
    "__contains__",
    "__dlpack__",
    "__dlpack_device__",
    "__float__",
    "__index__",
    "__int__",
    "_typed_storage",
    "data_ptr",
    "item",
    "nanquantile",
    "narrow",
    "numpy",
    "quantile",
    "select",
    "storage",
    "tolist",
    "untyped_storage",
}

# Each rank would draw for its own rows, by generators that are most often seeded alike.
_RANDOM = {
    *DRAWS,
    "kaiming_normal_",
    "kaiming_uniform_",
    "orthogonal_",
    "sparse_",
    "trunc_normal_",
    "xavier_normal_",
    "xavier_uniform_",
}

_INDEXING = {"__getitem__", "__setitem__"}


def check_of_any(func: Any, name: str, args: tuple[Any, ...], whole: Whole) -> None:
    """Refuses what is wrong where this rank has all of `whole`, too: its own gradients, draws, and other memory."""
    if func is torch.autograd.grad:
        whole.refuse_autograd_grad()
    if getattr(func, "__module__", "") == _COLLECTIVES:
        whole.refuse_collective(name)
    if name in ("expand_as", "view_as") and args[0] is args[1] and torch.is_grad_enabled():
        whole.refuse_node(name)
    if name == "share_memory_":
        whole.refuse_other_memory(name)
    if name in _RANDOM:
        whole.refuse(name)


def check_of_rows(name: str, args: tuple[Any, ...], whole: Whole, *, of_values: bool) -> None:
    """Refuses what would be of this rank's rows alone. `of_values`: as in `Whole.refuse`."""
    if name in _REFUSED or (name in _INDEXING and not _takes_all(args[1])):
        whole.refuse(name, of_values=of_values)


def _takes_all(index: Any) -> bool:
    """Whether `index` is `[:]`, `[...]`, `[:, ...]` or the like. Torch counts others from this rank's first row."""
    if isinstance(index, tuple):
        return all(map(_takes_all, index))
    return index is ... or (isinstance(index, slice) and index == slice(None))
