"""What becomes of the reduced gradients of all units: they are checked, shown as `.grad`, and clipped by their norm."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch

from shardcomm.mesh import Mesh
from shardcomm.plain import grad_of, plain
from shardcomm.sharded_unit import ShardedUnit

OnNonfinite = Literal["raise", "skip"] | None


class Gradients:
    """The gradients of a model's sharded parameters, over the ranks of `mesh`.

    Attributes:
        nonfinite: the units in whose gradients the latest backward that was reduced left NaN or Inf, on any rank;
            found where `on_nonfinite` is not None.
    """

    def __init__(self, units: Sequence[ShardedUnit], mesh: Mesh, on_nonfinite: OnNonfinite) -> None:
        self.nonfinite: tuple[str, ...] = ()
        self._units = units
        self._params = [param for unit in units for param in unit.params]
        self._mesh = mesh
        self._on_nonfinite = on_nonfinite
        self._all_used = torch.ones(len(self._params), dtype=torch.int32, device=mesh.device)
        # One a unit, set by whatever writes its gradients.
        self._nonfinite = self._all_used.new_zeros(len(units) if on_nonfinite else 0)
        if on_nonfinite:
            for unit, flag in zip(units, torch.split(self._nonfinite, 1), strict=True):
                for bucket, _ in unit.buckets:
                    bucket.nonfinite = flag

    def begin_backward(self) -> None:
        """Forgets what the reduces of the one before left."""
        if self._on_nonfinite is not None:
            self._nonfinite.zero_()

    def publish(self) -> None:
        """Sets `.grad` of what any rank had a gradient for; what no rank used keeps None, as under DDP.

        Raises:
            FloatingPointError: they are not finite, where that is to raise.
        """
        buckets = [entry for unit in self._units for entry in unit.buckets]
        if not any(bucket.gradients.unshown for bucket, _ in buckets):
            return
        flags = self._of_any_rank(
            [
                param.used or not bucket.gradients.unshown
                for bucket, params in buckets
                for param in params
            ]
        )
        used, nonfinite = iter(flags), flags[len(self._params) :]
        self.nonfinite = tuple(
            unit.name for unit, bad in zip(self._units, nonfinite, strict=False) if bad
        )
        if self.nonfinite:
            self._leave_out()
            return
        for bucket, params in buckets:
            used_here = [next(used) for _ in params]
            if bucket.gradients.unshown:
                bucket.gradients.show(used_here)
            for param in params:
                param.used = False
        self._call_hooks()

    def _call_hooks(self) -> None:
        """Those of `register_post_accumulate_grad_hook`, now that the gradients are there."""
        with plain():
            hooked = [p.shard for p in self._params if p.shard._post_accumulate_grad_hooks]
            hooked = [shard for shard in hooked if grad_of(shard) is not None]
        for shard in hooked:
            with plain():
                hooks = list(shard._post_accumulate_grad_hooks.values())
            for hook in hooks:
                hook(shard)

    def clip_norm_(self, max_norm: float) -> torch.Tensor:
        """Scales them so that their global L2 norm is at most `max_norm`; returns the norm before."""
        with plain():
            every = [grad_of(param.shard) for param in self._params]
        grads = [grad for grad in every if grad is not None]
        norms = (
            torch._foreach_norm(grads)
            if grads
            else [self._all_used.new_zeros((), dtype=torch.float32)]
        )
        square = torch.stack([norm.float() for norm in norms]).square().sum().to(self._mesh.device)
        self._mesh.all_reduce_shards(square, "sum")
        norm = square.sqrt()
        if grads:
            scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
            torch._foreach_mul_(grads, scale.to(grads[0].device))
        return norm

    def _of_any_rank(self, used: list[bool]) -> list[bool]:
        """For each parameter whether a rank used it; then for each unit whether its gradients have NaN or Inf."""
        if self._mesh.size == 1 and not self._on_nonfinite:
            return used
        # Who used all of them knows the result; it is the others who read it, and wait for it.
        flags = self._all_used
        unknown = self._on_nonfinite is not None or not all(used)
        if unknown:
            flags = torch.cat([flags.new_tensor(used), self._nonfinite])
        if self._mesh.size > 1:
            self._mesh.all_reduce(flags, "max")
        return [bool(flag) for flag in flags.tolist()] if unknown else used

    def _leave_out(self) -> None:
        """Drops all gradients: those of earlier backwards too, which these were added to."""
        for unit in self._units:
            unit.forget_backward()
        for param in self._params:
            param.shard.grad = None
        if self._on_nonfinite == "raise":
            raise FloatingPointError(
                f"backward: gradients of {', '.join(map(repr, self.nonfinite))} are NaN or Inf after their reduce; no "
                "parameter has a .grad now. Look for the cause in that unit, or train on with on_nonfinite='skip'"
            )
