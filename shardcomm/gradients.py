"""What becomes of the reduced gradients of all units: they are checked, shown as `.grad`, and clipped by their norm."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch

from shardcomm.mesh import Mesh
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
        numel = len(self._params) + (len(units) if on_nonfinite else 0)
        self._all_used = torch.ones(numel, dtype=torch.int32, device=mesh.device)

    def publish(self) -> None:
        """Sets `.grad` of what any rank had a gradient for; what no rank used keeps None, as under DDP.

        Raises:
            FloatingPointError: they are not finite, where that is to raise.
        """
        buckets = [entry for unit in self._units for entry in unit.buckets]
        if not any(bucket.gradients.unshown for bucket, _ in buckets):
            return
        flags = [
            param.used or not bucket.gradients.unshown
            for bucket, params in buckets
            for param in params
        ]
        if self._on_nonfinite is not None:
            flags += self._nonfinite_here()
        if self._mesh.size > 1:
            flags = self._of_any_rank(flags)
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

    def clip_norm_(self, max_norm: float) -> torch.Tensor:
        """Scales them so that their global L2 norm is at most `max_norm`; returns the norm before."""
        grads = [param.shard.grad for param in self._params if param.shard.grad is not None]
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

    def _of_any_rank(self, flags: list[bool]) -> list[bool]:
        # Who used all of them knows the result; it is the others who read it, and wait for it.
        everybody = self._all_used
        unknown = self._on_nonfinite is not None or not all(flags)
        if unknown:
            everybody = torch.tensor(flags, dtype=torch.int32, device=self._mesh.device)
        self._mesh.all_reduce(everybody, "max")
        return [bool(flag) for flag in everybody.tolist()] if unknown else flags

    def _nonfinite_here(self) -> list[bool]:
        """Of each unit. A sum is not finite if an element is not; of those whose is not, the elements are looked at."""
        reduced = [
            [bucket.grad for bucket, _ in unit.buckets if bucket.gradients.unshown]
            for unit in self._units
        ]
        zero = self._all_used.new_zeros((), dtype=torch.float32)
        sums = [sum((grad.sum(dtype=_wide(grad)) for grad in grads), zero) for grads in reduced]
        finite = torch.stack([total.isfinite() for total in sums]).tolist()
        return [
            not ok and not all(bool(grad.isfinite().all()) for grad in grads)
            for ok, grads in zip(finite, reduced, strict=True)
        ]

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


def _wide(grad: torch.Tensor) -> torch.dtype:
    return torch.promote_types(grad.dtype, torch.float32)
