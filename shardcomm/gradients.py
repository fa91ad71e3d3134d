"""What becomes of the reduced gradients of all units: they are published as `.grad`, and clipped by their norm."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shardcomm.communicator import Communicator
from shardcomm.sharded_unit import ShardedParam


class Gradients:
    """The gradients of a model's sharded parameters, over the ranks of `comm`.

    `split`: whether each rank has its rows of them only, else all of them.
    """

    def __init__(self, params: Sequence[ShardedParam], comm: Communicator, *, split: bool) -> None:
        self._params = params
        self._comm = comm
        self._split = split
        self._all_used = torch.ones(len(params), dtype=torch.int32, device=comm.device)

    def publish(self) -> None:
        """Sets `.grad` of what any rank had a gradient for; what no rank used keeps None, as under DDP."""
        if not any(param.reduced for param in self._params):
            return
        used = [param.used or not param.reduced for param in self._params]
        if self._comm.size > 1:
            # Who used all of them knows the result; it is the others who read it, and wait for it.
            everybody = self._all_used
            if not all(used):
                everybody = torch.tensor(used, dtype=torch.int32, device=self._comm.device)
            self._comm.all_reduce(everybody, "max")
            if not all(used):
                used = [bool(flag) for flag in everybody.tolist()]
        for param, any_used in zip(self._params, used, strict=True):
            if param.reduced:
                param.publish_grad(any_used)

    def clip_norm_(self, max_norm: float) -> torch.Tensor:
        """Scales them so that their global L2 norm is at most `max_norm`; returns the norm before."""
        grads = [param.shard.grad for param in self._params if param.shard.grad is not None]
        norms = (
            torch._foreach_norm(grads)
            if grads
            else [self._all_used.new_zeros((), dtype=torch.float32)]
        )
        square = torch.stack([norm.float() for norm in norms]).square().sum()
        if self._split:
            self._comm.all_reduce(square, "sum")
        norm = square.sqrt()
        if grads:
            torch._foreach_mul_(grads, torch.clamp(max_norm / (norm + 1e-6), max=1.0))
        return norm
