"""Level "copies": FSDP2's copies into and out of communication memory, each one launch of a cached CopyPlan.

    torch.ops.fsdp.all_gather_copy_in       shards, side by side, into this rank's slot
    torch.ops.fsdp.split_with_sizes_copy    the gathered slots into full parameters
    torch.ops.fsdp.chunk_cat                gradients, cast, into a row for each rank
    torch.ops.fsdp.chunk_cat_mixed_dtype    what torch 2.15 calls instead

FSDP2 calls these operators for every model. Shardcomm's kernels are registered over torch's, and look at the memory
that they are given. If a `GroupCopies` owns it, that group's plans copy; otherwise the kernel calls torch's.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any
from weakref import finalize

import torch

from shardcomm.arguments.dtype import FLOATS
from shardcomm.copy.plan import CopyPlan
from shardcomm.interop.fsdp2.patch import Patch, Undo

_OPERATORS = (
    "all_gather_copy_in",
    "split_with_sizes_copy",
    "chunk_cat",
    "chunk_cat_mixed_dtype",
)


class GroupCopies:
    """The copies of one parameter group, on one kind of device."""

    def __init__(self, device_type: str) -> None:
        self._plans: dict[Any, CopyPlan] = {}
        self.close = finalize(self, _route(device_type))
        """Leaves the copies to torch again."""

    def own(self, memory: torch.Tensor) -> torch.Tensor:
        """Makes this group copy into and out of `memory`, as long as that tensor lives; returns `memory`."""
        address = memory.data_ptr()
        if address:
            _owners[address] = self
            finalize(memory, _owners.pop, address, None)
        return memory

    def all_gather_copy_in(
        self,
        inputs: list[torch.Tensor],
        output: torch.Tensor,
        sizes: list[int],
        numel: int,
        rank: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Packs `inputs`, of `sizes` elements, into slot `rank` of `output`, whose slots have `numel` elements."""
        slot = output.narrow(0, numel * rank, numel)
        dtype = inputs[0].dtype
        offsets = list(accumulate(sizes[:-1], initial=0))
        self._run(
            ("in", tuple(sizes), dtype),
            lambda: CopyPlan.pack(sizes, offsets, dtype, output.dtype),
            inputs,
            [slot],
        )
        return slot, output

    def split_with_sizes_copy(
        self,
        output: torch.Tensor,
        sizes: list[int],
        dim: int = 0,
        *,
        out: list[torch.Tensor],
    ) -> None:
        """Cuts `output`, of shape (ranks, sum(sizes)), on `dim` 1 into `out`, each of shape (ranks, size)."""
        ranks, dtype = output.shape[0], output.dtype
        self._run(
            ("out", tuple(sizes), ranks, dtype),
            lambda: CopyPlan.copy_out(sizes, ranks, dtype, dtype),
            [output],
            out,
        )

    def chunk_cat(
        self, tensors: list[torch.Tensor], dim: int, num_chunks: int, *, out: torch.Tensor
    ) -> None:
        """Cuts each tensor on `dim` 0 into `num_chunks`; row c of `out` gets chunk c of all, side by side and cast."""
        shapes = tuple(tensor.shape for tensor in tensors)
        dtype = tensors[0].dtype
        self._run(
            ("cat", shapes, num_chunks, dtype, out.dtype),
            lambda: CopyPlan.chunk_cat(shapes, num_chunks, dtype, out.dtype),
            [tensor.contiguous() for tensor in tensors],
            [out],
        )

    def _run(
        self,
        key: Any,
        plan: Callable[[], CopyPlan],
        sources: Sequence[torch.Tensor],
        destinations: Sequence[torch.Tensor],
    ) -> None:
        if key not in self._plans:
            self._plans[key] = plan()
        self._plans[key].run(sources, destinations, threads=torch.get_num_threads())


def _route(device_type: str) -> Undo:
    """Routes FSDP2's copy operators to the `GroupCopies` that owns the memory.

    Returns:
        An undo function; call it once.
    """
    key = device_type.upper()
    return _routes.setdefault(key, Patch(partial(_register, key))).take()


def _register(dispatch_key: str) -> Undo:
    """Registers shardcomm's kernels over torch's. The undo function restores torch's."""
    library: Any = torch.library
    registered = library.Library("fsdp", "IMPL")
    with warnings.catch_warnings():  # torch warns of a kernel over another, which is the purpose
        warnings.simplefilter("ignore")
        for operator in _OPERATORS:
            if hasattr(torch.ops.fsdp, operator):
                kernel = _kernel(operator, dispatch_key)
                registered.impl(
                    operator, kernel, dispatch_key, with_keyset=True, allow_override=True
                )
    undo: Undo = registered._destroy
    return undo


def _kernel(operator: str, dispatch_key: str) -> Callable[..., Any]:
    torchs = torch.library.get_kernel(f"fsdp::{operator}", dispatch_key)
    ours = getattr(GroupCopies, operator.removesuffix("_mixed_dtype"))

    def kernel(keys: Any, *args: Any, **kwargs: Any) -> Any:
        owner = _owner(operator, args, kwargs)
        if owner is None:
            return torchs.call_boxed(keys, *args, **kwargs)
        return ours(owner, *args, **kwargs)

    return kernel


def _owner(operator: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> GroupCopies | None:
    """The group whose memory a call copies, if a CopyPlan can do that copy; None: torch's kernel does it."""
    if operator == "all_gather_copy_in":
        tensors, memory, along = args[0], args[1], True
    elif operator == "split_with_sizes_copy":
        tensors, memory, along = kwargs["out"], args[0], args[2:] == (1,)
    else:
        tensors, memory, along = args[0], kwargs["out"], args[1] == 0
    owner = _owners.get(memory.data_ptr())
    if owner is None or not along:
        return None
    dtypes = {tensor.dtype for tensor in tensors}
    movable = len(dtypes) == 1 and (
        dtypes == {memory.dtype} or dtypes | {memory.dtype} <= {*FLOATS}
    )
    return owner if movable and memory.is_contiguous() else None


_owners: dict[int, GroupCopies] = {}  # the group that owns each memory, by its address
_routes: dict[str, Patch] = {}  # the registration of the kernels, by dispatch key
