"""Level "hooks": the collectives of a parameter group, through the hooks that FSDP2 has for them.

    sharded parameters --copy-in--> own slot of a window --all-gather--> window --copy-out--> parameters
    gradients ---------chunk_cat--> reduce memory --reduce-scatter--> sharded gradients

All ranks of the host share the window, so that once each has copied its shard in, the gather is only a meeting: no byte
moves. FSDP2 makes the copies into communication memory and the copy-out itself, unless level "copies" does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from shardcomm.arguments.dtype import movable
from shardcomm.comm.words import ReduceOp
from shardcomm.interop.fsdp2.copies import GroupCopies
from shardcomm.interop.fsdp2.group_communicators import GroupCommunicators
from shardcomm.interop.fsdp2.internals import AllGather, ReduceScatter


class GroupAllGather(AllGather):
    """The all-gather of one parameter group.

    On a GPU it goes to FSDP2's current stream. On a CPU it runs at once, whatever `async_op` says, since no byte is
    left to move.

    Args:
        param_group: FSDP2's parameter group.
        communicators: Communicators between the ranks of process groups.
        name: The module's name, by which errors tell this group's gathers from others.
        copies: Makes the copies into and out of the memory; None leaves them to torch.
    """

    def __init__(
        self,
        param_group: Any,
        communicators: GroupCommunicators,
        name: str,
        copies: GroupCopies | None = None,
    ) -> None:
        self._param_group = param_group
        self._communicators = communicators
        self._name = name
        self._copies = copies

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """The memory into which FSDP2 copies this rank's shard, and in which the others' shards appear."""
        # With a number as `reshard_after_forward` FSDP2 gathers over another group in backward. It does not say here
        # which group it will be.
        group_comm = self._communicators.get(self._param_group._all_gather_process_group, device)
        memory = group_comm.allocate(math.prod(map(int, size)), dtype, "gather")
        return memory if self._copies is None else self._copies.own(memory)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> None:
        """See `AllGather`."""
        group_comm = self._communicators.get(group, output_tensor.device)
        with group_comm.collective("gather"):
            group_comm.comm.all_gather(
                movable(output_tensor), movable(input_tensor), tag=group_comm.tags[self._name]
            )


class GroupReduceScatter(ReduceScatter):
    """The reduce-scatter of one parameter group."""

    def __init__(
        self,
        param_group: Any,
        communicators: GroupCommunicators,
        name: str,
        copies: GroupCopies | None = None,
    ) -> None:
        self._param_group = param_group
        self._communicators = communicators
        self._name = name
        self._copies = copies
        self._input_numel = 0  # of the reduce whose output is not allocated yet

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """The memory of a reduce. FSDP2 asks for it twice: for the input, and then for the output."""
        numel = math.prod(map(int, size))
        group = self._param_group._reduce_scatter_process_group
        if self._input_numel and numel * group.size() == self._input_numel:
            self._input_numel = 0
            # FSDP2 keeps the output as the gradients.
            return torch.empty(numel, dtype=dtype, device=device)
        self._input_numel = numel
        memory = self._communicators.get(group, device).allocate(numel, dtype, "reduce")
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
        group_comm = self._communicators.get(group, output_tensor.device)
        ours, factor = _reduction(op)
        if factor is not None:
            input_tensor.mul_(factor)
        with group_comm.collective("reduce"):
            group_comm.comm.reduce_scatter(
                output_tensor, input_tensor, ours, tag=group_comm.tags[self._name]
            )


def _reduction(op: dist.ReduceOp | dist.ReduceOp.RedOpType) -> tuple[ReduceOp, Any]:
    """The communicator's name of `op`, and the factor by which inputs are multiplied first; None: there is none."""
    if op == dist.ReduceOp.SUM:
        return "sum", None
    if op == dist.ReduceOp.AVG:
        return "avg", None
    if op == dist.ReduceOp.PREMUL_SUM:
        premultiplied: Any = op
        return "sum", premultiplied.__getstate__()[1]  # (kind, factor)
    raise ValueError(f"reduce_scatter: op is {op}; accepted: SUM, AVG, PREMUL_SUM")
