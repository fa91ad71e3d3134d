"""Level "hooks": the collectives of a parameter group, through the hooks that FSDP2 has for them.

    sharded parameters --copy-in--> own slot of a window --all-gather--> window --copy-out--> parameters
    gradients ---------chunk_cat--> reduce memory --reduce-scatter--> sharded gradients

The window is shared by all ranks of the host, so once each has copied its shard in, the gather is only a meeting: no
byte moves. Both arrows into communication memory and the copy-out are FSDP2's own, or level "copies"'.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from shardcomm.arguments.dtype import movable
from shardcomm.comm.communicator import ReduceOp
from shardcomm.interop.fsdp2.copies import GroupCopies
from shardcomm.interop.fsdp2.internals import AllGather, ReduceScatter
from shardcomm.interop.fsdp2.links import Links


class GroupAllGather(AllGather):
    """The all-gather of one parameter group, where FSDP2 calls it: on a GPU on its current stream, on a CPU at once.

    There `async_op` would gain nothing: no byte is left to move. `copies`: None leaves them to torch.
    """

    def __init__(
        self, param_group: Any, links: Links, tag: int, copies: GroupCopies | None = None
    ) -> None:
        self._param_group = param_group
        self._links = links
        self._tag = tag
        self._copies = copies

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Where FSDP2 copies this rank's shard in, and the others' appear."""
        # With an int `reshard_after_forward` it is another group in backward; FSDP2 does not say which here.
        link = self._links.get(self._param_group._all_gather_process_group, device)
        memory = link.allocate(math.prod(map(int, size)), dtype, "gather")
        return memory if self._copies is None else self._copies.own(memory)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> None:
        """See `AllGather`."""
        link = self._links.get(group, output_tensor.device)
        with link.collective("gather"):
            link.comm.all_gather(movable(output_tensor), movable(input_tensor), tag=self._tag)


class GroupReduceScatter(ReduceScatter):
    """The reduce-scatter of one parameter group."""

    def __init__(
        self, param_group: Any, links: Links, tag: int, copies: GroupCopies | None = None
    ) -> None:
        self._param_group = param_group
        self._links = links
        self._tag = tag
        self._copies = copies
        self._input_numel = 0  # of the reduce whose output is not allocated yet

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """FSDP2 asks twice for each reduce: for its input, then for its output."""
        numel = math.prod(map(int, size))
        group = self._param_group._reduce_scatter_process_group
        if self._input_numel and numel * group.size() == self._input_numel:
            self._input_numel = 0
            # It becomes the gradients, which live on.
            return torch.empty(numel, dtype=dtype, device=device)
        self._input_numel = numel
        memory = self._links.get(group, device).allocate(numel, dtype, "reduce")
        return memory if self._copies is None else self._copies.own(memory)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp | dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> None:
        """See `ReduceScatter`."""
        link = self._links.get(group, output_tensor.device)
        ours, factor = _reduction(op)
        if factor is not None:
            input_tensor.mul_(factor)
        with link.collective("reduce"):
            link.comm.reduce_scatter(output_tensor, input_tensor, ours, tag=self._tag)


def _reduction(op: dist.ReduceOp | dist.ReduceOp.RedOpType) -> tuple[ReduceOp, Any]:
    """Our name of `op`, and the factor that goes before it (None: none)."""
    if op == dist.ReduceOp.SUM:
        return "sum", None
    if op == dist.ReduceOp.AVG:
        return "avg", None
    if op == dist.ReduceOp.PREMUL_SUM:
        premultiplied: Any = op
        return "sum", premultiplied.__getstate__()[1]  # (kind, factor)
    raise ValueError(f"reduce_scatter: op is {op}; accepted: SUM, AVG, PREMUL_SUM")
